"""Text out of the engine: stop strings across tokens and accepted drafts, in a batch, counted up to the cut."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_engine import Checked, drafter, letter_tokenizer, tiny_lm
from typed import stand_in

from specdec_cli.engine.options import EngineOptions
from specdec_cli.events import Finished, Stepped
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

DRAFTS = ("stranger", "itself", "ngram", "none")
TEXTS = ["the end", "a then and a then and a th", "in one on one on", "Where the other went, and when?"]
PARAMS = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=1.1, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(letter_tokenizer())


@pytest.fixture
def engine_of(target, draft_of, tokenizer):
    def make(name: str = "none", k: int = 4, eos=(), **options) -> Checked:
        draft = drafter(None) if name == "none" else draft_of(name)
        if name in ("stranger", "itself"):
            draft = drafter(stand_in(draft), tokenizer.num_tokens)
        return Checked(target, draft, tokenizer, EngineOptions(num_speculative_tokens=k, **options), eos)

    return make


@pytest.fixture(scope="module")
def plain(target, tokenizer) -> dict[str, list[Any]]:
    engine = Checked(target, drafter(None), tokenizer, EngineOptions(verify="gumbel"))
    return {"greedy": engine.generate(TEXTS, PARAMS), "sampled": engine.generate(TEXTS, SAMPLED)}


def cropped(tokenizer, output, stops, first=1) -> tuple[str, list[int], str | None]:
    """The naive crop: decode ever more tokens, and cut the text at the first stop that has come."""
    for num in range(first, len(output.token_ids) + 1):
        text = tokenizer.decode(output.token_ids[:num])
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)[0]], output.token_ids[:num], min(found)[1]
    return output.text, output.token_ids, None


def test_text_is_the_decoded_tokens(plain, tokenizer) -> None:
    for output in [*plain["greedy"], *plain["sampled"]]:
        assert output.text == tokenizer.decode(output.token_ids)
        assert len(output.text) > 20


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stop_strings_with_a_draft_and_in_a_batch(engine_of, plain, tokenizer, name, kind: str) -> None:
    """Two to seven letters of each plain text in turn; they lie across tokens and across steps."""
    params = PARAMS if kind == "greedy" else SAMPLED
    for place, length in ((1, 2), (9, 3), (16, 5), (13, 7)):
        stops = (*(output.text[place : place + length] for output in plain[kind][:3]), "never in there")
        outputs = engine_of(name, verify="gumbel").generate(TEXTS, replace(params, stop=stops))
        assert [output.stop_reason for output in outputs].count(None) <= 1
        for output, whole in zip(outputs, plain[kind], strict=True):
            text, token_ids, stop = cropped(tokenizer, whole, stops)
            assert (output.text, output.token_ids, output.stop_reason) == (text, token_ids, stop)
            assert output.finish_reason == ("length" if stop is None else "stop")
            counts = output.speculative
            assert counts.num_emitted_tokens == len(token_ids) - 1
            assert counts.num_accepted_tokens <= counts.num_emitted_tokens
            assert sum(i * num for i, num in enumerate(counts.acceptance_histogram)) == counts.num_accepted_tokens


def test_what_a_stop_string_cuts_is_counted_up_to_the_cut(engine_of, plain, tokenizer) -> None:
    """With itself as draft every fifth token after the first is the target's own."""
    whole = plain["greedy"][3]
    for place in range(2, 20):
        stop = whole.text[place : place + 3]
        _, token_ids, _ = cropped(tokenizer, whole, [stop])
        [output] = engine_of("itself").generate(TEXTS[3:], replace(PARAMS, stop=(stop,)))
        assert output.token_ids == token_ids
        own = sum(1 for i in range(1, len(token_ids)) if i % 5 == 0)
        assert output.speculative.num_accepted_tokens == len(token_ids) - 1 - own


@pytest.mark.parametrize("name", DRAFTS)
def test_streamed_pieces_make_the_text_and_never_show_a_stop(engine_of, plain, name) -> None:
    stop = plain["greedy"][1].text[11:15]
    engine = engine_of(name)
    texts = [""] * len(TEXTS)
    for event in engine.stream(TEXTS, replace(PARAMS, stop=(stop,))):
        if isinstance(event, Stepped):
            for emitted in event.emitted:
                texts[emitted.sequence_id] += emitted.text
                assert stop not in texts[emitted.sequence_id]
        elif isinstance(event, Finished):
            texts[event.sequence_id] += event.text
    assert texts == [output.text.split(stop)[0] for output in plain["greedy"]]


@pytest.mark.parametrize("name", DRAFTS)
def test_min_tokens_holds_for_stop_strings_too(engine_of, plain, tokenizer, name) -> None:
    stop = plain["greedy"][3].text[4:6]
    for num in (1, 5, 9):
        outputs = engine_of(name).generate(TEXTS, replace(PARAMS, stop=(stop,), min_tokens=num))
        for output in outputs:
            assert len(output.token_ids) >= num
            assert output.finish_reason in ("stop", "length")
            assert (output.stop_reason == stop) == (output.finish_reason == "stop")
    early = engine_of(name).generate(TEXTS[3:], replace(PARAMS, stop=(stop,)))[0]
    late = engine_of(name).generate(TEXTS[3:], replace(PARAMS, stop=(stop,), min_tokens=20))[0]
    assert len(early.token_ids) < 12
    assert len(late.token_ids) >= 20
    assert late.token_ids == plain["greedy"][3].token_ids[: len(late.token_ids)]


@pytest.mark.parametrize("name", DRAFTS)
def test_an_end_token_is_kept_as_token_and_is_no_text(engine_of, plain, tokenizer, name) -> None:
    whole = plain["greedy"][3]
    end = whole.token_ids[10]
    outputs = engine_of(name, eos=(end,)).generate(TEXTS[3:], PARAMS)
    kept = whole.token_ids[: whole.token_ids.index(end) + 1]
    assert outputs[0].token_ids == kept
    assert outputs[0].text == tokenizer.decode(kept[:-1])
    assert outputs[0].stop_reason == end


def test_a_stop_string_before_an_end_token_in_one_step_wins(engine_of, plain, tokenizer) -> None:
    """Both are among the tokens of one accepted draft: what comes first in the text ends it."""
    whole = plain["greedy"][3]
    stop = tokenizer.decode(whole.token_ids[6:8])
    end = next(token for token in whole.token_ids[9:] if token not in whole.token_ids[:9])
    text, token_ids, _ = cropped(tokenizer, whole, [stop])
    [output] = engine_of("itself", k=20, eos=(end,)).generate(TEXTS[3:], replace(PARAMS, stop=(stop,)))
    assert (output.text, output.token_ids, output.stop_reason) == (text, token_ids, stop)


def test_no_token_beyond_the_tokenizers_is_decoded(folder, tokenizer) -> None:
    """Target and draft are padded to other widths; the tokenizer says what is real."""
    target, draft = (tiny_lm(folder, "llama", seed=s, vocab_size=size) for s, size in ((4, 128), (5, 96)))
    for params in (PARAMS, SAMPLED):
        engine = Checked(target, drafter(draft, tokenizer.num_tokens), tokenizer)
        assert engine.num_tokens == tokenizer.num_tokens == 87
        outputs = engine.generate(TEXTS, params)
        assert max(token for output in outputs for token in output.token_ids) < 87
