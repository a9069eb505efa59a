"""Where a request ends, what is counted, and what happens at the limits; with every kind of draft."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_engine import (
    PROMPTS,
    Checked,
    decode,
    drafter,
    ngram,
    step_of,
    tiny_engine,
    tiny_lm,
    tokens,
    transformers_greedy,
)
from tiny_models import VOCAB
from typed import not_none

from specdec_cli.engine import engine as engine_module
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.events import Finished, Noticed, SpeculativeCounts, Stepped
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

DRAFTS = ("stranger", "itself", "ngram")
GREEDY = SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return tokens(decode(target, None, 0, params=GREEDY))


def until(text: list[int], ends: set[int], first: int = 0) -> list[int]:
    """Tokens up to the first end token at `first` or later, which is kept."""
    place = next((i for i in range(first, len(text)) if text[i] in ends), len(text) - 1)
    return text[: place + 1]


@pytest.mark.parametrize("name", DRAFTS)
def test_max_new_tokens_at_every_value_around_k(target, draft_of, plain, name) -> None:
    k = 4
    for num in range(1, k + 3):
        outputs = decode(target, draft_of(name), k, params=SamplingParams(max_new_tokens=num))
        assert tokens(outputs) == [text[:num] for text in plain]
        assert all(output.finish_reason == "length" and output.stop_reason is None for output in outputs)
        counts = [output.speculative for output in outputs]
        assert all(count.num_emitted_tokens == num - 1 for count in counts)
        assert all(count.num_draft_tokens <= min(k, num - 2) * count.num_drafts for count in counts if num > 1)


@pytest.mark.parametrize("name", DRAFTS)
def test_eos_as_a_list(target, draft_of, plain, name) -> None:
    ends = (plain[0][7], plain[1][10], plain[3][2])
    outputs = decode(target, draft_of(name), 4, params=GREEDY, eos_token_ids=ends)
    assert tokens(outputs) == [until(text, set(ends)) for text in plain]
    assert [output.finish_reason for output in outputs].count("stop") >= 3
    for output in outputs:
        stopped = output.finish_reason == "stop"
        assert output.stop_reason == (output.token_ids[-1] if stopped else None)
        counts = output.speculative
        assert counts.num_emitted_tokens == len(output.token_ids) - 1
        assert counts.num_accepted_tokens <= counts.num_emitted_tokens


@pytest.mark.parametrize("name", DRAFTS)
def test_ignore_eos_keeps_stop_token_ids(target, draft_of, plain, name) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop_token_ids=(plain[2][9],))
    outputs = decode(target, draft_of(name), 4, params=params, eos_token_ids=(plain[2][3], plain[0][2]))
    assert tokens(outputs) == [until(text, {plain[2][9]}) for text in plain]


def test_what_a_stop_cuts_is_not_counted(target, itself, plain) -> None:
    """With itself as draft, step s emits tokens 1 + 5 s … 5 + 5 s, the last of them its own."""
    for end in range(1, 12):
        cut = until(plain[3], {plain[3][end]})
        [output] = decode(target, itself, 4, PROMPTS[3:], SamplingParams(24, stop_token_ids=(plain[3][end],)))
        assert output.token_ids == cut
        own = sum(1 for place in range(1, len(cut)) if place % 5 == 0)
        assert output.speculative.num_accepted_tokens == len(cut) - 1 - own
        assert sum(output.speculative.acceptance_histogram) == output.speculative.num_drafts == -(-(len(cut) - 1) // 5)


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("num", [1, 6, 13])
def test_min_tokens_is_transformers_min_new_tokens(target, draft_of, plain, name, num: int) -> None:
    ends = [plain[0][1], plain[1][3], plain[2][5], plain[3][0]]
    expected = transformers_greedy(target.name, PROMPTS, min_new_tokens=num, eos_token_id=ends)
    params = SamplingParams(max_new_tokens=24, min_tokens=num)
    outputs = decode(target, draft_of(name), 4, params=params, eos_token_ids=ends)
    assert tokens(outputs) == expected
    assert all(len(output.token_ids) >= num for output in outputs)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_targets_context_limit_ends_a_text(folder, draft_of, name) -> None:
    short = tiny_lm(folder, "llama", seed=1, max_position_embeddings=40)
    expected = tokens(decode(tiny_lm(folder, "llama", seed=1), None, 0, params=SamplingParams(60)))
    for k in (0, 1, 5):
        outputs = decode(short, draft_of(name), k, params=SamplingParams(max_new_tokens=60))
        assert tokens(outputs) == [text[: 40 - len(p)] for text, p in zip(expected, PROMPTS, strict=True)]
        assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("limit", [12, 33, 40])
def test_past_the_drafts_context_it_decodes_on_without_a_draft(folder, target, limit: int) -> None:
    draft = tiny_lm(folder, "llama", seed=1, max_position_embeddings=limit)
    params = SamplingParams(max_new_tokens=40)
    expected = tokens(decode(target, None, 0, params=params))
    engine = tiny_engine(target, draft, 4)
    texts: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    noticed: list[int | None] = []
    for event in engine.stream(PROMPTS, params):
        if isinstance(event, Noticed):
            assert f" {limit} tokens" in event.message
            noticed.append(event.sequence_id)
        if isinstance(event, Stepped):
            for emitted in event.emitted:
                if len(PROMPTS[emitted.sequence_id]) + len(texts[emitted.sequence_id]) > limit:
                    assert emitted.num_drafted == 0
                texts[emitted.sequence_id] += emitted.tokens
    assert list(texts.values()) == expected
    past = [i for i, p in enumerate(PROMPTS) if len(p) + 40 - 1 > limit]
    assert sorted(map(not_none, noticed)) == past, "each request that goes past it is told so exactly once"


def test_an_aborted_request_gives_its_blocks_back(target, stranger) -> None:
    engine = tiny_engine(target, stranger, 4, max_num_seqs=2)
    alone = tokens(decode(target, None, 0, params=GREEDY))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    reasons = {}

    def take(events) -> None:
        for event in events:
            if isinstance(event, Stepped):
                for emitted in event.emitted:
                    texts[emitted.sequence_id] += emitted.tokens
            if isinstance(event, Finished):
                reasons[event.sequence_id] = event.finish_reason

    for _ in range(4):
        take(engine.step())
    used = target.num_blocks - target.num_free_blocks
    take(engine.abort(ids[0]))
    assert target.num_blocks - target.num_free_blocks < used
    take(engine.abort(ids[3]))  # one that waits
    assert engine.abort(ids[0]) == engine.abort(99) == [], "an ended or unknown request gives no event"
    while engine.has_work:
        take(engine.step())
    assert reasons == {ids[0]: "abort", ids[1]: "length", ids[2]: "length", ids[3]: "abort"}
    assert texts[ids[1]] == alone[1]
    assert texts[ids[2]] == alone[2]
    assert 0 < len(texts[ids[0]]) < 24
    assert texts[ids[0]] == alone[0][: len(texts[ids[0]])]
    assert texts[ids[3]] == []


def test_each_request_has_its_own_k(target, stranger, plain) -> None:
    engine = tiny_engine(target, stranger, 4)
    wishes = [0, 1, None, 8]
    for prompt, wish in zip(PROMPTS, wishes, strict=True):
        engine.add(prompt, GREEDY, num_speculative_tokens=wish)
    most, texts = [0] * 4, [[] for _ in PROMPTS]
    while engine.has_work:
        for emitted in step_of(engine).emitted:
            most[emitted.sequence_id] = max(most[emitted.sequence_id], emitted.num_drafted)
            texts[emitted.sequence_id] += emitted.tokens
    assert most == [0, 1, 4, 8]
    assert texts == plain


def test_no_drafting_above_a_batch_size(target, itself, plain) -> None:
    engine = tiny_engine(target, itself, 4, disable_by_batch_size=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_new_tokens=8 + 5 * i))
    drafted_by_size: dict[int, int] = {}
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_work:
        stepped = step_of(engine)
        for emitted in stepped.emitted:
            texts[emitted.sequence_id] += emitted.tokens
            num = drafted_by_size.get(stepped.num_running, 0)
            drafted_by_size[stepped.num_running] = max(num, emitted.num_drafted)
    assert texts == [text[: 8 + 5 * i] for i, text in enumerate(plain)]
    assert drafted_by_size[4] == drafted_by_size[3] == 0
    assert drafted_by_size[2] == 4 or drafted_by_size[1] == 4


def test_k_by_the_context_s_length(target, itself, plain) -> None:
    """A draft that is its target is right in each step, in the first one after a pause, too."""
    engine = tiny_engine(target, itself, 4, k_by_context=((12, 2), (18, 0), (26, 9)))
    lengths = [len(prompt) for prompt in PROMPTS]
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    drafted: list[tuple[int, int]] = []
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_work:
        for emitted in step_of(engine).emitted:
            if not emitted.from_prefill and lengths[emitted.sequence_id] + 5 < len(PROMPTS[emitted.sequence_id]) + 24:
                drafted.append((lengths[emitted.sequence_id], emitted.num_drafted))
                assert emitted.num_accepted == emitted.num_drafted
            lengths[emitted.sequence_id] += len(emitted.tokens)
            texts[emitted.sequence_id] += emitted.tokens
    assert texts == plain
    for length, k in drafted:
        assert k == (4 if length < 12 else 2 if length < 18 else 0 if length < 26 else 4), length
    assert {k for _, k in drafted} == {0, 2, 4}
    assert any(length in range(26, 29) for length, k in drafted if k), "the first step after the pause"


def test_p_min_drafts_less_and_changes_nothing(target, stranger, plain) -> None:
    num_drafted = {}
    for p_min in (0.0, 0.5, 1.0):
        outputs = decode(target, stranger, 4, params=GREEDY, p_min=p_min)
        assert tokens(outputs) == plain
        num_drafted[p_min] = sum(output.speculative.num_draft_tokens for output in outputs)
    assert num_drafted[0.0] > num_drafted[0.5] > num_drafted[1.0] == 0


def test_a_model_that_drafts_from_its_own_cache(target, plain) -> None:
    """Target and draft may be one LM: the cache is a function of the context, whoever asks."""
    assert tokens(decode(target, target, 4, params=GREEDY)) == plain


def test_a_draft_in_another_dtype(folder, target, plain) -> None:
    draft = tiny_lm(folder, "llama", seed=1, dtype="bfloat16")
    outputs = decode(target, draft, 4, params=GREEDY)
    assert tokens(outputs) == plain
    assert sum(output.speculative.num_accepted_tokens for output in outputs) > 40
    for mode in ("rejection", "block"):
        sampled = decode(target, draft, 3, params=SamplingParams(24, temperature=0.9), verify=mode)
        accepted, drafted = (
            sum(getattr(output.speculative, name) for output in sampled)
            for name in ("num_accepted_tokens", "num_draft_tokens")
        )
        assert accepted > 0.8 * drafted, "q is nearly p"


def test_small_blocks_and_a_cache_with_room_for_few(folder, plain) -> None:
    """Four blocks of rejected tokens are given back at every step, and requests wait for room."""
    row_bytes = 2 * 2 * 2 * 8 * 4
    small: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 90 * row_bytes}
    scarce = load_lm(tiny_lm(folder, "llama", seed=1).name, **small)
    draft = load_lm(tiny_lm(folder, "llama", seed=2, num_hidden_layers=1).name, block_size=4)
    assert scarce.num_blocks < 4 * (24 + 29 + 8) // 4, "all four requests together would fit"
    outputs = decode(scarce, draft, 8, params=GREEDY)
    assert tokens(outputs) == plain


def test_typical_runs_and_accepts(target, itself) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=1.0)
    outputs = decode(target, itself, 4, params=params, verify="typical")
    assert all(len(output.token_ids) == 24 for output in outputs)
    assert sum(output.speculative.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("mode", ["rejection", "block", "gumbel", "exact-match", "typical"])
def test_counts_agree_with_each_other(target, stranger, mode: str) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=2.0)
    engine = tiny_engine(target, stranger, 3, verify=mode)
    counts, full = SpeculativeCounts(), SpeculativeCounts()
    for event in engine.stream(PROMPTS, params):
        if isinstance(event, Stepped):
            for emitted in event.emitted:
                counts.add(emitted)
                if emitted.num_drafted == 3:
                    full.add(emitted)
    assert counts.num_emitted_tokens == 4 * 39
    for some in (counts, full):
        assert sum(some.acceptance_histogram) == some.num_drafts > 0
        assert sum(i * num for i, num in enumerate(some.acceptance_histogram)) == some.num_accepted_tokens
        rates = some.per_position_acceptance_rates
        assert all(rate is not None and 0 <= rate <= 1 for rate in rates)
        assert some.acceptance_rate == pytest.approx(some.num_accepted_tokens / some.num_draft_tokens)
    product = 1.0
    for marginal, conditional in zip(
        full.per_position_acceptance_rates, full.conditional_acceptance_rates, strict=True
    ):
        product *= conditional or 0.0
        assert marginal == pytest.approx(product)
    assert full.num_accepted_tokens > 0
    assert counts.num_emitted_tokens == counts.num_accepted_tokens + counts.num_steps


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([1, VOCAB], {}, f"`{VOCAB}`"),
        ([1, -1], {}, "`-1`"),
        ([3] * 128, {}, "`128`"),
        ("text", {}, "tokenizer"),
        ([{"role": "user", "content": "hello"}], {}, "tokenizer"),
        ([1], {"stop": ("x",)}, "stop strings"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1], {"logit_bias": {-2: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_behind(target, prompt, params, words: str) -> None:
    engine = tiny_engine(target, ngram())
    with pytest.raises(UsageError, match=words):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work
    assert tokens(engine.generate([[5, 6]], SamplingParams(max_new_tokens=2)))[0]


def test_a_request_that_never_fits_is_refused(folder) -> None:
    target = load_lm(tiny_lm(folder, "llama", seed=1).name, block_size=4, kv_cache_bytes=8 * 4 * 2 * 2 * 2 * 8 * 4)
    engine = Checked(target, drafter(None), None, EngineOptions())
    with pytest.raises(UsageError, match="KV cache"):
        engine.add([1, 2, 3], SamplingParams(max_new_tokens=64))


def test_sampling_parameters_for_each_prompt(target) -> None:
    engine = tiny_engine(target, ngram())
    params = [SamplingParams(max_new_tokens=3 + i) for i in range(4)]
    assert [len(text) for text in tokens(engine.generate(PROMPTS, params))] == [3, 4, 5, 6]
    with pytest.raises(UsageError, match="sets of sampling parameters"):
        engine.generate(PROMPTS, params[:2])
    assert engine.generate([]) == []


def test_a_request_cannot_ask_for_fewer_than_no_guesses(target) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        tiny_engine(target, ngram()).add([1], num_speculative_tokens=-1)


def test_one_set_of_parameters_counts_its_index_up_from_its_own(target) -> None:
    engine = tiny_engine(target, ngram())
    params = SamplingParams(max_new_tokens=12, temperature=1.5)
    texts = tokens(engine.generate([PROMPTS[0]] * 3, params))
    assert len({tuple(text) for text in texts}) == 3
    assert tokens(engine.generate([PROMPTS[0]] * 2, replace(params, index=1))) == texts[1:]
    assert {output.lossless for output in engine.generate(PROMPTS, params)} == {True}


def test_the_policy_is_told_of_what_lies_between_steps_unless_it_is_longer_than_the_step(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begin and end of steps: the third begins long after the second, the fourth is another request's first."""
    moments = iter([0.0, 10.0, 14.0, 24.0, 100.0, 110.0, 111.0, 121.0])
    monkeypatch.setattr(engine_module, "perf_counter", lambda: next(moments))
    engine, told = tiny_engine(target, drafter("none"), 0), []
    monkeypatch.setattr(engine.policy, "observe", lambda seconds, *_: told.append(seconds))
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=1, ignore_eos=True))
    engine.step()
    assert told == [10.0, 14.0, 10.0, 10.0]
