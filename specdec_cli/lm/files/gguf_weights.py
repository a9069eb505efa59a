"""The weights of a GGUF file in plain numbers, dequantized in parallel and where they stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from typing import TYPE_CHECKING, Any
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

from specdec_cli.errors import NotFiniteError
from specdec_cli.lm.files.gguf_folder import WEIGHTS
from specdec_cli.lm.files.gguf_header import GgufHeader, GgufTensor
from specdec_cli.lm.files.gguf_names import TensorNames, experts_of, place_of
from specdec_cli.lm.files.quantization import check_finite

if TYPE_CHECKING:
    from specdec_cli.lm.plan import ModelPlan

Progress = Callable[[float, float], None]
"""Takes how many bytes are done, and of how many."""
_ALONE = 1 << 14  # numbers that torch copies on one thread
_PIECE = 1 << 18  # numbers at once: what they take while they are dequantized stays in a core's cache


def names_missing_tensors(header: GgufHeader, outline: Any) -> bool:
    """Whether transformers' newer reader takes a file, which names what is missing."""
    mapping = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return header.architecture not in mapping and outline.config.model_type not in mapping


class TransformersNames:
    """The names of any family that transformers reads (`gguf_names.TensorNames`)."""

    def __init__(self, header: GgufHeader, outline: Any) -> None:
        self._processor = tensor_processor(header, outline)
        self.places = hf_names(outline, self._processor)

    def restored(self, key: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """A tensor of the file as transformers has it."""
        parsed: dict[str, Any] = {"tensors": {}}
        result = self._processor.process(numbers, key, tensor_key_mapping=self.places, parsed_parameters=parsed)
        return np.ascontiguousarray(result.weights)

    def part_of(self, key: str, parameter: Tensor) -> Tensor:
        """All of a parameter, or the half of joined experts."""
        is_half = experts_of(key) in ("gate", "up")
        return parameter[:, : parameter.shape[1] // 2] if is_half else parameter

    def stays(self, key: str, tensor: GgufTensor) -> bool:
        """Whether transformers takes a tensor as it lies in the file, asked with one number in the place of all."""
        if key not in self.places or type(self._processor).process is TensorProcessor.process:
            return key in self.places
        stand_in = np.broadcast_to(np.float32(1), tensor.shape)
        parsed: dict[str, Any] = {"tensors": {}}
        result = self._processor.process(stand_in, key, tensor_key_mapping=self.places, parsed_parameters=parsed)
        return result.weights is stand_in and result.name == key

    def store(self, key: str, numbers: NDArray[Any], weights: dict[str, Tensor]) -> None:
        """Put a whole tensor where transformers' object puts it."""
        parsed = {"tensors": weights}
        result = self._processor.process(numbers, key, tensor_key_mapping=self.places, parsed_parameters=parsed)
        if result.name in self.places:
            weights[self.places[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights))


def tensor_processor(header: GgufHeader, outline: Any) -> Any:
    """transformers' object that undoes what llama.cpp's converter does to a family's tensors."""
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=outline.config.to_dict())


def hf_names(outline: Any, processor: Any) -> dict[str, str]:
    """The names of a file's tensors in transformers.

    transformers makes the table of names again for each module, which takes longer than to read the weights.
    """
    import gguf

    with patch("gguf.get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)):
        names: dict[str, str] = get_gguf_hf_weights_map(outline, processor)
    return names


def load_gguf(
    plan: ModelPlan, names: Callable[[], TensorNames], how: dict[str, Any], progress: Progress | None = None
) -> tuple[Any, Any]:
    """The transformers model of a GGUF file in plain numbers, and transformers' report.

    Args:
        plan: of the model.
        names: makes those of its tensors, where transformers does not read the file itself.
        how: further arguments for transformers.
        progress: told of the bytes that were read.

    Raises:
        NotFiniteError: a tensor holds numbers that are not finite.
    """
    header, outline = plan.header, plan.outline
    assert header is not None, "the plan is of a GGUF file"
    if is_gguf_arch_supported(header.architecture):
        how |= {"quantization_config": GgufConfig(dequantize=True), "local_files_only": True}
        model, report = AutoModelForCausalLM.from_pretrained(plan.folder, config=plan.config, gguf_file=WEIGHTS, **how)
        check_finite(plan.name, model)
        return model, report
    tensors = _read(plan.name, header, names(), outline, how["dtype"], progress or (lambda *_: None))
    model, report = type(outline).from_pretrained(None, state_dict=tensors, config=outline.config, **how)
    return model, report


def _read(
    name: str, header: GgufHeader, names: TensorNames, outline: Any, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """The weights by their names in transformers, all of them in memory once, and of the file a piece for each core."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    shapes = {key: tensor.shape for key, tensor in outline.state_dict().items()}
    weights: dict[str, Tensor] = {}

    def numbers(key: str, begin: int, count: int) -> NDArray[np.float32]:
        tensor = header.tensors[key]
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
        first = tensor.begin + begin // per_block * block_bytes
        blocks = np.fromfile(tensor.path, np.uint8, count // per_block * block_bytes, offset=first)[None]
        with np.errstate(all="ignore"):
            made: NDArray[np.float32] = quants.dequantize(blocks, GGMLQuantizationType[tensor.kind])[0]
            if not math.isfinite(made.sum(dtype=np.float32)):
                raise NotFiniteError(key, name)
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
        names.store(key, whole.reshape(tensor.shape), weights)
        place = place_of(names, key)
        assert place is not None, "it was asked for"
        weights[place] = weights[place].to(dtype)
        return len(whole)

    jobs: list[tuple[Any, ...]] = []
    for key, tensor in header.tensors.items():
        place = place_of(names, key)
        if place is None:
            continue
        if place not in weights:  # gate and up of experts share one
            weights[place] = torch.empty(shapes[place], dtype=dtype)
        if not names.stays(key, tensor):
            jobs.append((change, key))
            continue
        flat = weights[place].view(-1)
        jobs += [(put, key, begin, flat[begin : begin + _PIECE]) for begin in range(0, len(flat), _PIECE)]
    total = sum(tensor.num_numbers for tensor in header.tensors.values())
    done, num_bytes = 0, sum(path.stat().st_size for path in header.paths)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        try:
            for job in as_completed([pool.submit(*job) for job in jobs]):
                done += job.result()
                progress(done / total * num_bytes, num_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
    return weights
