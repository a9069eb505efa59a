"""A failure beside a library that was never tested names the library, and what this package admits is what it tests."""

import re
import tomllib
from pathlib import Path

import pytest
from tiny_models import make_tiny

from specdec_cli import libraries
from specdec_cli.errors import UsageError, in_words
from specdec_cli.libraries import untested
from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.load import load_lm

ROOT = Path(__file__).parents[1]
NEWER = "transformers 5.25.0 is newer than 5.24, the last one tested"
REQUIREMENT = "transformers>=5.17,<5.25"


@pytest.mark.parametrize(
    ("installed", "clause"),
    [
        ("5.25.0", NEWER),
        ("5.25", "transformers 5.25 is newer than 5.24, the last one tested"),
        ("6.0.0.dev0", "transformers 6.0.0.dev0 is newer than 5.24, the last one tested"),
        ("5.16.1", "transformers 5.16.1 is older than 5.17, the first one tested"),
        ("5.24.9", None),
        ("5.17.0", None),
        ("5.17", None),
    ],
)
def test_a_version_outside_the_tested_ones(installed: str, clause: str | None) -> None:
    found = untested(["rich>=14", "transformers<5.25,>=5.17"], {"rich": "99", "transformers": installed})
    assert found == (None if clause is None else (clause, REQUIREMENT))


def test_builds_and_packages_of_an_extra() -> None:
    required = ["torch<2.14,>=2.11", "peft<0.22,>=0.20; extra == 'lora'", "rich<16,>=14"]
    assert untested(required, {"torch": "2.13.1+cpu", "rich": "15.0.0"}) is None
    assert untested(required, {"torch": "2.14.0+cu130"}) == (
        "torch 2.14.0+cu130 is newer than 2.13, the last one tested",
        "torch>=2.11,<2.14",
    )
    assert untested(required, {"peft": "0.22.0"}) == (
        "peft 0.22.0 is newer than 0.21, the last one tested",
        "peft>=0.20,<0.22",
    )
    assert untested(required, {"rich": "16.0"}) == ("rich 16.0 is newer than 15, the last one tested", "rich>=14,<16")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "untested_here", lambda: (NEWER, REQUIREMENT))


def test_49_2_a_model_is_not_blamed_for_a_newer_library(
    newer: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def update(*_: object, **__: object) -> None:
        raise TypeError("update() got an unexpected keyword argument `of_a_later_version`")

    monkeypatch.setattr(BlockCache, "update", update)
    with pytest.raises(UsageError) as refused:
        load_lm(str(make_tiny("llama", tmp_path)), decoder="transformers")
    assert refused.value.message.startswith(f"{NEWER}: architecture `llama` of `")
    assert refused.value.hint == f"pip install '{REQUIREMENT}'"


def test_whatever_else_fails_names_it_too(newer: None) -> None:
    assert in_words(ImportError("cannot import name `Cache`"))[:2] == (
        f"{NEWER}: unexpected ImportError: cannot import name `Cache`",
        f"pip install '{REQUIREMENT}'",
    )
    with pytest.raises(Exception, match=re.escape(NEWER)), clear_errors("some-model"):
        raise AttributeError("no attribute `layers`")


def test_49_2_every_dependency_is_capped_at_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_users = [
        one for extra in ("serve", "plots", "structured", "chat", "gguf", "lora", "tokenizers") for one in extras[extra]
    ]
    required = [*project["dependencies"], *of_users]
    assert [one for one in required if not re.search(r",<\d", one)] == []
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    pinned = dict(line.replace("_", "-").split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert untested(required, pinned) is None
