"""Greedy tokens through `score` equal transformers' own generate, whatever was drafted and cut back in between."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import EXTRA_FAMILIES, FAMILIES, VOCAB, make_tiny
from transformers.models.gptj import modeling_gptj

from specdec_cli.lm.cache.cache import cache_parameter
from specdec_cli.lm.door import Row
from specdec_cli.lm.files.lengths import long_rope_threshold
from specdec_cli.lm.forward.implementations import NAME
from specdec_cli.lm.load import load_lm

NUM_NEW = 30
PROMPTS = [[5, 17, 3], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24], [2, 40, 41, 9, 77, 60, 3, 3, 8]]


def oracle(folder):
    # By name, because the kernel that transformers 5.17 would choose leaves out soft-capped scores (Gemma 2).
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            use_cache=long_rope_threshold(model.config) is None,  # 5.17 keeps short keys in a long text (Phi-3)
        )
        texts.append(out[0].tolist())
    return texts


@pytest.fixture(scope="module", params=[*FAMILIES, *EXTRA_FAMILIES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    texts = oracle(folder)
    assert max(len(set(text[len(prompt) :])) for text, prompt in zip(texts, PROMPTS, strict=True)) > 4
    return request.param, load_lm(str(folder)), texts


def decode(lm, texts, k, correct, chunk=5):
    """Greedy decoding as an engine does it: chunked prefill, drafts of which the first `correct` ones are right."""
    wrong = random.Random(k)
    contexts = {i: list(prompt) for i, prompt in enumerate(PROMPTS)}
    fed = dict.fromkeys(contexts, 0)
    while any(len(contexts[i]) < len(texts[i]) for i in contexts):
        rows, drafts = [], []
        for i, context in contexts.items():
            if len(context) >= len(texts[i]):
                lm.release(i)
                continue
            if fed[i] + chunk < len(context) and len(context) == len(PROMPTS[i]):
                fed[i] += chunk
                rows.append(Row(i, context[: fed[i]], 0))
                drafts.append((i, None))
                continue
            right = texts[i][len(context) : len(context) + min(correct, k)]
            guesses = right + [wrong.randrange(VOCAB) for _ in range(k - len(right))]
            guesses = guesses[: max(0, len(texts[i]) - len(context) - 1)]
            rows.append(Row(i, context + guesses, len(guesses) + 1))
            drafts.append((i, guesses))
        best = lm.score(rows).argmax(-1).tolist()
        lm.check_integrity()
        for i, guesses in drafts:
            if guesses is None:
                continue
            own, best = best[: len(guesses) + 1], best[len(guesses) + 1 :]
            accepted = next((j for j, guess in enumerate(guesses) if guess != own[j]), len(guesses))
            contexts[i] += own[: accepted + 1]
    for i in contexts:
        lm.release(i)
    assert lm.num_free_blocks == lm.num_blocks
    return [contexts[i] for i in sorted(contexts)]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(("k", "correct"), [(0, 0), (1, 0), (4, 0), (4, 2), (8, 8), (8, 3)])
def test_greedy_equals_generate(checkpoint, k: int, correct: int) -> None:
    _, lm, texts = checkpoint
    assert decode(lm, texts, k, correct) == texts


def test_a_lone_sequence_and_scattered_blocks_agree(checkpoint) -> None:
    """A sequence whose blocks lie apart gives what one in a single piece gives."""
    _, lm, texts = checkpoint
    text = texts[1]
    whole = lm.score([Row(0, text, 8)])
    lm.release(0)
    # Other sequences grow in between, so that no two blocks of handle 1 touch.
    taken = []
    for length in range(16, len(text) + 16, 16):
        lm.score([Row(1, text[:length], 0)])
        behind = lm._contexts.sequences[1].blocks[-1] + 1
        taken.append(behind)
        lm._contexts.pool._taken[behind] = 1
        lm._contexts.pool.num_free -= 1
        lm.num_blocks -= 1
    scattered = lm.score([Row(1, text, 8)])
    assert not lm._contexts.sequences[1].in_one_piece
    for block in taken:
        lm._contexts.pool._taken[block] = 0
        lm._contexts.pool.num_free += 1
        lm.num_blocks += 1
    lm.release(1)
    assert torch.allclose(whole, scattered, atol=1e-4)


def test_attention_goes_through_the_interface_where_there_is_one(checkpoint) -> None:
    family, lm, _ = checkpoint
    own_keys = {"falcon"} if hasattr(modeling_gptj, "GPTJRotaryEmbedding") else {"falcon", "gptj"}  # until 5.24
    has_none = family in own_keys
    assert (lm.config._attn_implementation != NAME) == has_none


@pytest.mark.parametrize("fault", ["one token too long", "no cut-back"])
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from specdec_cli.lm.cache.contexts import CachedSequence

    folder = make_tiny("llama", tmp_path)
    texts = oracle(folder)
    lm = load_lm(str(folder))
    right = CachedSequence.common_prefix

    def wrong(held, context, limit):
        kept = right(held, context, limit)
        most = min(len(held.tokens), limit)
        return min(most, kept + 1) if fault == "one token too long" else most

    assert decode(lm, texts, 4, 0) == texts
    monkeypatch.setattr(CachedSequence, "common_prefix", wrong)
    # A draft differs from the emitted token where it was refused: a cache kept too long holds the wrong one.
    contexts = [[*texts[1][:20], (texts[1][20] + 1) % VOCAB, 5], texts[1][:24]]
    lm.score([Row(0, contexts[0], 2)])
    faulty = lm.score([Row(0, contexts[1], 1)])
    monkeypatch.setattr(CachedSequence, "common_prefix", right)
    lm.release(0)
    assert not torch.allclose(faulty, lm.score([Row(0, contexts[1], 1)]), atol=1e-3)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_49_2_a_forward_may_call_its_cache_as_any_tested_version_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, family = str(make_tiny("llama", tmp_path)), transformers.LlamaForCausalLM
    wanted = load_lm(folder, decoder="transformers").score([Row(0, PROMPTS[0], 1)])
    forward, here = family.forward, cache_parameter(family.forward)
    by_name = {
        "past_key_values": lambda self, position_ids=None, past_key_values=None, **rest: forward(
            self, position_ids=position_ids, **{str(here): past_key_values}, **rest
        ),
        "cache": lambda self, position_ids=None, cache=None, **rest: forward(
            self, position_ids=position_ids, **{str(here): cache}, **rest
        ),
    }
    monkeypatch.setattr(family, "forward", by_name[name])
    torch.testing.assert_close(load_lm(folder, decoder="transformers").score([Row(0, PROMPTS[0], 1)]), wanted)
