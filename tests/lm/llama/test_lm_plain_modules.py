"""Models in plain torch: transformers' numbers, configuration and tokenizer, without its models' import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_gguf import SIZES, write_gguf
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.errors import RunError
from specdec_cli.lm.door import Row
from specdec_cli.lm.files.gguf_folder import _add, _llama_config, _transformers_config
from specdec_cli.lm.files.gguf_header import read_gguf_header
from specdec_cli.lm.files.names import BUILTIN
from specdec_cli.lm.files.plain_config import CONFIGS
from specdec_cli.lm.llama import llama_weights
from specdec_cli.lm.llama.plain_modules import CLASSES, LlamaForCausalLM, is_plain, read_builtin_model
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.self_draft import SelfDraft

NOT_NEEDED = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers", "huggingface_hub",
    "accelerate", "jinja2",
)  # fmt: skip
TRANSFORMERS = ["transformers", "huggingface_hub", "jinja2"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "Llama stretched": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "Qwen 2": ("qwen2", {"num_key_value_heads": 2}),
    "Qwen 2 with YaRN": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "Qwen 3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 48}),
}


@pytest.mark.parametrize("what", FAMILIES)
def test_a_family_computes_what_transformers_does(what: str, tmp_path: Path) -> None:
    family, settings = FAMILIES[what]
    folder = make_tiny(family, tmp_path / family, **SIZES | settings)
    right = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in right.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    content = right.config.to_dict()
    content |= {"head_dim": content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]}
    assert is_plain(content)
    plain = CLASSES[family](CONFIGS[family].from_dict(content))
    plain.load_state_dict(right.state_dict(), assign=True)
    plain.tie()
    texts, places = torch.arange(1, 299, 7).view(1, -1), torch.arange(512)[None]
    with torch.no_grad():
        assert relative_error(plain.eval()(texts).logits[0], right.eval()(texts).logits[0]) < 1e-5
    turns, right_turns = (one.model.rotary_emb(torch.empty(0), places) for one in (plain, right))
    assert all(map(torch.equal, turns, right_turns)), "our decoder reads these tables, bit for bit"
    assert [*dict(plain.named_modules())] == [*dict(right.named_modules())]


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("metadata", [{}, {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}])
def test_a_gguf_files_configuration_is_that_of_transformers(family: str, metadata: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_tiny(family, tmp_path / family, **SIZES, num_key_value_heads=2), path, "Q8_0", **metadata)
    header = read_gguf_header("tiny", path)
    ours, right = not_none(_llama_config(header)), _transformers_config("tiny", path, header)
    for config in (ours, right):
        _add("tiny", config, header)
        config.vocab_size = SIZES["vocab_size"]
    found = ours.to_dict()
    size = right.hidden_size // right.num_attention_heads
    wanted = {key: getattr(right, key, size if key == "head_dim" else None) for key in found}
    assert found == wanted


@pytest.mark.parametrize("name", BUILTIN)
def test_the_plain_modules_compute_what_transformers_does(name: str) -> None:
    plan = ModelPlan(name)
    plain = read_builtin_model(plan.folder, not_none(plan.plain_config), torch.float32)
    right = transformers.AutoModelForCausalLM.from_pretrained(plan.folder, attn_implementation="eager").eval()
    texts, places = torch.arange(1, 2047, 31).view(2, -1), torch.arange(512)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(texts).logits, right(texts).logits, rtol=0, atol=1e-4)
    turns, right_turns = (one.model.rotary_emb(torch.empty(0), places) for one in (plain, right))
    assert all(map(torch.equal, turns, right_turns)), "our decoder reads these tables, bit for bit"
    assert plain.state_dict().keys() == right.state_dict().keys()
    assert [*dict(plain.named_modules())] == [*dict(right.named_modules())]


@pytest.mark.parametrize("name", BUILTIN)
def test_its_configuration_is_that_of_transformers(name: str) -> None:
    plain = not_none(ModelPlan(name).plain_config).to_dict()
    right = ModelPlan(name, decoder="transformers").config.to_dict()
    assert {key for key in plain if plain[key] != right.get(key)} <= {"use_cache", "transformers_version"}


def test_its_tokenizer_is_the_one_that_transformers_finds() -> None:
    folder = ModelPlan("builtin:target").folder
    ours, right = load_tokenizer("builtin:target"), transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours.of_transformers) is type(right)
    assert ours.backend_tokenizer.to_str() == right.backend_tokenizer.to_str()
    assert ours.special_tokens_map == right.special_tokens_map
    assert ours.chat_template == right.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (right.bos_token_id, right.eos_token_id)
    messages, text = [{"role": "user", "content": "Hi"}], "a b  c <s>\n é"
    assert ours.apply_chat_template(messages) == right.apply_chat_template(messages)
    for adds in (True, False):
        assert ours.encode(text, add_special_tokens=adds) == right.encode(text, add_special_tokens=adds)
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=adds) == right.decode(ids, skip_special_tokens=adds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_layout_of_its_weights_is_caught(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(llama_weights, "_pair_order", lambda shape: torch.arange(shape.head_size))
    with pytest.raises(RunError, match="gives other logits here"):
        load_lm("builtin:draft", dtype=dtype)


def test_another_decoder_takes_the_model_of_transformers() -> None:
    assert type(load_lm("builtin:draft").model) is LlamaForCausalLM
    assert type(load_lm("builtin:draft", decoder="transformers").model) is transformers.LlamaForCausalLM
    assert type(load_lm("builtin:draft", dtype="float16").model) is transformers.LlamaForCausalLM


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["generate", "Hi", "-n", "5"], []),
        (["generate", "Hi", "-n", "2", "-d", "ngram"], []),
        # The keys that its attention reads are in a cache of transformers' class.
        (["doctor", "-t", "builtin:target", "-d", "builtin:draft", "--kernels"], TRANSFORMERS),
    ],
)
def test_49_23_a_command_on_the_pair_does_not_import_transformers(words: list[str], needed: list[str]) -> None:
    script = (
        "import sys; from specdec_cli.cli.main import run; code = run(sys.argv[2:]); "
        "print([name for name in sys.argv[1].split() if name in sys.modules], code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, " ".join(NOT_NEEDED), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{needed} 0", done.stderr


def test_a_command_on_a_gguf_file_does_not_import_transformers(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_tiny("qwen2", tmp_path / "qwen2", **SIZES), path, "Q4_K_M")
    words = ["generate", "the", "-n", "2", "-t", str(path)]
    test_49_23_a_command_on_the_pair_does_not_import_transformers(words, [])


def test_its_first_layers_draft() -> None:
    lm = load_lm("builtin:target")
    draft = lm.self_draft(SelfDraft(layers=3))
    draft.hold(2)
    assert draft.score([Row(0, [1, 2, 3], 1)]).shape == (1, 2048)
