"""`--quantize int4`: a model of plain numbers as our own decoder takes it, in blocks that it makes tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.lm.kernels.block_sizes import INT4, INT8, row_bytes
from specdec_cli.lm.kernels.packing import EXPERTS
from specdec_cli.lm.llama.families import family_of
from specdec_cli.lm.llama.llama_weights import expert_layers
from specdec_cli.lm.llama.quantized_rows import QuantizedRows


def int4_bytes(model: Any) -> dict[str, int]:
    """Bytes of each weight that becomes blocks, by its name; asked of a model without numbers, too."""
    modules, types = dict(model.named_modules()), _block_types(model)
    shapes = {name: modules[name].weight.shape for name in types}
    sizes = {f"{name}.weight": shape[0] * row_bytes(types[name], shape[1]) for name, shape in shapes.items()}
    for name, module in _experts_of(model):
        for part in EXPERTS:
            num_experts, *shape = getattr(module, part).shape
            num_outputs, num_inputs = shape[::-1] if family_of(model).has_limited_experts else shape
            sizes[f"{name}.{part}"] = num_experts * num_outputs * row_bytes(INT4, num_inputs)
    return sizes


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
    for key, module in _experts_of(model):
        weights = [[weight for weight, _ in layers] for layers in expert_layers(module, family_of(model))]
        module.expert_rows = [
            [QuantizedRows.of(f"{key}.{expert}", name, weight, INT4) for weight in its if isinstance(weight, Tensor)]
            for expert, its in enumerate(weights)
        ]
        for part in EXPERTS:
            stub = torch.zeros((), dtype=dtype).expand(getattr(module, part).shape)
            setattr(module, part, nn.Parameter(stub, requires_grad=False))
    return model


def _experts_of(model: Any) -> list[tuple[str, Any]]:
    """The experts of each layer of a mixture that our own decoder runs, by their names."""
    return [(name, module) for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def _block_types(model: Any) -> dict[str, int]:
    """Types of the blocks of each matrix by its module's name: 8 bits at both ends of a model, 4 between them."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    return {name: INT8 if any(module is end for end in ends) else INT4 for name, module in matrices.items()}
