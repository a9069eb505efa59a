"""A draft is read once, every room is told the same kind of it, and a format is one file and one row of the table."""

from __future__ import annotations

import builtins
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_format
import pytest
import torch
from every_draft import FOLDERS, KINDS, TOKENIZER
from safetensors.torch import load_file, save_file
from tiny_heads import publish, random_weights
from tiny_models import make_tiny
from typed import not_none

from specdec_cli import drafters
from specdec_cli.cli.shared import draft_methods
from specdec_cli.drafters.heads import published_drafter
from specdec_cli.engine.drafts import read_draft
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.export import export
from specdec_cli.export.draft_kind import draft_kind
from specdec_cli.lm.files import contents, draft_formats
from specdec_cli.lm.files.draft_formats import FORMATS, DraftFolder, recognize
from specdec_cli.lm.heads import published
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.recipe import resolve
from specdec_cli.recipe.present import json_schema
from specdec_cli.sampling.params import SamplingParams

PUBLISHED = [name for name in FOLDERS if name not in ("model", "universal")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 2, num_hidden_layers=6)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def test_an_eagle3_folder_is_read_once(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = publish(tmp_path / "head", random_weights(True), "official")
    opened: Counter[str] = Counter()

    def counted(real: Any) -> Any:
        def opening(path: Any, *given: Any, **named: Any) -> Any:
            if Path(str(path)).parent == folder:
                opened[Path(str(path)).name] += 1
            return real(path, *given, **named)

        return opening

    asked: list[Path] = []

    def recognizing(path: Path, *read: Any) -> DraftFolder | None:
        asked.append(path)
        return recognize(path, *read)

    monkeypatch.setattr(io, "open", counted(io.open))
    monkeypatch.setattr(builtins, "open", counted(builtins.open))
    for module in (published, contents):
        monkeypatch.setattr(module, "recognize", recognizing)
    engine = Engine.load(target, str(folder), kv_cache_bytes=1 << 20, check=False)
    assert engine.drafters.own_name == "eagle3"
    assert opened["config.json"] == 1
    assert asked.count(folder) == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_room_is_told_the_same_kind(target: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    FOLDERS[name](folder)
    plan = read_draft({"model": str(folder)}, ModelPlan(target), LoadSettings())
    assert draft_kind(str(folder), None, {}).method == not_none(plan.published).source.kind.name == name
    assert plan.method == not_none(plan.published).method == KINDS.get(name, name)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "pard"])  # which has no tensors of its own
def test_a_kind_is_known_by_its_tensors_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    FOLDERS[name](folder)
    if name == "pard2":
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {"target_proj.weight": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not_none(recognize(folder)).kind.name == draft_kind(str(folder), None, {}).method == name
    assert draft_kind(str(folder), "model", {}).method == name


class Planted:
    """A target, and a draft of a format that was added by one file and one row."""

    def __init__(self, target: str, folder: Path) -> None:
        self.target, self.folder = target, folder
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["EchoDraft"], "echo_tokens": 2}))
        save_file({"echo_scale": torch.ones(1)}, folder / "model.safetensors")


@pytest.fixture
def planted(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.setattr(draft_formats, "FORMATS", (planted_format.ROW, *FORMATS))
    monkeypatch.setitem(sys.modules, "specdec_cli.lm.heads.echo", planted_format)
    published_drafter.cache_clear()
    yield Planted(target, tmp_path / "draft")
    published_drafter.cache_clear()


def test_a_new_format_is_one_file_and_one_row(planted: Planted) -> None:
    plain = Engine.load(planted.target, None, kv_cache_bytes=1 << 20, check=False)
    engine = Engine.load(planted.target, str(planted.folder), kv_cache_bytes=1 << 20, check=False)
    assert engine.drafters.own_name == "echo"
    [found], [expected] = (one.generate(["abcabc"], SamplingParams(max_new_tokens=12)) for one in (engine, plain))
    assert found.token_ids == expected.token_ids
    assert found.speculative.num_draft_tokens > 0
    recipe = resolve(sets=[f"target.model={planted.target}", f"draft.model={planted.folder}"])
    doctor = preflight(recipe.recipe, look())
    said = "Echo draft: reads the final hidden states; repeats the last token up to 2 times"
    assert (doctor.head, doctor.draft_method, doctor.errors) == (said, "echo", [])
    made = export("vllm", recipe, "specdec export")
    assert any("no counterpart of an Echo draft" in warning for warning in made[1])
    assert "echo" in drafters.methods()
    assert "echo" in json.dumps(json_schema(draft_methods())), "which the reference of recipes is made of"


def test_a_new_format_is_in_the_help() -> None:
    code = (
        "import sys; from specdec_cli.lm.files import draft_formats as table; "
        "kind = table.PublishedKind('echo', 'an Echo draft', 'echo'); "
        "table.FORMATS += (table.DraftFormat(module='echo', kinds=(kind,)),); "
        "from specdec_cli.cli import options; "
        "sys.exit(0 if 'DSpark, EAGLE, EAGLE-3, Echo, Medusa' in options._DRAFT_HELP else options._DRAFT_HELP)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
