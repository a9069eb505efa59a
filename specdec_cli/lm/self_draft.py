"""Drafts that are made of their target: which layers they keep, and what they quantize."""

from __future__ import annotations

from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

from specdec_cli.errors import UsageError
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.lm.files.origin import Origin


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """A language model that is made of the target's weights.

    Args:
        layers: first layers that it keeps; None keeps all.
        quantize: how the linear layers of a copy are quantized, as recipes say; none without a copy.
    """

    layers: int | None = None
    quantize: str = "none"

    @property
    def spec(self) -> str:
        """The draft as `--draft` takes it."""
        return f"self-{self.quantize}" if self.layers is None else f"self-exit:{self.layers}"

    @property
    def words(self) -> str:
        """The draft in words."""
        if self.layers is None:
            return f"an {self.quantize} copy of the target's linear layers"
        return f"the target's first {self.layers} layers" if self.layers > 1 else "the target's first layer"

    def check(self, target: str, num_layers: int) -> None:
        """Refuse more layers than a draft can leave out; asked before weights are read.

        Raises:
            UsageError: the draft would have all layers of the target, or more.
        """
        if self.layers is not None and self.layers >= num_layers:
            message = f"`{self.spec}` drafts with {counted(self.layers, 'layer')}, and `{target}` has {num_layers}"
            hint = f"choose 1 to {num_layers - 1} layers" if num_layers > 1 else "choose another draft"
            raise UsageError(message, hint)

    def check_copy(self, target: str, decoder: str, quantize: str) -> None:
        """Refuse to quantize weights that cannot be copied.

        Raises:
            UsageError: they are quantized already, or laid out for another decoder than our own.
        """
        if self.quantize == "none":
            return
        if quantize == "blocks":
            raise UsageError(
                f"`{self.spec}` cannot copy the weights of `{target}`, which are in blocks",
                "load it in plain numbers (--compute dequantized, --quantize none), or choose another draft",
            )
        if quantize != "none":
            raise UsageError(
                f"`{self.spec}` cannot copy the weights of `{target}`, which are quantized already (`{quantize}`)",
                "leave the target's quantization out, or choose another draft",
            )
        if not decoder.startswith("own"):
            raise UsageError(
                f"`{self.spec}` copies the weights of the built-in decoder, and `{target}` runs in transformers' "
                "forward pass",
                f"load it twice: `--draft {quote(target)} --draft-quantize int8`",
            )

    def origin(self, target: Origin) -> Origin:
        """Where the draft's numbers come from, by where the target's do."""
        if self.layers is None:
            return replace(target, name=self.spec, quantize=self.quantize)
        weights = None if target.weights is None else f"{target.weights}:{self.layers}"
        return replace(target, name=f"{self.spec} of {target.name}", weights=weights)
