"""A transformers model's linear layers, packed in place: which they are, which share one product, what they weigh."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from specdec_cli.lm.kernels.block_sizes import INT4, INT8, row_bytes
from specdec_cli.lm.kernels.kinds import Kind, can_pack, pack
from specdec_cli.lm.kernels.linear import PackedLinear

# Layers of one parent that are given the same input, in the order in which transformers calls them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPERTS = {"gate_up_proj": (0, 1), "down_proj": (2,)}
"""transformers' parameters of experts, and which of gate, up and down are in each."""
_ORDINARY = (nn.Parameter, FakeTensor)  # the second in `fake_tensors`
_TRANSPOSED = "Conv1D"  # GPT-2's linear layer, which keeps its weight the other way round
# It, and subclasses of torch's linear layer that write the same product in other words.
_LIKE_LINEAR = {_TRANSPOSED, "FalconLinear"}
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
FEWEST_NUMBERS = 2**17
"""In a float32 weight that is packed: oneDNN's operator takes longer to call, which a smaller one does not make up."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a model, as it lies in memory.

    Args:
        name: transformers' name for it.
        num_numbers: how many numbers it has.
        num_bytes: memory for them, scales included.
        is_matrix: whether tokens are multiplied with it.
        is_looked_up: whether it is an input embedding alone, of which a forward reads a row for each token.
    """

    name: str
    num_numbers: int
    num_bytes: int
    is_matrix: bool
    is_looked_up: bool


def weights_of(model: Any, kind: Kind) -> list[Weight]:
    """The weights that a model has once its layers are of a kind; asked before it is packed, of fake tensors too.

    A tied embedding is one weight in the plain form. Packed it is two: the table that is looked up, and the output
    layer's matrix, whose layout gives no row back.
    """
    is_packed_anew = kind in ("packed", "int8", "int4")
    packs = partial(_packs, kind=kind, needs_bits=_needs_bits(model))
    read = _read_by_parents(model)
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if is_packed_anew and module not in read and packs(module)
    }
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = {id(p) for p in inputs.parameters()}
    is_apart = outputs is None or (is_packed_anew and packs(outputs))
    read_through = set() if is_apart else {id(p) for p in outputs.parameters()}
    weights, seen = [], set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_packed = name in linear
        if (id(parameter), is_packed) in seen:
            continue
        seen.add((id(parameter), is_packed))
        numbers = parameter.numel()
        num_bytes = numbers * parameter.element_size()
        module_name, _, part = name.rpartition(".")
        module = model.get_submodule(module_name)
        if hasattr(module, "file_rows") and part == "weight":
            num_bytes = module.file_rows.num_bytes
        elif hasattr(module, "expert_rows") and part in EXPERTS:
            num_bytes = sum(rows[place].num_bytes for rows in module.expert_rows for place in EXPERTS[part])
        if is_packed and kind in ("int8", "int4"):
            layer = model.get_submodule(name.removesuffix(".weight"))
            num_outputs = numbers // _num_inputs(layer)
            row = numbers // num_outputs + 4  # with a scale
            if kind == "int4":
                row = row_bytes(INT8 if layer is outputs else INT4, numbers // num_outputs)
            num_bytes = num_outputs * row
        is_looked_up = not is_packed and id(parameter) in embeddings - read_through
        weights.append(Weight(name, numbers, num_bytes, parameter.dim() > 1, is_looked_up))
    return weights


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies with a plain weight and does nothing else: only such a layer is ours to pack or read.

    It is torch's linear layer, GPT-2's or Falcon's, and no other class; its weight is a matrix of floating-point
    numbers, with no scales beside it; nothing was attached that computes before, behind or instead of it.
    """
    is_known = type(module) is nn.Linear or type(module).__name__ in _LIKE_LINEAR
    return is_known and is_untouched(module) and has_plain_weight(module)


def is_untouched(module: nn.Module) -> bool:
    """Whether a module computes what its class says, with no numbers but its weight and its bias."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not is_hooked and not module._buffers and set(module._parameters) <= {"weight", "bias"}


def has_plain_weight(module: nn.Module) -> bool:
    """Whether a module's weight is a matrix of floating-point numbers as torch keeps them, and so is its bias."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    weight = module._parameters.get("weight")
    is_plain = all(type(parameter) in _ORDINARY and parameter.dtype in _PLAIN for parameter in parameters)
    return is_plain and weight is not None and weight.dim() == 2


def _read_by_parents(model: Any) -> set[nn.Module]:
    """Layers that stay as they are because their parent's class reads their weight itself: some routers."""
    return {
        layer
        for parent in model.modules()
        for name in _names_read_by(cast("Hashable", type(parent)))
        if isinstance(layer := getattr(parent, name, None), nn.Linear)
    }


@functools.cache
def _names_read_by(parent_class: Hashable) -> tuple[str, ...]:
    """Names of layers whose weight a class's forward pass reads."""
    assert isinstance(parent_class, type), "a module's class is asked for"
    if not parent_class.__module__.startswith("transformers."):
        return ()
    # Mamba's forward hands all weights to a fused kernel, for training alone.
    source = re.sub(
        r"fused_output = \w+\(.*?^ *\)$", "", inspect.getsource(parent_class), flags=re.DOTALL | re.MULTILINE
    )
    return tuple(re.findall(r"self\.(\w+)\.weight\b(?!\.dtype)", source))


def _packs(module: nn.Module, kind: Kind, needs_bits: bool) -> bool:
    """Whether a layer becomes a kind; in float32 its layout saves time, and small layers none."""
    if not is_linear(module):
        return False
    weight = cast("Tensor", module.weight)
    is_small = not needs_bits and weight.dtype == torch.float32 and weight.numel() < FEWEST_NUMBERS
    return kind != "packed" or (can_pack(weight.dtype) and not is_small)


def _needs_bits(model: nn.Module) -> bool:
    """Whether rows must get the same bits in any company, from layers that stay in float32, too: in bfloat16."""
    return any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def _num_inputs(module: Any) -> int:
    return int(module.weight.shape[0] if type(module).__name__ == _TRANSPOSED else module.in_features)


@torch.no_grad()
def leave_files(model: Any) -> None:
    """Copy what is not a linear layer's weight, for a model whose linear layers are about to be packed or were taken.

    Weights that were read are views of a mapped file, and one that is left keeps the whole of it in memory.
    """
    read = _read_by_parents(model)
    linear = {id(module.weight) for module in model.modules() if module not in read and is_linear(module)}
    for module in model.modules():
        vars(module).pop("file_rows", None)
        vars(module).pop("expert_rows", None)
    for parameter in model.parameters():
        is_table = parameter is getattr(model.get_input_embeddings(), "weight", None)
        if (is_table or id(parameter) not in linear) and not parameter.is_meta:
            parameter.data = parameter.data.clone()


@torch.no_grad()
def pack_model(model: Any, kind: Kind) -> None:
    """Replace a model's linear layers one by one, so that only one of them is there twice at a time.

    Other modules than plain linear layers (see `is_linear`) stay as they are: experts of a mixture, quantized layers.
    """
    if kind == "plain":
        return
    read = _read_by_parents(model)
    packs = partial(_packs, kind=kind, needs_bits=_needs_bits(model))
    for parent in list(model.modules()):
        for names in SIBLINGS:
            _pack_siblings(parent, names, kind, packs)
        for name, module in list(parent.named_children()):
            if module not in read and packs(module):
                weight = module.weight.t().contiguous() if type(module).__name__ == _TRANSPOSED else module.weight
                packed = pack(weight, module.bias, kind)
                packed.weight = weight.new_empty(0)  # some forwards ask for its dtype
                setattr(parent, name, packed)
                del module, weight, packed


def _pack_siblings(parent: nn.Module, names: tuple[str, ...], kind: Kind, packs: Callable[[nn.Module], bool]) -> None:
    """Make one product of a parent's layers of these names, where they fit together."""
    siblings = [getattr(parent, name, None) for name in names]
    layers = [layer for layer in siblings if type(layer) is nn.Linear and packs(layer)]
    if len(layers) < len(names):
        return
    fitting = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}
    if len(fitting) > 1:
        return
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    product = SharedProduct(
        pack(torch.cat([layer.weight for layer in layers]), bias, kind), [layer.out_features for layer in layers]
    )
    for place, name in enumerate(names):
        setattr(parent, name, Part(product, place))


class SharedProduct(nn.Module):
    """One product for layers that are given the same input: the first that is called computes, the others take.

    Each part is handed out once. For another input, or a second request, the product is computed again.
    """

    def __init__(self, linear: PackedLinear, sizes: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self.sizes = sizes
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, place: int, x: Tensor) -> Tensor:
        """The outputs of one layer."""
        output = self._parts[place] if x is self._input else None
        if output is None:
            self._parts = list(self.linear(x).split(self.sizes, -1))
            self._input = x
            output = self._parts[place]
        assert output is not None, "a product was computed without one of its parts"
        self._parts[place] = None
        if not any(part is not None for part in self._parts):
            self._input = None
        return output


class Part(nn.Module):
    """Replaces a layer that shares its matrix product."""

    def __init__(self, product: SharedProduct, place: int) -> None:
        super().__init__()
        self.product = product
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return self.product.part(self.place, x)


def packed_layers(model: nn.Module) -> Iterator[PackedLinear]:
    """The packed layers of a model, each once."""
    return (module for module in model.modules() if isinstance(module, PackedLinear))
