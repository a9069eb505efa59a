"""GPTQ, AWQ and compressed-tensors in blocks: the same numbers, the same text with a draft, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from planted import plant
from refused import edit_config, edit_weights
from tiny_quantized import FORMS as WRITERS
from tiny_quantized import make_quantized
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm import integer_blocks
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files.layouts import Integers
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
FORMS = {"gptq": 5.5, "awq": 5.5, "w4a16": 4.5, "w8a8": 8.5}
"""Forms whose numbers blocks hold, and bits of each number there."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(form: str) -> Path:
        if form not in made:
            made[form] = make_quantized(form, tmp_path_factory.mktemp("integers"))
        return made[form]

    return folder


def score(lm: Any) -> Tensor:
    found: Tensor = lm.score([Row(0, TOKENS, len(TOKENS))])
    lm.release(0)
    return found


@pytest.mark.parametrize(
    ("bits", "zeros", "group_size", "expected"),
    [
        (4, (8, 8), 32, "Q4_0"),
        (4, (0, 15), 128, "Q5_0"),
        (2, (0, 3), 64, "Q4_0"),
        (8, (128, 128), 256, "Q8_0"),
        (4, (8, 8), 256, "Q4_0"),
    ],
)
def test_51_blocks_hold_the_same_numbers(bits: int, zeros: tuple[int, int], group_size: int, expected: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    generator = torch.Generator().manual_seed(0)
    shape = 24, 256 // group_size
    whole = torch.randint(0, 1 << bits, (24, 256), generator=generator, dtype=torch.int32)
    whole[0, :2] = torch.tensor([0, (1 << bits) - 1])
    zero = torch.randint(zeros[0], zeros[1] + 1, shape, generator=generator, dtype=torch.int32)
    weight = Integers(lambda: whole, (24, 256), bits, zero, torch.rand(shape, generator=generator).half())
    kind = gguf.GGMLQuantizationType[expected]
    found = gguf.quants.dequantize(integer_blocks.in_blocks(weight, int(kind)), kind)
    assert torch.equal(torch.from_numpy(found), weight.plain())
    in_order = replace(weight, group=torch.arange(256) // group_size)
    assert torch.equal(in_order.plain(), weight.plain())
    assert (integer_blocks.in_blocks(in_order, int(kind)) == integer_blocks.in_blocks(weight, int(kind))).all()


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("form", FORMS)
def test_51_a_form_runs_in_blocks(folders: Callable[[str], Path], form: str) -> None:
    folder = str(folders(form))
    plain, native = load_lm(folder, dtype="float32", compute="dequantized"), load_lm(folder, dtype="float32")
    assert (plain.decoder, native.decoder, native.kind) == ("own", "own, native", "blocks")
    assert 0 < relative_error(score(native), score(plain)) < 0.15
    facts, dequantized = describe(folder), describe(folder, compute="dequantized")
    assert (facts.decoder, dequantized.decoder) == ("own, native", "own")
    layers = [weight for weight in native.weights if "layers." in weight.name and weight.is_matrix]
    assert sum(8 * one.num_bytes for one in layers) == FORMS[form] * sum(one.num_numbers for one in layers)
    assert facts.weights_bytes == sum(weight.num_bytes for weight in load_lm(folder).weights)


@pytest.mark.parametrize("form", ["gptq", "w8a8"])
def test_51_text_with_a_draft_is_the_plain_one(folders: Callable[[str], Path], form: str) -> None:
    lm, draft = load_lm(str(folders(form))), load_lm(str(folders(form)), compute="dequantized")
    plain, drafted = tiny_engine.decode(lm, None), tiny_engine.decode(lm, draft)
    assert tiny_engine.tokens(drafted) == tiny_engine.tokens(plain)


def test_51_a_checkpoint_in_float16_keeps_the_rest_in_bfloat16(tmp_path: Path) -> None:
    folder = make_quantized("gptq", tmp_path)
    edit_config(folder, dtype="float16")
    lm, facts = load_lm(str(folder)), describe(str(folder))
    assert (lm.decoder, lm.dtype) == ("own, native", torch.bfloat16)
    assert (facts.decoder, facts.dtype) == ("own, native", "bfloat16")
    assert load_lm(str(folder), compute="dequantized").dtype == torch.float16


def test_51_an_output_layer_of_whole_numbers_stays_in_blocks(tmp_path: Path) -> None:
    """GPTQ's `lm_head: true`."""
    folder = make_quantized("gptq", tmp_path, vocab_size=96)

    def quantize(weights: dict[str, Tensor]) -> None:
        written = WRITERS["gptq"][0]("lm_head", weights.pop("lm_head.weight").float())
        weights |= {key: one.contiguous() for key, one in written.items() if not key.endswith("reference")}

    edit_weights(folder, quantize)
    native, plain = (load_lm(str(folder), dtype="float32", compute=one) for one in ("native", "dequantized"))
    assert relative_error(score(native), score(plain)) < 0.15
    head = next(weight for weight in native.weights if weight.name == "lm_head.weight")
    assert 8 * head.num_bytes == 5.5 * head.num_numbers


def with_wider_scales(weights: dict[str, Tensor]) -> None:
    key = "model.layers.1.mlp.up_proj.scales"
    weights[key] = weights[key].float() * 1.001


def with_a_plain_layer(weights: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        weights.pop(f"{name}.{part}")
    weights[f"{name}.weight"] = torch.ones(128, 64).bfloat16()


OBSTACLES: dict[str, tuple[str, Callable[[dict[str, Tensor]], None] | None, str]] = {
    "act order": ("gptq in order", None, "inputs of several groups in a block of 32"),
    "zero points of 8 bits": ("gptq, 8 bits, second version", None, "zero points that 8 bits do not hold"),
    "wide scales": ("gptq", with_wider_scales, "has scales beyond 16-bit floats"),
    "a plain layer": ("gptq", with_a_plain_layer, "`model.layers.1.mlp.up_proj` is not quantized, and the others are"),
    "another form": ("mlx", None, "`mlx` stores other numbers than whole ones with scales"),
    "FP8": ("fp8 dynamic", None, "`compressed-tensors` stores other numbers"),
}


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_51_what_blocks_do_not_hold_is_dequantized(tmp_path: Path, obstacle: str) -> None:
    form, change, reason = OBSTACLES[obstacle]
    folder = make_quantized(form, tmp_path)
    if change is not None:
        edit_weights(folder, change)
    assert load_lm(str(folder)).decoder == "own"
    said = describe(str(folder)).decoder
    assert said == "own" if "other numbers" in reason else said.startswith("own, dequantized (") and reason in said
    for ask in (load_lm, describe):
        with pytest.raises(UsageError, match=reason):
            ask(str(folder), compute="native")


def other_scale(weight: Integers) -> Integers:
    return replace(weight, scales=weight.scales * 2)


def other_zero(weight: Integers) -> Integers:
    return replace(weight, zeros=weight.zeros - 1)


def other_nibbles(weight: Integers) -> Integers:
    return replace(weight, unpack=lambda: weight.unpack().reshape(-1, 2).flip(1).view(weight.shape))


def other_rows(weight: Integers) -> Integers:
    return replace(weight, unpack=lambda: weight.unpack().roll(1, 0))


@pytest.mark.parametrize("fault", [other_scale, other_zero, other_nibbles, other_rows])
@pytest.mark.parametrize("form", ["gptq", "w4a16"])
def test_51_a_planted_fault_in_blocks_is_caught(
    folders: Callable[[str], Path], form: str, fault: Callable[[Integers], Integers], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = integer_blocks.in_blocks
    monkeypatch.setattr(integer_blocks, "in_blocks", lambda weight, kind: right(fault(weight), kind))
    with pytest.raises(RunError, match="other numbers in our decoder than in its file"):
        load_lm(str(folders(form)))


@pytest.mark.slow
def test_51_a_planted_fault_in_a_plain_output_layer_is_caught(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ("s.wanted[i] * hidden, m.norm, hidden", "s.wanted[i] * hidden, nullptr, hidden"), "-O0")
    with pytest.raises(RunError, match="gives other logits with its weights in blocks than dequantized"):
        load_lm(str(folders("gptq")))


def test_51_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_quantized("gptq", tmp_path)
    edit_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    for ask in (load_lm, describe):
        with pytest.raises(RunError, match=r"`model\.norm\.weight` is missing"):
            ask(str(folder))
