"""The kind of a draft in the words of other engines, found without loading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.files import given_path
from specdec_cli.lm.files.draft_formats import kind_by_name, published_kinds, recognize
from specdec_cli.lm.files.names import DRAFT_TOKENS, GGUF
from specdec_cli.recipe.values import QUANTIZATIONS

DRAFT_MODEL = "draft_model"
_WHAT = {
    DRAFT_MODEL: "a draft model",
    "reduced": "a draft model with a reduced vocabulary (fewer tokens than its tokenizer)",
    "ngram": "prompt lookup",
    "suffix": "suffix decoding",
    "mtp": "the target's MTP layers",
    "universal": "a draft model with another tokenizer",
    "self-exit": "the target's first layers",
    **{f"self-{quantize}": f"an {quantize} copy of the target" for quantize in QUANTIZATIONS},
}


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
        published = {kind.name: kind.what for kind in published_kinds()}
        return (_WHAT | published).get(self.method, f"`{self.method}`")

    def option(self, name: str) -> Any:
        """An option of its method, which counts as read; None where it has none of that name."""
        self._read.add(name)
        return self.options.get(name)

    @property
    def unread(self) -> list[str]:
        """Options that nothing has read."""
        return [name for name in self.options if name not in self._read]


def draft_kind(model: str | None, method: str | None, options: Mapping[str, Any]) -> DraftKind:
    """The kind of a recipe's draft: by its method, else as its files tell it, else by a hub id's name."""
    folder = None if model is None else folder_of(model)
    in_gguf = None if folder is None else _gguf_kind(str(model), folder)
    if in_gguf is not None and method in (None, "model", _method_of(in_gguf)):
        return DraftKind(in_gguf, model, dict(options))
    draft = None if folder is None else recognize(folder)
    most = None if draft is None else draft.format.most_tokens(draft.content)
    if method not in (None, "model") and (draft is None or draft.kind.method != method):
        return DraftKind(str(method), model, dict(options), most_tokens=most)
    assert model is not None, "a draft has a model or a method"
    if folder is not None:
        kind = "reduced" if DRAFT_TOKENS in configuration(folder) else DRAFT_MODEL
        return DraftKind(kind if draft is None else draft.kind.name, model, dict(options), most_tokens=most)
    named = kind_by_name(model)
    if named is not None:
        return DraftKind(named.name, model, dict(options), guessed_by="its name")
    return DraftKind(DRAFT_MODEL, model, dict(options))


def _method_of(kind: str) -> str:
    """The drafting method that runs a kind."""
    return next((published.method for published in published_kinds() if published.name == kind), kind)


def _gguf_kind(name: str, path: Path) -> str | None:
    """The kind of draft that a GGUF file holds for another file's target; None of a model and of other files."""
    if path.suffix != GGUF or not path.is_file():
        return None
    from specdec_cli.lm.files.gguf_header import read_gguf_header

    return read_gguf_header(name, path).draft


def folder_of(name: str) -> Path | None:
    """The absolute path of a model on this machine, a folder or a file; None for a hub id."""
    if name.startswith("builtin:"):
        return Path(__file__).parents[1] / "builtin" / name.removeprefix("builtin:")
    path = given_path(name)
    return path.resolve() if path.exists() else None


def configuration(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty where none can be read."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
