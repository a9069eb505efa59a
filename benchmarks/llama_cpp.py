"""The engine beside llama.cpp on the same GGUF file, in turn (A B B A), two threads each: load, prompt, plain decoding.

    python -m venv E; E/bin/pip install xllamacpp
    python benchmarks/llama_cpp.py model-Q4_K_M.gguf --llama-cpp E/bin/python --save llama_cpp_qwen

Loading is counted from a process' start to its first token behind 16, in new processes in turn: seconds of a clock, and
of the processor, which other processes disturb less, and the most memory, pages of the mapped file included. Then one
process of each stays, and they take turns with the same token ids: a prompt of 500 tokens, and 128 tokens behind it.
Medians, and their ratio; `--rounds 0` measures loading alone. With `--avx2` ours leaves out what a processor has beyond
AVX2, as llama.cpp's wheel does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import record

OURS = """
import json, sys
from specdec_cli import Engine, SamplingParams
import torch
torch.set_num_threads(int(sys.argv[2]))
engine = Engine.load(sys.argv[1], None, max_model_len=2048)
print(json.dumps({"decoder": engine.target.decoder}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    params = SamplingParams(max_new_tokens=job["tokens"], temperature=0, ignore_eos=True)
    output = engine.generate([job["prompt"]], params)[0]
    seconds = {"prompt_seconds": output.timing.ttft_s, "decode_seconds": output.timing.decode_s}
    print(json.dumps(seconds | {"decode_tokens": len(output.token_ids) - 1}), flush=True)
"""
FIRST_PROMPT, PROMPT, TOKENS = 16, 500, 128


class Arm:
    """A process that has the file loaded and decodes what it is asked for."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        begin = perf_counter()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.about = self._answer()
        self.loaded_seconds = perf_counter() - begin
        self.decode(FIRST_PROMPT, 1)
        self.first_token_seconds = perf_counter() - begin
        times = psutil.Process(self._process.pid).cpu_times()
        self.first_token_cpu_seconds = times.user + times.system
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        self.peak_megabytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6

    def decode(self, num_prompt: int, num_tokens: int, turn: int = 0) -> dict[str, Any]:
        """Seconds of a prompt and of the tokens behind it; each turn has a prompt of its own."""
        assert self._process.stdin is not None
        prompt = [(7919 * i * i + 31 * i + 17 * turn) % 30000 + 500 for i in range(num_prompt)]
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"error: `{' '.join(map(str, self._process.args))[:200]}` ended")  # type: ignore[arg-type]


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--llama-cpp", required=True, help="the Python of an environment with xllamacpp")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--avx2", action="store_true", help="leave out our AVX-512 kernels")
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before = record.machine()
    file = [given.path, str(given.threads)]
    older = {"ATEN_CPU_CAPABILITY": "avx2"} if given.avx2 else {}
    arms = {
        "specdec": ([sys.executable, "-c", OURS, *file], os.environ | older),
        "llama.cpp": ([given.llama_cpp, str(Path(__file__).with_name("llama_cpp_arm.py")), *file], dict(os.environ)),
    }
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    running: dict[str, Arm] = {}
    for turn in range(given.loads):
        for name in sorted(arms, reverse=turn % 2 == 0):
            if name in running:
                running[name].close()
            running[name] = arm = Arm(*arms[name])
            figures[name]["load, s"].append(arm.loaded_seconds)
            figures[name]["first token, s"].append(arm.first_token_seconds)
            figures[name]["first token, CPU s"].append(arm.first_token_cpu_seconds)
            figures[name]["peak memory, MB"].append(arm.peak_megabytes)
    for turn in range(given.rounds):
        for name in sorted(arms, reverse=turn % 2 == 0):
            seconds = running[name].decode(PROMPT, TOKENS + 1, turn)
            figures[name]["prompt tokens/s"].append(PROMPT / seconds["prompt_seconds"])
            figures[name]["plain tokens/s"].append(seconds["decode_tokens"] / seconds["decode_seconds"])
    middle = {name: {key: round(median(values), 2) for key, values in its.items()} for name, its in figures.items()}
    ours, theirs = middle["specdec"], middle["llama.cpp"]
    results: dict[str, Any] = {"file": Path(given.path).name, "file_bytes": Path(given.path).stat().st_size}
    results |= {"instructions of ours": "AVX2" if given.avx2 else before["instructions"], "threads": given.threads}
    results |= {"medians": middle, "specdec over llama.cpp": {key: round(ours[key] / theirs[key], 2) for key in ours}}
    results["about"] = {name: arm.about for name, arm in running.items()}
    for arm in running.values():
        arm.close()
    print(json.dumps(results, indent=1))
    if given.save:
        record.save(given.save, before, results, given.threads)


if __name__ == "__main__":
    main()
