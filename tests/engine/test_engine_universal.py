"""A draft with another tokenizer: the output is the target's own, whatever the draft makes of the text."""

from __future__ import annotations

from typing import Any

import pytest
from many_tokenizers import KINDS, PERMUTED, tokenizer
from shortened import mostly_slow
from universal_engine import PROMPTS, ids, random_lm, reciter, universal_engine

from specdec_cli.drafters import universal
from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.outputs import Output
from specdec_cli.events import Stepped
from specdec_cli.measure.audit.draws import DistributionCheck, Draws, ask_pair, check
from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.translation import Translator

TEXT = "Once upon a time there was a lion named Bear. He loved the river and the café, and Lily went to the park."
GREEDY = SamplingParams(max_new_tokens=16)
MATCHES = ("text", "intersection")


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """Targets and drafts by kind."""
    folder = tmp_path_factory.mktemp("universal")
    found: dict[tuple[str, str], Any] = {}

    def of(role: str, kind: str):
        if (role, kind) not in found:
            layers = {"target": 2, "draft": 1}[role]
            found[role, kind] = random_lm(folder / role, kind, seed=len(kind), num_hidden_layers=layers)
        return found[role, kind]

    return of


def token_ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def acceptance(outputs: list[Output]) -> float:
    return outputs[0].speculative.acceptance_rate or 0.0


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("draft", [*KINDS, PERMUTED])
def test_greedy_output_is_the_targets_own(lms, draft: str, match: str) -> None:
    """Ragged batches, special tokens, emoji and half characters; every kind drafts for a byte-level target."""
    target = "coarser byte-level" if draft == "byte-level" else "byte-level"
    plain = universal_engine(lms("target", target), target, None).generate(ids(target), GREEDY)
    for k, batch in ((1, 8), (5, 3)):
        engine = universal_engine(
            lms("target", target), target, lms("draft", draft), draft, match, k, max_num_seqs=batch
        )
        assert token_ids(engine.generate(ids(target), GREEDY)) == token_ids(plain)


@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("target", ["sentencepiece", "unigram", "word-piece", "characters"])
def test_every_kind_can_be_the_target(lms, target: str, match: str) -> None:
    plain = universal_engine(lms("target", target), target, None).generate(ids(target), GREEDY)
    engine = universal_engine(lms("target", target), target, lms("draft", "byte-level"), "byte-level", match)
    assert token_ids(engine.generate(ids(target), GREEDY)) == token_ids(plain)


@pytest.mark.parametrize("match", MATCHES)
def test_gumbel_output_is_that_of_plain_decoding(lms, match: str) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.9, seed=5)
    target = lms("target", "byte-level")
    plain = universal_engine(target, "byte-level", None, verify="gumbel").generate(ids("byte-level"), params)
    engine = universal_engine(target, "byte-level", lms("draft", "unigram"), "unigram", match, verify="gumbel")
    assert token_ids(engine.generate(ids("byte-level"), params)) == token_ids(plain)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("match", MATCHES)
def test_preemption_and_cached_prefixes_change_nothing(tmp_path, match: str, prefix_caching: bool) -> None:
    target, draft = (random_lm(tmp_path / role, "byte-level") for role in ("target", "draft"))
    prompts = ids("byte-level", [PROMPTS[3], PROMPTS[3] + "and", PROMPTS[0], PROMPTS[3]])
    plain = universal_engine(target, "byte-level", None).generate(prompts, GREEDY)
    draft = random_lm(tmp_path / "own", "sentencepiece")
    engine = universal_engine(target, "byte-level", draft, "sentencepiece", match, prefix_caching=prefix_caching)
    for _ in range(2):
        assert token_ids(engine.generate(prompts, GREEDY)) == token_ids(plain)
    target.hold(14)
    few = universal_engine(
        target, "byte-level", draft, "sentencepiece", match, prefix_caching=prefix_caching, max_num_seqs=5
    )
    assert token_ids(few.generate(prompts, GREEDY)) == token_ids(plain)


@pytest.mark.parametrize("match", MATCHES)
def test_a_full_draft_cache_leaves_rows_undrafted(lms, tmp_path, match: str) -> None:
    draft = random_lm(tmp_path, "characters")
    draft.hold(12)
    target = lms("target", "byte-level")
    plain = universal_engine(target, "byte-level", None).generate(ids("byte-level"), GREEDY)
    engine = universal_engine(target, "byte-level", draft, "characters", match)
    assert token_ids(engine.generate(ids("byte-level"), GREEDY)) == token_ids(plain)


@pytest.mark.parametrize("match", MATCHES)
def test_a_text_longer_than_the_draft_reads(lms, tmp_path, match: str) -> None:
    draft = random_lm(tmp_path, "characters", max_position_embeddings=48)
    target = lms("target", "byte-level")
    params = SamplingParams(max_new_tokens=60)
    plain = universal_engine(target, "byte-level", None).generate(ids("byte-level")[:3], params)
    engine = universal_engine(target, "byte-level", draft, "characters", match)
    assert token_ids(engine.generate(ids("byte-level")[:3], params)) == token_ids(plain)


@pytest.mark.parametrize("match", MATCHES)
def test_stop_strings_and_penalties(lms, match: str) -> None:
    target = lms("target", "byte-level")
    for params in (
        SamplingParams(max_new_tokens=24, stop=("e", "an")),
        SamplingParams(max_new_tokens=12, repetition_penalty=1.3, logit_bias={70: 3.0}, min_tokens=4),
    ):
        plain = universal_engine(target, "byte-level", None).generate(ids("byte-level"), params)
        engine = universal_engine(target, "byte-level", lms("draft", "sentencepiece"), "sentencepiece", match)
        found = engine.generate(ids("byte-level"), params)
        assert token_ids(found) == token_ids(plain)
        assert [one.text for one in found] == [one.text for one in plain]


@pytest.mark.parametrize("match", MATCHES)
def test_a_grammar(lms, match: str) -> None:
    target, own = lms("target", "byte-level"), tokenizer("byte-level")
    grammar = compile_grammar("regex", "(the (lion|bear) [0-9]{2,4} )+", own)
    found = []
    for draft in (None, lms("draft", "sentencepiece")):
        engine = universal_engine(target, "byte-level", draft, "sentencepiece", match)
        numbers = [engine.add(prompt, GREEDY, grammar=grammar) for prompt in ids("byte-level")]
        texts = {number: list[int]() for number in numbers}
        while engine.has_work:
            for event in engine.step():
                for emitted in event.emitted if isinstance(event, Stepped) else ():
                    texts[emitted.sequence_id] += emitted.tokens
        found.append([texts[number] for number in numbers])
    assert found[0] == found[1]
    assert own.decode(found[0][0]).startswith("the ")


RECITERS = [("byte-level", "sentencepiece"), ("sentencepiece", "coarser byte-level")]


@pytest.mark.parametrize(("target", "draft"), RECITERS)
def test_a_draft_that_knows_the_text_is_accepted_nearly_whole(target: str, draft: str) -> None:
    prompt = tokenizer(target).encode("Once upon a time", False)
    lm, other = reciter(target, TEXT), reciter(draft, TEXT)
    params = SamplingParams(max_new_tokens=20)
    by_text = universal_engine(lm, target, other, draft, "text").generate([prompt], params)
    assert acceptance(by_text) > 0.9
    by_tokens = universal_engine(lm, target, other, draft, "intersection").generate([prompt], params)
    assert 0.1 < acceptance(by_tokens) <= acceptance(by_text)


MODES = [(match, verify) for match in MATCHES for verify in ("rejection", "block", "exact-match")]


@pytest.mark.parametrize("mode", mostly_slow(MODES, [("text", "block")]))
def test_samples_follow_the_targets_distribution(mode: tuple[str, str]) -> None:
    assert drawn(*mode).is_fine


def drawn(match: str, verify: str) -> DistributionCheck:
    engine = universal_engine(
        reciter("byte-level", TEXT, 2.0),
        "byte-level",
        reciter("unigram", TEXT, 3.0),
        "unigram",
        match,
        3,
        verify=verify,
    )
    question = ask_pair(engine, tokenizer("byte-level").encode("Once upon a", False), SamplingParams(temperature=1.0))
    draws = Draws(engine, question.prompt, question.params)
    draws.run(800, lambda _: None, lambda: False)
    return check(match, draws, question.joint, question.num_choices)


@pytest.mark.slow
def test_a_q_that_is_not_normalized_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = universal.Drafter.propose

    def planted(self, rows: list[DraftRow]) -> list[Guesses]:
        return [Guesses(one.drafted, None if one.q is None else 0.4 * one.q) for one in propose(self, rows)]

    monkeypatch.setattr(universal.Drafter, "propose", planted)
    assert not drawn("intersection", "rejection").is_fine


def test_ids_taken_over_untranslated_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Translator, "guessed", lambda self, translation, tokens: list(tokens))
    with pytest.raises(AssertionError):
        test_a_draft_that_knows_the_text_is_accepted_nearly_whole("byte-level", "sentencepiece")


def test_a_boundary_token_that_is_guessed_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed = Translator.guessed

    def planted(self, translation, tokens):
        return [translation.tokens[-1], *guessed(self, translation, tokens)]

    monkeypatch.setattr(Translator, "guessed", planted)
    with pytest.raises(AssertionError):
        test_a_draft_that_knows_the_text_is_accepted_nearly_whole("byte-level", "sentencepiece")
