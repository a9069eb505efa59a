"""Quantized checkpoints: transformers' own logits, or a refusal that names the form; never its bytes as numbers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from refused import refusals
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from tiny_quantized import DEQUANTIZED, FORMS, UNDONE, make_mxfp4, make_quantized
from torch import nn

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.kernels import packing
from specdec_cli.lm.kernels.packing import is_linear
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error
from specdec_cli.recipe.values import Quantize

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8]
FP8 = torch.float8_e4m3fn
DTYPES = ("auto", "float32", "bfloat16", "float16")
REFUSED = {
    "fp8 without a form": "F8_E4M3",
    "int8 without a form": "I8",
    "modelopt awq": "`modelopt` with `quant_algo: W4A16_AWQ`",
    "torchao int4 in tiles": "`torchao`, which transformers does not load here: ",
    "awq gemv": "`awq` with `version: gemv`",
    "gptq, 3 bits": "`gptq` with `bits: 3`",
    "compressed, sparse": "`compressed-tensors` with `format: marlin-24`",
    "nvfp4": "`nvfp4`, which transformers does not load here: ",
}


def score(lm):
    return lm.score([Row(0, TOKENS, len(TOKENS))])


@torch.inference_mode()
def reference(folder, dtype, *, is_cast: bool = False):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = model.to(getattr(torch, dtype)) if is_cast and dtype != "auto" else model
    return model(torch.tensor([TOKENS])).logits[0].float()


def metadata(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict(file.metadata())


def rewrite(folder, weights) -> None:
    """Other tensors under the metadata of the file."""
    save_file(weights, folder / "model.safetensors", metadata=metadata(folder))


@pytest.mark.in_turn(5, every=6)
@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize("form", [*DEQUANTIZED])
def test_16_fp8_is_right_in_every_dtype(tmp_path: Path, form, dtype) -> None:
    """transformers makes bfloat16 of the weights whatever is asked for, and its own forward stops at that."""
    folder = make_quantized(form, tmp_path)
    lm = load_lm(str(folder), dtype=dtype)
    assert lm.decoder == ("transformers" if dtype == "float16" else "own")
    assert relative_error(score(lm), reference(folder, dtype, is_cast=True)) < 0.05
    assert relative_error(score(lm), reference(tmp_path / "plain", "float32")) < 0.3
    assert describe(str(folder), dtype=dtype).decoder.startswith(lm.decoder)


@pytest.mark.in_turn(2, every=8)
@pytest.mark.parametrize("form", [*UNDONE])
def test_39_a_form_computes_with_the_numbers_that_it_means(tmp_path: Path, form: str) -> None:
    folder = make_quantized(form, tmp_path)
    right = reference(tmp_path / "reference", "float32")
    lm = load_lm(str(folder), dtype="float32", compute="dequantized")
    assert lm.decoder == "own"
    assert relative_error(score(lm), right) < 1e-5
    rounded = score(load_lm(str(folder), dtype="bfloat16", compute="dequantized"))
    assert torch.corrcoef(torch.stack([rounded.float().flatten(), right.flatten()]))[0, 1] > 0.99
    facts = describe(str(folder), dtype="bfloat16", compute="dequantized")
    assert (facts.decoder, facts.stored_as) == (
        "own",
        f"{(FORMS[form][1] or {}).get('quant_method', 'modelopt' if 'modelopt' in form else 'mlx')} in safetensors",
    )
    assert facts.weights_bytes == 2 * facts.num_parameters


def test_39_gpt_oss_computes_with_its_experts_of_four_bits(tmp_path: Path) -> None:
    folder = make_mxfp4(tmp_path)
    lm = load_lm(str(folder), dtype="float32")
    assert relative_error(score(lm), reference(tmp_path / "reference", "float32")) < 1e-5
    assert lm.dtype == torch.float32
    assert load_lm(str(folder)).dtype == torch.bfloat16
    facts = describe(str(folder))
    assert (facts.stored_as, facts.weights_bytes) == ("mxfp4 in safetensors", 2 * facts.num_parameters)


@pytest.mark.parametrize("form", ["w8a8", "bitsandbytes int8"])
def test_39_int8_by_channel_fits_our_kernel(tmp_path: Path, form: str) -> None:
    """Packed again, the same whole numbers come out: only the kernel's own rounding is left."""
    folder = make_quantized(form, tmp_path)
    lm = load_lm(str(folder), quantize="int8")
    assert (lm.kind, lm.decoder) == ("int8", "own")
    plain = score(load_lm(str(tmp_path / "plain"), dtype="bfloat16", quantize="int8"))
    right = reference(tmp_path / "reference", "float32")
    assert relative_error(score(lm), right) < 1.5 * relative_error(plain, reference(tmp_path / "plain", "float32"))


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("form", [*UNDONE, *DEQUANTIZED])
@pytest.mark.parametrize("is_there", [False, True])
def test_39_scales_that_are_missing_or_no_numbers_are_refused(tmp_path: Path, form: str, is_there: bool) -> None:
    folder = make_quantized(form, tmp_path)
    weights = load_file(folder / "model.safetensors")
    ends = ("weight_scale", "_weight_scale", "scales", "SCB", "absmax", "weight_scale_inv")
    name = next(key for key in weights if "layers.1" in key and key.rpartition(".")[2] in ends)
    scale = weights.pop(name)
    if is_there:
        whole = scale.float() if scale.is_floating_point() else None
        if whole is None:
            pytest.skip("scales of whole numbers")
        weights[name] = torch.full_like(whole, torch.nan).to(scale.dtype)
    rewrite(folder, weights)
    with pytest.raises(RunError) as caught:
        load_lm(str(folder), dtype="float32")
    assert name.rpartition(".")[0] in caught.value.message
    assert "\n" not in caught.value.message


PARTS = {
    "gptq": "scales",
    "nvfp4 compressed": "weight_scale",
    "nvfp4 modelopt": "weight_scale",
    "mxfp4 compressed": "weight_scale",
    "torchao int4": "_weight_scale",
    "torchao int4 in bytes": "_weight_scale",
    "fp8 modelopt": "weight",
}


@pytest.mark.parametrize("form", PARTS)
def test_39_parts_that_do_not_fit_are_refused(tmp_path: Path, form: str) -> None:
    folder = make_quantized(form, tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    part = weights[f"{name}.{PARTS[form]}"]
    weights[f"{name}.{PARTS[form]}"] = (
        part.view(torch.uint8)
        if part.dtype == FP8 and part.dim() == 2 and (form == "fp8 modelopt")
        else part[:, : part.shape[1] - 1].contiguous()
    )
    rewrite(folder, weights)
    for said in refusals(folder):
        assert f"the parts of `{name}.weight`" in said.message


@pytest.mark.parametrize("form", [form for form in UNDONE if "modelopt" in form or "torchao" in form])
def test_39_a_shard_is_read_as_a_whole_file(tmp_path: Path, form: str) -> None:
    """Parts of a layer lie in two files, and each file describes its own."""
    folder = make_quantized(form, tmp_path)
    right = score(load_lm(str(folder), dtype="float32"))
    weights, described = load_file(folder / "model.safetensors"), metadata(folder)
    keys = sorted(weights)
    index = {key: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, key in enumerate(keys)}
    for file in {*index.values()}:
        its = {key: weights[key] for key in keys if index[key] == file}
        save_file(its, folder / file, metadata=described if file.startswith("model-00001") else {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert torch.equal(score(load_lm(str(folder), dtype="float32")), right)


def test_39_modelopt_may_describe_its_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = make_quantized("nvfp4 modelopt", tmp_path)
    right = score(load_lm(str(folder), dtype="float32"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert torch.equal(score(load_lm(str(folder), dtype="float32")), right)
    assert describe(str(folder)).stored_as == "modelopt in safetensors"
    (folder / "hf_quant_config.json").write_text("{")
    for refused in refusals(folder):
        assert "hf_quant_config.json` cannot be read" in refused.message


def test_39_torchao_scales_inputs_before_some_layers(tmp_path: Path) -> None:
    folder = make_quantized("torchao int8", tmp_path)
    weights, by = load_file(folder / "model.safetensors"), torch.rand(64) + 0.5
    rewrite(folder, weights | {"model.layers.1.mlp.up_proj._weight_act_pre_scale": by})
    path = tmp_path / "reference" / "model.safetensors"
    right = load_file(path)
    right["model.layers.1.mlp.up_proj.weight"] *= by
    save_file(right, path, metadata={"format": "pt"})
    assert relative_error(score(load_lm(str(folder), dtype="float32")), reference(path.parent, "float32")) < 1e-5


@pytest.mark.parametrize("change", ["no description", "another class", "no blocks", "no object"])
def test_39_torchao_tensors_without_their_description_are_refused(tmp_path: Path, change: str) -> None:
    folder = make_quantized("torchao int8", tmp_path)
    described = metadata(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    others = {"another class": {"_type": "MXTensor"}, "no blocks": {"_type": "Int8Tensor", "_data": {}}, "no object": 3}
    described[name] = json.dumps(others.get(change))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata=described)
    for said in refusals(folder):
        assert f"`{name}`" in said.message
        assert change != "another class" or "stores `" in said.message


def test_39_a_mixture_has_experts_in_four_bits(tmp_path: Path) -> None:
    """Each expert's weight is stored on its own, and transformers joins them."""
    folder = make_quantized("nvfp4 modelopt", tmp_path, family="qwen3_moe", moe_intermediate_size=32)
    right = reference(tmp_path / "reference", "float32")
    assert relative_error(score(load_lm(str(folder), dtype="float32")), right) < 1e-5
    assert describe(str(folder)).stored_as == "modelopt in safetensors"


@pytest.mark.parametrize("form", REFUSED)
def test_16_other_forms_are_refused_by_name(tmp_path: Path, form) -> None:
    folder = make_quantized(form, tmp_path)
    for dtype in ("auto", "float32"):
        for said in refusals(folder, dtype=dtype):
            assert REFUSED[form] in said.message


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][1] and form not in (*UNDONE, *DEQUANTIZED)])
def test_16_int8_of_what_is_quantized_already_is_refused(tmp_path: Path, form) -> None:
    for said in refusals(make_quantized(form, tmp_path), quantize="int8"):
        assert "quantized" in said.message
        assert form in REFUSED or isinstance(said, UsageError)


def test_16_random_weights_know_no_form(tmp_path: Path) -> None:
    lm = load_lm(str(make_quantized("modelopt awq", tmp_path)), load_format="dummy", quantize="int8")
    assert lm.decoder == "own"


@pytest.mark.parametrize("extra", ["q_proj.bias", "q_proj.input_scale", "q_proj.g_idx"])
def test_16_what_a_file_holds_beside_a_weight_is_not_dropped(tmp_path: Path, extra: str) -> None:
    folder = make_tiny("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.1.self_attn.{extra}"] = torch.ones(32)
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)  # of a layer that the model does not have
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=f"`model.layers.1.self_attn.{extra}` is not read"):
        load_lm(str(folder))


class _Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _hook(layer) -> None:
    layer.register_forward_hook(lambda module, given, found: 2 * found)


def _pre_hook(layer) -> None:
    layer.register_forward_pre_hook(lambda module, given: tuple(2 * one for one in given))


def _own_forward(layer) -> None:
    right = layer.forward
    layer.forward = lambda x: 2 * right(x)


def _parametrization(layer) -> None:
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight", Double())


def _scale(layer) -> None:
    layer.register_buffer("scale", torch.tensor(2.0))
    layer.register_forward_hook(lambda module, given, found: module.scale * found)


def _class(layer) -> None:
    layer.__class__ = _Doubling


def _subclass_of_tensor(layer) -> None:
    class Quantized(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            found = super().__torch_function__(function, types, args, kwargs)
            return 2 * found.as_subclass(torch.Tensor) if function is nn.functional.linear else found

    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)


ATTACHED = [_hook, _pre_hook, _own_forward, _parametrization, _scale, _class, _subclass_of_tensor]


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("attach", ATTACHED)
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_16_a_layer_with_something_attached_is_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attach, dtype: str, quantize: Quantize
) -> None:
    """What the next quantizer may do to a layer; the check at load is off, so that the rule itself is seen."""
    folder = make_tiny("llama", tmp_path)
    right = transformers.AutoModelForCausalLM.from_pretrained
    layers = []

    def load(*args, **kwargs):
        found = right(*args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        layers.append(model.model.layers[1].mlp.down_proj)
        attach(layers[-1])
        return found

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    expected = reference(folder, dtype)
    lm = load_lm(str(folder), dtype=dtype, quantize=quantize, check=False)
    assert not is_linear(layers[-1])
    assert lm.decoder == "transformers"
    assert relative_error(score(lm), expected) < (0.3 if quantize == "int8" else 0.05)
    plain = score(load_lm(str(tmp_path), dtype=dtype, check=False))  # the same, attached again
    assert relative_error(plain, expected) < 0.05


def test_16_what_a_dtype_is_packed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 for its bits, and with it float32 layers of the same model; small float32 layers alone stay plain."""
    monkeypatch.setattr(packing, "can_pack", lambda dtype: dtype != torch.float16)
    mixed = nn.ModuleList([nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).half()])
    whole = nn.ModuleList([nn.Linear(8, 8), nn.Linear(512, 256)])
    monkeypatch.setattr(packing, "pack", lambda weight, bias, kind: nn.Identity())
    for layers in (mixed, whole):
        packing.pack_model(layers, "packed")
    assert [type(layer) is nn.Linear for layer in mixed] == [False, False, True]
    assert [type(layer) is nn.Linear for layer in whole] == [True, False]
