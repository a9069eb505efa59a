"""The exactness benchmark in its short form, and that it notices lost bits."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from invariance import holds
from planted import plant

from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.llama import LlamaDecoder

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["exact.py", "--short", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "exact.py"), run_name="__main__")
    return ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(("precisions", "num_rows"), [(["bfloat16"], 18), (["float32", "bfloat16", "int8"], 54)])
def test_the_short_form_holds(
    precisions: list[str], num_rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    assert exit_status(monkeypatch, "--precision", *precisions) == 0
    assert f"0 of {num_rows} rows break their promise" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(native.missing() is not None, reason="our own decoder does not run here")
def test_a_row_that_follows_its_company_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted fault: rows that are computed together have other bits."""
    plant(monkeypatch, "a row is another one in company")
    assert exit_status(monkeypatch, "--precision", "bfloat16", "--tokens", "600") == 1
    assert " 0 of 18 rows break their promise" not in capsys.readouterr().out


def test_a_gpu_promises_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "exact.py"), run_name="exact")
    promise, is_broken = names["_promise"], names["_is_broken"]
    cases = {
        ("float32", "cpu"): (True, False),
        ("bfloat16", "cpu"): (True, True),
        ("int8", "cpu"): (True, True),
        ("float32", "cuda"): (True, False),
        ("bfloat16", "cuda"): (False, False),
    }
    for (precision, device), found in cases.items():
        row = {"promise": promise(precision, device), "token_mismatches": 0, "logit_mismatches": 0}
        assert (is_broken(row | {"token_mismatches": 1}), is_broken(row | {"logit_mismatches": 1})) == found
        assert not is_broken(row)


@pytest.mark.slow
@pytest.mark.skipif(native.missing() is not None, reason="our own decoder does not run here")
def test_a_path_that_is_not_moved_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted fault: the accepted path's keys and values stay where the tree had them, which no chain notices."""
    monkeypatch.setattr(LlamaDecoder, "move", lambda *_: None)
    assert exit_status(monkeypatch, "--precision", "bfloat16") == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    differ = {row["shape"] for row in rows if row["logit_mismatches"]}
    assert differ == {"static trees", "dynamic trees"}
