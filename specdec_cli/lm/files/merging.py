"""Merges a LoRA adapter into its base model's weights by peft (arXiv:2106.09685; DoRA: arXiv:2402.09353).

A sum is rounded once: a layer is merged in float32 and cast back to its dtype.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.pytorch_utils import Conv1D

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.files.adapter import adapter_files
from specdec_cli.lm.files.headers import read_headers, read_tensors, tensor_dtypes
from specdec_cli.lm.files.reading import first_line, quiet

if TYPE_CHECKING:
    from specdec_cli.lm.files.checkpoint import Checkpoint

_PREFIX = "base_model.model."
_NAME = "default"  # peft's own for an adapter without a name
_FLOATS = ("F64", "F32", "BF16", "F16")
_AGAIN = "copy or download the adapter again"
_OWN = re.compile(rf"\.{_NAME}(\.|$)")
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+):.*?(\[[\d, ]*\]).*?(\[[\d, ]*\])")  # as torch says it


@torch.no_grad()
def merged(checkpoint: Checkpoint, model: Any, is_fake: bool) -> Any:
    """A model with an adapter merged into it; the model itself where its folder has none.

    Args:
        checkpoint: of the model.
        model: transformers' model of the base, changed in place.
        is_fake: sizes are merged in the place of numbers; asked within `fake_tensors`.

    Raises:
        RunError: the adapter does not fit its base, or holds numbers that are not finite.
    """
    name, folder, content = checkpoint.name, checkpoint.folder, checkpoint.adapter
    if content is None:
        return model
    files = [folder / file for file in adapter_files(folder)[1:]]
    odd = next(((key, dtype) for file in files for key, dtype in tensor_dtypes(file) if dtype not in _FLOATS), None)
    if odd is not None:
        raise RunError(f"`{odd[0]}` of the adapter `{name}` is {odd[1]}, and adapters are read as floats", _AGAIN)
    if is_fake:
        return _sized(name, content, model, files)
    tensors = read_tensors(files)
    broken = next((key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
    if broken is not None:
        raise RunError(f"`{broken}` of the adapter `{name}` holds numbers that are not finite", _AGAIN)
    return _with(name, content, model, tensors)


def _with(name: str, content: Mapping[str, Any], model: Any, tensors: dict[str, Tensor]) -> Any:
    """A model with an adapter's tensors merged into it; numbers and tensors may be on the meta device."""
    with quiet(), _fitting(name):
        _resize(name, model, tensors)
        adapted = _adapted(name, content, model, tensors)
        _merge_in_float32(adapted)
        return _unloaded(adapted, model)


def _sized(name: str, content: Mapping[str, Any], model: Any, files: list[Path]) -> Any:
    """A model of fake tensors in the sizes of the merged one, which is made on the meta device: peft takes no fakes."""
    with unset_fake_temporarily(), torch.device("meta"):
        outline = type(model)(copy.deepcopy(model.config))
        outline = _with(name, content, outline, read_headers(files))
    num_tokens = len(outline.get_input_embeddings().weight)
    if num_tokens != len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = outline.get_output_embeddings().weight is outline.get_input_embeddings().weight
    if output.weight is embedding.weight and not is_tied:
        output.weight = nn.Parameter(output.weight.clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return model


def _adapted(name: str, content: Mapping[str, Any], model: Any, tensors: dict[str, Tensor]) -> Any:
    """peft's model with every tensor of the adapter in its place."""
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = next((key for key, value in content.items() if value and key not in known), None)
    if unknown is not None:
        message = f"the adapter `{name}` says `{unknown}`, which the installed peft does not know"
        raise RunError(message, "install a newer peft")
    own_words = {key: value for key, value in content.items() if key in known and key != "peft_type"}
    config = LoraConfig(**own_words | {"inference_mode": True})
    adapted = PeftModel(model, config)
    _untie(adapted, model)
    report = set_peft_model_state_dict(adapted, tensors)
    own = {key: parameter for key, parameter in adapted.named_parameters(remove_duplicate=False) if _OWN.search(key)}
    absent = set(report.missing_keys)
    # Some are shared between tied layers.
    loaded = {id(parameter) for key, parameter in own.items() if key not in absent}
    missing = [key for key, parameter in own.items() if key in absent and id(parameter) not in loaded]
    for keys, what in ((report.unexpected_keys, "belongs to no layer of it"), (missing, "is missing")):
        if keys:
            raise _misfit(name, f"`{_short(min(keys))}` {what}")
    return adapted


def _resize(name: str, model: Any, tensors: dict[str, Tensor]) -> None:
    """Give a model as many tokens as the adapter's embeddings have."""
    names = {module: key for key, module in model.named_modules()}
    rows: dict[str, int] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        key = names.get(module)
        given = [tensors.get(f"{_PREFIX}{key}{part}.weight") for part in ("", ".base_layer")]
        rows |= {str(key): len(tensor) for tensor in given if tensor is not None and tensor.dim() == 2}
    num_tokens = next(iter(rows.values()), None)
    if num_tokens is None or num_tokens == len(model.get_input_embeddings().weight):
        return
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if len({*rows.values()}) > 1 or (len(rows) == 1 and not is_tied):
        raise _misfit(
            name, f"`{next(iter(rows))}` has {num_tokens} rows, and the other embedding has as many as before"
        )
    model.resize_token_embeddings(num_tokens, mean_resizing=False)


def _tied_modules(adapted: Any, model: Any) -> list[tuple[Any, Any]]:
    """Modules of tied weights that an adapter has a part in: of the output first, then of the input embedding."""
    pairs = [(key.rpartition(".")[0], own.rpartition(".")[0]) for key, own in model.all_tied_weights_keys.items()]
    modules = [tuple(adapted.base_model.model.get_submodule(name) for name in pair) for pair in pairs]
    return [(output, other) for output, other in modules if _is_wrapped(output) or _is_wrapped(other)]


def _untie(adapted: Any, model: Any) -> None:
    """Give tied layers a weight of their own where the adapter changes one of them: a sum would reach both."""
    for first, other in _tied_modules(adapted, model):
        output, embedding = (getattr(module, "original_module", module) for module in (first, other))
        output, embedding = (getattr(module, "base_layer", module) for module in (output, embedding))
        if output.weight is embedding.weight:
            output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)


def _merge_in_float32(adapted: Any) -> None:
    """Merge layers of 16 bits, so that a sum is rounded once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [module for module in adapted.base_model.model.modules() if isinstance(module, BaseTunerLayer)]:
        base = layer.get_base_layer()
        if isinstance(base, (nn.Linear, nn.Embedding, Conv1D)) and base.weight.dtype in (torch.bfloat16, torch.float16):
            dtype = base.weight.dtype
            base.float()
            layer.merge()
            base.to(dtype)


def _unloaded(adapted: Any, model: Any) -> Any:
    """The model without peft's layers; what was tied stays so where both weights are alike."""
    from peft.utils.other import TrainableTokensWrapper

    parts = _tied_modules(adapted, model)
    has_tokens = all(isinstance(module, TrainableTokensWrapper) for pair in parts for module in pair)
    is_meant = has_tokens or bool(adapted.peft_config[_NAME].ensure_weight_tying)
    configs = [model.config, model.config.get_text_config()]
    was_tied = [getattr(config, "tie_word_embeddings", None) for config in configs]
    for config in configs:
        config.tie_word_embeddings = False
    model = adapted.base_model.merge_and_unload()
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_alike = not parts or (is_meant if output.weight.is_meta else torch.equal(output.weight, embedding.weight))
    if is_alike:
        for config, tied in zip(configs, was_tied, strict=True):
            config.tie_word_embeddings = tied
    if parts and is_alike:
        output.weight = embedding.weight
    return model


def _is_wrapped(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


@contextmanager
def _fitting(name: str) -> Iterator[None]:
    """Turn what peft raises into one sentence."""
    try:
        yield
    except (SpecdecError, MemoryError, torch.OutOfMemoryError):
        raise
    except TypeError as error:
        message = f"the `adapter_config.json` of `{name}` is not valid: {first_line(error)}"
        raise UsageError(message, _AGAIN) from error
    except Exception as error:
        size = _OTHER_SHAPE.search(str(error))
        reason = f"`{_short(size[1])}` has another shape, {size[2]} instead of {size[3]}" if size else first_line(error)
        raise _misfit(name, reason) from error


def _misfit(name: str, reason: str) -> UsageError:
    hint = "name the base model that it was made for in `adapter_config.json`"
    return UsageError(f"the adapter `{name}` does not fit its base model: {reason}", hint)


def _short(key: str) -> str:
    """A tensor's name as the adapter's file has it."""
    return _OWN.sub(r"\1", key.removeprefix(_PREFIX))
