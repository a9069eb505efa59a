"""The built-in pair in plain torch: modules by the names of those in transformers' Llama.

To import transformers' models takes longer than all else that `generate` does. Our own decoder takes the weights of
these modules, and the check at load (`lm.oracle`) compares it with their forward, which is transformers' in the same
operations.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdec_cli.lm.files.reading import read_object


class BuiltinConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is untyped here
    """The configuration of a model of the pair: the values in its file, which names all that this package reads."""

    model_type = "llama"


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A linear layer whose weight is still to come."""
    return nn.Linear(num_inputs, num_outputs, bias=False, device="meta")


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

    def __init__(self, theta: float, head_size: int) -> None:
        super().__init__()
        self._exponents = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").float() / head_size
        self._theta = theta

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both [1, n, D] in the dtype of hidden states, of positions [1, n]."""
        frequencies = 1.0 / self._theta**self._exponents
        angles = (frequencies[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim, hidden = config.head_dim, config.hidden_size
        self.scaling = self.head_dim**-0.5
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (_linear(hidden, size) for size in (queries, keys, keys))
        self.o_proj = _linear(queries, hidden)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Attended states [B, n, hidden] of positions, each of which sees those up to its own."""
        parts = (part(hidden) for part in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        queries, keys = (_turned(part, turns) for part in (queries, keys))
        found = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.scaling, enable_gqa=True
        )
        attended: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
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
        self.rotary_emb = RotaryEmbedding(config.rope_parameters["rope_theta"], config.head_dim)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Final hidden states [B, n, hidden] of tokens [B, n]."""
        hidden = self.embed_tokens(input_ids)
        turns = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, turns)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaForCausalLM(nn.Module):
    """A model of the pair, as `LlamaDecoder` and `Oracle` ask a model of transformers; its output layer is tied."""

    def __init__(self, config: BuiltinConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Let the output layer have the embedding's weight."""
        self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

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


def read_builtin_config(folder: Path) -> BuiltinConfig:
    """The configuration of a model of the pair."""
    config: BuiltinConfig = BuiltinConfig.from_dict(read_object(folder / "config.json"))
    return config


def read_builtin_model(folder: Path, config: BuiltinConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of the pair with its weights, in evaluation mode.

    Raises:
        RuntimeError: the file does not hold the weights of the configuration.
    """
    model = LlamaForCausalLM(config)
    weights = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie()
    return model.requires_grad_(False).eval()
