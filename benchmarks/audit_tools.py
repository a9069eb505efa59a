"""Tool calls with and without a draft that looks up text, by llama.cpp's server and by ours (`specdec audit --tools`).

    python benchmarks/audit_tools.py MODEL.gguf --llamacpp E/bin/python     # a Python with the wheel xllamacpp

The n-gram minimum is 2, which shows damage soonest. Correctness alone is measured, so that the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

from specdec_cli.export.llamacpp import WHEEL
from specdec_cli.measure.elsewhere.engine_process import EngineProcess

REQUESTS = Path(__file__).parent / "workloads" / "tools.jsonl"
MINIMUM, K = "2", "8"
DRAFTS = {
    "ngram-mod": ["--spec-ngram-mod-n-match", MINIMUM, "--spec-ngram-mod-n-min", MINIMUM, "--spec-ngram-mod-n-max", K],
    "ngram-simple": ["--spec-ngram-simple-size-n", MINIMUM, "--spec-ngram-simple-size-m", K],
}
OURS = f"ngram:min={MINIMUM}"


def server(python: str, model: Path, threads: int, *draft: str) -> EngineProcess:
    """llama.cpp's server, not yet started."""
    words = [python, str(WHEEL), "--model", str(model), "--jinja", "--metrics", "--parallel", "1", "--ctx-size", "2048"]
    return EngineProcess("llama.cpp", [*words, "--threads", str(threads), *draft], 600)


def audit(*options: str) -> dict[str, Any]:
    """The counts and differences of one audit."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "audit.json"
        line = [sys.executable, "-m", "specdec_cli", "audit", "--tools", str(REQUESTS), "--output", str(result)]
        ended = subprocess.run([*line, *options], capture_output=True, text=True, check=False)
        if not result.exists():
            raise SystemExit(ended.stderr)
        document = json.loads(result.read_text())
    print(ended.stdout, file=sys.stderr)
    kept = ("verdict", "by_kind", "differences", "num_draft_tokens", "num_accepted_tokens", "notices")
    return {key: document[key] for key in kept if key in document} | {"exit_code": ended.returncode}


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llamacpp", required=True, help="a Python with the wheel xllamacpp")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    before, found = record.machine(), dict[str, Any]()
    with server(options.llamacpp, options.model, options.threads) as plain:
        for kind, more in DRAFTS.items():
            with server(options.llamacpp, options.model, options.threads, "--spec-type", kind, *more) as url:
                found[f"llama.cpp {kind}"] = audit("--endpoint", url, "--plain-endpoint", plain)
    found[f"specdec {OURS}"] = audit("-t", str(options.model), "-d", OURS, "-k", K)
    about = {"file": options.model.name, "requests": REQUESTS.name, "ngram_minimum": int(MINIMUM), "k": int(K)}
    print(record.save("audit_tools_qwen", before, about | {"audits": found}))


if __name__ == "__main__":
    main()
