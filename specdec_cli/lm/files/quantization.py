"""How a checkpoint's weights are quantized: by its configuration, by its files' headers, and by its loaded modules.

transformers loads some forms itself and reads others as if their bytes were plain numbers. Here each is named, and what
neither transformers nor this engine computes with is refused before a weight is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import NotFiniteError, RunError, UsageError
from specdec_cli.lm.files.dequantize import is_known, obstacle
from specdec_cli.lm.files.gguf_header import SUFFIX
from specdec_cli.lm.files.headers import tensor_dtypes
from specdec_cli.lm.files.reading import first_line, quiet
from specdec_cli.lm.files.weights_files import weights_files

_FLOATING = {"F64", "F32", "F16", "BF16"}
_SCALES = re.compile(
    r"(\.|_)(weight_scale(_inv|_2)?|qweight|qzeros|weight_packed|weight_zero_point|SCB|weight\.absmax|W_q)$"
)
_HINT = "choose an unquantized checkpoint, or one in a form that transformers loads here"


def check_quantization(name: str, config: Any, folder: Path | None, quantize: str) -> None:
    """Refuse, by name, quantized weights that would not be computed with as they were meant.

    It decides on the configuration and on the headers of the safetensors files; the engine asks it before it loads
    weights, and so can code that loads none.

    - A form that transformers does not know, or does not load on this machine (a package or a GPU is missing): refused
      with transformers' own reason.
    - Weights in whole numbers or FP8, or scales beside them, without a form in the configuration: refused, because
      transformers would take the bytes for the weights.
    - A form whose activations share a scale across a batch: refused, because a draft would change the text.
    - `quantize` other than none for any quantized checkpoint: refused.

    - A variant of a form that is undone here (`dequantize`) and that this does not read: refused.

    Everything else runs: undone here (`dequantize`), by transformers' own modules, or, where transformers turns the
    weights into plain ones as it loads them (`stays_quantized` is None), as any other checkpoint.

    Args:
        name: the model's name in messages.
        config: its transformers configuration.
        folder: of its safetensors files; None where they are not here.
        quantize: how the engine is to quantize it, as recipes say.

    Raises:
        UsageError: to quantize what is quantized already, or a form that this engine cannot run.
        RunError: a form that transformers does not load here, or none that is named.
    """
    given = settings_of(config)
    if given is None:
        _check_headers(name, config, folder)
        return
    method = method_of(config)
    if method is None:
        words = ", ".join(f"`{key}: {given[key]}`" for key in sorted(given)[:3])
        raise RunError(f"`{name}` is quantized ({words}) in a form without a `quant_method`", _HINT)
    if is_known(given):
        reason = obstacle(given)
        if reason is not None:
            raise RunError(f"`{name}` is quantized by `{method}` with {reason}, which is not read", _HINT)
        return
    if quantize != "none":
        raise UsageError(
            f"`{name}` is already quantized (`{method}`) and cannot be quantized to `{quantize}`", "set it to none"
        )
    if method not in _methods():
        raise RunError(f"`{name}` is quantized by `{method}`, which transformers does not load", _HINT)
    _quantizer(name, given, method)
    shared = _shared_scale(given, method)
    if shared is not None:
        raise UsageError(
            f"`{name}` is quantized by `{method}` with {shared}: a draft would change the target's output", _HINT
        )


def _methods() -> Mapping[str, Any]:
    """The forms that transformers loads, by their names."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    methods: Mapping[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
    return methods


def method_of(config: Any) -> str | None:
    """The name of the form in which a checkpoint's weights are quantized; None where the configuration says none."""
    given = settings_of(config) or {}
    if is_known(given):
        return str(given["quant_method"])
    for bits in ("4bit", "8bit"):
        if given.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    method = given.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def stays_quantized(config: Any) -> str | None:
    """The form of weights that are still quantized once transformers has loaded them; None for plain ones."""
    given, method = settings_of(config), method_of(config)
    if given is None or method is None or method not in _methods():
        return method
    return None if is_dequantized(config) else method


def is_dequantized(config: Any) -> bool:
    """Whether transformers turns a checkpoint's quantized weights into plain ones on this machine as it loads them."""
    given, method = settings_of(config), method_of(config)
    if given is None or method not in _methods():
        return False
    try:
        quantizer = _quantizer("", given, method)
    except RunError:
        return False
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def forget_quantization(config: Any) -> None:
    """Remove the quantization from a configuration, for new, unquantized weights."""
    for configuration in (config, config.get_text_config()):
        for key in ("quantization_config", "quantization"):
            if getattr(configuration, key, None) is not None:
                delattr(configuration, key)


@torch.no_grad()
def check_finite(name: str, model: Any) -> None:
    """Refuse weights that became no numbers when they were dequantized, as broken scales make them.

    Raises:
        NotFiniteError: one is infinite or NaN.
    """
    for key, parameter in model.named_parameters():
        if not bool(parameter.sum(dtype=torch.float32).isfinite()):
            raise NotFiniteError(key, name)


@torch.no_grad()
def give_dtype(model: Any, dtype: torch.dtype) -> None:
    """Cast what transformers made of quantized weights, which is bfloat16 whatever dtype was asked for."""
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)


def settings_of(config: Any) -> dict[str, Any] | None:
    """The quantization settings of a configuration, whether transformers has made its own object of them or not."""
    for configuration in (config, config.get_text_config()):
        given = getattr(configuration, "quantization_config", None) or getattr(configuration, "quantization", None)
        if given:
            settings = dict(given) if isinstance(given, dict) else dict(given.to_dict())
            method = settings.get("quant_method")
            if method is None and {"bits", "group_size"} <= set(settings):  # as MLX writes it
                return settings | {"quant_method": "mlx"}
            if method is None and "quant_algo" in settings:  # as ModelOpt writes it
                return settings | {"quant_method": "modelopt"}
            return settings if method is None else settings | {"quant_method": str(getattr(method, "value", method))}
    return None


def take_form(config: Any) -> dict[str, Any] | None:
    """Take a form that is undone here out of a configuration, which is then that of plain weights.

    Returns:
        its settings; None where the configuration has none, or one that transformers reads.
    """
    given = settings_of(config)
    if given is None or not is_known(given):
        return None
    forget_quantization(config)
    return given


def _quantizer(name: str, given: dict[str, Any], method: str | None) -> Any:
    """transformers' quantizer, once it has agreed to this machine.

    Raises:
        RunError: it does not.
    """
    import transformers

    try:
        with quiet():
            quantizer = transformers.quantizers.AutoHfQuantizer.from_config(copy.deepcopy(given), pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:
        message = f"`{name}` is quantized by `{method}`, which transformers does not load here: {first_line(error)}"
        raise RunError(message, _HINT) from error
    return quantizer


def _shared_scale(given: dict[str, Any], method: str) -> str | None:
    """The part of a format's activations that depends on other rows of the batch, in words; None if none does."""
    if method == "bitsandbytes_8bit":
        return "outlier columns that are chosen for a whole batch"
    groups = given.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else ():
        inputs = (group.get("input_activations") if isinstance(group, dict) else None) or {}
        if inputs.get("dynamic") is True and inputs.get("strategy") in (None, "tensor"):
            return "one activation scale for a whole batch"
    is_dynamic = method == "torchao" and "PerTensor" in str(given) and "Dynamic" in str(given)
    return "one activation scale for a whole batch" if is_dynamic else None


def _check_headers(name: str, config: Any, folder: Path | None) -> None:
    """Refuse quantized weights of which the configuration says nothing."""
    for key, dtype in _headers(name, folder) if folder is not None else ():
        is_weight = key.endswith("weight") and dtype not in _FLOATING
        if is_weight or dtype.startswith(("F8", "F4", "F6", "E8")) or _SCALES.search(key):
            raise RunError(
                f"the weights of `{name}` are quantized (`{key}` is {dtype}), and its `config.json` does not say how",
                _HINT,
            )


def _headers(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Names and dtypes of a checkpoint's tensors."""
    for file in weights_files(name, folder):
        if not file.endswith(SUFFIX):
            yield from tensor_dtypes(folder / file)
