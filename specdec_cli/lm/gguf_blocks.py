"""A GGUF file's model with its matrices left in the file: modules with sizes, and where the rows of each lie."""

from __future__ import annotations

import copy
import math
import mmap
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specdec_cli.errors import NotFiniteError
from specdec_cli.lm.files.gguf_header import FLOATS, GgufHeader, GgufTensor
from specdec_cli.lm.files.gguf_names import experts_of, place_of
from specdec_cli.lm.files.gguf_tensors import tensor_names
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.file_rows import FileRows, MappedBytes, has_layout
from specdec_cli.lm.llama.plain_modules import LlamaForCausalLM

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_weights import Progress

_BLOCKS_AT_ONCE = 1 << 16


def ggml_type(tensor: GgufTensor) -> int:
    """ggml's number of a tensor's type."""
    from gguf import GGMLQuantizationType

    return int(GGMLQuantizationType[tensor.kind])


def blocks_obstacle(header: GgufHeader) -> str | None:
    """Why a file's weights cannot stay as they are in it; None where they can."""
    for name, tensor in header.tensors.items():
        is_read = has_layout(ggml_type(tensor)) if _is_multiplied(name, tensor) else tensor.kind in FLOATS
        if not is_read:
            return f"`{name}` is in `{tensor.kind}`"
    kinds = {tensor.kind for name, tensor in header.tensors.items() if _is_multiplied(name, tensor)}
    if kinds in ({"F32"}, {"BF16"}):
        return f"all of them are in `{kinds.pop()}`, which has faster products of its own"
    return None


def _is_multiplied(name: str, tensor: GgufTensor) -> bool:
    """Whether a tensor is a matrix or those of all experts; norms, biases and routers are read as plain numbers."""
    return len(tensor.shape) > 1 and name.endswith(".weight") and ".ffn_gate_inp." not in name


def block_bytes(header: GgufHeader, outline: Any) -> dict[str, int]:
    """Bytes of each weight in a GGUF file, by transformers' names."""
    names = tensor_names(header, outline)
    sizes: dict[str, int] = {}
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place is not None:
            sizes[place] = sizes.get(place, 0) + tensor.num_bytes
    return sizes


class _PackedBytes:
    """Counts the bytes of a file's matrices that several threads have packed."""

    def __init__(self, header: GgufHeader, progress: Progress) -> None:
        self._num_bytes = sum(its.num_bytes for name, its in header.tensors.items() if _is_multiplied(name, its))
        self._progress, self._lock, self._done = progress, Lock(), 0

    def count(self, num_bytes: int) -> None:
        """Take that so many more are packed."""
        with self._lock:
            self._done += num_bytes
            self._progress(self._done, self._num_bytes)


def model_in_blocks(
    name: str, header: GgufHeader, outline: Any, dtype: torch.dtype, progress: Progress | None = None
) -> Any:
    """The transformers model of a GGUF file without the numbers of its matrices.

    Norms, biases and routers are read, in float32. A matrix is its module's `file_rows`, and experts are a list of
    gate, up and down, their module's `expert_rows`; the weights there take no memory.

    Args:
        name: of the model, for messages.
        header: of a file without a `blocks_obstacle` and with the tensors of its configuration.
        outline: of the model.
        dtype: that the model decodes in.
        progress: told how many bytes of the matrices are packed, and of how many.

    Raises:
        NotFiniteError: a norm or a bias holds numbers that are not finite; a matrix is asked when it is packed.
    """
    model = empty_model(type(outline), copy.deepcopy(outline.config), dtype)
    names, mappings = tensor_names(header, outline), {path: _mapped(path) for path in header.paths}
    packed = _PackedBytes(header, progress or (lambda *_: None))
    experts: dict[str, dict[str | None, list[FileRows]]] = {}
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place is None:
            continue
        module_name, _, part = place.rpartition(".")
        module = model.get_submodule(module_name)
        mapped = MappedBytes(mappings[tensor.path], tensor.begin, tensor.num_bytes)
        parameter = getattr(module, part)
        if _is_multiplied(key, tensor):
            its = torch.zeros((), dtype=dtype).expand(parameter.shape)
            num_rows = math.prod(tensor.shape[:-1])
            # The file's row of each of transformers' rows.
            order = torch.from_numpy(names.restored(key, np.arange(num_rows)[:, None])[:, 0])
            blocks = mapped.array().reshape(num_rows, -1)
            about = key, name, ggml_type(tensor), tensor.shape[-1]
            rows = FileRows(*about, blocks, order, mapped=mapped, packed=packed.count)
            if len(tensor.shape) == 2:
                module.file_rows = rows
            else:
                each = [rows[first : first + tensor.shape[1]] for first in range(0, num_rows, tensor.shape[1])]
                experts.setdefault(module_name, {})[experts_of(key)] = each
        else:
            its = torch.empty(parameter.shape) if parameter.is_meta else parameter.data
            numbers = names.restored(key, _plain_numbers(key, name, tensor, mapped))
            names.part_of(key, its).copy_(torch.from_numpy(numbers))
        setattr(module, part, nn.Parameter(its, requires_grad=False))
    for module_name, layers in experts.items():
        each_layer = [layers[what] for what in ("gate", "up", "down")]
        model.get_submodule(module_name).expert_rows = list(zip(*each_layer, strict=True))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not hasattr(outputs, "file_rows"):  # it is tied
        outputs.file_rows, outputs.weight = inputs.file_rows, inputs.weight
    return model


def check_file_numbers(name: str, header: GgufHeader) -> None:
    """Refuse a file with numbers that are not finite, as loading does, where nothing is loaded.

    Raises:
        NotFiniteError: a number or a scale of blocks is not finite.
    """
    mappings, is_built = {path: _mapped(path) for path in header.paths}, native.missing() is None
    for key, tensor in header.tensors.items():
        mapped = MappedBytes(mappings[tensor.path], tensor.begin, tensor.num_bytes)
        if is_built and has_layout(ggml_type(tensor)):
            rows = mapped.array().reshape(math.prod(tensor.shape[:-1]), -1)
            order = torch.arange(len(rows))
            FileRows(key, name, ggml_type(tensor), tensor.shape[-1], rows, order, mapped=mapped).check()
        else:
            _check_dequantized(key, name, tensor, mapped)


def _check_dequantized(key: str, name: str, tensor: GgufTensor, mapped: MappedBytes) -> None:
    """The same of one tensor by the gguf package, which reads more types and takes seconds for large ones."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType[tensor.kind]
    blocks = mapped.array().reshape(-1, GGML_QUANT_SIZES[kind][1])
    with np.errstate(all="ignore"):
        for begin in range(0, len(blocks), _BLOCKS_AT_ONCE):
            if not np.isfinite(quants.dequantize(blocks[begin : begin + _BLOCKS_AT_ONCE], kind)).all():
                raise NotFiniteError(key, name)


def _plain_numbers(key: str, name: str, tensor: GgufTensor, mapped: MappedBytes) -> NDArray[np.float32]:
    """The numbers of a norm, a bias or a router, in float32."""
    from gguf import GGMLQuantizationType, quants

    flat: NDArray[np.float32] = quants.dequantize(mapped.array(), GGMLQuantizationType[tensor.kind])
    if not np.isfinite(flat).all():
        raise NotFiniteError(key, name)
    return flat.reshape(tensor.shape)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def empty_model(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model whose weights have shapes and no memory; what it computes of its configuration is there."""
    if issubclass(model_class, LlamaForCausalLM):
        return model_class(config).to(dtype)
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return model_class._from_config(config, dtype=dtype)
