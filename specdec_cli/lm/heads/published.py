"""Published drafts: what a draft's folder says of itself, whatever its format; each is read once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from specdec_cli.errors import RunError, UsageError
from specdec_cli.files import given_path
from specdec_cli.lm.files.checkpoint import find_checkpoint
from specdec_cli.lm.files.draft_formats import DraftFolder, kinds_by_method, recognize
from specdec_cli.lm.files.reading import check_counts, check_flags, read_object

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.heads.draft_sequences import DraftSequences

AGAIN = "copy or download the draft again"
OTHER = "choose a draft that was made for this target"
NONE_ELSE = "choose another draft, or `--draft ngram`"
_NOT_READ = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
"""Tensors of published heads that say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDraft(ABC):
    """Facts that the folder of a published draft gives of itself; each format adds its own fields.

    Args:
        name: of the draft, for messages.
        source: its folder.
        taps: the target's hidden states that it reads, layers counted from 0; None until the target is known.
        target_hidden_size: width of these; None where nothing says it.
        vocab_size: the target's vocabulary that it was made for; None where nothing says it.
        draft_vocab_size: tokens that it can draft.
    """

    runs_as_target: ClassVar[bool] = True
    """Whether it computes in the target's dtype on the target's device, and so has no settings of its own."""

    beside: ClassVar[str | None] = None
    """How the names of the tensors begin that are read from the pickled files beside its weights; None reads none."""

    ids_tensor: ClassVar[str] = "d2t"
    """The tensor that leads from the draft's tokens to the target's."""

    name: str
    source: DraftFolder
    taps: tuple[Tap, ...] | None
    target_hidden_size: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None

    @abstractmethod
    def __str__(self) -> str:
        """For people: what it is, what it reads, and what it can draft."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that it must have, by common names; a name that ends in `?` may be missing."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.source.path

    @property
    def method(self) -> str:
        """The drafting method that runs it."""
        return self.source.kind.method

    @property
    def is_reduced(self) -> bool:
        """Whether it drafts fewer tokens than the target has."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kv_numbers(self) -> int | None:
        """Numbers of each token that it keeps as keys and values; None for a draft that is a model with its own."""
        return None

    @property
    def layer_taps(self) -> list[int]:
        """The layers whose outputs it reads, counted from 0."""
        return [tap for tap in self.taps or () if isinstance(tap, int)]

    @property
    def reading(self) -> str:
        """The hidden states that it reads, for people."""
        if self.taps is None:
            return "layers by default"
        layers = ", ".join(str(tap) for tap in self.taps if tap != "final")
        named = ["the final hidden states"] if "final" in self.taps else []
        return " and ".join([*named, *([f"the outputs of layers {layers}"] if layers else [])])

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> Self:
        """The same with its hidden states named: by the recipe, by itself, or by default.

        Args:
            options: of the drafting method, as the recipe has them.
            num_layers: of the target, where the folder leaves something to it.

        Raises:
            UsageError: as `num_layers` does, or the target has not the usual layers.
        """
        if options.get("layers") is not None:
            return replace(self, taps=parsed_taps(str(options["layers"])))
        return self if self.taps is not None else replace(self, taps=self.usual_taps(num_layers()))

    def usual_taps(self, num_layers: int) -> tuple[Tap, ...]:
        """The hidden states that such a draft reads of a target with so many layers, unless it says otherwise.

        Raises:
            UsageError: the target has too few layers.
        """
        raise NotImplementedError

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """Refuse a draft that was made for another target, by the width of hidden states and the vocabulary.

        Args:
            target: its name, for messages.
            hidden_size: width of its hidden states.
            vocab_size: V, the width of its logits.

        Raises:
            UsageError: it was.
        """
        if self.target_hidden_size not in (None, hidden_size):
            message = f"the draft `{self.name}` reads hidden states of width {self.target_hidden_size}"
            raise UsageError(f"{message}, and `{target}` has {hidden_size}", OTHER)
        if self.vocab_size not in (None, vocab_size):
            message = f"the draft `{self.name}` was made for {self.vocab_size} tokens"
            raise UsageError(f"{message}, and `{target}` scores {vocab_size}", OTHER)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See that all tensors that it needs are there and fit, and no others.

        Args:
            shapes: of its tensors, by common names.

        Raises:
            UsageError: one is missing or has another shape, or there is one that such a draft has not.
        """
        wanted = self.shapes()
        for name, shape in wanted.items():
            stored = shapes.get(name.rstrip("?"))
            if stored is None and not name.endswith("?"):
                raise UsageError(f"the draft head `{self.name}` lacks the tensor `{name}`", "copy or download it again")
            if stored is not None and stored != shape:
                message = f"the tensor `{name.rstrip('?')}` of `{self.name}` has the shape {list(stored)}"
                raise UsageError(f"{message}, where {list(shape)} is expected", AGAIN)
        known = {name.rstrip("?") for name in wanted}
        strange = next((name for name in shapes if name not in known and self.reads(name)), None)
        if strange is not None:
            message = f"the draft head `{self.name}` has a tensor `{strange}`, which is not supported"
            raise UsageError(message, f"{OTHER}, or `--draft ngram`")

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The target's id of each drafted token, by its tensors; None where it drafts by the target's ids.

        `d2t` says how much larger each is than the draft's own.
        """
        if not self.is_reduced or "d2t" not in tensors:
            return None
        offsets = tensors["d2t"]
        return torch.arange(len(offsets), device=offsets.device) + offsets.long()

    def target_ids(self, tensors: Mapping[str, Tensor], target: str, vocab_size: int) -> Tensor | None:
        """The same [drafted tokens] int64, checked.

        Args:
            tensors: the draft's, by common names.
            target: its name, for messages.
            vocab_size: V, the width of its logits.

        Raises:
            UsageError: the ids are not the target's.
        """
        ids = self.drafted_ids(tensors)
        if ids is None:
            return None
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
            message = f"the draft `{self.name}` drafts tokens that `{target}` does not have, or has twice"
            raise UsageError(f"{message}, by its tensor `{self.ids_tensor}`", OTHER)
        return ids

    def reads(self, name: str) -> bool:
        """Whether a tensor of a common name says anything that the draft computes with."""
        return name not in _NOT_READ

    @staticmethod
    def common_name(name: str) -> str:
        """A tensor's name as every folder of the format has it here."""
        return name


def parsed_taps(text: str) -> tuple[Tap, ...]:
    """Hidden states from what the option `layers` says: numbers of layers or `final`, joined by dashes."""
    return tuple(int(part) if part.isdecimal() else "final" for part in text.split("-"))


def find_published(name: str, revision: str | None = None, has_weights: bool = True) -> PublishedDraft | None:
    """The published draft that a name leads to; None where it leads to something else or nowhere.

    Args:
        name: hub id or folder.
        revision: branch, tag or commit of a hub id.
        has_weights: fetch its weights too.

    Raises:
        UsageError: it is a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    try:
        source = recognize(find_checkpoint(name, revision, trust_remote_code=False, has_weights=False).folder)
    except (RunError, UsageError):
        return None
    if source is None or not source.format.module:
        return None
    if has_weights and not given_path(name).is_dir():
        return read_published(name, revision)
    return _read(name, source)


def read_published(
    name: str, revision: str | None = None, has_weights: bool = True, method: str | None = None
) -> PublishedDraft:
    """The published draft that a name must lead to.

    Args:
        name: hub id or folder.
        revision: branch, tag or commit of a hub id.
        has_weights: fetch its weights too.
        method: a drafting method that is to run it; None takes the folder's own.

    Raises:
        UsageError: it holds something else, or a variant that is not supported.
        RunError: there is no such folder, or its configuration cannot be read.
    """
    checkpoint = find_checkpoint(name, revision, trust_remote_code=False, has_weights=has_weights, is_head=True)
    source = recognize(checkpoint.folder)
    if source is None or not source.format.module:
        kind = kinds_by_method().get(method or "")
        what = "draft of a known format" if kind is None else kind.what.partition(" ")[2]
        raise UsageError(f"`{name}` holds no {what}", "give the folder of one, or name a model as the draft")
    if method not in (None, source.kind.method):
        message = f"`{name}` is for the drafting method `{source.kind.method}`, not `{method}`"
        raise UsageError(message, f"write `-d {name}`")
    return _read(name, source)


def load_sequences(draft: PublishedDraft, target: LM, num_tokens: int) -> DraftSequences:
    """The sequences of a draft on the target's hidden states, its weights loaded by its format's file.

    Args:
        draft: with its hidden states named.
        target: the loaded target.
        num_tokens: V, the size of the real vocabulary.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a draft for another target.
    """
    loaded: DraftSequences = _module(draft.source).sequences(draft, target, num_tokens)
    return loaded


def _module(source: DraftFolder) -> Any:
    """The format's file."""
    return import_module(f"specdec_cli.lm.heads.{source.format.module}")


def _read(name: str, source: DraftFolder) -> PublishedDraft:
    """The draft of a folder that was recognized, read by its format's file."""
    path = source.path / "config.json"
    if not path.is_file():
        raise RunError(f"the draft `{name}` has no `config.json`", "give the folder that holds the draft's files")
    if not source.content:
        read_object(path)  # which says why it cannot be read
    check_counts(path, source.content, source.format.counts)
    check_flags(path, source.content, source.format.flags)
    draft: PublishedDraft = _module(source).read(name, source)
    return draft


def listed_layers(name: str, key: str, given: Any) -> list[int]:
    """A list of layers' numbers, as a configuration has it.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(given, list) or not given or not all(type(layer) is int for layer in given):
        raise UsageError(f"`{key}` of `{name}` is no list of layers: `{given}`", AGAIN)
    return given


def check_has_usual_layers(name: str, num_layers: int) -> None:
    """Refuse a target with too few layers for a draft that does not say which ones it reads.

    Raises:
        UsageError: the layers that such drafts usually read do not exist: one is three before the last.
    """
    if num_layers < 4:
        message = f"`{name}` does not say which layers it reads, and the usual ones need a target of 4 layers"
        hint = "name them in the recipe, for example `draft.layers: 0-1-2`, or choose another target"
        raise UsageError(f"{message}: this one has {num_layers}", hint)


def vocabulary_shapes(draft: PublishedDraft, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's embedding, output layer and map, which are the target's where they are missing.

    Args:
        draft: whose head it is.
        size: width of its hidden states.
    """
    vocabulary, drafted = draft.vocab_size or 0, draft.draft_vocab_size or 0
    is_own = size != draft.target_hidden_size
    return {
        "embed_tokens.weight" if is_own else "embed_tokens.weight?": (vocabulary, size),
        "lm_head.weight" if draft.is_reduced or is_own else "lm_head.weight?": (drafted, size),
        "d2t" if draft.is_reduced else "d2t?": (drafted,),
    }
