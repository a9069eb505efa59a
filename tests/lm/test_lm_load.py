"""Loading: what works, and one clear sentence for whatever does not."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import transformers
from refused import edit_config, edit_weights
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import make_tiny
from tokenizers import Tokenizer, models
from typed import not_none

import specdec_cli
from specdec_cli.errors import ExitCode, RunError, SpecdecError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm, load_tokenizer

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "data" / "checkpoints"
needs_shared = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="needs ../shared/data/checkpoints")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny("llama", tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound, tmp_path: Path):
    return shutil.copytree(sound, tmp_path / "model")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refusal(name, kind=RunError, **options) -> SpecdecError:
    with pytest.raises(kind) as caught:
        load_lm(str(name), **options)
    error = caught.value
    assert "\n" not in error.message
    assert not error.message.endswith(".")
    assert error.hint
    return error


def test_what_a_loaded_model_says_about_itself(folder, capfd: pytest.CaptureFixture[str]) -> None:
    lm = load_lm(str(folder))
    assert (lm.name, lm.vocab_size, lm.max_context, lm.block_size) == (str(folder), 97, 128, 16)
    assert (lm.dtype, lm.device.type) == (torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    assert lm.weight_bytes == sum(w.numel() * 4 for w in load_file(folder / "model.safetensors").values())
    assert lm.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert lm.num_blocks == 8 * 9
    assert not lm.model.training
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_eos_as_id_or_list(folder, eos) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_lm(str(folder)).eos_token_ids == tuple([eos] if isinstance(eos, int) else eos)
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=eos)
    assert load_lm(str(folder)).eos_token_ids == tuple([eos] if isinstance(eos, int) else eos)


def test_dtype_auto_is_the_checkpoints(folder) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.bfloat16().save_pretrained(folder)
    assert load_lm(str(folder)).dtype == torch.bfloat16
    assert load_lm(str(folder), dtype="float32").dtype == torch.float32
    assert load_lm(str(folder), dtype="float16").dtype == torch.float16


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    assert load_lm(str(make_tiny("llama", tmp_path, tie_word_embeddings=True))).vocab_size == 97


def test_sharded_weights(folder) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = load_lm(str(folder)).score([Row(0, [1, 2, 3], 1)])
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert load_lm(str(folder)).score([Row(0, [1, 2, 3], 1)]).equal(expected)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(folder).message
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json` cannot be read" in refusal(folder).message


def test_no_such_folder(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "../none/such", "~/no-such-model-folder", "a/b/c", "", "has space"):
        assert f"model folder `{name}` does not exist" in refusal(name, UsageError).message


def test_a_file_is_not_a_folder(folder) -> None:
    assert "is a file" in refusal(folder / "config.json", UsageError).message


def test_unknown_hub_model_offline_answers_at_once() -> None:
    start = time.perf_counter()
    error = refusal("nobody/no-such-model")
    assert "neither a folder nor in the local hub cache" in error.message
    assert "local folder" in not_none(error.hint)
    assert time.perf_counter() - start < 5


def test_unknown_builtin() -> None:
    error = refusal("builtin:huge", UsageError)
    assert error.exit_code == ExitCode.USAGE
    assert "builtin:target" in not_none(error.hint)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model_type": 3}'])
def test_config_missing_or_broken(folder, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert "config.json`" in refusal(folder, SpecdecError).message


def test_config_with_impossible_values(folder) -> None:
    edit_config(folder, num_attention_heads="many")
    assert refusal(folder).exit_code == ExitCode.COULD_NOT_RUN


def test_no_weights(folder) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder).message


def test_pickled_weights_under_another_name_are_never_opened(folder) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.zeros(2)}, folder / "weights.pt")
    error = refusal(folder)
    assert "has pickled weights, but none that is named `pytorch_model.bin`" in error.message
    assert "safetensors" in not_none(error.hint)


@pytest.mark.parametrize("keep", [0, 4, 100, -64])
def test_truncated_weights(folder, keep: int) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])
    assert "not a whole safetensors file" in refusal(folder).message


def test_weights_that_do_not_match_the_config(folder) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(folder)
    assert "`model.layers.1.mlp.up_proj.weight` is missing" in error.message


def test_weights_of_another_shape(folder) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(8)}))
    assert "model" in refusal(folder).message


def test_more_layers_in_the_config_than_in_the_file(folder) -> None:
    edit_config(folder, num_hidden_layers=3)
    assert "do not match its `config.json`" in refusal(folder).message


def test_unknown_architecture(folder) -> None:
    edit_config(folder, model_type="hyperllama")
    assert "architecture `hyperllama`" in refusal(folder, UsageError).message


def test_remote_code_is_not_run(folder) -> None:
    marker = folder / "ran"
    (folder / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    files = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    edit_config(folder, model_type="x_model", auto_map=files)
    error = refusal(folder, UsageError)
    assert "its own Python code" in error.message
    assert "--trust-remote-code" in not_none(error.hint)
    assert not marker.exists()


def save(config, folder):
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.ReformerConfig(is_decoder=True), "buckets"),
        (transformers.BltConfig(), "bytes in patches"),
        (transformers.RobertaConfig(is_decoder=True), "only decoder-only models are supported"),
        (transformers.OpenAIGPTConfig(), "early architecture that is no longer in use"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_each_refusal_says_what_the_architecture_does(config, said, tmp_path: Path) -> None:
    config.architectures = None
    error = refusal(save(config, tmp_path), UsageError)
    assert f"architecture `{config.model_type}`" in error.message
    assert said in error.message


def test_encoder_decoders_and_masked_models(tmp_path: Path) -> None:
    assert "encoder-decoder" in refusal(save(transformers.T5Config(), tmp_path / "t5"), UsageError).message
    for config in (transformers.BertConfig(architectures=["BertForMaskedLM"]), transformers.BartConfig()):
        folder = save(config, tmp_path / config.model_type)
        assert "belongs to an encoder or an encoder-decoder" in refusal(folder, UsageError).message
    modern = transformers.ModernBertConfig()
    assert "both directions" in refusal(save(modern, tmp_path / "modern"), UsageError).message
    assert "not a causal LM" in refusal(save(transformers.ViTConfig(), tmp_path / "vit"), UsageError).message


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dtype": "float8"}, UsageError),
        ({"device": "tpu"}, UsageError),
        ({"device": "cuda:x"}, UsageError),
        ({"device": "cuda:77"}, RunError),
    ],
)
def test_wrong_options(sound, options, kind) -> None:
    value = next(iter(options.values()))
    assert f"`{value}`" in refusal(sound, kind, **options).message


def test_tokenizer(folder) -> None:
    with pytest.raises(RunError, match="has no tokenizer"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RunError, match=r"tokenizer of `.*` does not load"):
        load_tokenizer(str(folder))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(str(folder))) == 2


@needs_shared
def test_real_checkpoints_load() -> None:
    for name in ("stories260K", "bitstories-1M"):
        lm = load_lm(str(CHECKPOINTS / name))
        assert (lm.vocab_size, lm.max_context, lm.eos_token_ids) == (512, 512, (1, 2))
        assert len(load_tokenizer(str(CHECKPOINTS / name))) == 512


@pytest.mark.parametrize("name", ["builtin:target", "builtin:draft"])
def test_the_built_in_pair_lies_in_halves_and_computes_in_float32(name: str) -> None:
    folder = Path(specdec_cli.__file__).parent / "builtin" / name.removeprefix("builtin:")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    assert describe(name).dtype == "float32"
    assert load_lm(name, max_num_seqs=1).dtype == torch.float32
