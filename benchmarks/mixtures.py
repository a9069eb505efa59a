"""Random mixtures of experts in GGUF files beside llama.cpp: probabilities, and milliseconds of a step in turn.

    python -m venv E; E/bin/pip install xllamacpp
    python benchmarks/mixtures.py --llama-cpp E/bin/python --save llama_cpp_mixtures

Agreement: tiny files of every family, the probabilities behind beginnings of a random text; KL divergence of ours from
llama.cpp's, native and dequantized. llama.cpp's end token is left out, and so are beginnings whose next byte is no
text. Steps: a Qwen3-MoE of a common shape behind 256 tokens, one thread each, native, dequantized to bfloat16 and
llama.cpp in turn; llama.cpp reads the further rows as the end of a prompt whose beginning is in its cache. The least
time is the one beside which no busy process ran.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

tiny_gguf, tiny_models = (importlib.import_module(name) for name in ("tiny_gguf", "tiny_models"))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 256, "num_experts": 6, "num_experts_per_tok": 3},
    "mixtral": {"head_dim": 64},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "gpt_oss": {"head_dim": 64},
}
FORMS = ("MXFP4", "Q4_K_M", "Q8_0")
ARMS: dict[str, dict[str, Any]] = {
    "native, float32": {"dtype": "float32"},
    "native": {},
    "dequantized, float32": {"compute": "dequantized", "dtype": "float32"},
}
SHAPE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8192}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
SHAPE |= {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "norm_topk_prob": True}
CONTEXT, ROWS, LENGTH = 256, (1, 6), 60
THEIRS = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.warmup = sys.argv[1], 1, 512, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
for line in sys.stdin:
    body = {"n_predict": 1, "temperature": 0, "ignore_eos": True, "cache_prompt": True} | json.loads(line)
    answer = server.handle_completions(body)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    found = {"ms": answer["timings"]["prompt_ms"], "rows": answer["timings"]["prompt_n"]}
    probs = answer["choices"][0].get("logprobs")
    if probs and probs["content"]:
        found["logprobs"] = {one["id"]: one["logprob"] for one in probs["content"][0]["top_logprobs"]}
    print(json.dumps(found), flush=True)
"""


class LlamaCpp:
    """A process of llama.cpp with a file."""

    def __init__(self, python: str, path: Path) -> None:
        pipe, silent = subprocess.PIPE, subprocess.DEVNULL
        command = [python, "-c", THEIRS, str(path)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=silent, text=True)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Its answer to a prompt."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        print(json.dumps(job), file=sink, flush=True)
        found: dict[str, Any] = json.loads(next(line for line in source if line.startswith('{"ms"')))
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def agreement(python: str, path: Path) -> dict[str, Any]:
    """How ours differ from llama.cpp's probabilities behind beginnings of a random text."""
    draw = random.Random(0)
    text = [draw.randrange(250) for _ in range(LENGTH)]
    theirs = LlamaCpp(python, path)
    answers: dict[int, dict[str, float]] = {}
    for n in range(2, LENGTH):
        if logprobs := theirs.ask(prompt=text[:n], logprobs=tiny_gguf.SIZES["vocab_size"]).get("logprobs"):
            answers[n] = logprobs
    theirs.close()
    ids = sorted(map(int, next(iter(answers.values()))))
    right = torch.tensor([[answer[str(i)] for i in ids] for answer in answers.values()]).double().log_softmax(-1)
    results: dict[str, Any] = {"beginnings": len(answers)}
    for name, options in ARMS.items():
        lm = load_lm(str(path), **options)
        its = torch.cat([lm.score([Row(0, text[:n], 1)]) for n in answers])[:, ids].double().log_softmax(-1)
        kl = (right.exp() * (right - its)).sum(-1)
        same = (right.argmax(-1) == its.argmax(-1)).double()
        results[name] = {
            "median KL divergence": round(float(kl.median()), 5),
            "mean KL divergence": round(float(kl.mean()), 5),
            "equal first choices": round(float(same.mean()), 3),
        }
    return results


def steps(python: str, path: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step by rows, and load times and memory of the weights."""
    torch.set_num_threads(1)
    text = [(7919 * i * i + 31 * i) % 8000 for i in range(CONTEXT + max(ROWS))]
    results: dict[str, Any] = {"file_bytes": path.stat().st_size}
    models = {}
    arms: dict[str, dict[str, Any]] = {"native": {}, "dequantized": {"compute": "dequantized"}}
    for name, options in arms.items():
        begin = perf_counter()
        models[name] = load_lm(str(path), max_model_len=512, max_num_seqs=1, **options)
        results[name] = {"load_seconds": round(perf_counter() - begin, 1), "weight_bytes": models[name].weight_bytes}
    theirs = LlamaCpp(python, path)
    times: dict[tuple[str, int], list[float]] = {(arm, rows): [] for arm in (*models, "llama.cpp") for rows in ROWS}
    for turn in range(rounds + 1):
        for rows in ROWS:
            for arm in sorted((*models, "llama.cpp"), reverse=turn % 2 == 1):
                if arm == "llama.cpp":
                    theirs.ask(prompt=text[:CONTEXT])
                    answer = theirs.ask(prompt=text[: CONTEXT + rows])
                    assert answer["rows"] == rows, "the beginning is cached"
                    milliseconds = answer["ms"]
                else:
                    models[arm].score([Row(0, text[:CONTEXT], 1)])
                    begin = perf_counter()
                    models[arm].score([Row(0, text[: CONTEXT + rows], rows)])
                    milliseconds = (perf_counter() - begin) * 1e3
                if turn:
                    times[arm, rows].append(milliseconds)
    theirs.close()
    for (arm, rows), its in times.items():
        found = {"least": round(min(its), 2), "median": round(median(its), 2)}
        results.setdefault(arm, {})[f"{rows} rows, ms"] = found
    return results


def main() -> None:
    """Write the files, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", required=True, help="Python with xllamacpp")
    parser.add_argument("--rounds", type=int, default=40, help="of steps")
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family, own in FAMILIES.items():
            made = tiny_models.make_tiny(
                family, folder / family, 3, 0.3, **tiny_gguf.SIZES | own | {"max_position_embeddings": 256}
            )
            for form in FORMS:
                path = folder / f"{family}-{form}.gguf"
                tiny_gguf.write_gguf(made, path, form)
                results[f"{family}, {form}"] = agreement(given.llama_cpp, path)
        path = folder / "large.gguf"
        tiny_gguf.write_gguf(tiny_models.make_tiny("qwen3_moe", folder / "large", 3, **SHAPE), path, "Q4_K_M")
        results["steps, qwen3_moe Q4_K_M"] = steps(given.llama_cpp, path, given.rounds)
    print(json.dumps(results, indent=1))
    if given.save:
        record.save(given.save, before, results)


if __name__ == "__main__":
    main()
