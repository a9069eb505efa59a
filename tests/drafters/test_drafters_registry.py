"""The folder is the registry; specs and options are checked, and a wrong one says what would be right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_cli import drafters
from specdec_cli.errors import UsageError


def test_the_folder_is_the_registry() -> None:
    assert {"model", "ngram", "none", "prediction"} <= set(drafters.methods())
    assert "contract" not in drafters.methods()
    assert [field.name for field in drafters.options("ngram")] == ["max", "min"]
    assert [field.name for field in drafters.options("model")] == ["model"]


@pytest.mark.parametrize(("spec", "draft"), [
    ("none", {"method": "none"}),
    ("ngram", {"method": "ngram"}),
    ("ngram:max=4,min=2", {"method": "ngram", "max": 4, "min": 2}),
    ("ngram: max = 3", {"method": "ngram", "max": 3}),
    ("suffix", {"method": "suffix"}),
    ("suffix:min_prob=0.2,cache=0", {"method": "suffix", "min_prob": 0.2, "cache": 0}),
    ("prediction", {"method": "prediction"}),
    ("self-int8", {"method": "self-int8"}), ("self-int4", {"method": "self-int4"}),
    ("self-exit:4", {"method": "self-exit", "layers": 4}),
    ("self-exit:layers=4", {"method": "self-exit", "layers": 4}),
    ("gpt2", {"model": "gpt2"}),
    ("Qwen/Qwen3-0.6B", {"model": "Qwen/Qwen3-0.6B"}),
    ("org/name:Q4_K_M", {"model": "org/name:Q4_K_M"}),
    ("builtin:draft", {"model": "builtin:draft"}),
    ("model", {"model": "model"}),
    ("./suffix", {"model": "./suffix"}),
    ("./self-exit:2", {"model": "./self-exit:2"}),
    ("./runs/a+b:3", {"model": "./runs/a+b:3"}),
    ("/models/x:1", {"model": "/models/x:1"}),
])  # fmt: skip
def test_specs(spec: str, draft: dict[str, Any]) -> None:
    assert drafters.parse_spec(spec) == draft


def test_an_existing_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a+b", "run:3"):
        (tmp_path / name).mkdir()
        assert drafters.parse_spec(name) == {"model": name}


@pytest.mark.parametrize(("spec", "message"), [
    ("", "empty"),
    ("  ", "empty"),
    ("self-int8:k=3", "no option `k`"),
    ("self-exit:", "not an option"),
    ("self-exit:four", "`layers` of `self-exit` must be a whole number, not `four`"),
    ("self-exit:0", "`layers` must be at least 1"),
    ("self-exit:-1", "`layers` must be at least 1"),
    ("parallel:some/dir", "not available"),
    ("ngram:max", "not an option"),
    ("ngram:", "not an option"),
    ("ngram:max=", "not an option"),
    ("ngram:max=two", "must be a whole number, not `two`"),
    ("ngram:max=2.5", "must be a whole number"),
    ("ngram:max=2,max=3", "given twice"),
    ("ngram:maxx=2", "no option `maxx`"),
    ("ngram:max=0", "`min`|`max`"),
    ("ngram:min=0", "`min`"),
    ("ngram:max=2,min=3", "`max`"),
    ("none:k=3", "no option `k`"),
    ("ngrm:max=3", "no drafting method `ngrm`"),
    ("org/name:max=3", "no drafting method `org/name`"),
    ("org/name:", "no drafting method `org/name`"),
])  # fmt: skip
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        drafters.parse_spec(spec)


def test_hints_name_what_was_meant() -> None:
    for call, meant in (
        (lambda: drafters.parse_spec("ngrm:max=3"), "`ngram`"),
        (lambda: drafters.parse_spec("ngram:maxx=3"), "`max`"),
        (lambda: drafters.parse_spec("parallel:x"), "none, p-eagle, pard, pard2, prediction"),
        (lambda: drafters.get("predicton"), "`prediction`"),
        (lambda: drafters.create("none", {"k": 3}), "no options"),
        (lambda: drafters.create("eagle3", {}), "name its folder or hub id as the draft"),
    ):
        with pytest.raises(UsageError) as error:
            call()
        assert meant in (error.value.hint or "")


@pytest.mark.parametrize(("method", "given", "message"), [
    ("model", {}, "needs `model`"),
    ("model", {"model": " "}, "empty"),
    ("self-exit", {}, "needs `layers`"),
    ("model", {"model": 3}, "must be a text, not `3`"),
    ("ngram", {"max": True}, "must be a whole number, not `True`"),
    ("ngram", {"max": "4"}, "must be a whole number"),
    ("ngram", {"max": 65}, "`max`"),
    ("prediction", {"min": -1}, "`min`"),
    ("nothing.like_this", {}, "cannot be imported"),
    ("os.path", {}, "cannot be imported"),
])  # fmt: skip
def test_wrong_options(method: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        drafters.create(method, given)


def test_a_drafter_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_package").mkdir()
    (tmp_path / "outside_package" / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from specdec_cli.drafters.contract import WithoutModel\n"
        "@dataclass\nclass Drafter(WithoutModel):\n    share: float = 0.5\n    name: str | None = None\n"
        "    def load(self, resources): ...\n    def propose(self, rows): ...\n    def release(self, handle): ...\n"
    )
    (tmp_path / "outside_package" / "older.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Drafter:\n    max_context: int = 0\n"
    )
    (tmp_path / "outside_package" / "bare.py").write_text("class Drafter:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = drafters.create("outside_package.mine", {"share": 1, "name": None})
    assert (made.share, made.name) == (1, None)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="a number, not `'x'`"):
        drafters.create("outside_package.mine", {"share": "x"})
    with pytest.raises(UsageError, match="not a dataclass"):
        drafters.get("outside_package.bare")
    with pytest.raises(UsageError, match=r"`outside_package\.older\.Drafter` has no `lm`"):
        drafters.get("outside_package.older")
    for name in [name for name in sys.modules if name.startswith("outside_package")]:
        monkeypatch.delitem(sys.modules, name)
