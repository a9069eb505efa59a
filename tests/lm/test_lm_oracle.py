"""The check at load: our path's logits against transformers' untouched forward, and the faults that it must catch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import EXTRA_FAMILIES, FAMILIES, make_tiny
from typed import stand_in

from specdec_cli.errors import RunError
from specdec_cli.lm import load
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.attention import RowMasks
from specdec_cli.lm.kernels import packing
from specdec_cli.lm.kernels.linear import PackedLinear
from specdec_cli.lm.llama import llama_weights
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import Oracle, relative_error
from specdec_cli.recipe.values import Quantize

PRECISIONS: list[tuple[str, Quantize]] = [
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "int8"),
    ("float16", "none"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=4))


@pytest.mark.in_turn(5, every=7)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_49_3_no_family_is_refused_for_its_rounding(
    tmp_path: Path, family: str, precision: tuple[str, Quantize], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights amplify it, and still it stays under half of what the check allows."""
    dtype, quantize = precision
    errors = []
    right = Oracle.error
    monkeypatch.setattr(Oracle, "error", lambda self, lm: errors.append(right(self, lm)) or errors[-1])
    monkeypatch.setattr(Oracle, "allowed", lambda self, lm, its=Oracle.allowed: its(self, lm) / 2)
    load_lm(str(make_tiny(family, tmp_path)), dtype=dtype, quantize=quantize)
    assert len(errors) == 1


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize(("dtype", "quantize"), PRECISIONS)
def test_49_1_a_layer_with_another_ones_weights_is_caught(
    folder, dtype, quantize, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are read as other numbers: what a form that nobody knows yet does to a layer's weight."""

    def misread(weight):
        return weight.flip(0)

    quantized, packed = stand_in(llama_weights.Matrix.of).__func__, packing.pack
    monkeypatch.setattr(
        llama_weights.Matrix,
        "of",
        classmethod(lambda cls, weight, *others, **named: quantized(cls, misread(weight), *others, **named)),
    )
    monkeypatch.setattr(packing, "pack", lambda weight, bias, kind: packed(misread(weight), bias, kind))
    is_packed = quantize == "int8" or (dtype == "bfloat16" and packing.can_pack(torch.bfloat16))
    if decoder == "transformers" and not is_packed:
        pytest.skip("nothing is packed, which test_wrong_weights_are_caught tries")
    if decoder == "auto" and dtype == "float16":
        pytest.skip("our own decoder takes no float16, and nothing is packed")
    with pytest.raises(RunError, match="other logits here than in transformers' own forward pass"):
        load_lm(folder, dtype=dtype, quantize=quantize, decoder=decoder)


def permuted(model: Any) -> None:
    """Rows of one layer's output matrix in another order."""
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight.copy_(weight.roll(5, 0))


def swapped(model: Any) -> None:
    """Two layers in the place of each other."""
    first, second = model.model.layers[1], model.model.layers[2]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        one.data, other.data = other.data, one.data


def scaled(model: Any) -> None:
    """One matrix with another scale."""
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-2)


WRONG = [permuted, swapped, scaled]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize(("dtype", "quantize"), PRECISIONS)
def test_wrong_weights_are_caught(
    folder, dtype, quantize, decoder: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes the weights behind the reference, and whether anything is packed on this processor."""
    right = load.TransformersLM

    def taking(model: Any, *others: Any, **named: Any) -> Any:
        with torch.no_grad():
            wrong(model)
        return right(model, *others, **named)

    monkeypatch.setattr(load, "TransformersLM", taking)
    with pytest.raises(RunError, match="other logits here than in transformers' own forward pass"):
        load_lm(folder, dtype=dtype, quantize=quantize, decoder=decoder)


def errors_of(monkeypatch: pytest.MonkeyPatch, **errors: float) -> None:
    """Have the check find these relative errors, by dtype."""
    monkeypatch.setattr(Oracle, "error", lambda self, lm: errors[str(lm.dtype).removeprefix("torch.")])


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_49_3_what_fails_in_bfloat16_and_passes_in_float32_runs_in_float32(
    folder, decoder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors_of(monkeypatch, bfloat16=0.4, float32=1e-6)
    assert load_lm(folder, dtype="bfloat16", decoder=decoder).dtype == torch.float32
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the relative error is 0.4, and bfloat16 explains" in line
    assert line.endswith("runs in float32")


@pytest.mark.parametrize("errors", [{"bfloat16": 0.4, "float32": 0.4}, {"bfloat16": 1.3, "float32": 0.0}])
def test_unrelated_logits_are_refused_and_so_is_what_float32_refuses(
    folder, errors: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors_of(monkeypatch, **errors)
    with pytest.raises(RunError, match=r"the relative error is .*, and bfloat16 explains"):
        load_lm(folder, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_reference_is_float32_and_leaves_the_weights(folder, dtype: str) -> None:
    """Of 16-bit weights, by no second copy of them, and its rounded forward is away by what their own is."""
    kept = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kept).eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    oracle = Oracle(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], copy) and after[name].dtype == copy.dtype for name, (_, copy) in before.items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        ids = torch.tensor(oracle.texts)
        rough = model(ids, use_cache=False).logits
        exact = model.float()(ids, use_cache=False).logits
    assert torch.allclose(oracle.logits, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    own = max(relative_error(found, right) for found, right in zip(rough, exact, strict=True))
    assert own / 4 < oracle.rounding < own * 4


def test_one_wrong_layer_is_caught(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of one layer, in bfloat16."""
    right = llama_weights.Taking.layer

    def wrong(self, layer, *others):
        if layer.self_attn.layer_idx == 2:
            layer.mlp.down_proj.weight.data = -layer.mlp.down_proj.weight.data
        return right(self, layer, *others)

    monkeypatch.setattr(llama_weights.Taking, "layer", wrong)
    with pytest.raises(RunError, match="and bfloat16 explains"):
        load_lm(folder, dtype="bfloat16")


def test_a_wrong_mask_is_caught_in_attention_that_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowMasks.bias

    def bias(self, index, num_groups, dtype):
        return right(self, index, num_groups, dtype).roll(1, dims=1)

    monkeypatch.setattr(RowMasks, "bias", bias)
    with pytest.raises(RunError, match="other logits here"):
        load_lm(str(make_tiny("starcoder2", tmp_path)))


def test_a_model_that_transformers_cannot_decode_is_refused_for_that(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, **_) -> None:
        raise RuntimeError("its kernels take no such dtype.")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(
        RunError, match=r"transformers' own forward pass of `.*` fails: its kernels take no such dtype$"
    ):
        load_lm(folder)


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_one_position_that_is_no_number_is_caught(folder, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    pieces = Oracle._pieces

    def broken(self, lm):
        for place, (found, right) in enumerate(pieces(self, lm)):
            found[-1, 3] = torch.nan if place == piece else found[-1, 3]
            yield found, right

    monkeypatch.setattr(Oracle, "_pieces", broken)
    with pytest.raises(RunError, match="the relative error is nan"):
        load_lm(folder)


def test_a_draft_is_checked_too(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.engine.engine import Engine

    checked = []
    monkeypatch.setattr(Oracle, "check", lambda self, lm: checked.append(lm.name))
    Engine.load("builtin:target", "builtin:draft").generate(["Once"])
    assert checked == ["builtin:target", "builtin:draft"]


def test_the_check_is_left_out_by_choice_alone(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "check", lambda self, lm: pytest.fail("the check was left out"))
    assert load_lm(folder, check=False).vocab_size == 97


@pytest.mark.parametrize("room", [{"max_model_len": 2}, {"block_size": 1}, {"max_num_seqs": 1, "kv_cache_bytes": 8192}])
def test_it_fits_into_the_smallest_cache(folder, room) -> None:
    lm = load_lm(folder, **room)
    assert lm.num_free_blocks == lm.num_blocks
    lm.check_integrity()


def test_no_weights_are_held_twice(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is computed before layers are packed, and keeps nothing of the model but its logits."""
    seen = []
    right = Oracle.__init__

    def init(self, model) -> None:
        seen.append(any(isinstance(module, PackedLinear) for module in model.modules()))
        right(self, model)
        assert not any(one is model for one in vars(self).values())
        assert model.config._attn_implementation == "specdec"

    monkeypatch.setattr(Oracle, "__init__", init)
    load_lm(folder, dtype="bfloat16", decoder="transformers")
    assert seen == [False]


def test_weights_that_are_no_numbers_are_left_to_the_step_that_meets_them(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[:] = torch.nan
    model.save_pretrained(folder)
    assert load_lm(str(folder)).score([Row(0, [1, 2], 1)]).isnan().all()
