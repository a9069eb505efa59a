"""Native blocks of real GGUF files compute what the dequantized float32 model does, within bounds for each file."""

import runpy
from pathlib import Path

import pytest
from real_files import GEMMA, QWEN, SMOLLM, real_file

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_TOKENS = 200
# About twice the mean KL divergence and the unequal first choices in benchmarks/results/gguf_agreement_*.json.
BOUNDS = {QWEN: (0.0025, 0.96), SMOLLM: (0.008, 0.90), GEMMA: (0.0125, 0.90)}
TEXT = "\n\n".join(
    (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")[:1200]
    for page in ("decoding", "choosing-k")
)


@pytest.mark.parametrize("name", BOUNDS)
def test_native_agrees_with_dequantized_float32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    agreement = runpy.run_path(str(BENCHMARKS / "gguf_blocks.py"))["agreement"]
    measured = agreement(real_file(name), TEXT, NUM_TOKENS)
    most_divergence, least_equal = BOUNDS[name]
    assert measured["tokens"] == NUM_TOKENS
    assert 0 < measured["mean KL divergence"] < most_divergence
    assert measured["equal first choices"] > least_equal
