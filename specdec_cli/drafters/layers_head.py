"""Base of drafters with a published head on hidden states of several target layers, as EAGLE-3 has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING

from specdec_cli.drafters.feature_head import H, HeadDrafter
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.heads.eagle_files import HeadConfig


@dataclass
class LayersDrafter(HeadDrafter[H]):
    """Reads the outputs of target layers that its option or its head's configuration names.

    Args:
        model: hub id or folder of the head.
        layers: target layers whose outputs it reads, counted from 0 and joined by dashes, such as 1-15-28; unset takes
            those that its configuration names.
    """

    model: str
    layers: str | None = None

    def __post_init__(self) -> None:
        """Refuse an empty name, and layers that are no numbers."""
        super().__init__(self.model)
        if self.layers is not None and not all(part.isdecimal() for part in self.layers.split("-")):
            raise UsageError(f"`layers` must be numbers joined by dashes, such as 1-15-28, not `{self.layers}`")

    @cached_property
    def taps(self) -> Sequence[Tap]:
        """The outputs of the layers.

        Raises:
            UsageError: neither the option nor the head's configuration names them.
            RunError: its configuration cannot be read.
        """
        if self.layers is not None:
            return tuple(int(part) for part in self.layers.split("-"))
        layers = self.published().named_layers
        if layers is None:
            said = f"the draft head `{self.model}` does not say which of the target's layers it reads"
            example = quote(f"{self.method}:model={self.model},layers=1-15-28")
            raise UsageError(said, f"for example `--draft {example}`")
        return layers

    @property
    def layer_taps(self) -> tuple[int, ...]:
        """The layers themselves."""
        return tuple(tap for tap in self.taps if isinstance(tap, int))

    def config(self, revision: str | None = None) -> HeadConfig:
        """The head's configuration, with the layers that it is to read.

        Args:
            revision: branch, tag or commit of a hub id.

        Raises:
            RunError: it cannot be read.
            UsageError: it is of another method.
        """
        from dataclasses import replace

        from specdec_cli.lm.heads.eagle_files import HeadConfig

        config = self.published(revision)
        assert isinstance(config, HeadConfig), "the format that has the method has its configuration"
        return replace(config, layers=self.layer_taps)
