"""Which drafts pay for which work? `specdec compare-drafts` on four kinds of work, every draft at its own best k.

    python benchmarks/what_pays.py MODEL.gguf --model SmolLM2-135M-Instruct.Q4_1.gguf --save what_pays_qwen
    python benchmarks/what_pays.py MODEL.gguf --model SMALL.gguf --head EAGLE3 --int8 DISTILLED --save what_pays_qwen
    python benchmarks/what_pays.py MODEL.gguf --workloads edit --avx2 --save what_pays_qwen_avx2
    python benchmarks/what_pays.py MODEL.gguf --llamacpp E/bin/python --save what_pays_both_engines

The prompts are in `workloads/`: code is written, a file is edited, a question is answered, data are extracted from a
text as JSON. They go through the target's chat template, and every text ends where the target ends it. With `--avx2`
the kernels leave out what a processor has beyond AVX2. With `--bfloat16` the target has plain numbers, so that copies
of it in 8 and 4 bits are drafts too; a file of 4 bits has no smaller copy. Drafts of `--int8` are loaded in 8 bits and
compared in a run of their own after the others', because the command quantizes all of its drafts or none. With
`--llamacpp`, a Python with the wheel xllamacpp, `compare-drafts --engine llamacpp` also compares `--their-drafts` on
each workload: before ours and after it, from one workload to the next. A saved result is written after every workload;
another run with the same name adds workloads or measures them again. `scripts/readme_tables.py` makes a table of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

WORKLOADS = ("edit", "code", "json", "chat")
DRAFTS = ("ngram", "suffix", "self-exit:12")
THEIR_DRAFTS = ("ngram-simple:size_n=4", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
THREADS = 2  # of llama.cpp, which would else count those of the host
COPIES = ("self-int8", "self-int4")
FOLDER = Path(__file__).with_name("workloads")


def compared(options: argparse.Namespace, workload: str, drafts: list[str], *further: str) -> dict[str, Any]:
    """The command's document for a workload."""
    prompts = ["--chat", "--prompt-file", str(FOLDER / f"{workload}.jsonl"), "--num-prompts", str(options.num_prompts)]
    words = [word for draft in drafts for word in ("-d", draft)]
    often = ["--repeats", str(options.repeats), "-n", str(options.tokens)]
    numbers = ["--compute", "dequantized", "--dtype", "bfloat16"] if options.bfloat16 else []
    environment = os.environ | ({"ATEN_CPU_CAPABILITY": "avx2"} if options.avx2 else {})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "drafts.json"
        command = [sys.executable, "-m", "specdec_cli", "compare-drafts", "-t", options.target, *numbers, *words]
        subprocess.run([*command, *further, *prompts, *often, "--output", str(output)], env=environment, check=True)
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of a document that the table needs, a draft's model by its file's name."""
    return {
        "prompts": document["workload"]["num_prompts"],
        "tokens": document["plain"]["speculative"]["num_emitted_tokens"],
        "plain tokens/s": rounded(document["plain"]["timing"]["decode_tokens_per_second"]),
        "busy": document["machine"]["busy"],
        "lossless": document["lossless"],
        "drafts": {
            short(row["draft"]): {
                "k": row["best_k"],
                "speed-up": interval(row["speedup"]),
                "end to end": interval(row["latency_speedup"]),
                "tokens/s": rounded(row["timing"]["decode_tokens_per_second"]),
                "acceptance length": rounded(row["acceptance_length"]),
                "acceptance rate": rounded(row["acceptance_rate"]),
            }
            for row in document["rows"]
        },
        "notices": document["notices"],
    }


def short(draft: str) -> str:
    """A draft without the folders of its model."""
    first, plus, second = draft.rpartition("+")
    return f"{first}{plus}{Path(second).name}"


def interval(speedup: dict[str, Any]) -> dict[str, Any]:
    """A median with its interval."""
    return {"median": rounded(speedup["median"]), "ci95": speedup["ci95"] and [rounded(end) for end in speedup["ci95"]]}


def rounded(value: float | None) -> float | None:
    """Three digits behind the point."""
    return None if value is None else round(value, 3)


def ours(options: argparse.Namespace, workload: str, drafts: list[str]) -> dict[str, Any]:
    """The figures of our engine."""
    limit = [] if options.k_max is None else ["--k-max", str(options.k_max)]
    found = shortened(compared(options, workload, drafts, *limit))
    if options.int8:
        in_int8 = shortened(compared(options, workload, options.int8, *limit, "--draft-quantize", "int8"))["drafts"]
        found["drafts"] |= {f"{draft}, int8": facts for draft, facts in in_int8.items()}
    return found


def theirs(options: argparse.Namespace, workload: str) -> dict[str, Any]:
    """The figures of llama.cpp, its drafts at one k."""
    engine = ["--engine", "llamacpp", "--engine-command", options.llamacpp, "--engine-args", f"--threads {THREADS}"]
    shape = ["--set", f"speculation.num_speculative_tokens={options.their_k}"]
    return shortened(compared(options, workload, options.their_drafts, *engine, *shape))


def main() -> None:
    """Measure the workloads, and keep each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a model")
    parser.add_argument("--drafts", nargs="*", default=list(DRAFTS), help="drafts that need no file")
    parser.add_argument("--model", action="append", default=[], help="a draft model, of any tokenizer (repeatable)")
    parser.add_argument("--int8", action="append", default=[], help="a draft model to load in 8 bits (repeatable)")
    parser.add_argument("--head", action="append", default=[], help="a trained head (repeatable)")
    parser.add_argument("--second", action="append", default=[], help="a draft to combine with suffix (repeatable)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--k-max", type=int, help="without it as `compare-drafts` chooses")
    parser.add_argument("--bfloat16", action="store_true", help="the target's weights as plain numbers")
    parser.add_argument("--avx2", action="store_true", help="leave out AVX-512")
    parser.add_argument("--llamacpp", help="a Python with the wheel xllamacpp, to compare llama.cpp's drafts, too")
    parser.add_argument("--their-drafts", nargs="+", default=list(THEIR_DRAFTS), help="llama.cpp's")
    parser.add_argument("--their-k", type=int, default=16, help="largest guess of llama.cpp's drafts")
    parser.add_argument("--save", help="name of the result; printed alone without it")
    options = parser.parse_args()
    drafts = [
        *(COPIES if options.bfloat16 else ()),
        *options.drafts,
        *options.model,
        *options.head,
        *(f"suffix+{draft}" for draft in options.second),
    ]
    path = record.RESULTS / f"{options.save}.json"
    workloads = json.loads(path.read_text())["results"]["workloads"] if options.save and path.exists() else {}
    for turn, name in enumerate(options.workloads):
        before = record.machine()
        their_figures = {"llama.cpp": theirs(options, name)} if options.llamacpp and turn % 2 else {}
        workloads[name] = {"machine": record.brief(before), **ours(options, name, drafts), **their_figures}
        if options.llamacpp and turn % 2 == 0:
            workloads[name]["llama.cpp"] = theirs(options, name)
        if options.save:
            results: dict[str, Any] = {"target": Path(options.target).name, "bfloat16": options.bfloat16}
            results["tokens"] = options.tokens
            results["instructions"] = "AVX2" if options.avx2 else before["instructions"]
            record.save(options.save, before, results | {"workloads": workloads})


if __name__ == "__main__":
    main()
