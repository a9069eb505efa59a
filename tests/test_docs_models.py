"""docs/models.md is what its script makes of the outcomes in benchmarks/results/."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers
from every_type import TYPES, WRAPPERS
from tiny_quantized import DEQUANTIZED, FORMS, UNDONE

from specdec_cli.lm.files.architecture import TYPES as REFUSED

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "docs_models.py"))


def test_the_page_is_current(script: dict[str, Any]) -> None:
    said = "run `python scripts/docs_models.py`"
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == script["page"](), said


def test_every_type_is_there_and_none_is_wrong(script: dict[str, Any]) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "every_model.json").read_text(encoding="utf-8"))
    results = kept["results"]
    measured_with = kept["machine"]["transformers"]
    assert f"transformers=={measured_with}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if transformers.__version__ == measured_with:  # others know other types
        assert (set(results["causal"]), set(results["wrappers"])) == (set(TYPES), set(WRAPPERS))
    kinds = {name: script["kind_of"](one) for part in results.values() for name, one in part.items()}
    assert "wrong" not in kinds.values()


def test_refusals_of_the_result_are_those_of_today() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "every_model.json").read_text(encoding="utf-8"))["results"]
    outcomes = {**results["causal"], **results["wrappers"]}
    reasons = {name: outcomes[name]["reason"] for name in REFUSED if name in outcomes}
    assert {
        name for name, reason in reasons.items() if not reason.endswith(f"not supported: it {REFUSED[name]}")
    } == set()


def test_every_form_of_files_is_there_and_none_is_wrong(script: dict[str, Any]) -> None:
    path = ROOT / "benchmarks" / "results" / "file_forms.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert set(FORMS) <= set(results)
    assert {one["outcome"] for one in results.values()} == {"equal", "refused"}
    assert {name for name, one in results.items() if one["outcome"] == "refused"}.isdisjoint({*UNDONE, *DEQUANTIZED})
    assert set(script["NAMES"]) <= set(results)


def test_a_reason_is_told_without_its_subject(script: dict[str, Any]) -> None:
    reason_of = script["reason_of"]
    assert reason_of("xlm", "`xlm` is not supported: it keeps a cache of its own") == "it keeps a cache of its own"
    assert reason_of("t5", "`t5` is an encoder-decoder") == "is an encoder-decoder"


def test_what_people_ask_for_comes_first_and_runs(script: dict[str, Any]) -> None:
    page, common = script["page"](), script["COMMON"]
    first = page[: page.index("## All causal language models")]
    types = [name for names in common.values() for name in names]
    assert len(types) == len(set(types)) > 60
    assert [name for name in types if f"`{name}`" not in first] == []
    assert "| Llama 2, 3, TinyLlama | `llama` |  |" in first
    assert "| Falcon, Falcon-H1, Falcon-Mamba |  | `falcon`, " in first


def test_an_exception_is_named(script: dict[str, Any]) -> None:
    runs = {"plain": "equal", "draft": "equal", "bfloat16": "equal"}
    outcomes = {"a": runs, "b": {**runs, "bfloat16": "near tie"}, "c": {**runs, "bfloat16": "refused"}}
    assert script["exceptions"]({"a": runs}) == ""
    assert script["exceptions"](outcomes) == "; apart from near ties in `b`; `c` does not run in bfloat16"
