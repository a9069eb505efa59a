"""A Llama-shaped model's weights, taken from transformers' modules and laid out as our decoder reads them.

The two halves that a rotation pairs stand side by side (one complex product turns queries and keys), and query heads
stand group by group (what attention returns is what the output product reads), so that nothing is moved at run time.

Letters: H query heads, K key heads, G = H/K, D head size, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.linear import Kind
from specdec_cli.lm.products import Product

CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Rotary types whose frequencies do not change with the length.
ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


def obstacle(model: Any, device: torch.device | None = None) -> str | None:
    """What of a transformers model this decoder does not know; None when it can run it.

    Args:
        model: a causal LM, on paper too.
        device: where it would run; None is where it is.
    """
    config = model.config
    name = type(model).__name__
    if name not in CLASSES or not type(model).__module__.startswith("transformers.models."):
        return f"architecture `{name}`"
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ("full_attention",))
    facts = {
        f"activation `{config.hidden_act}`": config.hidden_act not in ("silu", "swish"),
        f"rotary type `{rope.get('rope_type')}`": rope.get("rope_type") not in ROPE_TYPES,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "a sliding window": not hasattr(config, "layer_types") and getattr(config, "sliding_window", None) is not None,
        f"layers of `{', '.join(sorted(layer_types))}`": layer_types != {"full_attention"},
        f"device `{(device or model.device).type}`": (device or model.device).type != "cpu",
    }
    return next((fact for fact, stands in facts.items() if stands), None) or _unknown_module(model)


def _unknown_module(model: Any) -> str | None:
    """A layer whose parts are others than this decoder reads."""
    if type(model.lm_head) is not nn.Linear or model.lm_head.bias is not None:
        return "the output layer"
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        gates = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(product) is not nn.Linear for product in (*products, *gates)):
            return "a linear layer of another kind"
        if any(product.bias is not None for product in (attention.o_proj, *gates)):
            return "a bias behind attention or in the MLP"
        if len({product.bias is None for product in products[:3]}) != 1:
            return "a bias of some of queries, keys and values"
    return None


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, by the letters of this file.

    Args:
        dtype: of keys, values and queries.
        activations: what products are given and give.
    """

    num_heads: int
    num_key_heads: int
    head_size: int
    hidden_size: int
    mlp_size: int
    dtype: torch.dtype
    activations: torch.dtype

    @property
    def num_groups(self) -> int:
        """G: query heads of one key head."""
        return self.num_heads // self.num_key_heads

    @property
    def num_turned(self) -> int:
        """Heads that are rotated: queries and keys."""
        return self.num_heads + self.num_key_heads


@dataclass(slots=True)
class Norm:
    """RMS norm: x · weight / sqrt(mean(x²) + eps), as x · (weight √d) / hypot(|x|, √(d eps)): one reduction.

    Args:
        weight: [d] float32, times √d.
        floor: √(d eps), a tensor.
    """

    weight: Tensor
    floor: Tensor

    @classmethod
    def of(cls, module: Any) -> Norm:
        """A transformers module's."""
        size = module.weight.shape[-1]
        floor = torch.tensor((size * module.variance_epsilon) ** 0.5)
        return cls(module.weight.detach().float() * size**0.5, floor)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """The norm of x [..., d] float32 in `out`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        torch.hypot(length, self.floor, out=length)
        if out.dtype == torch.float32:
            return torch.mul(x, self.weight, out=out).div_(length)
        return out.copy_(torch.div(x, length).mul_(self.weight))


@dataclass(slots=True)
class Layer:
    """One layer's weights.

    Args:
        input_norm: before attention.
        qkv: to queries, keys and values, [H + 2K, D] in all.
        head_norm: of each query and key head, [H + K, D] (Qwen 3).
        out: back to the residual stream.
        mlp_norm: before the MLP.
        gate_up: to gate and up, [2, I].
        down: back to the residual stream.
    """

    input_norm: Norm
    qkv: Product
    head_norm: Norm | None
    out: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product


def take_layer(layer: Any, shape: Shape, kind: Kind) -> Layer:
    """A layer's weights in this decoder's layout; the module is left without them."""
    attention, mlp = layer.self_attn, layer.mlp
    order = _turning_order(shape)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv = torch.cat([part.weight for part in parts])[order]
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])[order]
    head_norm = _head_norm(attention, shape) if hasattr(attention, "q_norm") else None
    grouped = _group_order(shape).repeat_interleave(shape.head_size) * shape.head_size
    columns = grouped + torch.arange(shape.head_size).repeat(shape.num_heads)
    taken = Layer(
        Norm.of(layer.input_layernorm),
        Product(qkv, bias, kind),
        head_norm,
        Product(attention.o_proj.weight[:, columns], None, kind),
        Norm.of(layer.post_attention_layernorm),
        Product(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), None, kind),
        Product(mlp.down_proj.weight.detach(), None, kind),
    )
    empty(*parts, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return taken


def _group_order(shape: Shape) -> Tensor:
    """Query heads [H] group by group: the first of every key head, the second of every key head, ..."""
    return torch.arange(shape.num_heads).view(shape.num_key_heads, shape.num_groups).t().reshape(-1)


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


def _head_norm(attention: Any, shape: Shape) -> Norm:
    """Norms of query and key heads as one, [H + K, D]."""
    norms = [Norm.of(module) for module in (attention.q_norm, attention.k_norm)]
    order = _pair_order(shape.head_size)
    counts = (shape.num_heads, shape.num_key_heads)
    weights = [norm.weight[order].expand(count, -1) for norm, count in zip(norms, counts, strict=True)]
    return Norm(torch.cat(weights), norms[0].floor)


def empty(*modules: Any) -> None:
    """Leave modules with weights that have a shape and no memory; tied ones stay tied."""
    emptied: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, emptied.setdefault(id(parameter), shape))
