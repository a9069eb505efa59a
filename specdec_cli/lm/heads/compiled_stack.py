"""The layers and products of a draft head by our own compiled decoder: read as fast as memory gives them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.files.lengths import long_rope_threshold
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack, each_layer
from specdec_cli.lm.llama.caller import Caller, Rotations
from specdec_cli.lm.llama.families import FAMILIES, Family, windows_of
from specdec_cli.lm.llama.llama_weights import Layer, Matrix, Taking, epsilon_of
from specdec_cli.lm.llama.model_fields import ModelFields, matrix_fields, model_fields, shape_of

DTYPES = (torch.float32, torch.bfloat16)
"""Of weights that it reads."""
_EVERY = 1 << 40  # more keys than there are


class CompiledStack(LayerStack):
    """Decoder layers in one call of compiled code. Their keys and values are laid out as that code reads them.

    Args:
        config: a transformers configuration.
        layers: their weights, taken by `taking`.
        taking: with the sizes and the family of the layers.
        modules: transformers' modules of the layers.
        rotary: transformers' module of their rotary positions.
        epsilon: of their norms.
        dtype: of their weights.
        block_size: slots in a block of the cache.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[Layer],
        taking: Taking,
        modules: Sequence[nn.Module],
        rotary: nn.Module,
        epsilon: float,
        dtype: torch.dtype,
        block_size: int,
    ) -> None:
        shape = taking.shape
        super().__init__((len(layers) * shape.num_key_heads, shape.head_size), epsilon)
        self._caller, self._layers = Caller("plain", dtype), layers
        self._looks_ahead = any(layer.ahead for layer in layers)
        self._rotations = Rotations(rotary, shape.num_turned, long_rope_threshold(config))
        self._caller.model = model_fields(config, taking, layers, modules, epsilon)
        self._last = ctypes.c_int64(len(layers) - 1)
        self._caller.step.block, self._caller.step.taps = block_size, ctypes.addressof(self._last)

    @classmethod
    def published(
        cls,
        config: Any,
        weights: MutableMapping[str, Tensor],
        block_size: int,
        block_layers: Sequence[BlockLayer] | None = None,
    ) -> CompiledStack:
        """The layers of a published head; arguments as for `TorchStack`. Of the matrices, it leaves shapes."""
        taking, layers = Taking(shape_of(config, _HEADS), _HEADS, "plain", Arena()), []
        modules = [_module(layer_weights, taking.shape.head_size) for layer_weights in each_layer(weights)]
        dtype = modules[0].mlp.down_proj.weight.dtype
        usual = [BlockLayer(window=None, is_causal=True)] * len(modules)
        for module, how in zip(modules, block_layers or usual, strict=True):
            first = "input_layernorm" if hasattr(module, "input_layernorm") else ""
            family = replace(_HEADS, norms=(first, *_HEADS.norms[1:]))
            with torch.inference_mode():
                layer = replace(taking, family=family).layer(module, how.window or 0, 0)
            layers.append(replace(layer, ahead=_ahead(how)))
        for name in [name for name in weights if name.startswith("layers.") and name.endswith("proj.weight")]:
            weights[name] = weights[name].to("meta")
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        epsilon = float(config.rms_norm_eps)
        return cls(config, layers, taking, modules, rotary, epsilon, dtype, block_size)

    @classmethod
    def of_decoder(cls, decoder: Any, family: Family, block_size: int) -> CompiledStack:
        """The layers of a decoder of transformers, whose modules are left without weights."""
        config, norm = decoder.config, decoder.norm
        taking = Taking(shape_of(config, family), family, "plain", Arena())
        epsilon, dtype = epsilon_of(norm), decoder.dtype
        pairs = zip(decoder.layers, windows_of(config, family), strict=True)
        with torch.inference_mode():
            layers = [taking.layer(layer, window, 0) for layer, window in pairs]
        return cls(config, layers, taking, decoder.layers, decoder.rotary_emb, epsilon, dtype, block_size)

    def run(self, hidden: Tensor, positions: Tensor, feeds: list[LayerFeed], inputs: Tensor | None = None) -> Tensor:
        """As `LayerStack.run`."""
        residual = hidden.float().contiguous()
        read = None if inputs is None else inputs.float().contiguous()
        outputs = torch.empty_like(residual)
        self._call(residual, read, positions, feeds, outputs)
        return outputs.to(hidden.dtype)

    def remember(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> None:
        """As `LayerStack.remember`."""
        read = inputs.float().contiguous()
        self._call(read, read, positions, feeds, None)

    def _call(
        self,
        residual: Tensor,
        inputs: Tensor | None,
        positions: Tensor,
        feeds: list[LayerFeed],
        outputs: Tensor | None,
    ) -> None:
        """Run the layers, or, without room for their outputs, file keys and values alone."""
        step, keys = self._caller.step, feeds[0].keys
        assert feeds[0].values.data_ptr() == keys.data_ptr() + keys.nbytes, "values lie behind keys"
        kept: list[Tensor] = []  # slots of keys, which the call reads
        rows = _rows(feeds, positions.tolist(), kept)
        ends = [feed.end for feed in feeds for _ in feed.places]
        self._caller.reserve(len(residual), 0, max(ends), 0)
        step.rows, step.cache, step.num_slots = rows, keys.data_ptr(), keys.shape[1]
        step.ends = (ctypes.c_int64 * len(ends))(*ends) if self._looks_ahead else None
        step.turns = self._rotations.address(int(positions.max()) + 1)
        step.residual, step.inputs = residual.data_ptr(), None if inputs is None else inputs.data_ptr()
        step.only_files = outputs is None
        if outputs is not None:
            step.num_taps, step.states = 1, outputs.data_ptr()
        self._caller.run(self._caller.library.forward)


class CompiledProduct:
    """x [n, in] times a weight [out, in], in float32.

    Args:
        weight: float32 or bfloat16.
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._caller, self._arena = Caller("plain", weight.dtype), Arena()
        self._matrix = Matrix.of(weight, bias, "plain", self._arena)
        head = matrix_fields(self._matrix)
        self._caller.model = ModelFields(head=head, hidden=weight.shape[1], num_taken=1, num_key_heads=1)

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] float32."""
        x = x.float().contiguous()
        product = torch.empty(len(x), self._matrix.num_outputs)
        self._caller.reserve(len(x), len(x), 0, product.data_ptr())
        self._caller.run(self._caller.library.head, x.data_ptr())
        return product


_HEADS = FAMILIES["LlamaForCausalLM"]


def _ahead(how: BlockLayer) -> int:
    """How many keys behind its own a slot sees."""
    if how.is_causal:
        return 0
    return _EVERY if how.window is None else how.window - 1


def _rows(feeds: Iterable[LayerFeed], positions: list[int], kept: list[Tensor]) -> Any:
    """The fields of `Row` in the C++ source for each new slot, as one array."""
    fields: list[int] = []
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
            fields += (0, next(at), slot, first, 0 if seen is None else seen.data_ptr(), num_in_order)
    return (ctypes.c_int64 * len(fields))(*fields)


def _module(weights: Mapping[str, Tensor], head_size: int) -> Any:
    """A layer's weights as a module of transformers has them."""
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if not name.endswith(".weight"):
            continue
        its = rest.removesuffix(".weight")
        if part not in ("self_attn", "mlp"):
            setattr(layer, part, _norm(weight))
            continue
        module = _linear(weight, weights.get(f"{part}.{its}.bias")) if its.endswith("_proj") else _norm(weight)
        setattr(getattr(layer, part), its, module)
    layer.self_attn.scaling = head_size**-0.5
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
