"""Traffic and work of a forward pass: bytes of weights and cached keys, floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import RunError
from specdec_cli.lm.files.architecture import setting

if TYPE_CHECKING:
    from specdec_cli.lm.kernels.packing import Weight

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sizes from which a forward's cost follows.

    Args:
        dense_bytes: weights that every forward reads.
        dense_parameters: of them, what every token is multiplied with.
        expert_bytes: weights of all experts; 0 without any.
        expert_parameters: numbers in them.
        expert_share: share of the experts that one token takes.
        kv_bytes_per_token: keys and values of one token in all layers.
        attention_width: heads × head size, summed over the layers; None where the configuration does not say.
    """

    dense_bytes: int
    dense_parameters: int
    expert_bytes: int
    expert_parameters: int
    expert_share: float
    kv_bytes_per_token: int
    attention_width: int | None

    def bytes_moved(self, num_tokens: float, num_cached: float) -> float:
        """Bytes that a forward reads.

        Args:
            num_tokens: tokens fed, of all sequences together; m of them touch 1 - (1 - share)^m of the experts.
            num_cached: cached tokens read, of all sequences together.
        """
        touched: float = 1 - (1 - self.expert_share) ** num_tokens
        return self.dense_bytes + self.expert_bytes * touched + self.kv_bytes_per_token * num_cached

    def flops(self, num_tokens: float, context: float) -> float:
        """Floating-point operations of a forward: two per weight and token, four per cached number and token.

        Args:
            num_tokens: tokens fed.
            context: mean context of a token.

        Raises:
            RunError: the configuration does not say how wide attention is.
        """
        if self.attention_width is None:
            raise RunError("the model's configuration does not say how wide its attention is")
        per_token = 2 * (self.dense_parameters + self.expert_parameters * self.expert_share)
        return num_tokens * (per_token + 4 * self.attention_width * context)


def model_traffic(config: Any, weights: Sequence[Weight], kv_bytes_per_token: int) -> Traffic:
    """The sizes of a model with these weights; an embedding that is only looked up is not read through."""
    text = config.get_text_config()
    dense = expert = dense_bytes = expert_bytes = 0
    for weight in weights:
        if weight.is_looked_up:
            continue
        if ".experts." in weight.name:
            expert, expert_bytes = expert + weight.num_numbers, expert_bytes + weight.num_bytes
        else:
            dense_bytes += weight.num_bytes
            dense += weight.num_numbers if weight.is_matrix else 0
    return Traffic(
        dense_bytes, dense, expert_bytes, expert, _expert_share(text), kv_bytes_per_token, _attention_width(text)
    )


def num_experts(text_config: Any) -> int:
    """Experts of a layer; 0 without a mixture."""
    return next((int(number) for key in _EXPERTS if (number := setting(text_config, key))), 0)


def _expert_share(text_config: Any) -> float:
    """The share of a layer's experts that a token takes."""
    total = num_experts(text_config)
    taken = next((number for key in _TAKEN if (number := setting(text_config, key))), total)
    return min(1.0, taken / total) if total else 1.0


def _attention_width(text_config: Any) -> int | None:
    """Heads × head size, summed over the layers, which may differ; None where the configuration does not say."""
    num_layers = getattr(text_config, "num_hidden_layers", 0)
    is_one_for_all = not getattr(text_config, "is_heterogeneous", False)
    layers = [text_config] * num_layers if is_one_for_all else list(text_config.per_layer_config)
    widths = [_width(layer) for layer in layers]
    return None if not widths or None in widths else sum(width for width in widths if width is not None)


def _width(config: Any) -> int | None:
    num_heads, head_size = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if num_heads is None:
        return None
    size = getattr(config, "hidden_size", None)
    return int(num_heads * head_size) if head_size else None if size is None else int(size // num_heads * num_heads)
