"""The short form of `benchmarks/every_model.py`: one type of each kind, every draft, float32.

The whole run is the benchmark; its outcomes are in docs/models.md.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from every_type import save_tiny
from model_check import check
from shortened import mostly_slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Latents, windows and sinks, joined keys, a mixture, shared keys, compressed keys, a state beside keys.
SAMPLE = ("deepseek_v3", "gpt_oss", "gptj", "olmoe", "gemma3n_text", "deepseek_v4", "inkling_text")


@pytest.mark.parametrize("model_type", mostly_slow(SAMPLE, ("deepseek_v3",)))
def test_text_is_transformers_whatever_drafts(tmp_path: Path, model_type: str) -> None:
    found = check(save_tiny(model_type, tmp_path / "model"), has_bfloat16=False)
    assert (found.plain, found.draft, found.reason) == ("equal", "equal", "")


def test_a_refusal_is_doctors_too(tmp_path: Path) -> None:
    found = check(save_tiny("reformer", tmp_path / "model"))
    assert found.plain == "refused"
    assert found.reason.endswith("is not supported: it hashes its keys into buckets (LSH attention)")


@pytest.mark.slow
def test_the_script_runs_a_worker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["every_model.py", "--no-bfloat16", "xlm"])
    runpy.run_path(str(BENCHMARKS / "every_model.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "xlm                          refused | `xlm` is not supported: it keeps a cache of its own" in out
    assert "causal types: 1 refused" in out
