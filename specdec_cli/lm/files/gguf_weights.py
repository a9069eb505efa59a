"""The weights of a GGUF file in plain numbers, dequantized in parallel and where they stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from specdec_cli.errors import WeightsError
from specdec_cli.lm.files.dummy import on_paper
from specdec_cli.lm.files.gguf_folder import WEIGHTS, gguf_of
from specdec_cli.lm.files.gguf_header import ROPE_FACTORS, GgufHeader, GgufTensor, read_gguf_header
from specdec_cli.lm.files.quantization import check_finite

Progress = Callable[[float, float], None]
"""Takes how many bytes are done, and of how many."""
_OTHER = "choose the checkpoint with its safetensors"
_ALONE = 1 << 14  # numbers that torch copies on one thread
_PIECE = 1 << 18  # numbers at once: what they take while they are dequantized stays in a core's cache


def check_gguf_tensors(name: str, folder: Path, config: Any) -> None:
    """Refuse a GGUF file whose tensors are not those of its configuration, before one of them is read.

    Args:
        name: for messages.
        folder: of the model; nothing is checked of one that is not made from a GGUF file.
        config: of the model.

    Raises:
        WeightsError: a tensor is missing, has another size, or belongs to nothing.
    """
    path = gguf_of(folder)
    if path is None:
        return
    header, outline = read_gguf_header(name, path), on_paper(config, "auto", False)
    mapping = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    if header.architecture not in mapping and outline.config.model_type not in mapping:
        return  # read by transformers' newer reader, which names what is missing
    wanted = {key: tensor.numel() for key, tensor in outline.state_dict().items()}
    places = hf_names(outline, tensor_processor(header, outline))
    found = dict.fromkeys(wanted, 0)
    wrong = []
    for key, tensor in header.tensors.items():
        place = places.get(key) or places.get(key.removesuffix(".weight"))
        if place in found:
            found[place] += tensor.num_numbers
        elif key != ROPE_FACTORS:
            wrong.append(f"`{key}` is not read")
    tied = {**outline.all_tied_weights_keys} if outline.config.get_text_config().tie_word_embeddings else {}
    names = {place: key for key, place in places.items()}
    for place, size in wanted.items():
        if found[place] != size and place not in tied:
            what = "is missing" if not found[place] else "has another shape"
            wrong.insert(0, f"`{names.get(place, place)}` {what}")
    if wrong:
        raise WeightsError(f"the weights of `{name}` do not match its header: {wrong[0]}", _OTHER)


def tensor_processor(header: GgufHeader, outline: Any) -> Any:
    """transformers' object that undoes what llama.cpp's converter does to a family's tensors."""
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=outline.config.to_dict())


def hf_names(outline: Any, processor: Any) -> dict[str, str]:
    """The names of a file's tensors in transformers.

    transformers makes the table of names again for each module, which takes longer than to read the weights.
    """
    import gguf

    with patch("gguf.get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)):
        found: dict[str, str] = get_gguf_hf_weights_map(outline, processor)
    return found


def load_gguf(
    name: str, folder: Path, config: Any, how: dict[str, Any], progress: Progress | None = None
) -> tuple[Any, Any]:
    """The transformers model of a GGUF file in plain numbers, and transformers' report.

    Args:
        name: for messages.
        folder: made by `gguf_folder`.
        config: of the model.
        how: further arguments for transformers.
        progress: told of the bytes that were read.

    Raises:
        WeightsError: a tensor holds numbers that are not finite.
    """
    path = gguf_of(folder)
    assert path is not None, "the folder is made from a GGUF file"
    header = read_gguf_header(name, path)
    if is_gguf_arch_supported(header.architecture):
        how |= {"quantization_config": GgufConfig(dequantize=True), "local_files_only": True}
        model, report = AutoModelForCausalLM.from_pretrained(folder, config=config, gguf_file=WEIGHTS, **how)
        check_finite(name, model)
        return model, report
    outline = on_paper(config, "auto", False)
    tensors = _read(name, path, header, outline, how["dtype"], progress or (lambda *_: None))
    model, report = type(outline).from_pretrained(None, state_dict=tensors, config=outline.config, **how)
    return model, report


def _read(
    name: str, path: Path, header: GgufHeader, outline: Any, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """The weights by their names in transformers, all of them in memory once, and of the file a piece for each core."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    processor = tensor_processor(header, outline)
    places, shapes = hf_names(outline, processor), {key: one.shape for key, one in outline.state_dict().items()}
    found: dict[str, Tensor] = {}

    def numbers(key: str, begin: int, count: int) -> NDArray[np.float32]:
        tensor = header.tensors[key]
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
        first = header.data_start + tensor.offset + begin // per_block * block_bytes
        blocks = np.fromfile(path, np.uint8, count // per_block * block_bytes, offset=first)[None]
        with np.errstate(all="ignore"):
            made: NDArray[np.float32] = quants.dequantize(blocks, GGMLQuantizationType[tensor.kind])[0]
            if not math.isfinite(made.sum(dtype=np.float32)):
                said = f"the weight `{key}` of `{name}` holds numbers that are not finite"
                raise WeightsError(said, "copy or download the model again")
        return made

    def put(key: str, begin: int, into: Tensor) -> int:
        """Dequantize a piece of a tensor in its place."""
        made = torch.from_numpy(numbers(key, begin, len(into)))
        for place in range(0, len(into), _ALONE):
            into[place : place + _ALONE].copy_(made[place : place + _ALONE])
        return len(into)

    def change(key: str) -> int:
        """Dequantize a tensor that llama.cpp keeps in another layout, and undo that."""
        tensor = header.tensors[key]
        whole = np.empty(tensor.num_numbers, np.float32)
        for begin in range(0, len(whole), _PIECE):
            whole[begin : begin + _PIECE] = numbers(key, begin, min(_PIECE, len(whole) - begin))
        parsed = {"tensors": found}
        result = processor.process(
            whole.reshape(tensor.shape), key, tensor_key_mapping=places, parsed_parameters=parsed
        )
        if result.name in places:
            found[places[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights))
        place = places.get(key) or places[key.removesuffix(".weight")]
        found[place] = found[place].to(dtype)
        return len(whole)

    jobs: list[tuple[Any, ...]] = []
    for key, tensor in header.tensors.items():
        place = places.get(key) or places.get(key.removesuffix(".weight"))
        if place is None:
            continue
        found[place] = torch.empty(shapes[place], dtype=dtype)
        if not _stays(processor, key, tensor, places):
            jobs.append((change, key))
            continue
        flat = found[place].view(-1)
        jobs += [(put, key, begin, flat[begin : begin + _PIECE]) for begin in range(0, len(flat), _PIECE)]
    total = sum(tensor.num_numbers for tensor in header.tensors.values())
    done = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        try:
            for job in as_completed([pool.submit(*job) for job in jobs]):
                done += job.result()
                progress(done / total * path.stat().st_size, path.stat().st_size)
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def _stays(processor: Any, key: str, tensor: GgufTensor, places: Mapping[str, str]) -> bool:
    """Whether transformers takes a tensor as it lies in the file, asked with one number in the place of all."""
    if key not in places or type(processor).process is TensorProcessor.process:
        return key in places
    stand_in = np.broadcast_to(np.float32(1), tensor.shape)
    parsed: dict[str, Any] = {"tensors": {}}
    result = processor.process(stand_in, key, tensor_key_mapping=places, parsed_parameters=parsed)
    return result.weights is stand_in and result.name == key
