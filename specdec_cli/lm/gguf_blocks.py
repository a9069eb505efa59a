"""A GGUF file's model with its matrices left in the file: modules with sizes, and where the blocks of each lie."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from specdec_cli.errors import NotFiniteError
from specdec_cli.lm.files.gguf_header import GgufHeader, GgufTensor
from specdec_cli.lm.files.gguf_tensors import place_of, tensor_names
from specdec_cli.lm.llama.file_rows import FileRows, MappedBytes, has_layout
from specdec_cli.lm.llama.plain_modules import LlamaForCausalLM

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_weights import Progress


def ggml_type(tensor: GgufTensor) -> int:
    """ggml's number of a tensor's type."""
    from gguf import GGMLQuantizationType

    return int(GGMLQuantizationType[tensor.kind])


def blocks_obstacle(header: GgufHeader) -> str | None:
    """Why a file's weights cannot stay in blocks; None where they can."""
    for name, tensor in header.tensors.items():
        if len(tensor.shape) == 2 and not has_layout(ggml_type(tensor)):
            return f"`{name}` is in `{tensor.kind}`"
        if len(tensor.shape) == 1 and tensor.kind not in ("F32", "F16"):  # norms and biases are read as such
            return f"`{name}` is in `{tensor.kind}`"
        if len(tensor.shape) > 2:
            return "it is a mixture of experts"
    return None


def block_bytes(header: GgufHeader, outline: Any) -> dict[str, int]:
    """Bytes of each weight in a GGUF file, by transformers' names."""
    names = tensor_names(header, outline)
    tensors = {place_of(names, key): tensor for key, tensor in header.tensors.items()}
    return {place: tensor.num_bytes for place, tensor in tensors.items() if place is not None}


class _PackedBytes:
    """Counts the bytes of a file's matrices that several threads have packed.

    Args:
        header: of the file.
        progress: told how many, and of how many.
    """

    def __init__(self, header: GgufHeader, progress: Progress) -> None:
        self._num_bytes = sum(tensor.num_bytes for tensor in header.tensors.values() if len(tensor.shape) == 2)
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

    Norms and biases are read, in float32. A matrix is its module's `file_rows`; the `weight` there takes no memory.

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
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place is None:
            continue
        module_name, _, part = place.rpartition(".")
        module = model.get_submodule(module_name)
        mapped = MappedBytes(mappings[tensor.path], tensor.begin, tensor.num_bytes)
        if len(tensor.shape) == 2:
            module.weight = nn.Parameter(torch.zeros((), dtype=dtype).expand(tensor.shape), requires_grad=False)
            rows = mapped.array().reshape(tensor.shape[0], -1)
            # The file's row of each of transformers' rows.
            order = names.restored(key, np.arange(tensor.shape[0], dtype=np.float32)[:, None])[:, 0].astype(np.int64)
            module.file_rows = FileRows(
                *(key, name, ggml_type(tensor), tensor.shape[1], rows, torch.from_numpy(order)),
                mapped=mapped,
                packed=packed.count,
            )
        else:
            numbers = mapped.array().view(f"<f{tensor.num_bytes // tensor.num_numbers}").astype(np.float32)
            if not np.isfinite(numbers).all():
                raise NotFiniteError(key, name)
            numbers = names.restored(key, numbers.reshape(tensor.shape))
            setattr(module, part, nn.Parameter(torch.from_numpy(numbers), requires_grad=False))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not hasattr(outputs, "file_rows"):  # it is tied
        outputs.file_rows, outputs.weight = inputs.file_rows, inputs.weight
    return model


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
