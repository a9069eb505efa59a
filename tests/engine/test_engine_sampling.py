"""Processors, logprobs and seeds under speculation: what other engines refuse, or get wrong, with a draft."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engine import PROMPTS, decode, drafter, step_of, tiny_engine, tiny_lm, tokens, transformers_greedy
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM
from typed import not_none

from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import MODES

DRAFTS = ("stranger", "itself", "ngram")
BIAS = {7: 2.5, 44: -4.0, 60: 1.5, 81: 3.0}
EVERYTHING: dict[str, Any] = {
    "min_p": 0.02,
    "top_k": 60,
    "top_p": 0.97,
    "logit_bias": BIAS,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 5,
}


@pytest.mark.in_turn(0, every=5)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("name", [*DRAFTS])
def test_bias_and_repetition_penalty_are_those_of_transformers(target, draft_of, name, k: int) -> None:
    bias = {(token,): value for token, value in BIAS.items()}
    expected = transformers_greedy(target.name, PROMPTS, sequence_bias=bias, repetition_penalty=1.3)
    params = SamplingParams(max_new_tokens=24, logit_bias=BIAS, repetition_penalty=1.3, min_p=0.1, top_p=0.9)
    assert tokens(decode(target, draft_of(name), k, params=params)) == expected
    assert expected != transformers_greedy(target.name, PROMPTS, repetition_penalty=1.3)


@pytest.mark.parametrize("name", DRAFTS)
def test_every_processor_at_once_in_greedy_decoding(target, draft_of, name) -> None:
    params = SamplingParams(max_new_tokens=24, **EVERYTHING)
    plain = tokens(decode(target, None, 0, params=params, eos_token_ids=(3, 9)))
    assert plain != tokens(decode(target, None, 0, params=SamplingParams(max_new_tokens=24)))
    for k in (1, 4, 8):
        assert tokens(decode(target, draft_of(name), k, params=params, eos_token_ids=(3, 9))) == plain


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("processors", [{}, EVERYTHING], ids=["temperature alone", "everything"])
def test_gumbel_gives_the_same_text_with_any_draft_k_and_batch(target, draft_of, name, processors) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.9, seed=11, **processors)
    plain = tokens(decode(target, None, 0, params=params, verify="gumbel"))
    for k in (1, 4, 8):
        outputs = decode(target, draft_of(name), k, params=params, verify="gumbel", max_num_seqs=3)
        assert tokens(outputs) == plain
    if name == "itself":
        assert all(output.speculative.acceptance_rate == 1.0 for output in outputs)


@pytest.mark.parametrize("mode", ["rejection", "block", "gumbel", "exact-match"])
def test_a_seed_gives_one_text_and_another_seed_another(target, stranger, mode: str) -> None:
    def text(seed: int, index: int = 0) -> list[int]:
        params = [SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed, index=index)]
        return tokens(decode(target, stranger, 3, PROMPTS[:1], params, verify=mode))[0]

    assert text(1) == text(1)
    assert len({tuple(text(*key)) for key in [(1, 0), (2, 0), (2**63 - 1, 0), (1, 1), (2, 1)]}) == 5


@pytest.mark.parametrize("mode", ["rejection", "block", "gumbel", "exact-match"])
def test_one_prompt_many_times_gives_different_texts(target, stranger, mode: str) -> None:
    outputs = decode(target, stranger, 3, [PROMPTS[0]] * 5, SamplingParams(12, temperature=1.5), verify=mode)
    assert len({tuple(text) for text in tokens(outputs)}) == 5


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_logprobs_are_the_log_softmax_of_transformers(target, draft_of, name) -> None:
    model = AutoModelForCausalLM.from_pretrained(target.name).eval()
    outputs = decode(target, draft_of(name), 4, params=SamplingParams(max_new_tokens=20, logprobs=3))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert [one.token_id for one in not_none(output.logprobs)] == output.token_ids
        for row, one in zip(expected, not_none(output.logprobs), strict=True):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_do_not_depend_on_the_draft(target, draft_of, name, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=temperature, logprobs=2, **EVERYTHING)
    plain = decode(target, None, 0, params=params, verify="gumbel")
    drafted = decode(target, draft_of(name), 4, params=params, verify="gumbel")
    for one, other in zip(plain, drafted, strict=True):
        assert len(not_none(other.logprobs)) == len(other.token_ids) == len(one.token_ids)
        assert [p.token_id for p in not_none(other.logprobs)] == other.token_ids == one.token_ids
        assert [p.logprob for p in not_none(other.logprobs)] == pytest.approx(
            [p.logprob for p in not_none(one.logprobs)], abs=1e-4
        )
        for p, q in zip(not_none(one.logprobs), not_none(other.logprobs), strict=True):
            assert dict(q.top) == pytest.approx(dict(p.top), abs=1e-4)


def test_logprobs_are_cut_with_their_tokens(target, itself) -> None:
    plain = tokens(decode(target, None, 0, PROMPTS[3:], SamplingParams(24)))[0]
    end = plain[12]
    params = SamplingParams(max_new_tokens=24, logprobs=0, stop_token_ids=(end,))
    [output] = decode(target, itself, 6, PROMPTS[3:], params)
    assert [one.token_id for one in not_none(output.logprobs)] == output.token_ids == plain[: plain.index(end) + 1]
    assert all(one.top == () for one in not_none(output.logprobs))


def narrow(engine, num_tokens) -> None:
    """What the engine takes from its tokenizer."""
    engine.num_tokens = num_tokens
    engine._stepper.num_tokens = num_tokens


def test_padding_of_the_vocabulary_is_never_decoded(folder) -> None:
    """Target and draft padded to different widths, as Qwen2.5 7B (152064) and 0.5B (151936) are."""
    real = 70
    target = tiny_lm(folder, "llama", seed=4, vocab_size=90)
    prompts = [[token % real for token in prompt] for prompt in PROMPTS]
    expected = transformers_greedy(target.name, prompts, suppress_tokens=list(range(real, 90)))
    assert expected != transformers_greedy(target.name, prompts)
    for draft in (tiny_lm(folder, "llama", seed=5, vocab_size=101), tiny_lm(folder, "llama", seed=5, vocab_size=72)):
        engine = tiny_engine(target, drafter(draft, real), 4)
        narrow(engine, real)
        assert tokens(engine.generate(prompts, SamplingParams(24))) == expected
        for mode in MODES[1:]:
            engine = tiny_engine(target, drafter(draft, real), 4, verify=mode)
            narrow(engine, real)
            outputs = engine.generate(prompts, SamplingParams(16, temperature=1.5))
            assert all(token < real for text in tokens(outputs) for token in text)


def test_a_draft_with_too_few_tokens_is_refused(folder) -> None:
    with pytest.raises(UsageError, match="scores 72 tokens"):
        drafter(tiny_lm(folder, "llama", seed=5, vocab_size=72), VOCAB)


def test_greedy_verification_refuses_a_request_that_samples(target, stranger) -> None:
    engine = tiny_engine(target, stranger, verify="greedy")
    with pytest.raises(UsageError, match="greedy"):
        engine.add([1], SamplingParams(temperature=0.5))
    with pytest.raises(UsageError, match="unknown verification mode"):
        tiny_engine(target, stranger).add([1], verify="guess")
    assert EngineOptions().verify == "auto"


def test_requests_of_one_batch_may_differ_in_everything(target, stranger) -> None:
    """Each text is the one that its request gets alone."""
    sets = [
        SamplingParams(12),
        SamplingParams(9, temperature=1.1, seed=3, top_k=5),
        SamplingParams(15, temperature=0.7, repetition_penalty=1.4, logprobs=1, index=2),
        SamplingParams(6, temperature=1.3, logit_bias=BIAS, min_p=0.05),
    ]
    modes, ks = ["greedy", "block", "gumbel", "rejection"], [3, 0, 5, 2]
    together = tiny_engine(target, stranger)
    for prompt, params, mode, k in zip(PROMPTS, sets, modes, ks, strict=True):
        together.add(prompt, params, k, mode)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while together.has_work:
        for emitted in step_of(together).emitted:
            texts[emitted.sequence_id] += emitted.tokens
            assert len(emitted.logprobs) == (len(emitted.tokens) if emitted.sequence_id == 2 else 0)
    for i, (prompt, params, mode, k) in enumerate(zip(PROMPTS, sets, modes, ks, strict=True)):
        engine = tiny_engine(target, stranger, verify=mode)
        [alone] = engine.generate([prompt], [replace(params, logprobs=None)], k)
        assert alone.token_ids == texts[i]
