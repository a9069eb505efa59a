"""A draft head's decoder layer with multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434).

Of a token, DeepSeek's models keep one compressed vector and one rotated key for all heads. Here the keys and values
that all heads make of them are kept: a draft has one such layer, seldom more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from specdec_cli.lm.heads.head_layer import HeadLayer


class LatentLayer(HeadLayer):
    """One decoder layer with latent attention, whose input may be wider than its output.

    Args:
        config: a transformers configuration of a DeepSeek-V3 model.
        weights: the layer's tensors, named as below `layers.0.`.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, weights)
        self.num_kv_heads, self._turned, self._rank = (
            config.num_attention_heads,
            config.qk_rope_head_dim,
            config.kv_lora_rank,
        )
        self.head_size, self.value_size = config.qk_nope_head_dim + self._turned, config.v_head_dim
        # Attention divides by the root of the head's size; YaRN's share of the scale goes into the queries.
        self._query_scale = float(modeling_deepseek_v3.yarn_apply_mscale(config.rope_parameters, 1.0))
        self._is_interleaved = config.rope_interleave

    @classmethod
    def attention_shapes(cls, config: Any, width: int) -> dict[str, tuple[int, ...]]:
        """As of `HeadLayer`; queries are compressed, too, where `q_lora_rank` is given."""
        heads, turned, hidden = config.num_attention_heads, config.qk_rope_head_dim, config.hidden_size
        fixed, rank, query_rank = config.qk_nope_head_dim, config.kv_lora_rank, config.q_lora_rank
        queries = heads * (fixed + turned)
        compressed = {
            "q_a_proj.weight": (query_rank, width),
            "q_a_layernorm.weight": (query_rank,),
            "q_b_proj.weight": (queries, query_rank),
        }
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, width)} if query_rank is None else compressed
        shapes |= {
            "kv_a_proj_with_mqa.weight": (rank + turned, width),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (fixed + config.v_head_dim), rank),
            "o_proj.weight": (hidden, heads * config.v_head_dim),
        }
        if config.attention_bias:
            biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
            shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased if f"{name}.weight" in shapes}
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    @classmethod
    def cached_numbers(cls, config: Any, num_layers: int) -> int:
        """As of `HeadLayer`."""
        size = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return int(num_layers * config.num_attention_heads * size)

    def projected(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As of `HeadLayer`."""
        if "self_attn.q_proj.weight" in self._weights:
            queries = self._linear(inputs, "self_attn.q_proj")
        else:
            compressed = self._normed(self._linear(inputs, "self_attn.q_a_proj"), "q_a")
            queries = self._linear(compressed, "self_attn.q_b_proj")
        queries = queries.view(len(inputs), -1, self.head_size).transpose(0, 1)
        both = self._linear(inputs, "self_attn.kv_a_proj_with_mqa")
        latents, shared = both[:, : self._rank], both[:, self._rank :]
        expanded = self._linear(self._normed(latents, "kv_a"), "self_attn.kv_b_proj")
        fixed = self.head_size - self._turned
        heads = expanded.view(len(inputs), self.num_kv_heads, -1).transpose(0, 1)
        query, key = self.rotate(positions, queries[..., fixed:], shared[None])
        queries = torch.cat([queries[..., :fixed], query], -1) * self._query_scale
        keys = torch.cat([heads[..., :fixed], key.expand(len(heads), -1, -1)], -1)
        return queries, keys, heads[..., fixed:]

    def rotate(self, positions: Tensor, *heads: Tensor) -> list[Tensor]:
        """As of `HeadLayer`; neighbours are turned with each other where the configuration says so."""
        if self._is_interleaved:  # the same order of queries' and keys' numbers leaves their products as they are
            heads = tuple(torch.cat([head[..., ::2], head[..., 1::2]], -1) for head in heads)
        return super().rotate(positions, *heads)

    def _normed(self, compressed: Tensor, name: str) -> Tensor:
        return self.norm(compressed, self._weights[f"self_attn.{name}_layernorm.weight"])
