"""`--quantize int4`: a model of plain numbers as our own decoder takes it, in blocks that it makes tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec_cli.lm.kernels.block_sizes import INT4, INT8, row_bytes
from specdec_cli.lm.llama.quantized_rows import QuantizedRows
from specdec_cli.lm.traffic import num_experts


def int4_obstacle(config: Any) -> str | None:
    """Why a model that our own decoder runs is not computed in 4 bits; None where it is."""
    return "it is a mixture of experts" if num_experts(config.get_text_config()) else None


def int4_bytes(model: Any) -> dict[str, int]:
    """Bytes of each weight that becomes blocks, by its name; asked of a model without numbers, too."""
    modules, types = dict(model.named_modules()), _block_types(model)
    shapes = {name: modules[name].weight.shape for name in types}
    return {f"{name}.weight": shape[0] * row_bytes(types[name], shape[1]) for name, shape in shapes.items()}


def quantize_model(name: str, model: Any, dtype: torch.dtype) -> Any:
    """The same model with its matrices as their modules' `file_rows`; the `weight` there takes no memory.

    Nothing is quantized yet: the decoder does that as it takes one matrix after the other.

    Args:
        name: of the model, for messages.
        model: whose weights may be mapped from files.
        dtype: that the model decodes in.
    """
    taken: dict[int, tuple[QuantizedRows, nn.Parameter]] = {}  # a tied one once
    for key, type_ in _block_types(model).items():
        module = model.get_submodule(key)
        weight = module.weight
        if id(weight) not in taken:
            shape = nn.Parameter(torch.zeros((), dtype=dtype).expand(weight.shape), requires_grad=False)
            taken[id(weight)] = QuantizedRows.of(f"{key}.weight", name, weight, type_), shape
        module.file_rows, module.weight = taken[id(weight)]
    return model


def _block_types(model: Any) -> dict[str, int]:
    """Types of the blocks of each matrix by its module's name: 8 bits at both ends of a model, 4 between them."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    return {name: INT8 if any(module is end for end in ends) else INT4 for name, module in matrices.items()}
