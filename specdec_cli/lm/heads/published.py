"""Published drafts: what a draft's folder says of itself, whatever its format, and what an entry of the table gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from torch import Tensor

_NOT_READ = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
"""Tensors of published heads that say nothing new."""


@dataclass(frozen=True, slots=True)
class PublishedDraft(ABC):
    """Facts that the folder of a published draft gives of itself; each format adds its own fields.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        method: the drafting method that runs it.
    """

    runs_as_target: ClassVar[bool] = True
    """Whether it computes in the target's dtype on the target's device, and so has no settings of its own."""

    beside: ClassVar[tuple[str, str]] = ("", "")
    """A pickled file beside its weights, and how the names of the tensors begin that are read of it."""

    own_files: ClassVar[tuple[str, ...]] = ()
    """Files of weights under names that this format alone has; the first one that is there holds them all."""

    ids_tensor: ClassVar[str] = "d2t"
    """The tensor that leads from the draft's tokens to the target's."""

    name: str
    folder: Path
    method: str

    @abstractmethod
    def __str__(self) -> str:
        """For people: what it is, what it reads, and what it can draft."""

    @abstractmethod
    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> Self:
        """The same as a recipe has it run.

        Args:
            options: of the drafting method, as the recipe has them.
            num_layers: of the target, where the folder leaves something to it.

        Raises:
            UsageError: as `num_layers` does.
        """

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Options of the drafting method, as `given` settled them."""

    @abstractmethod
    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """Refuse a draft that was made for another target.

        Args:
            target: its name, for messages.
            hidden_size: width of its hidden states.
            vocab_size: V, the width of its logits.

        Raises:
            UsageError: it was.
        """

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that it must have, by common names; a name that ends in `?` may be missing."""

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The target's id of each drafted token, by its tensors; None where it drafts by the target's ids."""
        return None

    @property
    def kv_numbers(self) -> int | None:
        """Numbers of each token that it keeps as keys and values; None for a draft that is a model with its own."""
        return None

    @property
    def named_layers(self) -> tuple[int, ...] | None:
        """Target layers whose outputs it reads, counted from 0; None where it names none."""
        return None

    def reads(self, name: str) -> bool:
        """Whether a tensor of a common name says anything that the draft computes with."""
        return name not in _NOT_READ

    @staticmethod
    def common_name(name: str) -> str:
        """A tensor's name as every folder of the format has it here."""
        return name


@dataclass(frozen=True, slots=True)
class DraftFormat:
    """One published format.

    Args:
        what: it holds, for messages: `an EAGLE head`.
        methods: the drafting methods that run it.
        recognizes: whether a folder holds it, by the folder and its configuration.
        read: what a folder of it says: of the draft's name, its folder and its configuration.
    """

    what: str
    methods: tuple[str, ...]
    recognizes: Callable[[Path, dict[str, Any]], bool]
    read: Callable[[str, Path, dict[str, Any]], PublishedDraft]
