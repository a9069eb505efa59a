"""A model of GPTQ, AWQ or compressed-tensors with its whole numbers in blocks: the same numbers in another layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from specdec_cli.errors import NotFiniteError, WeightsError
from specdec_cli.lm.files.dequantize import StoredIntegers, descriptions, stored_integers
from specdec_cli.lm.files.headers import read_tensors
from specdec_cli.lm.files.layouts import Integers
from specdec_cli.lm.files.names import NO_BLOCKS
from specdec_cli.lm.files.reading import other_shape
from specdec_cli.lm.files.weights_files import weights_files
from specdec_cli.lm.gguf_blocks import empty_model
from specdec_cli.lm.llama.file_rows import FileRows

if TYPE_CHECKING:
    from specdec_cli.lm.plan import ModelPlan

_BLOCK = 32
_Q4_0, _Q5_0, _Q8_0 = 2, 6, 8
_RANGES = {_Q4_0: (-8, 7), _Q5_0: (-16, 15), _Q8_0: (-128, 127)}
"""The least and the largest whole number in blocks of ggml's types, which have one scale of 16 bits and no minimum."""
_AT_ONCE, _FEW = 1024, 16  # outputs whose numbers are unpacked together: whole words in every layout


@dataclass(frozen=True, slots=True, eq=False)
class IntegerRows(FileRows):
    """A weight of whole numbers, which becomes blocks when it is packed; `data` has their shape and no memory.

    Args:
        weight: as the files store it.
    """

    weight: StoredIntegers

    @property
    def scale_inputs(self) -> int:
        """How many of a product's inputs have one scale."""
        return _BLOCK

    def fill(self, panels: Tensor) -> None:
        """Write the outputs into panels, as `FileRows` does."""
        blocks = np.empty(self.data.shape, np.uint8)
        for begin in range(0, len(blocks), _AT_ONCE):
            some = self.weight.outputs(begin, min(begin + _AT_ONCE, len(blocks)))
            blocks[begin : begin + _AT_ONCE] = in_blocks(some, self.type)
        FileRows.fill(replace(self, data=blocks), panels)

    def reference(self) -> Tensor:
        """The numbers [out, in] float32 as they are dequantized, which knows nothing of blocks."""
        if len(self.order) == len(self.data):
            return self.weight.outputs(0, len(self.data)).plain()[self.order]
        numbers = torch.empty(len(self.order), self.num_inputs)
        for begin in set((self.order // _FEW * _FEW).tolist()):
            places = self.order // _FEW * _FEW == begin
            some = self.weight.outputs(begin, min(begin + _FEW, len(self.data)))
            numbers[places] = some.plain()[self.order[places] - begin]
        return numbers


def in_blocks(weight: Integers, type_: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Outputs [n, bytes of a row] uint8 in blocks of one of ggml's types: a scale, perhaps high bits, and codes."""
    groups = _groups_of_blocks(weight)
    whole = weight.unpack().view(-1, len(groups), _BLOCK) - weight.zeros[:, groups, None]
    scales = weight.scales[:, groups].half()[..., None].contiguous().view(torch.uint8)
    if type_ == _Q8_0:
        return torch.cat((scales, whole.to(torch.int8).view(torch.uint8)), -1).flatten(1).numpy()
    codes = (whole - _RANGES[type_][0]).to(torch.uint8)
    low = codes & 15
    parts = [low[..., :16] | low[..., 16:] << 4]
    if type_ == _Q5_0:
        bits = (codes >> 4).view(*codes.shape[:2], 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.insert(0, bits.sum(-1, dtype=torch.uint8))
    return torch.cat((scales, *parts), -1).flatten(1).numpy()


def _groups_of_blocks(weight: Integers) -> Tensor:
    """The group of each block of inputs [in / 32] int64."""
    if weight.group is not None:
        return weight.group[::_BLOCK]
    return torch.arange(0, weight.shape[1], _BLOCK) // (weight.shape[1] // weight.scales.shape[1])


def block_type(weight: StoredIntegers) -> int | str:
    """ggml's type whose blocks hold exactly a weight's numbers, or why none does."""
    its, num_inputs = weight.whole, weight.whole.shape[1]
    if num_inputs % _BLOCK:
        return f"`{weight.layer}` has {num_inputs} inputs, which are no whole blocks of {_BLOCK}"
    is_parted = its.group is not None and bool((its.group.view(-1, _BLOCK) != its.group[::_BLOCK, None]).any())
    if is_parted or (its.group is None and num_inputs // its.scales.shape[1] % _BLOCK):
        return f"`{weight.layer}` has inputs of several groups in a block of {_BLOCK}"
    if not torch.equal(its.scales.half().to(its.scales.dtype), its.scales):
        return f"`{weight.layer}` has scales beyond 16-bit floats"
    least, most = (int(bound) for bound in its.zeros.aminmax())
    bounds = -most, (1 << its.bits) - 1 - least
    for type_, (low, high) in _RANGES.items():
        if low <= bounds[0] and bounds[1] <= high:
            return type_
    return f"`{weight.layer}` has zero points that 8 bits do not hold"


@dataclass(frozen=True)
class IntegerWeights:
    """A checkpoint's weights in whole numbers, by layer, and what else is in its files.

    Args:
        layers: the weights.
        types: of the blocks of each.
        others: tensors that are stored plainly, by name.
        reason: why no blocks hold the weights; None where they do.
    """

    layers: Mapping[str, StoredIntegers] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str | None = None

    def row_bytes(self, layer: str) -> int:
        """Bytes of an output's blocks."""
        bits = {_Q4_0: 4, _Q5_0: 5, _Q8_0: 8}[self.types[layer]]
        return self.layers[layer].whole.shape[1] // _BLOCK * (2 + _BLOCK * bits // 8)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of the weights that are not in the model's dtype, by their names: those in blocks, norms and biases."""
        plain = {key: 4 * tensor.numel() for key, tensor in self.others.items() if tensor.dim() < 2}
        return plain | {f"{key}.weight": self.row_bytes(key) * its.whole.shape[0] for key, its in self.layers.items()}

    def obstacle(self, outline: Any) -> str | None:
        """Why a model cannot run on these blocks; None where it can."""
        if self.reason is not None:
            return self.reason
        linear = {name for name, module in outline.named_modules() if isinstance(module, nn.Linear)}
        linear -= {name for name, module in outline.named_modules() if module is outline.get_output_embeddings()}
        for layer in self.layers:
            if layer not in linear and outline.get_output_embeddings() is not _submodule(outline, layer):
                return f"`{layer}` is no linear layer of its own here"
        plain = min(linear - set(self.layers), default=None)
        return None if plain is None else f"`{plain}` is not quantized, and the others are"


def _submodule(outline: Any, name: str) -> Any:
    try:
        return outline.get_submodule(name)
    except AttributeError:
        return None


def integer_weights(plan: ModelPlan) -> IntegerWeights:
    """The weights of a model in whole numbers; their scales and zero points are read, to see if blocks hold them."""
    if plan.undone is None:
        return IntegerWeights(reason=NO_BLOCKS)
    files = [plan.folder / file for file in weights_files(plan.name, plan.folder)]
    layers, others = stored_integers(read_tensors(files), plan.undone, descriptions(files))
    if not layers:
        method = plan.undone["quant_method"]
        return IntegerWeights(reason=f"`{method}` stores other numbers than whole ones with scales")
    types: dict[str, int] = {}
    for layer, weight in layers.items():
        type_or_reason = block_type(weight)
        if isinstance(type_or_reason, str):
            return IntegerWeights(layers, reason=type_or_reason)
        types[layer] = type_or_reason
    return IntegerWeights(layers, types, others)


def model_of_integers(plan: ModelPlan, weights: IntegerWeights) -> Any:
    """The transformers model without the numbers of its quantized matrices, which are their modules' `file_rows`.

    Raises:
        WeightsError: a tensor is missing, or has another shape.
        NotFiniteError: a plain tensor holds numbers that are not finite; a scale is asked when it is packed.
    """
    model = empty_model(type(plan.outline), copy.deepcopy(plan.outline.config), plan.dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for layer, weight in weights.layers.items():
        module, shape = model.get_submodule(layer), weight.whole.shape
        _check_shape(plan.name, f"{layer}.weight", tuple(module.weight.shape), shape)
        module.weight = nn.Parameter(torch.zeros((), dtype=plan.dtype).expand(shape), requires_grad=False)
        data = np.broadcast_to(np.uint8(0), (shape[0], weights.row_bytes(layer)))
        order = torch.arange(shape[0])
        module.file_rows = IntegerRows(layer, plan.name, weights.types[layer], shape[1], data, order, weight)
    for name, tensor in weights.others.items():
        if name in parameters:
            _check_shape(plan.name, name, tuple(parameters[name].shape), tuple(tensor.shape))
            if not bool(tensor.sum(dtype=torch.float32).isfinite()):
                raise NotFiniteError(name, plan.name)
            dtype = torch.float32 if tensor.dim() < 2 else plan.dtype  # norms and biases are read as such
            _put(model, name, nn.Parameter(tensor.to(dtype), requires_grad=False))
    tied = {**model.all_tied_weights_keys} if model.config.get_text_config().tie_word_embeddings else {}
    for name, source in tied.items():
        if name not in weights.others or torch.equal(weights.others[name], weights.others[source]):
            _put(model, name, model.get_parameter(source))
    missing = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if missing is not None:
        raise _mismatch(plan.name, f"`{missing}` is missing")
    return model


def _put(model: Any, name: str, parameter: nn.Parameter) -> None:
    module, _, part = name.rpartition(".")
    setattr(model.get_submodule(module), part, parameter)


def _check_shape(name: str, key: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
    if wanted != found:
        raise _mismatch(name, other_shape(key, found, wanted))


def _mismatch(name: str, what: str) -> WeightsError:
    message = f"the weights of `{name}` do not match its `config.json`: {what}"
    return WeightsError(message, "copy or download the model again")
