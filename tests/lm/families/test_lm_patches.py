"""A patch that does not fit the installed transformers refuses its own families, and nobody else's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from every_type import save_tiny
from tiny_models import make_tiny

import specdec_cli.lm.families
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.families import gpt_neo, patches
from specdec_cli.lm.load import load_lm

SHARED = {"__init__", "mixer", "patches", "recurrences", "renamed"}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "rwkv"])
def test_a_stateful_family_without_its_patch_is_refused_alone(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if transformers had renamed what the patches replace."""
    monkeypatch.setattr(patches, "FUNCTIONS", {})
    monkeypatch.setattr(patches, "CLASSES", {})
    folder = save_tiny(model_type, tmp_path / "stateful")
    for look in (describe, load_lm):
        with pytest.raises(UsageError, match=f"architecture `{model_type}` of .* does not run on a block cache"):
            look(str(folder))
    lm = load_lm(str(make_tiny("gpt2", tmp_path / "other")))
    assert lm.score([Row(0, [3, 4, 5], 1)]).isfinite().all()


def test_a_family_whose_module_changed_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object) -> bool:
        raise AttributeError("'GPTNeoSelfAttention' object has no attribute '_attn'")

    monkeypatch.setattr(gpt_neo, "_attention_of", breaks)
    folder = save_tiny("gpt_neo", tmp_path)
    with pytest.raises(UsageError, match=r"architecture `gpt_neo` of .* is not supported: .*no attribute '_attn'"):
        load_lm(str(folder))


def test_every_family_s_file_names_the_versions_that_it_was_tested_on() -> None:
    files = [path for path in Path(specdec_cli.lm.families.__path__[0]).glob("*.py") if path.stem not in SHARED]
    assert len(files) > 10
    for path in files:
        assert re.search(r"Tested with transformers 5\.\d+( to 5\.\d+)?\.", path.read_text(encoding="utf-8")), path.stem
