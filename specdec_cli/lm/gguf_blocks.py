"""A GGUF file's model with its matrices left in the file: modules with sizes, and where the blocks of each lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from specdec_cli.lm.files.dummy import on_paper
from specdec_cli.lm.files.gguf_folder import gguf_of
from specdec_cli.lm.files.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from specdec_cli.lm.files.gguf_weights import hf_names, tensor_processor
from specdec_cli.lm.llama.file_rows import FileRows, has_layout


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


def block_bytes(name: str, folder: Path, config: Any) -> dict[str, int]:
    """Bytes of each weight in a GGUF file, by transformers' names."""
    path = gguf_of(folder)
    assert path is not None, "the folder is made from a GGUF file"
    header, outline = read_gguf_header(name, path), on_paper(config, "auto", False)
    names = hf_names(outline, tensor_processor(header, outline))
    found = {names.get(key) or names.get(key.removesuffix(".weight")): tensor for key, tensor in header.tensors.items()}
    return {place: tensor.num_bytes for place, tensor in found.items() if place is not None}


def model_in_blocks(name: str, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The transformers model of a GGUF file without the numbers of its matrices.

    Norms and biases are read, in float32. A matrix is its module's `file_rows`; the `weight` there takes no memory.

    Args:
        name: for messages.
        folder: made by `gguf_folder`, of a file without a `blocks_obstacle` and with the tensors of its configuration.
        config: of the model.
        dtype: that the model decodes in.
    """
    path = gguf_of(folder)
    assert path is not None, "the folder is made from a GGUF file"
    header, outline = read_gguf_header(name, path), on_paper(config, "auto", False)
    with init_empty_weights(include_buffers=False):
        model = type(outline)._from_config(copy.deepcopy(outline.config), dtype=dtype)
    processor = tensor_processor(header, outline)
    names, data = hf_names(outline, processor), np.memmap(path, np.uint8, "r")
    for key, tensor in header.tensors.items():
        place = names.get(key) or names.get(key.removesuffix(".weight"))
        if place is None:
            continue
        module_name, _, part = place.rpartition(".")
        module, begin = model.get_submodule(module_name), header.data_start + tensor.offset
        own = data[begin : begin + tensor.num_bytes]
        if len(tensor.shape) == 2:
            module.weight = nn.Parameter(torch.zeros((), dtype=dtype).expand(tensor.shape), requires_grad=False)
            rows = own.reshape(tensor.shape[0], -1)
            module.file_rows = FileRows(
                key, ggml_type(tensor), tensor.shape[1], rows, _order(processor, key, tensor, names)
            )
        else:
            numbers = own.view(f"<f{tensor.num_bytes // tensor.num_numbers}").astype(np.float32)
            numbers = _processed(processor, key, numbers.reshape(tensor.shape), names)
            setattr(module, part, nn.Parameter(torch.from_numpy(numbers), requires_grad=False))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not hasattr(outputs, "file_rows"):  # it is tied
        outputs.file_rows, outputs.weight = inputs.file_rows, inputs.weight
    return model


def _order(processor: Any, key: str, tensor: GgufTensor, names: dict[str, str]) -> Tensor:
    """The file's row of each of transformers' rows [rows] int64: the converter of some families moves them."""
    numbers = np.arange(tensor.shape[0], dtype=np.float32)[:, None]
    return torch.from_numpy(_processed(processor, key, numbers, names)[:, 0].astype(np.int64))


def _processed(processor: Any, key: str, numbers: Any, names: dict[str, str]) -> Any:
    """A tensor of the file as transformers reads it."""
    result = processor.process(numbers, key, tensor_key_mapping=names, parsed_parameters={"tensors": {}})
    return np.ascontiguousarray(result.weights)
