"""LoRA folders as targets and drafts: their numbers merged into the base model's, or one sentence for every fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import edit, refusal
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from tiny_quantized import make_quantized
from torch import Tensor

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.from_files import model_from_files
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.sampling.params import SamplingParams

pytest.importorskip("peft", reason="needs peft")

from tiny_adapters import FAMILIES, VARIANTS, adapted_logits, make_adapter

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
TIED = {"ensure_weight_tying": True, "target_modules": ["q_proj", "embed_tokens"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return make_adapter(base, tmp_path / "adapter")


def score(path: Path, **options: Any) -> Tensor:
    return load_lm(str(path), **options).score([Row(0, TOKENS, len(TOKENS))])


@pytest.mark.in_turn(5, every=8)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("variant", [*VARIANTS, "tied"])
def test_39_an_adapter_is_merged(tmp_path: Path, variant: str, is_tied: bool) -> None:
    base = make_tiny("llama", tmp_path / "base", tie_word_embeddings=is_tied)
    folder = make_adapter(base, tmp_path / "adapter", **VARIANTS.get(variant, TIED))
    right = adapted_logits(base, folder, TOKENS)
    lm = load_lm(str(folder), dtype="float32")
    assert relative_error(lm.score([Row(0, TOKENS, len(TOKENS))]), right) < 1e-5
    assert relative_error(score(base, dtype="float32"), right) > 0.02
    rounded = score(folder, dtype="bfloat16").float()
    assert torch.corrcoef(torch.stack([rounded.flatten(), right.flatten()]))[0, 1] > 0.999
    facts = describe(str(folder))
    assert (facts.decoder, lm.decoder) == ("own", "own")
    assert facts.num_parameters == lm.num_parameters


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_39_families_have_their_own_layers(tmp_path: Path, family: str) -> None:
    base = make_tiny(family, tmp_path / "base")
    folder = make_adapter(base, tmp_path / "adapter", **FAMILIES[family])
    right = adapted_logits(base, folder, TOKENS)
    assert relative_error(score(folder, dtype="float32"), right) < 1e-5
    assert relative_error(score(base, dtype="float32"), right) > 0.01
    assert describe(str(folder)).architecture == load_lm(str(folder)).config.model_type


@pytest.mark.parametrize("is_tied", [False, True])
def test_39_more_tokens_than_the_base_has(tmp_path: Path, is_tied: bool) -> None:
    base = make_tiny("llama", tmp_path / "base", tie_word_embeddings=is_tied)
    folder = make_adapter(base, tmp_path / "adapter", num_tokens=103)
    lm = load_lm(str(folder), dtype="float32")
    text = [*TOKENS, 101, 102, 98]
    assert relative_error(lm.score([Row(0, text, len(text))]), adapted_logits(base, folder, text, 103)) < 1e-5
    facts = describe(str(folder))
    assert (facts.embedding_size, lm.config.vocab_size) == (103, 103)
    assert facts.num_parameters == lm.num_parameters


def test_39_layers_of_16_bits_are_rounded_once(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    weights = {key: one.bfloat16() for key, one in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    edit(base / "config.json", dtype="bfloat16")
    folder = make_adapter(base, tmp_path / "adapter")
    model = model_from_files(ModelPlan(str(folder)))
    own = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    low, high = (own[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
    right = (weights[f"{name}.weight"].float() + high @ low).bfloat16()
    assert torch.equal(model.get_submodule(name).weight, right)


def test_39_int8_packs_what_was_merged(base: Path, folder: Path) -> None:
    lm = load_lm(str(folder), quantize="int8")
    assert (lm.kind, lm.decoder) == ("int8", "own")
    assert relative_error(lm.score([Row(0, TOKENS, len(TOKENS))]), adapted_logits(base, folder, TOKENS)) < 0.1


def test_39_the_base_may_be_quantized(tmp_path: Path) -> None:
    quantized = make_quantized("gptq", tmp_path)
    folder = make_adapter(tmp_path / "reference", tmp_path / "adapter")
    edit(folder / "adapter_config.json", base_model_name_or_path=str(quantized))
    right = adapted_logits(tmp_path / "reference", folder, TOKENS)
    assert relative_error(score(folder, dtype="float32"), right) < 1e-5
    assert describe(str(folder)).stored_as == "gptq in safetensors with a LoRA adapter (rank 8)"


def test_39_the_base_may_be_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    from tiny_gguf import SIZES, write_gguf

    base = make_tiny("llama", tmp_path / "base", **SIZES)
    write_gguf(base, tmp_path / "base.gguf", "F32")
    folder = make_adapter(base, tmp_path / "adapter")
    edit(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base.gguf"))
    assert relative_error(score(folder, dtype="float32"), adapted_logits(base, folder, TOKENS)) < 1e-5
    assert describe(str(folder)).stored_as == "GGUF (F32) with a LoRA adapter (rank 8)"
    tokenizer = load_tokenizer(str(folder))
    assert len(tokenizer) == SIZES["vocab_size"]


def test_39_a_pickled_adapter_is_the_same(base: Path, folder: Path) -> None:
    right, weights = score(folder), load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(weights, folder / "adapter_model.bin")
    assert torch.equal(score(folder), right)
    describe(str(folder))


@pytest.mark.parametrize("place", ["beside", "relative"])
def test_39_a_base_is_found_beside_its_adapter(
    base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    right = score(folder)
    if place == "beside":
        shutil.copytree(base, folder / "base")
    else:
        monkeypatch.chdir(base.parent)
    edit(folder / "adapter_config.json", base_model_name_or_path="base")
    assert torch.equal(score(folder), right)


def test_39_the_tokenizer_is_the_adapters_where_it_has_one(folder: Path, tmp_path: Path) -> None:
    builtin = Path(__file__).parents[3] / "specdec_cli" / "builtin" / "target"
    base = shutil.copytree(builtin, tmp_path / "builtin")
    edit(folder / "adapter_config.json", base_model_name_or_path=str(base))
    assert load_tokenizer(str(folder)).get_vocab() == load_tokenizer(str(base)).get_vocab()
    (folder / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    chat = [{"role": "user", "content": "a"}]
    assert load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False) == "[a]"
    own = load_tokenizer(str(base))
    own.add_tokens(["<mine>"])
    own.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.convert_tokens_to_ids("<mine>") == len(own) - 1


def test_39_tokens_of_target_and_draft_equal_plain_decoding(tmp_path: Path) -> None:
    builtin = Path(__file__).parents[3] / "specdec_cli" / "builtin"
    target = make_adapter(builtin / "target", tmp_path / "target", target_modules=["q_proj", "o_proj"])
    draft = make_adapter(builtin / "draft", tmp_path / "draft", target_modules=["q_proj"], r=2)
    params = SamplingParams(max_new_tokens=24, temperature=0)
    with_draft = Engine.load(str(target), str(draft), dtype="float32", num_speculative_tokens=3)
    plain = Engine.load(str(target), dtype="float32", draft=None)
    [found], [right] = (engine.generate(["The old dog"], params) for engine in (with_draft, plain))
    assert found.token_ids == right.token_ids


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("arguments", [["generate", "the", "-n", "4", "--quiet", "--json"], ["doctor", "--json"]])
def test_39_commands_take_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    builtin = Path(__file__).parents[3] / "specdec_cli" / "builtin"
    target = make_adapter(builtin / "target", tmp_path / "target", target_modules=["q_proj", "o_proj"])
    assert run([*arguments, "-t", str(target), "-d", "builtin:draft"]) == 0
    out = capsys.readouterr().out
    if arguments[0] == "doctor":
        stored = json.loads(out)["pair"]["target"]["stored_as"]
        assert stored == "safetensors with a LoRA adapter (rank 8)"


def test_39_adapters_of_one_base_are_told_apart(base: Path, folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    edit(other / "adapter_config.json", lora_alpha=1)
    prints = [load_lm(str(path), check=False).origin.weights for path in (base, folder, other, folder)]
    assert len({*prints}) == 3
    assert prints[1] == prints[3]


def test_39_an_adapter_beside_a_whole_model_is_not_applied(base: Path, folder: Path, tmp_path: Path) -> None:
    both = shutil.copytree(base, tmp_path / "both")
    shutil.copytree(folder, both, dirs_exist_ok=True)
    assert torch.equal(score(both), score(base))
    assert describe(str(both)).stored_as == "safetensors"


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "is a PEFT adapter (IA3), and only LoRA adapters are supported"),
        ({"peft_type": "PROMPT_TUNING"}, "is a PEFT adapter (PROMPT_TUNING)"),
        ({"task_type": "SEQ_CLS"}, "is a LoRA adapter for `SEQ_CLS`, not for a causal LM"),
        ({"alora_invocation_tokens": [3]}, "which works only behind some tokens (activated LoRA): it cannot be merged"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "which repeats layers of its base model: it cannot be merged"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changed its base model in a way that the folder does not keep"),
        ({"base_model_name_or_path": None}, "whose `adapter_config.json` does not name its base model"),
        ({"base_model_name_or_path": "./none"}, "its base model cannot be used: model folder `./none` does not exist"),
        ({"target_modules": ["c_attn"]}, "does not fit its base model: Target modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, "layers.0.mlp.down_proj.lora_A.weight` belongs to no layer of it"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]}, "up_proj.lora_A.weight` is missing"),
        ({"r": 4}, "lora_A.weight` has another shape, [8, 32] instead of [4, 32]"),
        ({"of_the_future": True}, "says `of_the_future`, which the installed peft does not know"),
        ({"use_dora": True}, "lora_magnitude_vector.weight` is missing"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"lora_bias": True}, "does not fit its base model: "),
        ({"target_modules": 3}, "the `adapter_config.json` of"),
        ({"r": None}, "the `adapter_config.json` of"),
        ({"lora_alpha": "large"}, "the `adapter_config.json` of"),
        ({"r": 0}, "does not fit its base model: "),
    ],
)
def test_39_another_adapter_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit(folder / "adapter_config.json", **changes)
    assert said in refusal(folder).message


@pytest.mark.parametrize("shape", [{"hidden_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_39_a_base_of_another_shape_is_refused(folder: Path, tmp_path: Path, shape: dict[str, Any]) -> None:
    edit(folder / "adapter_config.json", base_model_name_or_path=str(make_tiny("llama", tmp_path / "other", **shape)))
    said = refusal(folder)
    assert isinstance(said, UsageError)
    assert f"the adapter `{folder}` does not fit its base model: `" in said.message


def test_39_a_base_that_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    twice = shutil.copytree(folder, tmp_path / "twice")
    edit(twice / "adapter_config.json", base_model_name_or_path=str(folder))
    assert "which is an adapter itself" in refusal(twice).message
    edit(twice / "adapter_config.json", base_model_name_or_path=str(twice))
    assert "which is an adapter itself" in refusal(twice).message
    (tmp_path / "empty").mkdir()
    edit(twice / "adapter_config.json", base_model_name_or_path=str(tmp_path / "empty"))
    assert "`config.json`" in refusal(twice).message


def test_39_a_base_that_stays_quantized_is_refused(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("specdec_cli.lm.plan_checks.stays_quantized", lambda _: "hqq")
    with pytest.raises(UsageError, match="is quantized by `hqq` and stays so, and an adapter is merged into plain"):
        load_lm(str(folder))


def test_39_broken_files_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) - 3):
        (folder / "adapter_model.safetensors").write_bytes(whole[:size])
        assert f"`{folder / 'adapter_model.safetensors'}` is not a whole safetensors file" in refusal(folder).message
    (folder / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is a git-lfs pointer" in refusal(folder).message
    (folder / "adapter_model.safetensors").unlink()
    assert "has no weights: `adapter_model.safetensors` is missing" in refusal(folder).message
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json` cannot be read" in refusal(folder).message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_39_an_adapter_may_have_a_dtype_of_its_own(base: Path, folder: Path, dtype: torch.dtype) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({key: one.to(dtype) for key, one in load_file(path).items()}, path)
    assert relative_error(score(folder, dtype="float32"), adapted_logits(base, folder, TOKENS)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_39_an_adapter_without_floats_is_refused(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({key: one.to(dtype) for key, one in load_file(path).items()}, path)
    assert "and adapters are read as floats" in refusal(folder).message


def test_39_a_base_without_weights_is_called_so(folder: Path, tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "other")
    (base / "model.safetensors").unlink()
    edit(folder / "adapter_config.json", base_model_name_or_path=str(base))
    assert refusal(folder).message == f"the base model of `{folder}` has no weights: `model.safetensors` is missing"


def test_39_numbers_that_are_none_are_refused(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    key = next(iter(weights))
    save_file(weights | {key: torch.full_like(weights[key], torch.nan)}, folder / "adapter_model.safetensors")
    with pytest.raises(RunError, match="holds numbers that are not finite"):
        load_lm(str(folder))


def test_39_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.lm.files.adapter.find_spec", lambda _: None)
    said = refusal(folder)
    assert "takes the package `peft`, and that is not installed" in said.message
    assert said.hint == "pip install 'specdec-cli[lora]'"


def test_39_an_adapter_on_the_hub_brings_its_base(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder / "adapter_config.json", base_model_name_or_path="org/base", revision="main")
    asked = []

    def fetch(name: str, **how: Any) -> str:
        asked.append((name, how["revision"], "*.safetensors" in how["allow_patterns"]))
        return str({"org/base": base, "org/adapter": folder}[name])

    monkeypatch.setattr("specdec_cli.lm.files.hub.snapshot_download", fetch)
    describe("org/adapter")
    assert asked == [("org/adapter", None, False), ("org/base", "main", False)]
    lm = load_lm("org/adapter", dtype="float32")
    assert asked[-2:] == [("org/adapter", None, True), ("org/base", "main", True)]
    assert relative_error(lm.score([Row(0, TOKENS, len(TOKENS))]), adapted_logits(base, folder, TOKENS)) < 1e-5
