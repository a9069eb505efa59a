"""A vLLM server of its own for a benchmark: started on a free port in a process group, waited for, ended.

    with vllm_serving("vllm", "path/to/target", {"method": "draft_model", …}) as url:
        ...

Start no two at a time on a small machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS_TO_START = 3600.0  # where another one is waited for, too
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
REPAIR = Path(__file__).parent / "vllm_cpu_fix"
OPTIONS = ("--enforce-eager", "--max-model-len", "512")
EACH_REQUEST = ("--per-request-spec-decode-metrics", "detailed")


@contextmanager
def vllm_serving(
    command: str,
    target: Path,
    speculative: Mapping[str, Any] | None,
    log: Path,
    *,
    max_num_seqs: int = 8,
    is_repaired: bool = False,
    dtype: str = "float32",
) -> Iterator[str]:
    """Run `vllm serve` until the block ends.

    Args:
        command: the program.
        target: the model's folder; its name is `target`.
        speculative: `--speculative-config`; None decodes without a draft.
        log: file that takes its output.
        max_num_seqs: most sequences of a step.
        is_repaired: whether sampled speculation of the CPU build is repaired (`vllm_cpu_fix`).
        dtype: of target and draft.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [command, "serve", str(target.resolve()), "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    words += ["--dtype", dtype, "--served-model-name", "target", "--max-num-seqs", str(max_num_seqs)]
    if speculative is not None:
        words += ["--speculative-config", json.dumps(dict(speculative)), *EACH_REQUEST]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    environment |= {"PYTHONPATH": str(REPAIR)} if is_repaired else {}
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env=environment, cwd=log.parent, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS_TO_START
    try:
        while not _is_ready(url):
            assert process.poll() is None, f"vLLM ended before it was ready, see {log}"
            assert time.monotonic() < deadline, f"vLLM does not get ready, see {log}"
            time.sleep(0.5)
        yield url
    finally:
        _end(process)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: its workers are processes of their own."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
