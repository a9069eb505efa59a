"""A GGUF file's blocks as they are, beside the same file dequantized, in one process and in turn.

    python benchmarks/gguf_blocks.py model.gguf [--rounds 9] [--context 256] [--save NAME]

Arms: native, dequantized in the file's dtype (bfloat16), and dequantized and quantized to int8 and int4, all in our own
decoder.
Each round asks every arm for 1, 2, 4, 6 and 8 rows behind the same context, forwards and backwards in turn. Loading is
timed and its memory counted in a process of its own for each arm. With --text, native and the dequantized numbers
quantized to int8 and int4 are compared with the dequantized float32 model over a text: KL divergence and equal first
choices, as in llama.cpp's perplexity tool; with --rounds 0, they are compared and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm, load_tokenizer

ARMS: dict[str, dict[str, Any]] = {
    "native": {"compute": "native"},
    "bfloat16": {"compute": "dequantized"},
    "int8": {"compute": "dequantized", "quantize": "int8"},
    "int4": {"compute": "dequantized", "quantize": "int4"},
}
COMPARED: dict[str, dict[str, Any]] = {
    "float32": {"compute": "dequantized", "dtype": "float32"},
    "native": {"compute": "native"},
    "int8": {"compute": "dequantized", "dtype": "float32", "quantize": "int8"},
    "int4": {"compute": "dequantized", "dtype": "float32", "quantize": "int4"},
}
"""The first is what the others are compared with."""
ROWS = (1, 2, 4, 6, 8)
_LOAD = """
import json, resource, sys, time
begin = time.perf_counter()
from specdec_cli.lm.load import load_lm
imported = time.perf_counter()
load_lm(sys.argv[1], max_model_len=1024, max_num_seqs=1, **json.loads(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
seconds = {"import_seconds": imported - begin, "load_seconds": time.perf_counter() - imported}
print(json.dumps(seconds | {"peak_bytes": peak}))
"""


def loading(path: str) -> dict[str, Any]:
    """Seconds and memory of a load, each arm in a process of its own."""
    found = {}
    for name, options in ARMS.items():
        command = [sys.executable, "-c", _LOAD, path, json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = {key: round(value, 2) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
    return found


def steps(path: str, rounds: int, context: int) -> dict[str, Any]:
    """Milliseconds of a forward by rows, medians, and what 6 rows cost over 1."""
    models = {name: load_lm(path, max_model_len=2048, max_num_seqs=1, **options) for name, options in ARMS.items()}
    vocab = min(model.vocab_size for model in models.values())
    text = [(7919 * i * i + 31 * i) % vocab for i in range(context + max(ROWS))]
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in ARMS for rows in ROWS}
    for turn in range(rounds + 1):
        for rows in ROWS:
            for name in sorted(ARMS, reverse=turn % 2 == 1):
                models[name].score([Row(0, text[:context], 1)])
                begin = perf_counter()
                models[name].score([Row(0, text[: context + rows], rows)])
                if turn:
                    times[name, rows].append((perf_counter() - begin) * 1e3)
    middle = {key: median(its) for key, its in times.items()}
    return {
        name: {f"{rows} rows, ms": round(middle[name, rows], 1) for rows in ROWS}
        | {"6 rows over 1": round(middle[name, 6] / middle[name, 1], 2)}
        | {"1 row over native's": round(middle[name, 1] / middle["native", 1], 2)}
        for name in ARMS
    }


def agreement(path: str, text: str, num_tokens: int) -> dict[str, Any]:
    """How native, int8 and int4 differ from the dequantized float32 model over a text, and bytes of their weights."""
    tokens = load_tokenizer(path)(text)["input_ids"][:num_tokens]
    plain: torch.Tensor | None = None
    found: dict[str, Any] = {"tokens": len(tokens)}
    for name, options in COMPARED.items():
        lm = load_lm(path, max_model_len=len(tokens) + 16, max_num_seqs=1, **options)
        its = logits(lm, tokens)
        if plain is None:
            plain = its
            continue
        parts = zip(torch.split(plain, 64), torch.split(its, 64), strict=True)
        kl = torch.cat([_divergence(*some) for some in parts])
        same = (its.argmax(-1) == plain.argmax(-1)).double()
        found[name] = {
            "mean KL divergence": round(float(kl.mean()), 5),
            "99th percentile": round(float(kl.quantile(0.99)), 5),
            "equal first choices": round(float(same.mean()), 4),
            "weight bytes": lm.weight_bytes,
        }
    return found


def _divergence(plain: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The KL divergence of logits [n, V] from the plain ones: [n]."""
    right, its = (torch.log_softmax(one.double(), -1) for one in (plain, other))
    return (right.exp() * (right - its)).sum(-1)


def logits(lm: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [n, V] behind each of n tokens."""
    ends = [*range(128, len(tokens), 128), len(tokens)]
    parts = (lm.score([Row(0, tokens[:end], end - begin)]) for begin, end in zip([0, *ends], ends, strict=False))
    return torch.cat([part.clone() for part in parts])


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--text", type=Path, help="a text file for the agreement")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {"file": Path(given.path).name, "file_bytes": Path(given.path).stat().st_size}
    if given.rounds:
        results |= {"loading": loading(given.path), "steps": steps(given.path, given.rounds, given.context)}
    if given.text is not None:
        results["text"] = given.text.name
        results["agreement"] = agreement(given.path, given.text.read_text(encoding="utf-8"), given.tokens)
    print(json.dumps(results, indent=1))
    if given.save:
        record.save(given.save, before, results)


if __name__ == "__main__":
    main()
