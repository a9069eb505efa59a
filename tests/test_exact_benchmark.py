"""The exactness benchmark in its short form, and that it notices lost bits."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from specdec_cli.lm.invariance import row_invariance
from specdec_cli.lm.transformers_lm import TransformersLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def exit_status(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["exact.py", "--short", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "exact.py"), run_name="__main__")
    return ended.value.code


def is_row_invariant():
    return all(check.holds for check in row_invariance(torch.bfloat16) if check.needed)


def test_the_short_form_holds(monkeypatch, capsys):
    if not is_row_invariant():
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    assert exit_status(monkeypatch) == 0
    assert "0 of 9 rows differ" in capsys.readouterr().out


def test_a_lone_row_is_noticed(monkeypatch, capsys):
    """The planted fault: bfloat16 without its second row, which takes another kernel."""
    load = TransformersLM.__init__

    def forgetful(self, *arguments, **options):
        load(self, *arguments, **options)
        self._bitwise = self._packed_bitwise = False

    monkeypatch.setattr(TransformersLM, "__init__", forgetful)
    assert exit_status(monkeypatch, "--precision", "bfloat16") == 1
    assert " 0 of 3 rows differ" not in capsys.readouterr().out
