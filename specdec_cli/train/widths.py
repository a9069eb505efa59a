"""The widths of a decoder's layers: read from a configuration, chosen by settings, and written to another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Settings that make layers narrower, by the names of transformers' configurations."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes that all layers of a decoder share.

    Args:
        hidden_size: channels of the hidden states.
        intermediate_size: units of a feed-forward layer; None where the configuration names no number.
        num_attention_heads: query heads.
        num_key_value_heads: groups of query heads, which share a key/value head each.
        head_dim: size of a head.
    """

    hidden_size: int
    intermediate_size: int | None
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """Widths of a transformers configuration of a language model.

        Raises:
            UsageError: it has none, or several.
        """
        hidden, units, heads = (getattr(config, name, None) for name in WIDTHS[:3])
        if not isinstance(hidden, int) or not isinstance(heads, int):
            message = f"the layers of a `{config.model_type}` model have no common width"
            raise UsageError(message, "prune layers with --num-layers")
        return cls(
            hidden,
            units if isinstance(units, int) else None,
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or hidden // heads),
        )

    @property
    def heads_of_group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def sizes(self) -> dict[str, int]:
        """Rows or columns of a weight by what they count."""
        return {
            "channels": self.hidden_size,
            "units": self.intermediate_size or 0,
            "heads": self.num_attention_heads * self.head_dim,
            "groups": self.num_key_value_heads * self.head_dim,
        }

    @property
    def without_units(self) -> Widths:
        """Widths without that of feed-forward layers."""
        return replace(self, intermediate_size=None)

    def narrower(self, settings: Train) -> Widths:
        """The widths that a recipe's `train` section asks for, these where it says nothing.

        Raises:
            UsageError: one is larger than these, or heads do not share key/value heads evenly.
        """
        for name in WIDTHS:
            narrow, whole = getattr(settings, name), getattr(self, name)
            if narrow is not None and (whole is None or narrow > whole):
                message = f"`{name}` is `{narrow}`, and the target's is `{whole}`"
                raise UsageError(message, f"lower --{name.replace('_', '-')}, or leave it out")
        heads, groups = self._heads(settings.num_attention_heads, settings.num_key_value_heads)
        return replace(
            self,
            hidden_size=settings.hidden_size or self.hidden_size,
            intermediate_size=settings.intermediate_size or self.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=groups,
        )

    def _heads(self, heads: int | None, groups: int | None) -> tuple[int, int]:
        """Query and key/value heads; where one is None, as many to a group as now."""
        if heads is None:
            groups = groups or self.num_key_value_heads
            return groups * self.heads_of_group, groups
        if groups is None and heads % self.heads_of_group:
            message = (
                f"`num_attention_heads` is `{heads}`, and {self.heads_of_group} of the target share a key/value head"
            )
            raise UsageError(message, "choose a multiple of it, or add --num-key-value-heads")
        groups = groups or heads // self.heads_of_group
        if heads % groups or heads // groups > self.heads_of_group:
            message = f"`{heads}` attention heads cannot share `{groups}` key/value heads"
            hint = f"give each key/value head the same number of them, {self.heads_of_group} at most"
            raise UsageError(message, hint)
        return heads, groups

    def write(self, config: Any) -> None:
        """Put these widths into a configuration.

        Raises:
            UsageError: its family refuses them together.
        """
        before = Widths.of(config)
        for name in WIDTHS:
            if getattr(self, name) != getattr(before, name):
                setattr(config, name, getattr(self, name))
        if self.without_units != before.without_units:
            config.head_dim = self.head_dim  # many families derive it from the two others
        try:
            config.validate()
        except StrictDataclassError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            message = f"a `{config.model_type}` model cannot have `{self.hidden_size}` channels and "
            message += f"`{self.num_attention_heads}` heads: {reason}"
            raise UsageError(message, "choose a multiple of the number of heads for --hidden-size") from error
