"""Prefixes shared between requests: fed once, the same text, and never across salts."""

import pytest
from tiny_engine import check_books, drafter, tiny_engine, tiny_lm

from specdec_cli.events import Stepped
from specdec_cli.sampling.params import SamplingParams

BEGIN = [(5 * i * i + 3 * i) % 89 + 2 for i in range(50)]
PROMPTS = [[*BEGIN, 7], [*BEGIN, 8, 9, 10], BEGIN[:40], [*BEGIN, 7], [90, *BEGIN], BEGIN]
GREEDY = SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def draft(folder):
    return tiny_lm(folder, "llama", seed=2, num_hidden_layers=1)


def decoded(engine, prompts, salt: str = "", params=GREEDY):
    """Tokens of prompts together, how many of each were cached, and how many tokens were fed as prompts."""
    found = {engine.add(prompt, params, cache_salt=salt): [] for prompt in prompts}
    num_cached, num_fed = {}, 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Stepped):
                num_fed += event.num_prefill_tokens
                for emitted in event.emitted:
                    found[emitted.sequence_id] += emitted.tokens
                    if emitted.from_prefill:
                        num_cached[emitted.sequence_id] = emitted.num_cached_tokens
    return list(found.values()), list(num_cached.values()), num_fed


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("method", ["model", "ngram"])
def test_text_is_the_same_alone_and_in_company(target, draft, method: str, k: int) -> None:
    plain = tiny_engine(target, draft if method == "model" else drafter("ngram", min=1), k)
    expected, none, _ = decoded(plain, PROMPTS)
    assert none == [0] * len(PROMPTS)
    sharing = tiny_engine(target, draft if method == "model" else drafter("ngram", min=1), k, prefix_caching=True)
    first, _, _ = decoded(sharing, PROMPTS)
    again, num_cached, num_fed = decoded(sharing, PROMPTS)
    assert first == again == expected
    assert num_cached == [48, 48, 32, 48, 48, 48], "whole blocks, and a token is left to feed"
    assert num_fed == sum(map(len, PROMPTS)) - sum(num_cached)
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert decoded(sharing, [prompt])[0] == [text]


def test_an_answer_is_a_prefix_too(target, draft) -> None:
    """The next turn of a chat holds the one before it, output included; steps between blocks' edges leave no trace."""
    engine, plain = tiny_engine(target, draft, 4, prefix_caching=True), tiny_engine(target, draft, 4)
    (answer,), _, _ = decoded(engine, [BEGIN])
    turn = [*BEGIN, *answer, 3, 4, 5]
    text, (num_cached,), _ = decoded(engine, [turn])
    assert num_cached == (len(BEGIN) + len(answer) - 1) // 16 * 16
    assert text == decoded(plain, [turn])[0]


def test_salts_never_share(target, draft) -> None:
    engine = tiny_engine(target, draft, 4, prefix_caching=True)
    for salt in ("one", "two"):
        assert decoded(engine, [BEGIN], salt)[1] == [0], salt
        assert decoded(engine, [BEGIN], salt)[1] == [48]
    assert decoded(engine, [BEGIN], "on")[1] == [0]


def test_a_draft_model_reads_a_prefix_once_too(target, draft, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(target, draft, 4, prefix_caching=True)
    decoded(engine, [BEGIN])
    kept, feeds_of = [], draft._contexts.feeds

    def noting(rows, is_long):
        feeds = feeds_of(rows, is_long)
        kept.extend(feed.keep for feed in feeds)
        return feeds

    monkeypatch.setattr(draft._contexts, "feeds", noting)
    decoded(engine, [BEGIN])
    assert min(kept) >= (len(BEGIN) - 1) // 16 * 16, "the draft feeds what is behind the last whole block"


def test_blocks_of_prefixes_are_free_until_they_are_needed(target, draft) -> None:
    engine = tiny_engine(target, draft, 4, prefix_caching=True)
    for begin in range(2, 80):
        decoded(engine, [[begin, *BEGIN]], params=SamplingParams(max_new_tokens=2))
        check_books(engine)
    assert target.num_free_blocks == target.num_blocks
    assert decoded(engine, [[79, *BEGIN]])[1] == [48], "the newest is still there"
    assert decoded(engine, [[2, *BEGIN]])[1] == [0], "the oldest is gone"


def test_a_step_that_broke_off_goes_on_from_what_is_known(target, draft, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = (
        tiny_engine(target, draft, 4, prefix_caching=True),
        decoded(tiny_engine(target, draft, 4), PROMPTS),
    )
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    engine.step()
    forward = target._forward
    run = forward.run

    def failing(layout) -> None:
        monkeypatch.setattr(forward, "run", run)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(forward, "run", failing)
    outputs = {one.id: one.tokens for one in engine._sequences.values()}
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    while engine.has_work:
        engine.step()
    continued = [held[len(prompt) :] for held, prompt in zip(outputs.values(), PROMPTS, strict=True)]
    assert continued == expected[0]
