"""Which kind of linear layer a model gets on this machine, and whether the kernels behind it are there and right.

Every fast kernel is tried once before it is used. Where it is missing or wrong, float32 and bfloat16 on a CPU and 16
bits on a GPU stay torch's plain product, and int8 takes torch's plain integer product, or exact float32 products where
that one saturates; `doctor` says so.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.kernels.linear import (
    ZERO_POINT,
    Int8Linear,
    IntegerProduct,
    OneDnnLinear,
    PackedLinear,
    PlainLinear,
    float_integer_product,
    signed_product,
    vnni_product,
)

Kind = Literal["plain", "packed", "int8", "int4", "blocks", "few rows"]
Kernel = Literal["float32", "bfloat16", "int8", "few rows"]
"""A fast kernel: oneDNN's by what it multiplies, ours on a GPU."""

QUANTIZED: dict[str, Kind] = {"int8": "int8", "int4": "int4"}
"""The kinds of linear layers that are quantized at load, by the words of recipes."""
_PACKED: dict[torch.dtype, Kernel] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def pack(weight: Tensor, bias: Tensor | None, kind: Kind) -> PackedLinear:
    """Pack a weight.

    Args:
        weight: [out, in], floating; the caller drops it, so that one copy stays.
        bias: [out], or None.
        kind: from `kind_for`.
    """
    assert kind != "packed" or can_pack(weight.dtype), f"{weight.dtype} is not packed here"
    with torch.no_grad():
        match kind:
            case "plain" | "int4" | "blocks":  # the last two are our own decoder's alone, which packs no layer
                return PlainLinear(weight, bias)
            case "packed":
                return OneDnnLinear(weight, bias)
            case "int8":
                return Int8Linear(weight, bias, _integer_product(weight.device))
            case "few rows":
                from specdec_cli.lm.kernels.few_rows import FewRowsLinear

                return FewRowsLinear(weight, bias)


def _integer_product(device: torch.device) -> IntegerProduct:
    """The fastest product of whole numbers on a device: oneDNN's on a CPU, ours on a GPU with Triton, else torch's.

    On a CPU without VNNI both oneDNN's and torch's, which calls it, may cut sums of two products to 16 bits.
    """
    if device.type == "cpu" and missing("int8") is None:
        return vnni_product
    if device.type == "cpu" and not _multiplies_integers():
        return functools.partial(signed_product, multiply=float_integer_product)
    if device.type == "cuda" and has_triton():
        from specdec_cli.lm.kernels.few_rows import integer_product

        return functools.partial(signed_product, multiply=integer_product)
    return signed_product


def kind_for(dtype: torch.dtype, device: torch.device, quantize: str = "none") -> Kind:
    """The replacement of a model's linear layers.

    Args:
        dtype: of its weights.
        device: where it runs.
        quantize: how they are quantized, as recipes say.
    """
    if quantize != "none":
        return QUANTIZED[quantize]
    if device.type == "cuda":
        return "few rows" if dtype.itemsize == 2 and has_triton() else "plain"
    return "packed" if can_pack(dtype) else "plain"


def is_quantized(kind: Kind) -> bool:
    """Whether layers of a kind hold quantized weights, of which no other copy is made."""
    return kind == "blocks" or kind in QUANTIZED.values()


def takes_blocks(kind: Kind) -> bool:
    """Whether products of a kind take weights in blocks."""
    return kind in ("blocks", "int4")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's layout of a dtype's weights is faster on this CPU."""
    kernel = _PACKED.get(dtype)
    return kernel is not None and missing(kernel) is None


@functools.cache
def has_triton() -> bool:
    """Whether our kernels for a GPU, in Triton, which comes with torch for CUDA, run here and are right."""
    return torch.cuda.is_available() and missing("few rows") is None


def kernels() -> dict[str, str]:
    """The matrix products in transformers' forward pass, in words: on a CPU by dtype, and all on a GPU."""
    plain_integers = "torch's plain integer product" if _multiplies_integers() else "an exact float32 product"
    integers = {"int8": ("packed for oneDNN (VNNI)", f"{plain_integers}, slow")}
    descriptions: dict[str, str] = {}
    tried: tuple[Kernel, ...] = (*_PACKED.values(), "int8")
    for kernel in tried:
        fast, plain = integers.get(kernel, ("packed for oneDNN", "torch's plain product"))
        reason = missing(kernel)
        descriptions[kernel] = fast if reason is None else f"{plain}: {reason}"
    if torch.cuda.is_available():
        reason = missing("few rows")
        descriptions["on the GPU"] = "our own, in Triton" if reason is None else f"torch's plain products: {reason}"
    return descriptions


@functools.cache
def missing(kernel: Kernel) -> str | None:
    """Why a fast kernel is not used on this machine; None where it was tried and is right."""
    if kernel != "few rows" and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    tries = {"float32": _try_float32, "bfloat16": _try_bfloat16, "int8": _try_vnni, "few rows": _try_triton}
    try:
        with unset_fake_temporarily(), torch.no_grad():  # a model of fake tensors may ask
            return tries[kernel]()
    except Exception as error:  # Triton compiles with the system's compiler, which fails in many ways
        return f"its operator failed: {first_line(error)}"


def _try_triton() -> str | None:
    """On the GPU that is there, else in Triton's interpreter where that is asked for."""
    if find_spec("triton") is None:
        return "there is no Triton"
    from specdec_cli.lm.kernels.few_rows import multiply

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, weight = (torch.linspace(-1, 1, n * 256, device=device).sin().view(n, 256).half() for n in (5, 96))
    product, right = multiply(rows, weight, None), rows.float() @ weight.float().t()
    is_close = product.shape == right.shape and torch.allclose(product.float(), right, rtol=2e-2, atol=2e-2)
    return None if is_close else "its kernel computes something else"


def _try_float32() -> str | None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return "this processor has no AVX-512, without which a lone row takes longer"
    return _try_onednn(torch.float32, 1e-4)


def _try_bfloat16() -> str | None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 products"
    return _try_onednn(torch.bfloat16, 2e-2)


def _try_onednn(dtype: torch.dtype, tolerance: float) -> str | None:
    rows, weight = (torch.linspace(-1, 1, n * 64).sin().view(n, 64).to(dtype) for n in (5, 96))
    product = OneDnnLinear(weight, None)(rows)
    right = rows.float() @ weight.float().t()
    is_close = product.shape == right.shape and torch.allclose(product.float(), right, rtol=tolerance, atol=tolerance)
    return None if is_close else "its operator computes something else"


def _try_vnni() -> str | None:
    return None if _is_exact(vnni_product) else "its operator computes something else"


@functools.cache
def _multiplies_integers() -> bool:
    """Whether torch's plain product of whole numbers is right on this CPU."""
    with unset_fake_temporarily(), torch.no_grad():
        return _is_exact(signed_product)


def _is_exact(product: IntegerProduct) -> bool:
    """Whether a product of whole numbers is right.

    Args:
        product: of a weight and its scales.
    """
    # The largest numbers too: without VNNI, sums of two products overflow 16 bits.
    rows = torch.arange(4 * 64).view(4, 64).mul(37).remainder(255).add(1).to(torch.uint8)
    rows[0] = 255
    weight = torch.arange(96 * 64).view(96, 64).mul(29).remainder(255).sub(127).to(torch.int8)
    weight[0] = 127
    scales = torch.ones(96)
    right = ((rows.long() - ZERO_POINT) @ weight.long().t()).float()
    return torch.equal(product(weight, scales)(rows), right)
