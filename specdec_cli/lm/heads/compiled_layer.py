"""The layer and the products of a draft head by our own compiled decoder: read as fast as memory gives them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.caller import Caller
from specdec_cli.lm.llama.families import ACTIVATIONS, FAMILIES, ROPE_TYPES
from specdec_cli.lm.llama.llama_weights import Matrix, Shape, Taking
from specdec_cli.lm.llama.rotations import Rotations
from specdec_cli.lm.llama.structures import LayerFields, ModelFields, layer_fields, matrix_fields

_DTYPES = (torch.float32, torch.bfloat16)
_NO_NORMS = ("", "", "post_attention_layernorm", "")
_OF_ROW = 6  # fields


def compiles(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled decoder runs a head's layer of a configuration: on a CPU with a C++ compiler."""
    rope = config.rope_parameters
    is_known = rope.get("rope_type") in ROPE_TYPES - {"longrope"} and rope.get("partial_rotary_factor", 1.0) == 1.0
    is_known = is_known and config.hidden_act in ACTIVATIONS
    return is_known and device.type == "cpu" and dtype in _DTYPES and native.missing() is None


class CompiledLayer(HeadLayer):
    """A head's decoder layer in one call of compiled code. Its keys and values are laid out as that code reads them.

    Args:
        config: as for `HeadLayer`.
        weights: likewise; of the matrices that it takes, shapes are left.
        block_size: slots in a block of the cache.
    """

    def __init__(self, config: Any, weights: MutableMapping[str, Tensor], block_size: int) -> None:
        super().__init__(config, weights)
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        self._shape = Shape(heads, self.num_kv_heads, self.head_size, self.head_size, hidden)
        self._caller, arena = Caller(), Arena()
        self._rotations = Rotations(self._rotary, self.head_size, None)
        family = replace(FAMILIES["LlamaForCausalLM"], norms=_NO_NORMS)
        with torch.inference_mode():
            self._taken = Taking(self._shape, family, "plain", arena).layer(_module(weights, self.head_size), 0, 0)
        dtype = weights["mlp.down_proj.weight"].dtype
        for name in [name for name in weights if name.endswith("proj.weight")]:
            weights[name] = weights[name].to("meta")
        self._fields = (LayerFields * 1)(layer_fields(self._taken))
        self._tap = ctypes.c_int64(0)
        self._caller.model = self._model(config, dtype)
        step = self._caller.step
        step.block, step.taps = block_size, ctypes.addressof(self._tap)

    def _model(self, config: Any, dtype: torch.dtype) -> ModelFields:
        shape = self._shape
        return ModelFields(
            layers=self._fields,
            num_layers=1,
            hidden=shape.hidden_size,
            num_heads=shape.num_heads,
            num_key_heads=shape.num_key_heads,
            head_size=shape.head_size,
            num_turned=shape.num_turned,
            mlp=int(config.intermediate_size),
            num_taken=1,
            kind=_DTYPES.index(dtype),
            is_half=dtype == torch.bfloat16,
            activation=ACTIVATIONS[config.hidden_act],
            epsilon=self.epsilon,
            embedding_scale=1.0,
        )

    def run(self, residual: Tensor, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """As `HeadLayer.run`."""
        residual, read = residual.float().contiguous(), inputs.float().contiguous()
        outputs, step, keys = torch.empty_like(residual), self._caller.step, feeds[0].keys
        assert feeds[0].values.data_ptr() == keys.data_ptr() + keys.nbytes, "values lie behind keys"
        kept: list[Tensor] = []  # slots of keys, which the call reads
        rows = _rows(feeds, positions.tolist(), kept)
        most_keys = max(feed.end for feed in feeds)
        self._caller.size(len(residual), 0, most_keys, 0)
        step.rows, step.cache, step.num_slots = rows, keys.data_ptr(), keys.shape[1]
        step.turns = self._rotations.address(int(positions.max()) + 1)
        step.residual, step.inputs = residual.data_ptr(), read.data_ptr()
        step.num_taps, step.states = 1, outputs.data_ptr()
        self._caller.run(self._caller.library.forward)
        return outputs.to(inputs.dtype)


class CompiledProduct:
    """x [n, in] times a weight [out, in], in float32.

    Args:
        weight: float32 or bfloat16.
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._caller, self._arena = Caller(), Arena()
        self._matrix = Matrix.of(weight, bias, "plain", self._arena)
        kind = _DTYPES.index(weight.dtype)
        self._caller.model = ModelFields(
            head=matrix_fields(self._matrix), hidden=weight.shape[1], num_taken=1, num_key_heads=1, kind=kind
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] float32."""
        x = x.float().contiguous()
        found = torch.empty(len(x), self._matrix.num_outputs)
        self._caller.size(len(x), len(x), 0, found.data_ptr())
        self._caller.run(self._caller.library.head, x.data_ptr())
        return found


def _rows(feeds: Iterable[LayerFeed], positions: list[int], kept: list[Tensor]) -> Any:
    """The fields of `Row` in the C++ source for each new slot, as one array."""
    found: list[int] = []
    at = iter(positions)
    for feed in feeds:
        first = feed.slots.start if isinstance(feed.slots, slice) else 0
        slots = feed.slots if isinstance(feed.slots, Tensor) else None
        new = [first + place for place in feed.places] if slots is None else slots[list(feed.places)].tolist()
        for i, slot in enumerate(new):
            seen, num_in_order = slots, sys.maxsize
            if feed.visible is not None:
                places = feed.visible[i].nonzero()[:, 0]
                num_in_order = int((places == torch.arange(len(places))).sum())
                seen = places + first if slots is None else slots[places]
                kept.append(seen)
            found += (0, next(at), slot, first, 0 if seen is None else seen.data_ptr(), num_in_order)
    return (ctypes.c_int64 * len(found))(*found)


def _module(weights: Mapping[str, Tensor], size: int) -> nn.Module:
    """A layer's weights as a module of transformers has them."""
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if not name.endswith(".weight") or part not in ("self_attn", "mlp"):
            continue
        its = rest.removesuffix(".weight")
        module = _linear(weight, weights.get(f"{part}.{its}.bias")) if its.endswith("_proj") else _norm(weight)
        setattr(getattr(layer, part), its, module)
    layer.post_attention_layernorm = _norm(weights["post_attention_layernorm.weight"])
    layer.self_attn.scaling = size**-0.5
    return layer


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def _norm(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module
