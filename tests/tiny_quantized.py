"""Tiny checkpoints in quantized forms, written as their makers write them: no package of theirs is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor, nn

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
    reference = whole.float() * scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return {f"{name}.weight": whole, f"{name}.{scale}": scales, f"{name}.reference": reference}


def _fp8_tensor(name: str, weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    written = {"weight": (weight / scale).to(_FP8), "weight_scale_inv": scale, "activation_scale": torch.tensor(0.05)}
    written["reference"] = written["weight"].float() * scale
    return {f"{name}.{key}": value for key, value in written.items()}


def _mxfp8(name: str, weight: Tensor) -> Written:
    rows, columns = weight.shape
    blocks = weight.view(rows, columns // 32, 32)
    exponents = (blocks.abs().amax(2) / 448).log2().ceil()
    whole = (blocks / exponents.exp2()[..., None]).reshape(rows, columns).to(_FP8)
    written = {"weight": whole, "weight_scale_inv": (exponents + 127).to(torch.uint8)}
    written["reference"] = whole.float() * exponents.exp2().repeat_interleave(32, 1)
    return {f"{name}.{key}": value for key, value in written.items()}


def _int8_channels(name: str, weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole, kept = (weight / scale).round(), scale.bfloat16()
    written = {"weight": whole.to(torch.int8), "weight_scale": kept, "reference": whole * kept.float()}
    return {f"{name}.{key}": value for key, value in written.items()}


def _fp8_channels(name: str, weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    whole, kept = (weight / scale).to(_FP8), scale.bfloat16()
    written = {"weight": whole, "weight_scale": kept, "reference": whole.float() * kept.float()}
    return {f"{name}.{key}": value for key, value in written.items()}


def _int4_groups(name: str, weight: Tensor) -> Written:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 32, 32)
    scale = groups.abs().amax(2) / 7
    whole = ((groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32) + 8).view(rows, columns // 8, 8)
    packed = torch.stack([(whole[..., place] & 15) << (4 * place) for place in range(8)]).sum(0, dtype=torch.int32)
    written = {"weight_packed": packed, "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}
    written["reference"] = ((whole.flatten(1) - 8) * _spread(written["weight_scale"].float())).float()
    return {f"{name}.{key}": value for key, value in written.items()}


def _words(whole: Tensor, bits: int) -> Tensor:
    """Numbers [rows, columns] of a few bits as 32-bit words, along the columns, the lowest bits first."""
    split = whole.long().view(len(whole), -1, 32 // bits)
    words = sum(split[..., place] << (bits * place) for place in range(32 // bits))
    assert isinstance(words, Tensor)
    return words.to(torch.uint32).view(torch.int32)


def _affine(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers [out, in], scales and zero points [out, groups] of groups of 32 inputs."""
    groups = weight.view(len(weight), -1, 32)
    scales = ((groups.amax(2) - groups.amin(2)) / (2**bits - 1)).half().float()
    zeros = (-groups.amin(2) / scales).round().clamp(1, 2**bits - 1)
    whole = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return whole.view_as(weight), scales, zeros


def _spread(values: Tensor) -> Tensor:
    return values.repeat_interleave(32, 1)


def _gptq(name: str, weight: Tensor, bits: int = 4, first_zero: int = 1) -> Written:
    whole, scales, zeros = _affine(weight, bits)
    written = {
        "qweight": _words(whole, bits).t(),
        "qzeros": _words((zeros - first_zero).t(), bits),
        "scales": scales.t().half(),
        "g_idx": torch.arange(weight.shape[1]).int() // 32,
        "reference": (whole - _spread(zeros)) * _spread(scales),
    }
    return {f"{name}.{key}": value for key, value in written.items()}


def _gptq_ordered(name: str, weight: Tensor) -> Written:
    """Inputs in the order of their groups, as `desc_act` writes them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    back = order.argsort()
    written = _gptq(name, weight[:, order])
    whole, _, _ = _affine(weight[:, order], 4)
    written[f"{name}.qweight"] = _words(whole[:, back], 4).t()
    written[f"{name}.g_idx"] = (back // 32).int()
    written[f"{name}.reference"] = written[f"{name}.reference"][:, back]
    return written


def _awq(name: str, weight: Tensor) -> Written:
    whole, scales, zeros = _affine(weight, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    in_order = [rows.t().reshape(rows.shape[1], -1, 8)[..., order].flatten(1) for rows in (whole, zeros)]
    return {
        f"{name}.qweight": _words(in_order[0], 4),
        f"{name}.qzeros": _words(in_order[1], 4),
        f"{name}.scales": scales.t().half(),
        f"{name}.reference": (whole - _spread(zeros)) * _spread(scales),
    }


def _mlx(name: str, weight: Tensor) -> Written:
    whole, scales, zeros = _affine(weight, 4)
    return {
        f"{name}.weight": _words(whole, 4).view(torch.uint32),
        f"{name}.scales": scales,
        f"{name}.biases": -zeros * scales,
        f"{name}.reference": whole * _spread(scales) - _spread(zeros * scales),
    }


def _ternary(name: str, weight: Tensor) -> Written:
    scale = weight.abs().mean()
    whole = (weight / scale).round().clamp(-1, 1)
    quarters = (whole + 1).to(torch.uint8).chunk(4)
    packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    scale = scale.bfloat16()
    return {
        f"{name}.weight": packed,
        f"{name}.weight_scale": scale[None],
        f"{name}.reference": whole * scale.float(),
    }


def _llm_int8(name: str, weight: Tensor) -> Written:
    largest = weight.abs().amax(1)
    whole = (weight / largest[:, None] * 127).round()
    return {
        f"{name}.weight": whole.to(torch.int8),
        f"{name}.SCB": largest,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        f"{name}.reference": whole * largest[:, None] / 127,
    }


def _nf4(name: str, weight: Tensor, is_nested: bool = True) -> Written:
    """bitsandbytes' four bits, in blocks of 64, with the blocks' sizes in bytes of their own."""
    levels = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.03, 0.97, 16))
    levels = levels / levels.abs().max()
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts: Written = {"weight.quant_map": levels}
    if is_nested:
        offset, table = largest.mean(), torch.linspace(-1, 1, 256)
        groups = nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
        by = groups.abs().amax(1)
        index = ((groups / by[:, None])[..., None] - table).abs().argmin(2).flatten()[: len(largest)]
        parts |= {"weight.absmax": index.to(torch.uint8), "weight.nested_absmax": by, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        largest = table[index] * by.repeat_interleave(256)[: len(largest)] + offset
    else:
        parts["weight.absmax"] = largest
    index = ((blocks / largest[:, None])[..., None] - levels).abs().argmin(2).flatten().to(torch.uint8)
    parts["weight"] = (index[0::2] << 4 | index[1::2])[:, None]
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts["reference"] = (levels[index.long()].view(-1, 64) * largest[:, None]).view_as(weight)
    return {f"{name}.{key}": value for key, value in parts.items()}


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _four_bit_floats(name: str, weight: Tensor, kind: str) -> Written:
    """NVFP4 of compressed-tensors or ModelOpt, or MXFP4: E2M1 numbers, two in a byte, and scales of groups."""
    size = 32 if kind == "mx" else 16
    groups = weight.view(len(weight), -1, size)
    wanted, whole = groups.abs().amax(2) / 6, weight.abs().max() / (6 * 448)
    if kind == "mx":
        exponents = wanted.log2().ceil()
        stored, scales = (exponents + 127).to(torch.uint8), exponents.exp2()
    else:
        stored = (wanted / whole).to(_FP8)
        scales = stored.float() * whole
    index = ((groups / scales[..., None])[..., None] - _E2M1).abs().argmin(3).view_as(weight)
    packed = index[:, 0::2].to(torch.uint8) | index[:, 1::2].to(torch.uint8) << 4
    written = {"weight_scale": stored, "reference": _E2M1[index] * scales.repeat_interleave(size, 1)}
    written |= {"weight" if kind == "modelopt" else "weight_packed": packed}
    if kind == "compressed":
        written |= {"weight_global_scale": 1 / whole[None], "input_global_scale": torch.ones(1)}
    if kind == "modelopt":
        written |= {"weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
    return {f"{name}.{key}": value for key, value in written.items()}


def _modelopt_fp8(name: str, weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    whole = (weight / scale).to(_FP8)
    written = {"weight": whole, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    written["reference"] = whole.float() * scale
    return {f"{name}.{key}": value for key, value in written.items()}


def _mxfp8_bytes(name: str, weight: Tensor) -> Written:
    """MXFP8 of compressed-tensors."""
    written = _mxfp8(name, weight)
    return {key.replace("weight_scale_inv", "weight_scale"): value for key, value in written.items()}


def _torchao(name: str, weight: Tensor, kind: str, size: int = 0) -> Written:
    """torchao's tensors as transformers flattens them; `make_quantized` writes their description."""
    columns = size or weight.shape[1]
    groups = weight.view(len(weight), -1, columns)
    largest = {"Int8Tensor": 127, "IntxUnpackedToInt8Tensor": 7, "Float8Tensor": 448, "Int4Tensor": 7}[kind]
    least = groups.amin(2) if kind == "Int4Tensor" else torch.zeros(groups.shape[:2])
    scale = (groups.amax(2) - least) / 15 if kind == "Int4Tensor" else groups.abs().amax(2) / largest
    zeros = least + 8 * scale if kind == "Int4Tensor" else torch.zeros_like(scale)
    whole = (groups - zeros[..., None]) / scale[..., None]
    whole = whole.to(_FP8).float() if kind == "Float8Tensor" else whole.round().clamp(-8 if size else -127, largest)
    parts = {"qdata": whole.flatten(1), "scale": scale, "zero_point": zeros}
    reference = (whole * scale[..., None] + zeros[..., None]).flatten(1)
    if kind == "Int4Tensor":
        bits = parts["qdata"].to(torch.int32) & 15
        parts |= {"qdata": (bits[:, 0::2] | bits[:, 1::2] << 4).to(torch.uint8).view(torch.int8)}
        parts |= {"scale": scale.t(), "zero_point": zeros.t()}
    elif kind == "Float8Tensor":
        del parts["zero_point"]
        parts["qdata"] = parts["qdata"].to(_FP8)
    else:
        parts |= {key: parts[key].to(torch.int8) for key in ("qdata", "zero_point")}
    return {f"{name}._weight_{key}": value for key, value in parts.items()} | {f"{name}.reference": reference}


def _torchao_config(kind: str, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": settings}}}


def _described(form: str, written: Written) -> dict[str, str]:
    """The metadata of a file with torchao's tensors."""
    write = FORMS[form][0]
    kind, size = write.keywords.values() if isinstance(write, partial) else ("", 0)
    found = {key: '{"_type": "Tensor"}' for key in written if "_weight_" not in key}
    for key in written:
        if key.endswith("._weight_qdata"):
            block = [1, size or written[key].shape[1]]
            said = {"_type": kind, "_data": {"block_size": block}}
            found[key.replace("._weight_qdata", ".weight")] = json.dumps(said)
    return found


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


_BNB = {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True}
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
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq, 8 bits, second version": (
        partial(_gptq, bits=8, first_zero=0),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq in order": (_gptq_ordered, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "bitnet": (
        _ternary,
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    ),
    "bitsandbytes nf4": (_nf4, {**_BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes nf4, sizes as they are": (partial(_nf4, is_nested=False), {**_BNB, "load_in_4bit": True}),
    "bitsandbytes int8": (_llm_int8, {**_BNB, "load_in_8bit": True}),
    "awq gemv": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}),
    "gptq, 3 bits": (_plain, {"quant_method": "gptq", "bits": 3, "group_size": 32}),
    "compressed, sparse": (_plain, _compressed("marlin-24", _numbers(4, "int", "group", group_size=32))),
    "nvfp4": (_plain, {"quant_method": "nvfp4"}),
    "mlx": (_mlx, {"bits": 4, "group_size": 32}),
    "nvfp4 compressed": (
        partial(_four_bit_floats, kind="compressed"),
        _compressed("nvfp4-pack-quantized", _numbers(4, "float", "tensor_group", group_size=16)),
    ),
    "mxfp4 compressed": (
        partial(_four_bit_floats, kind="mx"),
        _compressed("mxfp4-pack-quantized", _numbers(4, "float", "group", group_size=32)),
    ),
    "mxfp8 compressed": (
        _mxfp8_bytes,
        _compressed("mxfp8-quantized", _numbers(8, "float", "group", group_size=32)),
    ),
    "nvfp4 modelopt": (
        partial(_four_bit_floats, kind="modelopt"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]},
    ),
    "fp8 modelopt": (_modelopt_fp8, {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}),
    "torchao int8": (partial(_torchao, kind="Int8Tensor", size=0), _torchao_config("Int8WeightOnlyConfig")),
    "torchao int4 in bytes": (
        partial(_torchao, kind="IntxUnpackedToInt8Tensor", size=32),
        _torchao_config("IntxWeightOnlyConfig"),
    ),
    "torchao int4": (
        partial(_torchao, kind="Int4Tensor", size=32),
        _torchao_config("Int4WeightOnlyConfig", int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"}),
    ),
    "torchao fp8": (partial(_torchao, kind="Float8Tensor", size=0), _torchao_config("Float8WeightOnlyConfig")),
    "torchao int4 in tiles": (
        _plain,
        _torchao_config("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
    ),
    "modelopt awq": (_plain, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
}
DEQUANTIZED = ("fp8 blocks", "fp8 tensors", "mxfp8")
COMPRESSED = ("w8a8", "fp8 dynamic", "fp8 dynamic, one scale a batch", "w4a16")
UNDONE = (
    "awq", "gptq", "gptq, 8 bits, second version", "gptq in order", "mlx", "bitnet", "bitsandbytes nf4",
    "bitsandbytes nf4, sizes as they are", "bitsandbytes int8", *COMPRESSED, "nvfp4 compressed", "mxfp4 compressed",
    "mxfp8 compressed", "nvfp4 modelopt", "fp8 modelopt", "torchao int8", "torchao int4 in bytes", "torchao int4",
    "torchao fp8",
)  # fmt: skip
"""Forms that this package undoes itself."""


def make_quantized(form: str, folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Save a random Llama whose layers' weights are in a form, its embedding and output layer in bfloat16.

    Beside it lie `plain`, what it was made from, and, of forms that write one, `reference`, what it means.
    """
    write, settings = FORMS[form]
    plain = make_tiny(family, folder / "plain", **{"hidden_size": 64, "intermediate_size": 128} | sizes)
    quantized = shutil.copytree(plain, folder / "quantized")
    written: Written = {}
    right: Written = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_layer = name.endswith("_proj.weight")
        written |= write(name.removesuffix(".weight"), tensor) if is_layer else {name: tensor.bfloat16()}
    for key in [key for key in written if key.endswith(".reference")]:
        right[key.replace(".reference", ".weight")] = written.pop(key)
    metadata = {"format": "pt"} | (_described(form, written) if form.startswith("torchao") else {})
    save_file({key: value.contiguous() for key, value in written.items()}, quantized / "model.safetensors", metadata)
    if right:
        reference = shutil.copytree(plain, folder / "reference")
        names = [key for key in load_file(plain / "model.safetensors") if not key.endswith("_proj.weight")]
        kept = {key: written[key].float() for key in names} | {key: value.contiguous() for key, value in right.items()}
        save_file(kept, reference / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text()) | {"dtype": "bfloat16"}
    config |= {} if settings is None else {"quantization_config": settings}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized


def make_mxfp4(folder: Path) -> Path:
    """Save a random gpt-oss whose experts are in blocks of 4-bit numbers, as its makers wrote it, and `reference`."""
    plain = make_tiny("gpt_oss", folder / "plain", hidden_size=64, intermediate_size=64)
    quantized, reference = (shutil.copytree(plain, folder / name) for name in ("quantized", "reference"))
    written: Written = {}
    right: Written = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written[name], right[name] = tensor.bfloat16(), tensor.bfloat16().float()
            continue
        rows = tensor.transpose(1, 2)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = (blocks.abs().amax(3) / 6).log2().ceil()
        index = ((blocks / exponents.exp2()[..., None])[..., None] - _E2M1).abs().argmin(4).to(torch.uint8)
        written[f"{name}_blocks"] = index[..., 0::2] | index[..., 1::2] << 4
        written[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        right[name] = (_E2M1[index.long()] * exponents.exp2()[..., None]).view_as(rows).transpose(1, 2).contiguous()
    save_file(written, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(right, reference / "model.safetensors", metadata={"format": "pt"})
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((quantized / "config.json").read_text()) | {"dtype": "bfloat16"}
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": others}}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized
