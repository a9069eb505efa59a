"""Quantized checkpoints: transformers' own logits, or a refusal that names the form; never its bytes as numbers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from tiny_quantized import COMPRESSED, DEQUANTIZED, FORMS, make_quantized
from torch import nn

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.kernels import packing
from specdec_cli.lm.kernels.packing import is_linear
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8]
DTYPES = ("auto", "float32", "bfloat16", "float16")
REFUSED = {
    "fp8 without a form": "F8_E4M3",
    "int8 without a form": "I8",
    "modelopt": "ModelOpt",
    "awq": "`awq`",
    "gptq": "`gptq`",
    "nvfp4": "`nvfp4`, which transformers does not load here: ",
    "mlx": "MLX",
    "bitsandbytes int8": "`bitsandbytes_8bit`",
    "fp8 dynamic, one scale a batch": "`compressed-tensors`",
}


def score(lm):
    return lm.score([Row(0, TOKENS, len(TOKENS))])


@torch.inference_mode()
def reference(folder, dtype, *, is_cast: bool = False):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = model.to(getattr(torch, dtype)) if is_cast and dtype != "auto" else model
    return model(torch.tensor([TOKENS])).logits[0].float()


def refusals(folder, **options):
    """What the engine and the doctor say."""
    for ask in (load_lm, describe):
        with pytest.raises(SpecdecError) as caught:
            ask(str(folder), **options)
        assert caught.value.hint
        assert "\n" not in caught.value.message
        yield caught.value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", DEQUANTIZED)
def test_16_fp8_is_right_in_every_dtype(tmp_path: Path, form, dtype) -> None:
    """transformers makes bfloat16 of the weights whatever is asked for, and its own forward stops at that."""
    folder = make_quantized(form, tmp_path)
    lm = load_lm(str(folder), dtype=dtype)
    assert lm.decoder == ("transformers" if dtype == "float16" else "own")
    assert relative_error(score(lm), reference(folder, dtype, is_cast=True)) < 0.05
    assert relative_error(score(lm), reference(tmp_path / "plain", "float32")) < 0.3
    assert describe(str(folder), dtype=dtype).decoder.startswith(lm.decoder)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", COMPRESSED)
def test_16_compressed_tensors_run_in_transformers_own_layers(tmp_path: Path, form, dtype) -> None:
    folder = make_quantized(form, tmp_path)
    lm = load_lm(str(folder), dtype=dtype)
    assert lm.decoder_obstacle == "weights quantized by `compressed-tensors`"
    assert relative_error(score(lm), reference(folder, dtype)) < 0.1
    assert "compressed-tensors" in describe(str(folder), dtype=dtype).decoder


@pytest.mark.parametrize("form", REFUSED)
def test_16_other_forms_are_refused_by_name(tmp_path: Path, form) -> None:
    folder = make_quantized(form, tmp_path)
    for dtype in ("auto", "float32"):
        for said in refusals(folder, dtype=dtype):
            assert REFUSED[form] in said.message


@pytest.mark.parametrize("form", [form for form, (_, settings) in FORMS.items() if settings])
def test_16_int8_of_what_is_quantized_already_is_refused(tmp_path: Path, form) -> None:
    for said in refusals(make_quantized(form, tmp_path), quantize="int8"):
        assert "quantized" in said.message
        assert form == "mlx" or isinstance(said, UsageError)


def test_16_a_form_without_its_package_is_refused_with_transformers_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: False)
    for said in refusals(make_quantized("fp8 blocks", tmp_path)):
        assert "quantized by `fp8`" in said.message
        assert "pip install accelerate" in said.message


def test_16_random_weights_know_no_form(tmp_path: Path) -> None:
    lm = load_lm(str(make_quantized("modelopt", tmp_path)), load_format="dummy", quantize="int8")
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


@pytest.mark.parametrize("attach", ATTACHED)
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_16_a_layer_with_something_attached_is_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attach, dtype: str, quantize: str
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


def test_16_only_bfloat16_is_packed_as_such() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).half()])
    packing.pack_model(layers, "bf16")
    assert [type(layer) is nn.Linear for layer in layers] == [False, True, True]
