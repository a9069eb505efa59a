"""The built-in pair in plain torch: transformers' numbers, configuration and tokenizer, without its models' import."""

import subprocess
import sys

import pytest
import torch
import transformers

from specdec_cli.errors import RunError
from specdec_cli.lm.files.checkpoint import model_folder, read_config
from specdec_cli.lm.files.names import BUILTIN
from specdec_cli.lm.llama import llama_weights
from specdec_cli.lm.llama.builtin_pair import LlamaForCausalLM, read_builtin_config, read_builtin_model
from specdec_cli.lm.load import load_lm, load_tokenizer

NOT_NEEDED = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers.models",
    "transformers.modeling_utils", "transformers.cache_utils", "transformers.masking_utils", "transformers.quantizers",
    "transformers.generation.utils", "transformers.generation.continuous_batching", "accelerate",
)  # fmt: skip


@pytest.mark.parametrize("name", BUILTIN)
def test_the_plain_modules_compute_what_transformers_does(name: str) -> None:
    folder = model_folder(name, None, trust_remote_code=False)
    plain = read_builtin_model(folder, read_builtin_config(folder), torch.float32)
    right = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    texts, places = torch.arange(1, 2047, 31).view(2, -1), torch.arange(512)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(texts).logits, right(texts).logits, rtol=0, atol=1e-4)
    turns, right_turns = (one.model.rotary_emb(torch.empty(0), places) for one in (plain, right))
    assert all(map(torch.equal, turns, right_turns)), "our decoder reads these tables, bit for bit"
    assert plain.state_dict().keys() == right.state_dict().keys()
    assert [*dict(plain.named_modules())] == [*dict(right.named_modules())]


@pytest.mark.parametrize("name", BUILTIN)
def test_its_configuration_is_that_of_transformers(name: str) -> None:
    folder = model_folder(name, None, trust_remote_code=False)
    plain, right = read_builtin_config(folder).to_dict(), read_config(name, folder, False).to_dict()
    unread = {"use_cache", "_name_or_path"}
    assert {key for key in plain.keys() | right.keys() if plain.get(key) != right.get(key)} <= unread


def test_its_tokenizer_is_the_one_that_transformers_finds() -> None:
    folder = model_folder("builtin:target", None, trust_remote_code=False)
    ours, right = load_tokenizer("builtin:target"), transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(right)
    assert ours.backend_tokenizer.to_str() == right.backend_tokenizer.to_str()
    assert ours.special_tokens_map == right.special_tokens_map
    assert ours.chat_template == right.chat_template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_layout_of_its_weights_is_caught(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(llama_weights, "_pair_order", lambda shape: torch.arange(shape.head_size))
    with pytest.raises(RunError, match="gives other logits here"):
        load_lm("builtin:draft", dtype=dtype)


def test_another_decoder_takes_the_model_of_transformers() -> None:
    assert type(load_lm("builtin:draft").model) is LlamaForCausalLM
    assert type(load_lm("builtin:draft", decoder="transformers").model) is transformers.LlamaForCausalLM
    assert type(load_lm("builtin:draft", dtype="float16").model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("words", [["generate", "Hi", "-n", "5"], ["generate", "Hi", "-n", "2", "-d", "ngram"]])
def test_49_23_a_text_of_the_pair_imports_no_models_of_transformers(words: list[str]) -> None:
    script = (
        "import sys; from specdec_cli.cli.main import run; code = run(sys.argv[2:]); "
        "print([name for name in sys.argv[1].split() if name in sys.modules], code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, " ".join(NOT_NEEDED), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[] 0", done.stderr
