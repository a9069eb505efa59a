"""What a forward moves and computes: bytes of weights and cached keys, floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_cli.lm.packing import Weight
    from specdec_cli.lm.transformers_lm import TransformersLM

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


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
        attention_width: heads × head size × layers.
    """

    dense_bytes: int
    dense_parameters: int
    expert_bytes: int
    expert_parameters: int
    expert_share: float
    kv_bytes_per_token: int
    attention_width: int

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
        """
        per_token = 2 * (self.dense_parameters + self.expert_parameters * self.expert_share)
        return num_tokens * (per_token + 4 * self.attention_width * context)


def traffic_of(lm: TransformersLM) -> Traffic:
    """Read the sizes off a loaded model."""
    return model_traffic(lm.config, lm.weights, lm.kv_bytes_per_token)


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
    num_experts = next((found for key in _EXPERTS if (found := getattr(text, key, None))), 0)
    share = min(1.0, getattr(text, "num_experts_per_tok", num_experts) / num_experts) if num_experts else 1.0
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * head_size * text.num_hidden_layers
    return Traffic(dense_bytes, dense, expert_bytes, expert, share, kv_bytes_per_token, width)
