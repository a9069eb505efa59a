"""The check at load: our path's logits against transformers' untouched forward, and the faults that it must catch."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import EXTRA_FAMILIES, FAMILIES, make_tiny
from typed import stand_in

from specdec_cli.errors import RunError
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.attention import RowMasks
from specdec_cli.lm.kernels import packing
from specdec_cli.lm.kernels.linear import PackedLinear
from specdec_cli.lm.llama import llama_weights
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import Oracle

PRECISIONS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("float16", "none")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=4))


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
@pytest.mark.parametrize(("dtype", "quantize"), PRECISIONS)
def test_no_family_is_refused_for_its_rounding(
    tmp_path: Path, family, dtype, quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights amplify it, and still it stays under half of what the check allows."""
    errors = []
    right = Oracle.error
    monkeypatch.setattr(Oracle, "error", lambda self, lm: errors.append(right(self, lm)) or errors[-1])
    monkeypatch.setattr(Oracle, "allowed", lambda self, lm, its=Oracle.allowed: its(self, lm) / 2)
    load_lm(str(make_tiny(family, tmp_path)), dtype=dtype, quantize=quantize)
    assert len(errors) == 1


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize(("dtype", "quantize"), PRECISIONS)
def test_a_layer_with_another_ones_weights_is_caught(
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
    if decoder == "transformers" and (dtype, quantize) in (("float32", "none"), ("float16", "none")):
        pytest.skip("nothing is packed")
    if decoder == "auto" and dtype == "float16":
        pytest.skip("our own decoder takes no float16, and nothing is packed")
    with pytest.raises(RunError, match="other logits here than in transformers' own forward pass"):
        load_lm(folder, dtype=dtype, quantize=quantize, decoder=decoder)


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
