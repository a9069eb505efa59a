"""Vocabularies of one token, and padded ones: tokens that only the model's matrices know are never emitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import letter_tokenizer, tokens, transformers_greedy
from tiny_models import make_tiny
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typed import not_none

from specdec_cli.engine.engine import Engine
from specdec_cli.sampling.params import SamplingParams

RULES: list[dict[str, Any]] = [
    {},
    {"verify": "rejection"},
    {"verify": "block"},
    {"verify": "gumbel"},
    {"verify": "typical"},
    {"verify": "traversal", "tree": "2,2"},
]
DRAFTS = ["draft", "none", "ngram", "suffix", "self-exit:1", "self-int8"]


def save(folder: Path, vocab_size: int, tokenizer: PreTrainedTokenizerFast, seed: int, **shape: int) -> None:
    """A model whose padding is always the likeliest."""
    make_tiny("llama", folder, seed, vocab_size=vocab_size, **shape)
    real = len(tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[real:] = 20 * head[: vocab_size - real]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target with 9 rows of padding, and a draft with 41."""
    folder, tokenizer = tmp_path_factory.mktemp("padded"), letter_tokenizer()
    save(folder / "target", len(tokenizer) + 9, tokenizer, 1)
    save(folder / "draft", len(tokenizer) + 41, tokenizer, 2, num_hidden_layers=1)
    return {"target": str(folder / "target"), "draft": str(folder / "draft"), "real": str(len(tokenizer))}


def check(engine: Engine, params: SamplingParams, real: int) -> list[list[int]]:
    outputs = engine.generate(["Once upon", "a"], params)
    for output in outputs:
        assert all(token < real for token in output.token_ids)
        alternatives = [token for entry in output.logprobs or () for token, _ in entry.top]
        assert all(token < real for token in alternatives)
    return tokens(outputs)


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("draft", DRAFTS)
def test_49_22_padding_that_is_the_likeliest_is_never_emitted(padded, draft: str) -> None:
    real = int(padded["real"])
    target = padded["target"]
    load: dict[str, Any] = {"draft": padded["draft"] if draft == "draft" else draft, "num_speculative_tokens": 4}
    greedy = check(Engine.load(target, **load), SamplingParams(12, ignore_eos=True, logprobs=3), real)
    prompts = [not_none(Engine.load(target, None).tokenizer).encode(text) for text in ("Once upon", "a")]
    banned = list(range(real, real + 9))
    assert greedy == transformers_greedy(target, prompts, 12, suppress_tokens=banned)
    for rule in RULES:
        if draft != "none" or "tree" not in rule:
            sampled = SamplingParams(12, temperature=1.5, ignore_eos=True, logprobs=3)
            check(Engine.load(target, **load, **rule), sampled, real)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("draft", DRAFTS)
def test_49_22_a_vocabulary_of_one_token(tmp_path: Path, draft: str, padding: int) -> None:
    """The load check's texts are of that one token as well, whose id is 0."""
    one = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    save(tmp_path / "target", 1 + padding, one, 1, **ends)
    save(tmp_path / "draft", 1 + padding // 2, one, 2, num_hidden_layers=1, **ends)
    load: dict[str, Any] = {
        "draft": str(tmp_path / "draft") if draft == "draft" else draft,
        "num_speculative_tokens": 3,
    }
    for params, rule in ((SamplingParams(6), {}), (SamplingParams(6, temperature=1.0, top_k=1, top_p=0.5), RULES[2])):
        outputs = Engine.load(str(tmp_path / "target"), **load, **rule).generate("a", params)
        assert tokens(outputs) == [[0] * 6]
