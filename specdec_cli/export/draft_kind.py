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
        most_tokens: that it drafts in a row by its configuration; None without a limit, and where nothing says it.
    """

    method: str
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    guessed_by: str | None = None
    most_tokens: int | None = None
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
    folder = None if model is None else folder_of(model)
    content = {} if folder is None else configuration(folder)
    if method not in (None, "model") or folder is not None:
        kind = str(method) if method not in (None, "model") else _method_of(content)
        return DraftKind(kind, model, dict(options), most_tokens=_most_tokens(kind, content) if content else None)
    assert model is not None, "a draft has a model or a method"
    lowered = model.lower()
    named = next((kind for part, kind in _BY_NAME if part in lowered), None)
    if named is not None:
        return DraftKind(named, model, dict(options), guessed_by="its name")
    return DraftKind(DRAFT_MODEL, model, dict(options))


def folder_of(name: str) -> Path | None:
    """The absolute path of a model on this machine, a folder or a file; None for a hub id."""
    if name.startswith("builtin:"):
        return Path(__file__).parents[1] / "builtin" / name.removeprefix("builtin:")
    path = given_path(name)
    return path.resolve() if path.exists() else None


def configuration(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty where none can be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _method_of(content: Mapping[str, Any]) -> str:
    """The method of a draft's folder, by the marks that engines and `speculators` go by."""
    named = str(content.get("speculators_model_type") or "").lower()
    if named:
        return {"peagle": "p-eagle"}.get(named, named)
    architecture = " ".join(map(str, content.get("architectures") or [])).lower()
    marks = {
        "dspark": "dspark" in architecture,
        "dflash": "dflash" in architecture or "dflash_config" in content,
        "p-eagle": "mask_hidden" in content or bool(content.get("parallel_drafting")),
        "eagle3": "eagle3" in architecture or "draft_vocab_size" in content,
        "eagle": "eagle" in architecture,
        "medusa": "medusa" in architecture or _says_medusa(content),
        "pard": "pard_token" in content,
    }
    return next((method for method, is_there in marks.items() if is_there), DRAFT_MODEL)


def _most_tokens(method: str, content: Mapping[str, Any]) -> int | None:
    """Tokens that a draft gives in a row by its configuration, as `lm.heads` reads it; None where that does not say.

    The Medusa authors' own configurations may count fewer heads than there are; a converted folder's `num_heads` holds.
    """
    if method not in ("dflash", "dspark"):
        heads = content.get("num_heads") if method == "medusa" else None
        return heads if type(heads) is int else None
    nested = content.get("dflash_config")
    keys = {**content, **(nested if isinstance(nested, dict) else {})}
    size = keys.get("block_size", 8 if "speculators_model_type" in content else 16)
    if type(size) is not int:
        return None
    return size if keys.get("sample_from_anchor", method == "dspark") else size - 1


def _says_medusa(content: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in content or content.get("model_type") == "medusa"
