"""The kind of a draft in the words of other engines, found without loading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.files import given_path

DRAFT_MODEL = "draft_model"
_WHAT = {
    DRAFT_MODEL: "a draft model",
    "ngram": "prompt lookup",
    "suffix": "suffix decoding",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "p-eagle": "a P-EAGLE head",
    "mtp": "the target's MTP layers",
    "dflash": "a DFlash draft",
    "dspark": "a DSpark draft",
    "pard": "a PARD draft",
    "medusa": "Medusa heads",
    "universal": "a draft model with another tokenizer",
    "self-exit": "the target's first layers",
    "self-int8": "an int8 copy of the target",
}
_BY_NAME = (
    ("eagle3", "eagle3"),
    ("eagle-3", "eagle3"),
    ("eagle-", "eagle"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
    ("pard", "pard"),
)


@dataclass
class DraftKind:
    """A draft.

    Args:
        method: `draft_model`, `ngram`, `eagle3` and so on; `none` for no draft; specdec's own name for other ones.
        model: its folder or hub id; None for a draft without a model.
        options: of its method.
        guessed_by: the evidence for a kind that is not certain.
    """

    method: str
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    guessed_by: str | None = None
    _read: set[str] = field(default_factory=set)

    @property
    def what(self) -> str:
        """For people."""
        return _WHAT.get(self.method, f"`{self.method}`")

    def option(self, name: str) -> Any:
        """An option of its method, which counts as read; None where it has none of that name."""
        self._read.add(name)
        return self.options.get(name)

    @property
    def unread(self) -> list[str]:
        """Options that nothing has read."""
        return [name for name in self.options if name not in self._read]


def draft_kind(model: str | None, method: str | None, options: Mapping[str, Any]) -> DraftKind:
    """The kind of a recipe's draft: by its method, else by the configuration in its folder, else by a hub id's name."""
    if method not in (None, "model"):
        return DraftKind(str(method), model, dict(options))
    assert model is not None, "a draft has a model or a method"
    folder = folder_of(model)
    if folder is not None:
        return DraftKind(_method_of(_configuration(folder)), model, dict(options))
    lowered = model.lower()
    found = next((kind for part, kind in _BY_NAME if part in lowered), None)
    if found is not None:
        return DraftKind(found, model, dict(options), guessed_by="its name")
    return DraftKind(DRAFT_MODEL, model, dict(options))


def folder_of(name: str) -> Path | None:
    """The absolute path of a model on this machine, a folder or a file; None for a hub id."""
    if name.startswith("builtin:"):
        return Path(__file__).parents[1] / "builtin" / name.removeprefix("builtin:")
    path = given_path(name)
    return path.resolve() if path.exists() else None


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _method_of(configuration: Mapping[str, Any]) -> str:
    """The method of a draft's folder, by the marks that engines and `speculators` go by."""
    named = str(configuration.get("speculators_model_type") or "").lower()
    if named:
        return {"peagle": "p-eagle"}.get(named, named)
    architecture = " ".join(map(str, configuration.get("architectures") or [])).lower()
    marks = {
        "dspark": "dspark" in architecture,
        "dflash": "dflash" in architecture or "dflash_config" in configuration,
        "p-eagle": "mask_hidden" in configuration or bool(configuration.get("parallel_drafting")),
        "eagle3": "eagle3" in architecture or "draft_vocab_size" in configuration,
        "eagle": "eagle" in architecture,
        "medusa": "medusa" in architecture or _says_medusa(configuration),
        "pard": "pard_token" in configuration,
    }
    return next((method for method, is_there in marks.items() if is_there), DRAFT_MODEL)


def _says_medusa(configuration: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in configuration or configuration.get("model_type") == "medusa"
