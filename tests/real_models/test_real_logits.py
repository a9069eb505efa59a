"""Logits of real GGUF files: native blocks, the dequantized float32 model, transformers and llama.cpp agree."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_files import GEMMA, QWEN, SMOLLM, real_file

from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_TOKENS = 200
# About twice the mean KL divergence and the unequal first choices in benchmarks/results/gguf_agreement_*.json.
BOUNDS = {QWEN: (0.0025, 0.96), SMOLLM: (0.008, 0.90), GEMMA: (0.0125, 0.90)}
# The same of benchmarks/results/llama_cpp_agreement.json.
LLAMA_CPP_BOUNDS = {QWEN: (0.0025, 0.96), SMOLLM: (0.006, 0.91), GEMMA: (0.0105, 0.87)}
TEXT = "\n\n".join(
    (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")[:1200]
    for page in ("decoding", "choosing-k")
)


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


@pytest.mark.parametrize("name", BOUNDS)
def test_native_agrees_with_dequantized_float32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    agreement = benchmark(monkeypatch, "gguf_blocks")["agreement"]
    measured = agreement(real_file(name), TEXT, NUM_TOKENS)["native"]
    most_divergence, least_equal = BOUNDS[name]
    assert 0 < measured["mean KL divergence"] < most_divergence
    assert measured["equal first choices"] > least_equal


@pytest.mark.parametrize("name", LLAMA_CPP_BOUNDS)
def test_native_agrees_with_llama_cpp(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    measured = benchmark(monkeypatch, "llama_cpp_agreement")["agreement"](real_file(name), 2000, "native")
    most_divergence, least_equal = LLAMA_CPP_BOUNDS[name]
    assert measured["tokens"] == 2000
    assert 0 < measured["mean KL divergence"] < most_divergence
    assert measured["equal first choices"] > least_equal


@pytest.mark.parametrize("name", BOUNDS)
def test_dequantized_float32_is_that_of_transformers(name: str) -> None:
    """Logits of 100 tokens are equal but for the order of additions: 0.00013 apart at most when this was written."""
    from transformers import AutoModelForCausalLM

    path = Path(real_file(name))
    tokens = np.load(Path(__file__).with_name("llama_cpp_logits.npz"))[f"{name}/tokens"][:100].tolist()
    lm = load_lm(str(path), max_model_len=128, max_num_seqs=1, compute="dequantized", dtype="float32")
    ours = lm.score([Row(0, tokens, len(tokens))]).clone()
    del lm
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=0.001, rtol=0)
