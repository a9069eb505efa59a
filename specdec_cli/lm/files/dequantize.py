"""Quantized weights as plain numbers: the layouts of checkpoints that other programs write, undone layer by layer.

Only weights are undone. A form that also rounds activations (W8A8, FP8 with dynamic activations, BitNet) computes here
with the activations as they are. Tensors may be fake (`fake_tensors`): the layouts are then undone in shape alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdec_cli.errors import RunError
from specdec_cli.lm.files import layouts
from specdec_cli.lm.files.layouts import Integers, Parts
from specdec_cli.lm.files.torchao_tensors import ACTIVATIONS, described, is_known_torchao, undo_torchao

_HINT = "copy or download the model again"
_HINT_FORM = "choose an unquantized checkpoint, or one in another form"
_PART = re.compile(r"(?P<layer>.+?)\.(?P<part>weight\.[^.]+|weight\.quant_state\.[^.]+|[^.]+)")
_ACTIVATIONS = {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale"}
_ACTIVATIONS |= {"k_scale", "v_scale", "q_scale", "weight_format"}
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_READ: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gptq": {"bits": (2, 4, 8), "dynamic": (None, {}), "checkpoint_format": (None, "", "gptq", "gptq_v2")},
    "awq": {"bits": (4,), "version": (None, "gemm")},
    "mlx": {"bits": (2, 4, 8), "mode": (None, "affine")},
    "modelopt": {"quant_algo": ("fp8", "nvfp4", "mixed_precision")},
    "bitnet": {"use_rms_norm": (None, False), "quantization_mode": (None, "offline")},
}
"""Values of settings that are undone here, by `quant_method`."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One way in which a layer's weight is stored.

    Args:
        needs: parts that it consists of; a layer that has the first is stored so.
        may: parts that it may have beside them.
        undo: the weight [out, in], float32 or in whole numbers, from the parts, the settings and what the file says of
            the layer.
        outputs: for layouts of whole numbers, the dimension of each part along which its outputs lie.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...]
    undo: Callable[[Parts, Mapping[str, Any], Any], Tensor | Integers]
    outputs: Mapping[str, int] = field(default_factory=dict)

    def of_outputs(self, parts: Parts, begin: int, end: int, num_outputs: int) -> dict[str, Tensor]:
        """The parts of outputs begin…end-1, which are whole words of each part."""
        selected = dict(parts)
        for part, dim in self.outputs.items():
            its = parts.get(part)
            if its is not None and its.dim() > dim and its.shape[dim] > 1:
                size = its.shape[dim]
                selected[part] = its.narrow(dim, begin * size // num_outputs, -(-(end - begin) * size // num_outputs))
        return selected


def plain_weights(
    name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], said: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """A checkpoint's tensors with plain weights in the place of quantized ones.

    Args:
        name: for messages.
        tensors: of its files, by name.
        settings: its `quantization_config`, of a form that `is_known`.
        said: what the files say of single layers (`descriptions`).
        dtype: of the plain weights.

    Raises:
        RunError: a part is missing, or does not fit the others.
    """
    stored = _LAYOUTS[str(settings["quant_method"])]
    weights: dict[str, Tensor] = {}
    for layer, parts in _layers(tensors).items():
        layout = next((candidate for candidate in stored if _is_stored(parts, candidate)), None)
        if layout is None and "weight" in parts and parts["weight"].dtype not in _PLAIN:
            raise RunError(f"`{name}` has no scales of `{layer}.weight`, which is {_word(parts['weight'])}", _HINT)
        if layout is None:
            weights |= {f"{layer}.{part}" if layer else part: tensor for part, tensor in parts.items()}
            continue
        for part in layout.needs:
            if part not in parts:
                raise RunError(f"`{name}` has no `{layer}.{part}`, which its quantized weight needs", _HINT)
        try:
            made = layout.undo(parts, settings, said.get(layer))
            weight = made.plain() if isinstance(made, Integers) else made
        except NotImplementedError as error:
            raise RunError(f"`{name}` stores `{layer}.weight` as {error}, which is not read", _HINT_FORM) from error
        except (RuntimeError, IndexError, ValueError) as error:
            raise RunError(f"the parts of `{layer}.weight` of `{name}` do not fit each other", _HINT) from error
        weights[f"{layer}.weight"] = weight.to(dtype)
        used = {*layout.needs, *layout.may, *_ACTIVATIONS}
        weights |= {f"{layer}.{part}": tensor for part, tensor in parts.items() if part not in used}
    return weights


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """A layer's weight in whole numbers, as the files store it.

    Args:
        layer: its name.
        layout: of its parts.
        parts: of it.
        settings: the checkpoint's `quantization_config`.
        description: what the files say of the layer.
        whole: the weight; nothing of it is unpacked yet.
    """

    layer: str
    layout: StoredWeight
    parts: Parts
    settings: Mapping[str, Any]
    description: Any
    whole: Integers

    def outputs(self, begin: int, end: int) -> Integers:
        """Outputs begin…end-1, from whole words of each part."""
        parts = self.layout.of_outputs(self.parts, begin, end, self.whole.shape[0])
        made = self.layout.undo(parts, self.settings, self.description)
        assert isinstance(made, Integers), "as the whole weight"
        return made


def stored_integers(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], said: Mapping[str, Any]
) -> tuple[dict[str, StoredIntegers], dict[str, Tensor]]:
    """Weights in whole numbers by their layers, and the other tensors by name; both empty if some are in another form.

    Args:
        tensors: of the files.
        settings: the `quantization_config`, of a form that `is_known`.
        said: what the files say of single layers (`descriptions`).
    """
    integers: dict[str, StoredIntegers] = {}
    others: dict[str, Tensor] = {}
    for layer, parts in _layers(tensors).items():
        layout = next(
            (candidate for candidate in _LAYOUTS[str(settings["quant_method"])] if _is_stored(parts, candidate)), None
        )
        if layout is None:
            others |= {f"{layer}.{part}" if layer else part: tensor for part, tensor in parts.items()}
            continue
        if not layout.outputs or not parts.keys() >= set(layout.needs):
            return {}, {}
        try:
            made = layout.undo(parts, settings, said.get(layer))
        except (NotImplementedError, RuntimeError, IndexError, ValueError):
            return {}, {}  # dequantizing names what does not fit, or is not read
        if not isinstance(made, Integers) or not made.fits:
            return {}, {}
        used = {*layout.needs, *layout.may, *_ACTIVATIONS}
        others |= {f"{layer}.{part}": tensor for part, tensor in parts.items() if part not in used}
        integers[layer] = StoredIntegers(layer, layout, parts, settings, said.get(layer), made)
    return integers, others


def is_known(settings: Mapping[str, Any]) -> bool:
    """Whether this module knows the form of a `quantization_config`; `obstacle` tells of the variant."""
    method = settings.get("quant_method")
    return is_known_torchao(settings) if method == "torchao" else method in _LAYOUTS


def obstacle(settings: Mapping[str, Any]) -> str | None:
    """The reason why a variant of a known form is not undone; None where it is.

    Args:
        settings: a `quantization_config` whose method is known here.
    """
    method = settings["quant_method"]
    if method == "compressed-tensors":
        return _compressed_obstacle(settings)
    layer = next((key for key, value in settings.items() if method == "mlx" and isinstance(value, dict)), None)
    if layer is not None:
        return f"`{layer}: {settings[layer]}`"
    for key, read in _READ.get(method, {}).items():
        value = settings.get(key)
        if (value.lower() if isinstance(value, str) else value) not in read:
            return f"`{key}: {value}`"
    return None


def descriptions(files: list[Path]) -> dict[str, Any]:
    """Shapes and block sizes of single layers, by the layer's name.

    safetensors files keep them in small tensors, torchao's in their metadata.
    """
    by_layer: dict[str, Any] = {}
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, framework="np") as file:
            by_layer |= dict(described(file.metadata() or {}))
            for key in file.keys():  # noqa: SIM118 (no mapping)
                layer, _, part = key.partition(".weight.")
                if key.endswith(".weight_shape"):
                    by_layer[key.removesuffix(".weight_shape")] = [int(size) for size in file.get_tensor(key)]
                elif part.startswith("quant_state."):
                    by_layer[layer] = json.loads(file.get_tensor(key).tobytes())
    return by_layer


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_stored(parts: Parts, layout: StoredWeight) -> bool:
    """Whether a layer is stored in a layout; numbers under the name `weight` may be plain."""
    first = parts.get(layout.needs[0])
    return first is not None and (layout.needs[0] != "weight" or first.dtype not in _PLAIN)


def _layers(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by the layer that they belong to and the part of it that they are."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _PART.fullmatch(key)
        layer, part = (match["layer"], match["part"]) if match else ("", key)
        layers.setdefault(layer, {})[part] = tensor
    return layers


def _compressed_obstacle(settings: Mapping[str, Any]) -> str | None:
    """Why a variant of compressed-tensors is not undone."""
    forms = list(_formats(settings))
    known = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
    known |= {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}
    unknown = next((form for form in forms if form not in known), None)
    if unknown is not None:
        return f"`format: {unknown}`"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "a `sparsity_config`"
    if settings.get("transform_config"):
        return "a `transform_config`"
    return None


def _formats(settings: Mapping[str, Any]) -> Iterator[str]:
    """The formats that a configuration of compressed-tensors names."""
    yield str(settings.get("format", "dense"))
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and group.get("format"):
            yield str(group["format"])


_FP8 = StoredWeight(("weight", "weight_scale_inv"), ("activation_scale",), layouts.fp8)
_PACKED = ("weight_shape", "weight_zero_point", "weight_g_idx")
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_ALONG = {"qweight": 1, "qzeros": 1, "scales": 1}
_ACROSS = dict.fromkeys(("weight_packed", "weight", "weight_scale", "weight_zero_point"), 0)
_LAYOUTS: Mapping[str, tuple[StoredWeight, ...]] = {
    "gptq": (StoredWeight(("qweight", "qzeros", "scales"), ("g_idx",), layouts.gptq, _ALONG),),
    "awq": (StoredWeight(("qweight", "qzeros", "scales"), (), layouts.awq, _ALONG),),
    "mlx": (StoredWeight(("weight", "scales", "biases"), (), layouts.mlx),),
    "bitnet": (StoredWeight(("weight", "weight_scale"), (), layouts.bitnet),),
    "fp8": (_FP8,),
    "mxfp8": (_FP8,),
    "modelopt": (
        StoredWeight(("weight_scale_2", "weight", "weight_scale"), (), layouts.modelopt_fp4),
        StoredWeight(("weight", "weight_scale"), (), layouts.modelopt_fp8),
    ),
    "torchao": (StoredWeight(("_weight_qdata", "_weight_scale"), ("_weight_zero_point", *ACTIVATIONS), undo_torchao),),
    "compressed-tensors": (
        StoredWeight(("weight_packed", "weight_scale"), (*_PACKED, "weight_global_scale"), layouts.compressed, _ACROSS),
        StoredWeight(("weight", "weight_scale"), ("weight_zero_point",), layouts.compressed_whole, _ACROSS),
    ),
    "bitsandbytes": (
        StoredWeight(
            ("weight.quant_map", "weight", "weight.absmax"),
            ("weight.nested_absmax", "weight.nested_quant_map", *_STATES),
            layouts.bitsandbytes_4bit,
        ),
        StoredWeight(("weight", "SCB"), (), layouts.bitsandbytes_8bit),
    ),
}
"""Layouts by `quant_method`."""
