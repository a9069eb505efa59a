"""Tiny checkpoints in quantized forms, written as their makers write them: no package of theirs is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

Written = dict[str, Tensor]
_FP8 = torch.float8_e4m3fn
_BLOCK = 32


def _plain(name: str, weight: Tensor) -> Written:
    return {f"{name}.weight": weight.bfloat16()}


def _fp8_blocks(name: str, weight: Tensor, scale: str = "weight_scale_inv") -> Written:
    rows, columns = weight.shape
    blocks = weight.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    whole = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(_FP8)
    return {f"{name}.weight": whole, f"{name}.{scale}": scales}


def _fp8_tensor(name: str, weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    written = {"weight": (weight / scale).to(_FP8), "weight_scale_inv": scale, "activation_scale": torch.tensor(0.05)}
    return {f"{name}.{key}": value for key, value in written.items()}


def _mxfp8(name: str, weight: Tensor) -> Written:
    rows, columns = weight.shape
    blocks = weight.view(rows, columns // 32, 32)
    exponents = (blocks.abs().amax(2) / 448).log2().ceil()
    whole = (blocks / exponents.exp2()[..., None]).reshape(rows, columns).to(_FP8)
    return {f"{name}.weight": whole, f"{name}.weight_scale_inv": (exponents + 127).to(torch.uint8)}


def _int8_channels(name: str, weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale.bfloat16()}


def _fp8_channels(name: str, weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": (weight / scale).to(_FP8), f"{name}.weight_scale": scale.bfloat16()}


def _int4_groups(name: str, weight: Tensor) -> Written:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 32, 32)
    scale = groups.abs().amax(2) / 7
    whole = ((groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32) + 8).view(rows, columns // 8, 8)
    packed = torch.stack([(whole[..., place] & 15) << (4 * place) for place in range(8)]).sum(0, dtype=torch.int32)
    written = {"weight_packed": packed, "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}
    return {f"{name}.{key}": value for key, value in written.items()}


def _mlx(name: str, weight: Tensor) -> Written:
    rows, columns = weight.shape
    scales = torch.ones(rows, columns // 32)
    return {
        f"{name}.weight": torch.zeros(rows, columns // 8, dtype=torch.uint32),
        f"{name}.scales": scales,
        f"{name}.biases": scales.clone(),
    }


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _numbers(bits: int, kind: str, strategy: str, *, dynamic: bool = False, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **others}


FORMS: dict[str, tuple[Callable[[str, Tensor], Written], dict[str, Any] | None]] = {
    "fp8 blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}),
    "fp8 tensors": (_fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
    "mxfp8": (_mxfp8, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
    "w8a8": (
        _int8_channels,
        _compressed("int-quantized", _numbers(8, "int", "channel"), _numbers(8, "int", "token", dynamic=True)),
    ),
    "fp8 dynamic": (
        _fp8_channels,
        _compressed("float-quantized", _numbers(8, "float", "channel"), _numbers(8, "float", "token", dynamic=True)),
    ),
    "fp8 dynamic, one scale a batch": (
        _fp8_channels,
        _compressed("float-quantized", _numbers(8, "float", "channel"), _numbers(8, "float", "tensor", dynamic=True)),
    ),
    "w4a16": (_int4_groups, _compressed("pack-quantized", _numbers(4, "int", "group", group_size=32))),
    "fp8 without a form": (_fp8_blocks, None),
    "int8 without a form": (_int8_channels, None),
    "modelopt": (_fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "awq": (_plain, {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "gptq": (_plain, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "nvfp4": (_plain, {"quant_method": "nvfp4"}),
    "mlx": (_mlx, {"bits": 4, "group_size": 32}),
    "bitsandbytes int8": (_plain, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
DEQUANTIZED = ("fp8 blocks", "fp8 tensors", "mxfp8")
COMPRESSED = ("w8a8", "fp8 dynamic", "w4a16")


def make_quantized(form: str, folder: Path) -> Path:
    """Save a random Llama whose layers' weights are in a form, its embedding and output layer in bfloat16."""
    write, settings = FORMS[form]
    plain = make_tiny("llama", folder / "plain", hidden_size=64, intermediate_size=128)
    quantized = shutil.copytree(plain, folder / "quantized")
    written: Written = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_layer = name.endswith("_proj.weight")
        written |= write(name.removesuffix(".weight"), tensor) if is_layer else {name: tensor.bfloat16()}
    save_file({key: value.contiguous() for key, value in written.items()}, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text()) | {"dtype": "bfloat16"}
    config |= {} if settings is None else {"quantization_config": settings}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized
