"""A Llama-shaped model's weights, taken from transformers' modules and laid out as our decoder reads them.

The two halves that a rotation pairs stand side by side (one complex product turns queries and keys), and query heads
stand group by group (what attention returns is what the output product reads), so that nothing is moved at run time.

Letters: H query heads, K key heads, G = H/K, D head size, I MLP width.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.files.quantization import stays_quantized
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.linear import quantized
from specdec_cli.lm.kernels.packing import has_plain_weight, is_linear, is_untouched
from specdec_cli.lm.llama import native

_COMMON = (nn.SiLU.__module__, nn.ModuleList.__module__, "transformers.activations")  # what every family is made of
CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Rotary types whose frequencies do not change with the length.
ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_PANELS = 64, 32, 16  # outputs in a panel: those of the compiled decoder, as many as its processor likes and fewer
_PACK_BYTES = 4  # inputs that meet their weights at once
_LEAST = _PANELS[-1]


def obstacle(model: Any, device: torch.device | None = None) -> str | None:
    """The part of a transformers model that this decoder does not support; None if it can run the model.

    Args:
        model: a causal LM, on paper too.
        device: where it would run; None is where it is.
    """
    config = model.config
    name = type(model).__name__
    if name not in CLASSES or not type(model).__module__.startswith("transformers.models."):
        return f"architecture `{name}`"
    quantized = stays_quantized(config)
    if quantized is not None:
        return f"weights quantized by `{quantized}`"
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ("full_attention",))
    facts = {
        f"activation `{config.hidden_act}`": config.hidden_act not in ("silu", "swish"),
        f"rotary type `{rope.get('rope_type')}`": rope.get("rope_type") not in ROPE_TYPES,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "a sliding window": not hasattr(config, "layer_types") and getattr(config, "sliding_window", None) is not None,
        f"layers of `{', '.join(sorted(layer_types))}`": layer_types != {"full_attention"},
        f"device `{(device or model.device).type}`": (device or model.device).type != "cpu",
        f"dtype `{str(model.dtype).removeprefix('torch.')}`": model.dtype not in (torch.float32, torch.bfloat16),
    }
    return next((fact for fact, stands in facts.items() if stands), None) or _unknown_module(model) or native.missing()


def kept_as(kind: Kind, obstacle: str | None) -> Kind:
    """Memory of linear layers. Only transformers' forward pass changes the layout of bfloat16 weights."""
    return "plain" if obstacle is None and kind == "bf16" else kind


def _unknown_module(model: Any) -> str | None:
    """A part that computes something else than this decoder, or keeps its numbers in another way."""
    for name, module in model.named_modules():
        if not _is_known(module, type(model).__module__):
            return f"`{name}`, a `{type(module).__name__}` that was changed or is of another kind"
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.dtype != model.dtype:
            return f"`{name}` in another dtype than the model"
    if model.lm_head.bias is not None:
        return "the output layer"
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if any(part.bias is not None for part in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            return "a bias behind attention or in the MLP"
        if len({part.bias is None for part in (attention.q_proj, attention.k_proj, attention.v_proj)}) != 1:
            return "a bias of some of queries, keys and values"
    return None


def _is_known(module: nn.Module, family: str) -> bool:
    """Whether a module is one of the family's own classes, a plain weight or an activation, as it was made."""
    if type(module) is nn.Embedding:
        return is_untouched(module) and has_plain_weight(module)
    if isinstance(module, nn.Linear):
        return is_linear(module)
    is_as_made = not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    return is_as_made and type(module).__module__ in (family, *_COMMON)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, by the letters of this file."""

    num_heads: int
    num_key_heads: int
    head_size: int
    hidden_size: int
    mlp_size: int

    @property
    def num_turned(self) -> int:
        """Heads that are rotated: queries and keys."""
        return self.num_heads + self.num_key_heads


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight as the compiled decoder reads it, entries for what fills the last panel included.

    Args:
        num_outputs: without what fills the last panel.
        num_inputs: without what fills the last pack.
        half: outputs in the first half of them.
        weight: in `panels`; float32, bfloat16 or int8.
        bias: float32, or None.
        scales: float32, of int8 weights, else None.
        sums: int32, of each output's int8 weights, else None.
    """

    num_outputs: int
    num_inputs: int
    half: int
    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    sums: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, kind: Kind, arena: Arena, unit: int = 1) -> Matrix:
        """A weight [out, in] kept as `kind` says; threads do not part a unit of its outputs."""
        num_outputs, num_inputs = weight.shape
        half = half_of(num_outputs, unit)
        bias = None if bias is None else _of_panels(bias.detach().float())
        if kind != "int8":
            return cls(num_outputs, num_inputs, half, arena.keep(panels(weight.detach(), half)), bias)
        whole, scales = quantized(weight.detach())
        sums = _of_panels(whole.sum(1, dtype=torch.int32))
        return cls(num_outputs, num_inputs, half, arena.keep(panels(whole, half)), bias, _of_panels(scales), sums)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights.

    Args:
        input_norm: [hidden] float32, before attention.
        qkv: to queries, keys and values, [H + 2K, D] in all.
        head_norm: [H + K, D] float32, of each query and key head (Qwen 3), or None.
        out: back to the residual stream.
        mlp_norm: [hidden] float32, before the MLP.
        gate: to the MLP's gate.
        up: to what it lets through.
        down: back to the residual stream.
    """

    input_norm: Tensor
    qkv: Matrix
    head_norm: Tensor | None
    out: Matrix
    mlp_norm: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix


def half_of(num_outputs: int, unit: int = 1) -> int:
    """How many of a matrix' outputs are its first half: whole units, and whole panels of the smallest kind."""
    grain = math.lcm(_LEAST, unit)
    return num_outputs // 2 // grain * grain


def panels(weight: Tensor, half: int) -> Tensor:
    """A matrix [out, in] as the compiled decoder reads it, in one piece: see its `Matrix`."""
    pack = _PACK_BYTES // weight.element_size()
    filled = nn.functional.pad(weight, (0, -weight.shape[1] % pack, 0, -weight.shape[0] % _LEAST))
    found, start = torch.empty(filled.numel(), dtype=weight.dtype), 0
    most = native.library().panel_outputs()
    for end, outputs in itertools.product((half, len(filled)), (size for size in _PANELS if size <= most)):
        stop = start + (end - start) // outputs * outputs
        panel = filled[start:stop].view(-1, outputs, filled.shape[1] // pack, pack).transpose(1, 2)
        found[start * filled.shape[1] : stop * filled.shape[1]].view(panel.shape).copy_(panel)
        start = stop
    return found


def _of_panels(values: Tensor) -> Tensor:
    """One value for each output of the panels, in memory of its own."""
    return nn.functional.pad(values, (0, -len(values) % _LEAST)).contiguous()


def norm_weight(module: Any) -> Tensor:
    """An RMS norm's weight in float32, in memory of its own."""
    found: Tensor = module.weight.detach().float().clone()
    return found


def take_layer(layer: Any, shape: Shape, kind: Kind, arena: Arena) -> Layer:
    """A layer's weights in this decoder's layout; the module is left without them."""
    attention, mlp = layer.self_attn, layer.mlp
    order = _turning_order(shape)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv = torch.cat([part.weight for part in parts])[order]
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])[order]
    grouped = _group_order(shape).repeat_interleave(shape.head_size) * shape.head_size
    columns = grouped + torch.arange(shape.head_size).repeat(shape.num_heads)
    taken = Layer(
        norm_weight(layer.input_layernorm),
        Matrix.of(qkv, bias, kind, arena, shape.head_size),
        _head_norm(attention, shape) if hasattr(attention, "q_norm") else None,
        Matrix.of(attention.o_proj.weight[:, columns], None, kind, arena),
        norm_weight(layer.post_attention_layernorm),
        Matrix.of(mlp.gate_proj.weight, None, kind, arena),
        Matrix.of(mlp.up_proj.weight, None, kind, arena),
        Matrix.of(mlp.down_proj.weight, None, kind, arena),
    )
    empty(*parts, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return taken


def _group_order(shape: Shape) -> Tensor:
    """Query heads [H] group by group: the first of every key head, the second of every key head, ..."""
    return torch.arange(shape.num_heads).view(shape.num_key_heads, -1).t().reshape(-1)


def _pair_order(head_size: int) -> Tensor:
    """A head's numbers [D] with those that a rotation pairs side by side."""
    return torch.arange(head_size).view(2, head_size // 2).t().reshape(-1)


def _turning_order(shape: Shape) -> Tensor:
    """Rows of the joined weight [(H + 2K) · D] as this decoder wants them: values as they are."""
    keys = torch.arange(shape.num_heads, shape.num_turned)
    turned = torch.cat((_group_order(shape), keys))[:, None] * shape.head_size + _pair_order(shape.head_size)
    first_value = shape.num_turned * shape.head_size
    values = torch.arange(first_value, first_value + shape.num_key_heads * shape.head_size)
    return torch.cat((turned.reshape(-1), values))


def _head_norm(attention: Any, shape: Shape) -> Tensor:
    """Norms of query and key heads as one, [H + K, D]."""
    order = _pair_order(shape.head_size)
    counts = ((attention.q_norm, shape.num_heads), (attention.k_norm, shape.num_key_heads))
    return torch.cat([norm_weight(module)[order].expand(count, -1) for module, count in counts])


def empty(*modules: Any) -> None:
    """Leave modules with weights that have a shape and no memory; tied ones stay tied."""
    emptied: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, emptied.setdefault(id(parameter), shape))
