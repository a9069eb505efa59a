"""Packed linear layers: right numbers, the same bits in any company, one copy of the weights, a plain way out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_engine import decode, ngram, tokens
from tiny_hybrids import save_hybrid
from tiny_models import make_tiny

from specdec_cli.lm import invariance
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files.fake_tensors import fake_tensors
from specdec_cli.lm.kernels import kinds, linear, packing
from specdec_cli.lm.kernels.kinds import has_triton, kernels, kind_for, missing, pack
from specdec_cli.lm.kernels.packing import Part, packed_layers
from specdec_cli.lm.load import load_lm

CPU = torch.device("cpu")
TEXT = [(11 * i * i + 3 * i) % 97 for i in range(40)]
FAST: list[kinds.Kernel] = ["bfloat16", "float32"]
needs_bfloat16, needs_float32 = (
    pytest.mark.skipif(missing(kernel) is not None, reason=f"no packed {kernel} product") for kernel in FAST
)
PACKED = ["int8", pytest.param("packed", marks=needs_bfloat16)]


def matrix(num_outputs, num_inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("kind", ["plain", *PACKED])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_is_the_product(kind, has_bias: bool) -> None:
    weight, rows = matrix(96, 64), matrix(5, 64, 1)
    bias = matrix(1, 96, 2)[0] if has_bias else None
    expected = F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    found = pack(weight, bias, kind)(rows)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < (0.015 if kind == "int8" else 0.004)
    assert torch.equal(pack(weight, bias, kind)(rows[None]), found[None])


def test_int8_is_exact_where_numbers_are_whole() -> None:
    weight, rows = torch.arange(-127.0, 128)[:, None], torch.tensor([[127.0], [-127.0], [0.0]])
    whole = torch.cat((weight, torch.full_like(weight, 127.0)), 1)
    found = pack(whole, None, "int8")(F.pad(rows, (0, 1)))
    assert torch.allclose(found, rows @ weight.t(), rtol=1e-6)
    assert not found[2].any()


def test_a_row_has_its_own_scale() -> None:
    weight, rows = matrix(96, 64), matrix(4, 64, 1)
    layer = pack(weight, None, "int8")
    louder = rows.clone()
    louder[1:] *= 1000
    assert torch.equal(layer(rows)[0], layer(louder)[0])


def test_int8_without_its_kernel_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = matrix(96, 64), matrix(5, 64, 1)
    fast = pack(weight, None, "int8")(rows)
    monkeypatch.setattr(kinds, "missing", lambda kind: "it was taken away")
    slow = pack(weight, None, "int8")(rows)
    assert torch.allclose(slow.float(), fast.float(), rtol=1e-2)
    assert torch.equal(pack(weight, None, "int8")(rows[:2]), slow[:2])
    assert kind_for(torch.bfloat16, CPU) == kind_for(torch.float32, CPU) == "plain"
    assert kernels()["int8"].endswith("product, slow: it was taken away")
    assert kernels()["bfloat16"] == kernels()["float32"] == "torch's plain product: it was taken away"


def test_what_a_gpu_s_integer_product_is_filled_up_with_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it takes more than 16 rows and multiples of 8; here it is asked for the same."""
    weight, rows = matrix(50, 13), matrix(3, 13, 1)
    monkeypatch.setattr(kinds, "missing", lambda kind: "it was taken away")
    monkeypatch.setattr(kinds, "_multiplies_integers", lambda: True)
    whole = pack(weight, None, "int8")(rows)
    monkeypatch.setattr(linear, "_smallest", lambda device: (17, 8))
    asked, real = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: asked.append((a.shape, b.shape)) or real(a, b))
    assert torch.equal(pack(weight, None, "int8")(rows), whole)
    assert asked == [((17, 16), (16, 56))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_s_int8_product_is_the_cpu_s() -> None:
    weight, rows = matrix(50, 13), matrix(3, 13, 1)
    found = pack(weight.cuda(), None, "int8")(rows.cuda()).cpu()
    assert torch.allclose(found, pack(weight, None, "int8")(rows), rtol=1e-5)


def test_an_operator_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "vnni_product", lambda weight, scales: lambda rows: torch.zeros(4, 96))
    assert kinds._try_vnni() == "its operator computes something else"


def test_an_operator_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing("bfloat16") is not None:
        pytest.skip("this machine has no packed bfloat16 product")
    missing.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    assert str(missing("bfloat16")).startswith("its operator failed")
    missing.cache_clear()


@needs_float32
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_float32_product_has_a_row_s_bits_in_any_company(has_bias: bool) -> None:
    weight, rows = matrix(192, 160).float(), matrix(17, 160, 1).float()
    bias = matrix(1, 192, 2)[0].float() if has_bias else None
    product = pack(weight, bias, "packed")
    whole = product(rows)
    torch.testing.assert_close(whole, F.linear(rows, weight, bias), rtol=1e-4, atol=1e-3)
    for count in range(1, 17):
        assert product(rows[:count]).shape == (count, 192)
        torch.testing.assert_close(product(rows[None, :count])[0], whole[:count], rtol=1e-5, atol=1e-4)
    assert product(rows[:0]).shape == (0, 192)


@pytest.mark.parametrize("num_inputs", [64, 1024, 3000])
def test_49_1_int8_is_exact_where_torchs_integer_product_saturates(
    num_inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI, oneDNN cuts the sums of two products to 16 bits, and torch's own product calls oneDNN."""

    def saturating(rows, columns):
        pairs = (rows[:, 0::2].int()[:, :, None] * columns[0::2].int()) + rows[:, 1::2].int()[:, :, None] * columns[
            1::2
        ]
        return pairs.clamp(-(2**14), 2**14).sum(1, dtype=torch.int32)

    rows, weight = torch.full((3, num_inputs), 1.0), torch.full((8, num_inputs), -1.0)
    rows[1, ::3], weight[2, ::5] = 0.25, 0.5
    right = pack(weight, None, "int8")(rows)
    monkeypatch.setattr(kinds, "missing", lambda kind: "it was taken away")
    monkeypatch.setattr(torch, "_int_mm", saturating)
    kinds._multiplies_integers.cache_clear()
    assert kernels()["int8"] == "an exact float32 product, slow: it was taken away"
    torch.testing.assert_close(pack(weight, None, "int8")(rows), right, rtol=1e-6, atol=0)
    monkeypatch.undo()
    kinds._multiplies_integers.cache_clear()


def test_float32_on_an_older_processor_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    missing.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert str(missing("float32")).startswith("this processor has no AVX-512")
    assert kind_for(torch.float32, CPU) == "plain"
    missing.cache_clear()


def test_a_fake_model_tries_kernels_with_numbers() -> None:
    found = [missing(kernel) for kernel in FAST]
    missing.cache_clear()
    with torch.inference_mode(mode=False), fake_tensors():
        assert [missing(kernel) for kernel in FAST] == found


@needs_float32
@pytest.mark.parametrize("family", ["gpt2", "bitnet", "granitemoehybrid"])
def test_a_packed_float32_model_is_the_plain_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers stay plain; here all are packed, and memory is what was planned."""
    folder = str(save_hybrid(family, tmp_path) if family == "granitemoehybrid" else make_tiny(family, tmp_path))
    plain = load_lm(folder, dtype="float32")
    assert not list(packed_layers(plain.model))
    monkeypatch.setattr(packing, "FEWEST_NUMBERS", 0)
    packed = load_lm(folder, dtype="float32")
    layers = list(packed_layers(packed.model))
    assert packed.num_parameters == plain.num_parameters
    torch.testing.assert_close(packed.score([Row(0, TEXT, 9)]), plain.score([Row(0, TEXT, 9)]), rtol=1e-3, atol=1e-4)
    assert packed.weight_bytes == describe(folder, dtype="float32").weights_bytes
    rest = sum(p.numel() * p.element_size() for p in packed.model.parameters())
    assert packed.weight_bytes == rest + sum(layer.num_bytes for layer in layers)
    prompts = [[3, 9, 27, 81, 52, 60, 3, 9, 27], [7, 8]]
    assert tokens(decode(packed, ngram(), 4, prompts)) == tokens(decode(packed, None, 0, prompts))


def test_kinds() -> None:
    for dtype, kernel in ((torch.bfloat16, FAST[0]), (torch.float32, FAST[1])):
        assert kind_for(dtype, CPU) == ("packed" if missing(kernel) is None else "plain")
    assert kind_for(torch.float16, CPU) == "plain"
    assert kind_for(torch.float32, CPU, "int8") == "int8"
    assert kind_for(torch.bfloat16, torch.device("cuda")) == ("few rows" if has_triton() else "plain")
    assert kind_for(torch.float32, torch.device("cuda")) == "plain"
    assert kind_for(torch.bfloat16, torch.device("cuda"), "int8") == "int8"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_a_quantized_model_is_near_the_whole_one(family: str, tmp_path: Path) -> None:
    folder = str(make_tiny(family, tmp_path))
    whole, packed = (load_lm(folder, dtype="float32", quantize=how) for how in ("none", "int8"))
    expected, found = (lm.score([Row(0, TEXT, 20)]) for lm in (whole, packed))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.15


def test_siblings_share_one_product(tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("qwen2", tmp_path)), quantize="int8", decoder="transformers")
    layer = lm.model.model.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert all(isinstance(part, Part) for part in parts)
    calls = []
    layer.self_attn.q_proj.product.linear.register_forward_hook(lambda *_: calls.append(1))
    lm.score([Row(0, TEXT, 1)])
    assert calls == [1]
    rows, others = matrix(3, 32).to(lm.device), matrix(3, 32, 1).to(lm.device)
    alone = [part(rows).clone() for part in reversed(parts)]
    assert len(calls) == 2, "one product for all three, in any order"
    mixed = [part(x).clone() for part in parts for x in (others, rows, rows)][2::3]
    assert all(torch.equal(one, other) for one, other in zip(alone, reversed(mixed), strict=True))


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_copy_of_the_weights(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = str(make_tiny("mistral", tmp_path, tie_word_embeddings=tied))
    how_to: Any = {"dtype": dtype, "decoder": "transformers"}
    whole, packed = (load_lm(folder, quantize=how, **how_to) for how in ("none", "int8"))
    layers = list(packed_layers(packed.model))
    rest = sum(p.numel() * p.element_size() for p in packed.model.parameters())
    assert packed.weight_bytes == rest + sum(layer.num_bytes for layer in layers)
    assert packed.weight_bytes < whole.weight_bytes
    table = packed.model.get_input_embeddings().weight
    assert packed.traffic.dense_bytes == packed.weight_bytes - table.numel() * table.element_size()
    assert describe(folder, quantize="int8", **how_to).weights_bytes == packed.weight_bytes
    assert describe(folder, quantize="int8", **how_to).read_bytes == packed.traffic.dense_bytes


def all_hold():
    return all(check.holds for check in invariance.row_invariance(torch.bfloat16) if "int8" in check.kernel)


def test_one_scale_for_all_rows_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The planted fault: what a row is rounded to follows from its company."""
    monkeypatch.setattr(invariance, "LINEAR_SHAPES", invariance.LINEAR_SHAPES[:2])
    folder = str(make_tiny("mistral", tmp_path))
    target = load_lm(folder, dtype="bfloat16", quantize="int8", decoder="transformers")
    prompt = [[3, 9, 27, 81, 52, 60, 3, 9, 27]]
    assert all_hold()
    plain = tokens(decode(target, None, 0, prompt))
    assert tokens(decode(target, ngram(), 4, prompt)) == plain
    monkeypatch.setattr(linear, "row_scales", lambda rows: rows.abs().amax().expand(len(rows), 1))
    assert not all_hold()
    alone = target.score([Row(0, TEXT, 1)])
    target.release(0)
    assert not torch.equal(target.score([Row(0, TEXT, 5)])[-1:], alone)
