"""The engine beside llama.cpp on the same GGUF file, in turn (A B B A), two threads each: load, prompt, plain decoding.

    python -m venv E; E/bin/pip install xllamacpp
    python benchmarks/llama_cpp.py model-Q4_K_M.gguf --llama-cpp E/bin/python --save llama_cpp_qwen
    python benchmarks/llama_cpp.py FILE --llama-cpp PYTHON --built B/bin/llama-server --dequantized \
        --only plain context drafts busy streams --workloads edit --drafts ngram:k=16 \
        --their-drafts ngram_simple:size_n=4,size_m=16 ngram_mod --save llama_cpp_versions
    python benchmarks/llama_cpp.py FILE --llama-cpp PYTHON --only drafts --drafts suffix:k=24 --save llama_cpp_drafts
    python benchmarks/llama_cpp.py FILE --llama-cpp PYTHON --only streams --save llama_cpp_streams
    python benchmarks/llama_cpp.py FILE --llama-cpp B/bin/llama-server --save llama_cpp_native_qwen

The wheel is built for AVX2; `llama_cpp_arm.py` says how to build a server for the processor at hand, which takes part
beside the wheel with `--built`.

Loading is counted from a process' start to its first token behind 16, in new processes in turn: seconds of a clock, and
of the processor, which other processes disturb less, and the most memory, pages of the mapped file included. Then one
process of each stays, and they take turns with the same token ids: a prompt of 500 tokens, and 128 tokens behind it.
Medians, and their ratio; `--rounds 0` measures loading alone. Ours also times a forward of one row and of six. In the
same turns a buffer as large as the file is read again and again, which tells what share of the machine's bandwidth
plain decoding reaches. With `--avx2` ours leaves out what a processor has beyond AVX2, as llama.cpp's wheel does. With
`--dequantized` ours takes part twice, also with the weights dequantized at load.

Context: each arm decodes behind 4,096 tokens, in turn, beside reading what our step reads there: weights and keys.
Drafts: every arm decodes the prompts of `workloads/` in turn, each in a process of its own: ours plain and with our
drafts, llama.cpp's plain and with each of its drafts without a model. A speed-up is a prompt's, over plain decoding of
the same engine; `over llama.cpp's best` compares with the arm of llama.cpp that has the best median. Busy: the same
with half of the prompts and of the tokens, beside four processes that compute without a pause.
Streams: `specdec serve` and llama.cpp's server answer the same prompts, so many at a time, in turn: tokens of all
streams over the seconds until the last one ends, prompts included, in two rounds at most. Each part's findings are
saved when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import record
from roofline import bytes_per_second
from served import serving
from threads import neighbours

from specdec_cli.measure.stats import bootstrap_median

OURS = """
import json, os, sys
from statistics import median
from time import perf_counter
from specdec_cli import Engine, SamplingParams
from specdec_cli.lm.door import Row
import torch
torch.set_num_threads(int(sys.argv[2]))
draft, _, k = (*sys.argv[3:], "")[0].partition(":k=")
options = {"num_speculative_tokens": int(k)} if k else {}
options["compute"] = os.environ["COMPUTE"]
engine = Engine.load(sys.argv[1], draft or None, max_model_len=int(os.environ["MODEL_LENGTH"]), **options)
print(json.dumps({"decoder": engine.target.decoder}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "text" in job:
        print(json.dumps({"prompt": engine.encode([{"role": "user", "content": job["text"]}])}), flush=True)
        continue
    if "cached" in job:
        print(json.dumps({"bytes": engine.target.traffic.bytes_moved(1, job["cached"])}), flush=True)
        continue
    if "rows" in job:
        lm, context, milliseconds = engine.target, list(range(500, 628)), []
        lm.score([Row(0, context, 1)])
        for turn in range(15):
            rows = [*context, *(600 + turn + row for row in range(job["rows"]))]
            begin = perf_counter()
            lm.score([Row(0, rows, job["rows"])])
            milliseconds.append((perf_counter() - begin) * 1e3)
        lm.release(0)
        print(json.dumps({"milliseconds": median(milliseconds)}), flush=True)
        continue
    params = SamplingParams(max_new_tokens=job["tokens"], temperature=0, ignore_eos=job.get("ignore_eos", True))
    engine.drafters.clear()
    output = engine.generate([job["prompt"]], params)[0]
    seconds = {"prompt_seconds": output.timing.ttft_s, "decode_seconds": output.timing.decode_s}
    counts = {"decode_tokens": len(output.token_ids) - 1, "accepted": output.speculative.num_accepted_tokens}
    print(json.dumps(seconds | counts | {"text": output.text}), flush=True)
"""
FIRST_PROMPT, PROMPT, TOKENS, ROWS = 16, 500, 128, (1, 6)
LONG_PROMPT, LONG_TOKENS, BUSY = 4096, 32, 4
WARM_UP, STREAM_ROUNDS = 8, 2
READS = 5  # of a buffer, in each turn
PLAIN, NATIVE, DEQUANTIZED, LLAMA_CPP, BUILT = "plain", "specdec", "dequantized", "llama.cpp", "llama.cpp-built"
OUR_DRAFTS = ("ngram:k=16", "suffix:k=16")
THEIR_DRAFTS = (
    "ngram_simple",
    "ngram_simple:size_n=4,size_m=16",
    "ngram_map_k",
    "ngram_map_k4v",
    "ngram_mod",
    "ngram_cache",
)
MODEL_LENGTH, LONG_LENGTH = 2048, 4352
COMPUTE = {NATIVE: "auto", DEQUANTIZED: "dequantized"}
Command = tuple[list[str], dict[str, str]]
WORKLOADS = Path(__file__).with_name("workloads")


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
        pid = self.about.get("pid", self._process.pid)
        times = psutil.Process(pid).cpu_times()
        self.first_token_cpu_seconds = times.user + times.system
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        self.peak_megabytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6

    def decode(self, num_prompt: int, num_tokens: int, turn: int = 0) -> dict[str, Any]:
        """Seconds of a prompt and of the tokens behind it; each turn has a prompt of its own."""
        prompt = [(7919 * i * i + 31 * i + 17 * turn) % 30000 + 500 for i in range(num_prompt)]
        return self.ask({"prompt": prompt, "tokens": num_tokens})

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it, and a server that it started."""
        for process in psutil.Process(self._process.pid).children():
            process.kill()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"error: `{' '.join(map(str, self._process.args))[:200]}` ended")  # type: ignore[arg-type]


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[Arm]:
    """An arm until the block ends."""
    arm = Arm(command, environment)
    try:
        yield arm
    finally:
        arm.close()


def prompts_of(workload: str, num: int) -> list[str]:
    """Prompts of a kind of work, spread over its file."""
    lines = (WORKLOADS / f"{workload}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[i * len(lines) // num])["prompt"] for i in range(min(num, len(lines)))]


class Engines:
    """The engines that take part, and the commands that start them.

    Args:
        given: the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.ours = (NATIVE, DEQUANTIZED) if given.dequantized else (NATIVE,)
        self._llama_cpp = {LLAMA_CPP: given.llama_cpp} | ({BUILT: given.built} if given.built else {})
        self.theirs = tuple(self._llama_cpp)
        self.servers = {name: path for name, path in self._llama_cpp.items() if Path(path).name == "llama-server"}
        self._file = [given.path, str(given.threads)]

    def command(self, engine: str, draft: str = PLAIN, num_streams: int = 1, length: int = MODEL_LENGTH) -> Command:
        """Words and environment of the process that runs one."""
        if engine in self.ours:
            words = [sys.executable, "-c", OURS, *self._file, *([] if draft == PLAIN else [draft])]
            return words, os.environ | {"COMPUTE": COMPUTE[engine], "MODEL_LENGTH": str(length)}
        script = str(Path(__file__).with_name("llama_cpp_arm.py"))
        words = [script, *self._file, draft.replace(PLAIN, "none"), str(num_streams), "--context", str(length)]
        if engine in self.servers:
            return [sys.executable, *words, "--server", self.servers[engine]], dict(os.environ)
        return [self._llama_cpp[engine], *words], dict(os.environ)

    def drafting(self, given: argparse.Namespace) -> list[tuple[str, str]]:
        """Every engine plain and with each of its drafts."""
        its = dict.fromkeys(self.ours, given.drafts) | dict.fromkeys(self.theirs, given.their_drafts)
        return [(name, draft) for name in its for draft in (PLAIN, *its[name])]


def loading_and_decoding(given: argparse.Namespace, engines: Engines) -> Iterator[dict[str, Any]]:
    """Load, a prompt and plain decoding."""
    arms = {name: engines.command(name) for name in (*engines.ours, *engines.theirs)}
    num_bytes, bandwidths = Path(given.path).stat().st_size, list[float]()
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    loaded: dict[str, Arm] = {}
    for turn in range(given.loads):
        for name in sorted(arms, reverse=turn % 2 == 0):
            if name in loaded:
                loaded[name].close()
            loaded[name] = arm = Arm(*arms[name])
            figures[name]["load, s"].append(arm.loaded_seconds)
            figures[name]["first token, s"].append(arm.first_token_seconds)
            figures[name]["first token, CPU s"].append(arm.first_token_cpu_seconds)
            figures[name]["peak memory, MB"].append(arm.peak_megabytes)
    for turn in range(given.rounds):
        for name in sorted(arms, reverse=turn % 2 == 0):
            bandwidths.append(bytes_per_second(num_bytes, READS))
            seconds = loaded[name].decode(PROMPT, TOKENS + 1, turn)
            figures[name]["prompt tokens/s"].append(PROMPT / seconds["prompt_seconds"])
            rate = seconds["decode_tokens"] / seconds["decode_seconds"]
            figures[name]["plain tokens/s"].append(rate)
            figures[name]["share of bandwidth"].append(rate * num_bytes / bandwidths[-1])
            if name in engines.ours:
                few, many = (loaded[name].ask({"rows": rows})["milliseconds"] for rows in ROWS)
                figures[name]["6 rows over 1"].append(many / few)
    middle = {name: {key: round(median(values), 2) for key, values in its.items()} for name, its in figures.items()}
    found: dict[str, Any] = {"medians": middle}
    for theirs in engines.theirs:
        ratios = {key: round(middle[NATIVE][key] / value, 2) for key, value in middle[theirs].items()}
        found[f"specdec over {theirs}"] = ratios
    if bandwidths:
        found["read, GB/s"] = round(median(bandwidths) / 1e9, 2)
    found["about"] = {name: arm.about for name, arm in loaded.items()}
    for arm in loaded.values():
        arm.close()
    yield found


def context(given: argparse.Namespace, engines: Engines) -> Iterator[dict[str, Any]]:
    """Plain decoding behind a long text."""
    names = (*engines.ours, *engines.theirs)
    step: dict[str, list[float]] = {name: [] for name in names}
    over_reading: dict[str, list[float]] = {name: [] for name in engines.ours}
    with ExitStack() as stack:
        arms = {name: stack.enter_context(running(*engines.command(name, length=LONG_LENGTH))) for name in names}
        for turn in range(given.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                seconds = arms[name].decode(LONG_PROMPT, LONG_TOKENS + 1, turn)
                step[name].append(seconds["decode_seconds"] / seconds["decode_tokens"])
                if name in engines.ours:
                    num_bytes = arms[name].ask({"cached": LONG_PROMPT + LONG_TOKENS // 2})["bytes"]
                    over_reading[name].append(step[name][-1] * bytes_per_second(num_bytes, READS) / num_bytes)
    found: dict[str, Any] = {name: {"step, ms": round(median(its) * 1e3, 2)} for name, its in step.items()}
    for name, its in over_reading.items():
        found[name]["step over reading"] = round(median(its), 2)
    yield {f"behind {LONG_PROMPT} tokens": found}


def busy(given: argparse.Namespace, engines: Engines) -> Iterator[dict[str, Any]]:
    """Drafts beside busy processes, which start once everything is loaded."""
    fewer = argparse.Namespace(**vars(given) | {"num_prompts": -(-given.num_prompts // 2), "tokens": given.tokens // 2})
    for found in drafts(fewer, engines, BUSY):
        yield {f"{name} beside {BUSY} busy": its for name, its in found.items()}


def drafts(given: argparse.Namespace, engines: Engines, num_busy: int = 0) -> Iterator[dict[str, Any]]:
    """Drafts without a model on every workload."""
    with ExitStack() as stack:
        arms = {
            f"{name} {draft}": stack.enter_context(running(*engines.command(name, draft)))
            for name, draft in engines.drafting(given)
        }
        stack.enter_context(neighbours(num_busy, at_work=1.0))
        for workload in given.workloads:
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
            for turn, text in enumerate(prompts_of(workload, given.num_prompts)):
                job = arms[f"{NATIVE} {PLAIN}"].ask({"text": text}) | {"tokens": given.tokens + 1, "ignore_eos": False}
                for name in arms if turn % 2 == 0 else reversed(arms):
                    answers[name].append(arms[name].ask(job))
            yield {workload: compared(answers)}


def compared(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Every arm beside plain decoding of its engine, and each of ours beside the best of llama.cpp."""
    per_token = {
        name: np.array([one["decode_seconds"] / max(1, one["decode_tokens"]) for one in its])
        for name, its in answers.items()
    }
    best = min((name for name in answers if name.startswith(LLAMA_CPP)), key=lambda name: np.median(per_token[name]))
    found: dict[str, Any] = {"prompts": len(per_token[best]), "llama.cpp's best": best}
    for name, its in answers.items():
        plain = f"{name.partition(' ')[0]} {PLAIN}"
        steps = [1 + one["decode_tokens"] - one["accepted"] for one in its]
        found[name] = {
            "tokens/s": round(float(1 / np.median(per_token[name])), 1),
            "speed-up": interval(per_token[plain] / per_token[name]),
            "tokens a step": round(sum(one["decode_tokens"] + 1 for one in its) / max(1, sum(steps)), 2),
            "texts equal to plain": sum(a["text"] == b["text"] for a, b in zip(its, answers[plain], strict=True)),
        }
        if not name.startswith(LLAMA_CPP):
            found[name]["over llama.cpp's best"] = interval(per_token[best] / per_token[name])
    return found


def interval(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """The median ratio and its interval."""
    ends = bootstrap_median(ratios).ci95
    return {"median": round(float(np.median(ratios)), 3), "ci95": ends and [round(end, 3) for end in ends]}


def streams(given: argparse.Namespace, engines: Engines) -> Iterator[dict[str, Any]]:
    """Several streams through both servers, which answer once with few tokens first."""
    for num in given.streams:
        texts = [text for workload in given.workloads for text in prompts_of(workload, given.num_prompts)]
        texts = (texts * (2 * num))[: 2 * num]
        with ExitStack() as stack:
            urls: dict[str, str] = {}
            for name, draft in engines.drafting(given):
                if name in engines.ours:
                    urls[f"{name} {draft}"] = stack.enter_context(served(given, name, draft, num))
                else:
                    arm = stack.enter_context(running(*engines.command(name, draft, num)))
                    urls[f"{name} {draft}"] = arm.about["address"]
            rates: dict[str, list[float]] = {name: [] for name in urls}
            for turn in range(min(given.rounds, STREAM_ROUNDS) + 1):
                for name in urls if turn % 2 == 0 else reversed(urls):
                    rate = tokens_per_second(urls[name], texts, num, given.tokens if turn else WARM_UP)
                    if turn:
                        rates[name].append(rate)
        best = max((name for name in rates if name.startswith(LLAMA_CPP)), key=lambda name: median(rates[name]))
        found = {
            name: {
                "tokens/s": round(median(its), 1),
                "over llama.cpp's best": interval(np.array(its) / np.array(rates[best])),
            }
            for name, its in rates.items()
        }
        yield {f"{num} streams": {"llama.cpp's best": best} | found}


@contextmanager
def served(given: argparse.Namespace, version: str, draft: str, num: int) -> Iterator[str]:
    """The address of `specdec serve` with so many places."""
    name, _, k = draft.partition(":k=")
    words = ["-t", given.path, "--max-num-seqs", str(num), "--max-model-len", str(MODEL_LENGTH)]
    words += ["--no-enable-prefix-caching", "--compute", COMPUTE[version]]
    drafting = [] if draft == PLAIN else ["-d", name, "--depth-policy", "adaptive", *(["-k", k] if k else [])]
    with serving(*words, *drafting) as server:
        yield server.url


def tokens_per_second(url: str, texts: Sequence[str], num: int, tokens: int) -> float:
    """Tokens of all answers over the seconds until the last one, so many requests at a time."""

    def answer(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(json.load(response)["usage"]["completion_tokens"])

    begin = perf_counter()
    with ThreadPoolExecutor(num) as threads:
        total = sum(threads.map(answer, texts))
    return total / (perf_counter() - begin)


MEASURES = {"plain": loading_and_decoding, "context": context, "drafts": drafts, "busy": busy, "streams": streams}


def built_for(server: str) -> str:
    """The instructions that a llama-server was built for, which it writes before it finds no model."""
    words = [server, "-lv", "4", "-m", os.devnull]
    lines = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    return next(line.partition("CPU : ")[2].strip() for line in lines.splitlines() if "CPU : " in line)


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument(
        "--llama-cpp", required=True, help="the Python of an environment with xllamacpp, or a llama-server"
    )
    parser.add_argument("--built", help="a llama-server that takes part beside it")
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=["plain"], help="what is measured")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--loads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drafts", nargs="*", default=list(OUR_DRAFTS), help="ours, such as suffix:k=16")
    parser.add_argument("--their-drafts", nargs="*", default=list(THEIR_DRAFTS), help="llama.cpp's")
    parser.add_argument("--workloads", nargs="+", default=["edit", "code"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each workload")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--avx2", action="store_true", help="leave out our AVX-512 kernels")
    parser.add_argument("--dequantized", action="store_true", help="ours with dequantized weights, too")
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    if not given.rounds and given.only != ["plain"]:
        parser.error("--rounds 0 measures loading, so `plain` alone")
    if given.built and Path(given.built).name != "llama-server":
        parser.error(f"--built takes a llama-server, got {given.built}")
    before = record.machine()
    if given.avx2:
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    engines = Engines(given)
    results: dict[str, Any] = {"file": Path(given.path).name, "file_bytes": Path(given.path).stat().st_size}
    results |= {"instructions of ours": "AVX2" if given.avx2 else before["instructions"], "threads": given.threads}
    for name, server in engines.servers.items():
        results[f"instructions of {name}"] = built_for(server)
    for name in given.only:
        for found in MEASURES[name](given, engines):
            results |= found
            if given.save:
                record.save(given.save, before, results, given.threads)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
