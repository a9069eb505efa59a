"""The model families that our own decoder runs: how each differs from Llama, and what keeps a model from running.

A family is data. A layer's norms, window, rotation and experts are read from transformers' modules by the names that
the family gives them; `llama_weights` lays the weights out and the compiled decoder follows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from specdec_cli.lm.files.quantization import stays_quantized
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.packing import has_plain_weight, is_linear, is_untouched
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.plain_modules import LlamaForCausalLM

_COMMON = (nn.SiLU.__module__, nn.ModuleList.__module__, nn.Dropout.__module__, "transformers.activations")
# Rotary types that the tables of `rotations` hold: their frequencies do not follow the length, but for long rope's two.
ROPE_TYPES = {"default", "linear", "llama3", "yarn", "longrope"}
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
"""Activations of the compiled decoder by transformers' names for them."""
LIMITED_SILU = 2
"""The activation of gpt-oss."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a model class differs from Llama.

    Args:
        norms: names of a layer's norms before attention, behind it, before the MLP and behind it; empty for none.
        adds_one: a norm's factor is 1 + weight.
        norms_whole_width: queries are normed over all heads together, and so are keys; otherwise each head by itself.
        windows: which layers have the configuration's sliding window: `none`, `all`, or those of that `type`.
        is_partly_turned: the configuration may have only a part of each head rotated.
        caps_scores: attention scores are soft-capped (Gemma 2).
        has_multipliers: the configuration scales embeddings, the output of attention and MLP, and logits (Granite).
        router: name of the module that chooses a row's experts, in an MLP that has experts.
        has_limited_experts: experts are stored transposed, with gate and up interleaved, and clamp both (gpt-oss).
    """

    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    adds_one: bool = False
    norms_whole_width: bool = False
    windows: Literal["none", "all", "type"] = "none"
    is_partly_turned: bool = False
    caps_scores: bool = False
    has_multipliers: bool = False
    router: str = "gate"
    has_limited_experts: bool = False


_BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_AROUND = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all"),
    "MinistralForCausalLM": Family(windows="type"),
    "Qwen2ForCausalLM": Family(windows="type"),
    "Qwen3ForCausalLM": Family(windows="type"),
    "Phi3ForCausalLM": Family(windows="all", is_partly_turned=True),
    "SmolLM3ForCausalLM": Family(windows="type"),
    "Olmo2ForCausalLM": Family(norms=_BEHIND, norms_whole_width=True),
    "Olmo3ForCausalLM": Family(norms=_BEHIND, norms_whole_width=True, windows="type"),
    "GemmaForCausalLM": Family(adds_one=True),
    "Gemma2ForCausalLM": Family(norms=_AROUND, adds_one=True, windows="type", caps_scores=True),
    "Gemma3ForCausalLM": Family(norms=_AROUND, adds_one=True, windows="type"),
    "GraniteForCausalLM": Family(has_multipliers=True),
    "MixtralForCausalLM": Family(windows="all"),
    "Qwen3MoeForCausalLM": Family(windows="all"),
    "OlmoeForCausalLM": Family(norms_whole_width=True),
    "GptOssForCausalLM": Family(windows="type", router="router", has_limited_experts=True),
}
"""Families by the name of transformers' class."""


def family_of(model: Any) -> Family:
    """The family of a model without an `obstacle`."""
    return FAMILIES[type(model).__name__]


def family_of_layer(layer: nn.Module) -> Family | None:
    """The family that a decoder layer of transformers is of; None for one that is not known."""
    name = type(layer).__name__.replace("DecoderLayer", "ForCausalLM")
    return FAMILIES.get(name) if _is_transformers(layer) else None


def obstacle(model: Any, device: torch.device | None = None) -> str | None:
    """The part of a transformers model that this decoder does not support; None if it can run the model.

    Args:
        model: a causal LM, of fake tensors too.
        device: where it would run; None is where it is.
    """
    config = model.config
    name = type(model).__name__
    if name not in FAMILIES or not _is_transformers(model):
        return f"architecture `{name}`"
    quantized = stays_quantized(config)
    if quantized is not None:
        return f"weights quantized by `{quantized}`"
    of_config = config_obstacle(config, FAMILIES[name], model.dtype, device or model.device)
    of_head = "the output layer" if model.lm_head.bias is not None else None
    return of_config or unknown_module(model, model.dtype) or of_head or native.missing()


def config_obstacle(config: Any, family: Family, dtype: torch.dtype, device: torch.device) -> str | None:
    """The part of a configuration that this decoder does not support; None if it can run such layers.

    Args:
        config: of a model or of a draft head.
        family: of its layers.
        dtype: of the weights.
        device: where they would run.
    """
    ropes, layer_types = _ropes(config), set(getattr(config, "layer_types", None) or ())
    unknown_types = layer_types - {"full_attention", "sliding_attention"}
    rope_types = [rope.get("rope_type") for rope in ropes if rope.get("rope_type") not in ROPE_TYPES]
    facts = {
        f"activation `{activation_of(config)}`": activation_of(config) not in ACTIVATIONS,
        f"rotary type `{rope_types[0] if rope_types else None}`": bool(rope_types),
        "partial rotary": not family.is_partly_turned and any(turned_share(rope) != 1.0 for rope in ropes),
        f"layers of `{', '.join(sorted(unknown_types))}`": bool(unknown_types),
        "clipped queries, keys and values": getattr(config, "clip_qkv", None) is not None,
        "attention in both directions": bool(getattr(config, "use_bidirectional_attention", None)),
        f"device `{device.type}`": device.type != "cpu",
        f"dtype `{str(dtype).removeprefix('torch.')}`": dtype not in (torch.float32, torch.bfloat16),
    }
    return next((fact for fact, stands in facts.items() if stands), None)


def kept_as(kind: Kind, obstacle: str | None) -> Kind:
    """Memory of linear layers. Only transformers' forward pass has them in oneDNN's layout."""
    return "plain" if obstacle is None and kind == "packed" else kind


def activation_of(config: Any) -> str | None:
    """The activation's name in a configuration."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def turned_share(rope: dict[str, Any]) -> float:
    """The share of each head that rotary parameters turn."""
    return float(rope.get("partial_rotary_factor", 1.0))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Rotary parameters, of each type of layer where they differ."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [rope for rope in given.values() if isinstance(rope, dict)]
    return each or [given]


def windows_of(config: Any, family: Family) -> Iterator[int]:
    """How many keys each layer sees at most, its own included; 0 for all."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) if family.windows == "type" else None
    for layer in range(config.num_hidden_layers):
        is_sliding = family.windows == "all" or (types is not None and types[layer] == "sliding_attention")
        yield window if is_sliding else 0


def unknown_module(model: nn.Module, dtype: torch.dtype) -> str | None:
    """A part that computes something else than this decoder, or keeps its numbers in another way."""
    for name, module in model.named_modules():
        if not _is_known(module, type(model).__module__):
            return f"`{name}`, a `{type(module).__name__}` that was changed or is of another kind"
        matrices = [
            p for part, p in module.named_parameters(recurse=False) if p.dim() > 1 and not part.endswith("bias")
        ]
        is_router = hasattr(module, "top_k")  # which is read in float32, as biases are
        if not is_router and any(p.dtype != dtype for p in matrices):
            return f"`{name}` in another dtype than the model"
    return None


def _is_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.") or isinstance(module, LlamaForCausalLM)


def _is_known(module: nn.Module, family: str) -> bool:
    """Whether a module is one of the family's own classes, a plain weight or an activation, as it was made."""
    if type(module) is nn.Embedding:
        return is_untouched(module) and has_plain_weight(module)
    if isinstance(module, nn.Linear):
        return is_linear(module)
    is_as_made = not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    return is_as_made and type(module).__module__ in (family, *_COMMON)
