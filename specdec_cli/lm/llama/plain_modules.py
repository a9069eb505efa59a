"""Llama and two families like it in plain torch: modules by the names of those in transformers.

To import transformers' models takes longer than all else that `generate` does. Our own decoder takes the weights of
these modules, and the check at load (`lm.oracle`, `lm.blocks_check`) compares it with their forward, which is
transformers' in the same operations. The built-in pair and most GGUF files are loaded this way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec_cli.lm.files.plain_config import PlainConfig

_ROPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
"""Kinds of rotary positions, and what is read of each beside `rope_theta`."""
_YARN_TURNS = 32, 1


def _linear(num_inputs: int, num_outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer whose weight is still to come."""
    return nn.Linear(num_inputs, num_outputs, bias=bias, device="meta")


class RMSNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.variance_epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """The normed hidden states, computed in float32."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope, size = config.rope_parameters, config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        self._frequencies, self._scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
        if rope["rope_type"] == "linear":
            self._frequencies /= rope["factor"]
        elif rope["rope_type"] == "llama3":
            self._frequencies = _llama3_frequencies(rope, self._frequencies)
        elif rope["rope_type"] == "yarn":
            by_default = {"original_max_position_embeddings": config.max_position_embeddings}
            self._frequencies, self._scale = _yarn_frequencies(by_default | rope, size)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both [1, n, D] in the dtype of hidden states, of positions [1, n]."""
        angles = (self._frequencies[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), -1)
        cosines, sines = angles.cos() * self._scale, angles.sin() * self._scale
        return cosines.to(hidden.dtype), sines.to(hidden.dtype)


def _llama3_frequencies(rope: Mapping[str, Any], plain: Tensor) -> Tensor:
    """Frequencies [D / 2] of Llama 3.1: slow ones divided by a factor, fast ones kept, a mixture between them."""
    low, high, original = (
        rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelengths = 2 * math.pi / plain
    is_slow, is_fast = wavelengths > original / low, wavelengths < original / high
    frequencies = torch.where(is_slow, plain / rope["factor"], plain)
    share = (original / wavelengths - low) / (high - low)
    mixed = (1 - share) * frequencies / rope["factor"] + share * frequencies
    return torch.where(~is_slow & ~is_fast, mixed, frequencies)


def _yarn_frequencies(rope: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Frequencies [D / 2] of YaRN (arXiv:2309.00071) with its usual limits, and the scale of cosines and sines."""
    theta, factor, original = (rope[key] for key in ("rope_theta", "factor", "original_max_position_embeddings"))

    def place(num_turns: int) -> float:
        """Where a frequency makes so many turns within the original context."""
        return float((size * math.log(original / (num_turns * 2 * math.pi))) / (2 * math.log(theta)))

    first, last = max(math.floor(place(_YARN_TURNS[0])), 0), min(math.ceil(place(_YARN_TURNS[1])), size - 1)
    places = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    plain_share = 1 - ((places - first) / (last - first or 0.001)).clamp(0, 1)
    periods = theta ** (torch.arange(0, size, 2, device="cpu").float() / size)
    frequencies = 1.0 / (factor * periods) * (1 - plain_share) + 1.0 / periods * plain_share
    return frequencies, 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim, hidden = config.head_dim, config.hidden_size
        self.scaling = self.head_dim**-0.5
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        has_bias = config.model_type == "qwen2"
        self.q_proj, self.k_proj, self.v_proj = (_linear(hidden, size, has_bias) for size in (queries, keys, keys))
        self.o_proj = _linear(queries, hidden)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Attended states [B, n, hidden] of positions, each of which sees those up to its own."""
        parts = (part(hidden) for part in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (_turned(part, turns) for part in (queries, keys))
        head_outputs = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.scaling, enable_gqa=True
        )
        attended: Tensor = self.o_proj(head_outputs.transpose(1, 2).flatten(2))
        return attended


def _turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, last = heads.chunk(2, -1)
    cosines, sines = (part[:, None] for part in turns)
    return heads * cosines + torch.cat((-last, first), -1) * sines


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (_linear(hidden, width) for _ in range(2))
        self.down_proj = _linear(width, hidden)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        """The MLP's output, to be added to the hidden states."""
        added: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return added


class LlamaDecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [B, n, hidden] behind this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turns)
        behind: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return behind


class LlamaModel(nn.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=table
        )  # random numbers on meta would import dynamo
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Final hidden states [B, n, hidden] of tokens [B, n]."""
        hidden = self.embed_tokens(input_ids)
        turns = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, turns)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(nn.Module):
    """A model as `LlamaDecoder` and `Oracle` ask one of transformers."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Let the output layer have the embedding's weight where the configuration says so."""
        if getattr(self.config, "tie_word_embeddings", True):
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; norms may be in float32."""
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The output layer's weight, and whose it has."""
        return {"lm_head.weight": "model.embed_tokens.weight"}

    def get_decoder(self) -> nn.Module:
        """The layers, with what stands before and behind them."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Logits [B, n, V] of texts [B, n]."""
        assert not use_cache, "these modules keep no cache"
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Queries, keys and values have biases."""


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Queries and keys are normed, head by head."""


CLASSES: dict[str, type[LlamaForCausalLM]] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
"""The classes by their names in a configuration's `model_type`."""


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether these modules are all of a model, by the content of its configuration."""
    rope, needed = config.get("rope_parameters", {}), ("head_dim", "tie_word_embeddings")
    known = _ROPES.get(rope.get("rope_type"))
    is_known = known is not None and rope.keys() <= known | {"rope_type", "rope_theta"}
    return is_known and config.get("model_type") in CLASSES and all(key in config for key in needed)


def read_builtin_model(folder: Path, config: PlainConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of the built-in pair with its weights, in evaluation mode.

    Raises:
        RuntimeError: the file does not hold the weights of the configuration.
    """
    model = LlamaForCausalLM(config)
    weights = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie()
    return model.requires_grad_(False).eval()


def plain_on_meta(config: PlainConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model as its checks see it: on the meta device, where every size is known and nothing is stored."""
    return CLASSES[config.model_type](config).to(dtype).requires_grad_(False).eval()
