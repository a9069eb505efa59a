"""Structured output under speculation: it always matches, it is the masked target's own, and it ends by itself."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tiny_engine import check_books, drafter, ngram, tiny_lm
from tiny_grammar import byte_tokenizer, letter_tokens
from typed import stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import Guesses, Resources
from specdec_cli.drafters.model import Drafter
from specdec_cli.engine import stepper as stepper_module
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.outputs import Outputs
from specdec_cli.engine.stepper import fit
from specdec_cli.errors import UsageError
from specdec_cli.events import Failed, Finished
from specdec_cli.measure.audit import toy
from specdec_cli.measure.audit.chisquare import enumerate_joint
from specdec_cli.measure.audit.draws import Draws, check
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.grammar import Grammar, compile_grammar
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.sampling.thinking import ThinkingMarkers, after_thinking

TOKENIZER = byte_tokenizer()
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["ab", "true"]}, "maxItems": 2},
    },
    "required": ["name", "ok", "n", "tags"],
    "additionalProperties": False,
}
CHOICES = ["abab", "abba", "true", "no"]
SOURCES = {"json_schema": json.dumps(SCHEMA), "regex": "(ab|[0-9]){2,9}x?", "choice": json.dumps(CHOICES)}
GRAMMARS = {kind: compile_grammar(kind, source, TOKENIZER) for kind, source in SOURCES.items()}
PROMPT = TOKENIZER.encode('{"name":"ab","ok":true} ab ab 12 12', False)
LONG = SamplingParams(max_new_tokens=120)


def matches(kind: str, text: str) -> bool:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return " " not in text.replace(json.loads(text)["name"], "")
    return text in CHOICES if kind == "choice" else re.fullmatch(SOURCES["regex"], text) is not None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """The target, a stranger and the target again; vocabularies padded beyond the tokenizer's, the stranger's more."""
    shape: dict[str, Any] = {"vocab_size": TOKENIZER.num_tokens + 6, "max_position_embeddings": 256}
    wider = shape | {"vocab_size": TOKENIZER.num_tokens + 21}
    folder = tmp_path_factory.mktemp("grammar")
    made = {"stranger": tiny_lm(folder, "llama", 2, **wider), "itself": tiny_lm(folder, "llama", 1, **shape)}
    return {"target": tiny_lm(folder, "llama", 1, **shape), **made}


def engine_of(models, draft: str | None = None, k: int = 4, **options) -> Engine:
    drafts = {None: lambda: drafter(None), "ngram": ngram}
    made = drafts.get(draft, lambda: drafter(models[draft], TOKENIZER.num_tokens))()
    return Engine(models["target"], made, TOKENIZER, EngineOptions(k, **options), eos_token_ids=(EOS,))


def run(engine: Engine, grammars: Sequence[Grammar | None], params=LONG, prompt=PROMPT):
    """The outputs' texts, tokens and reasons, decoded together."""
    outputs, driver = Outputs(), Driver(engine)
    for i, grammar in enumerate(grammars):
        outputs.add(driver, prompt, params=replace(params, index=i), grammar=grammar)
    for events in driver.steps():
        for event in events:
            outputs.observe(event)
        check_books(engine)
    return outputs.finished()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(("draft", "k"), [(None, 0), ("stranger", 1), ("itself", 4), ("ngram", 4), ("itself", 8)])
def test_every_output_matches_and_ends_by_itself(models, draft: str | None, k: int, temperature: float) -> None:
    params = replace(LONG, temperature=temperature, seed=3)
    kinds = [*GRAMMARS] * (1 if temperature == 0 else 4)
    for kind, output in zip(kinds, run(engine_of(models, draft, k), [GRAMMARS[k] for k in kinds], params), strict=True):
        assert matches(kind, output.text), (kind, output.text)
        assert output.finish_reason == "stop"
        assert output.stop_reason in (None, EOS)
        assert output.text == TOKENIZER.decode([token for token in output.token_ids if token != EOS])


def test_greedy_tokens_are_equal_at_every_k_with_every_draft_and_in_company(models) -> None:
    grammars = [*GRAMMARS.values(), None]
    short = replace(LONG, max_new_tokens=60)
    alone = [run(engine_of(models), [grammar], short)[0].token_ids for grammar in grammars]
    for draft in ("stranger", "itself", "ngram"):
        for k in (1, 4, 8) if draft == "itself" else (4,):
            outputs = run(engine_of(models, draft, k), grammars, short)
            assert [output.token_ids for output in outputs] == alone, (draft, k)


@pytest.mark.parametrize("mode", ["gumbel"])
def test_one_seed_gives_one_text_with_any_draft(models, mode: str) -> None:
    params, grammars = replace(LONG, temperature=1.0), [*GRAMMARS.values()] * 2
    plain = [output.token_ids for output in run(engine_of(models, verify=mode), grammars, params)]
    for draft in ("stranger", "itself", "ngram"):
        assert [o.token_ids for o in run(engine_of(models, draft, 5, verify=mode), grammars, params)] == plain


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_one_seed_gives_one_text_alone_and_in_company(models, mode: str) -> None:
    params, [grammar, other, _] = replace(LONG, temperature=1.0, max_new_tokens=40), GRAMMARS.values()
    alone = run(engine_of(models, "stranger", 3, verify=mode), [grammar], params)[0]
    company = run(engine_of(models, "stranger", 3, verify=mode), [grammar, None, other, None], params)
    assert company[0].token_ids == alone.token_ids


def test_drafts_that_the_grammar_refuses_are_not_all_lost(models) -> None:
    [output] = run(engine_of(models, "itself", 4), [GRAMMARS["regex"]], replace(LONG, temperature=0.7))
    assert output.speculative.num_draft_tokens > 0


@pytest.mark.parametrize("k", [0, 4])
def test_the_end_token_comes_only_where_the_grammar_accepts(models, k: int) -> None:
    eager = replace(LONG, logit_bias={EOS: 1e6})
    [output] = run(engine_of(models, "ngram", k), [GRAMMARS["regex"]], eager)
    assert re.fullmatch("(ab|[0-9]){2}", output.text)
    assert output.token_ids[-1] == EOS
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)
    [longer] = run(engine_of(models, "ngram", k), [GRAMMARS["regex"]], replace(eager, min_tokens=5))
    assert len(longer.token_ids) == 6
    [ignored] = run(engine_of(models, "ngram", k), [GRAMMARS["regex"]], replace(eager, ignore_eos=True))
    assert EOS not in ignored.token_ids
    assert matches("regex", ignored.text)


@pytest.mark.parametrize("k", [0, 4])
def test_what_can_only_end_ends_before_min_tokens(models, k: int) -> None:
    [output] = run(engine_of(models, "ngram", k), [GRAMMARS["choice"]], replace(LONG, min_tokens=50))
    assert output.text in CHOICES
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_length_or_a_stop_string_still_cuts(models) -> None:
    [short] = run(engine_of(models, "itself"), [GRAMMARS["json_schema"]], replace(LONG, max_new_tokens=7))
    assert (len(short.token_ids), short.finish_reason) == (7, "length")
    [cut] = run(engine_of(models, "itself"), [GRAMMARS["json_schema"]], replace(LONG, stop=('":',)))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ('{"name', "stop", '":')


def test_logprobs_are_those_of_the_masked_target(models) -> None:
    for temperature in (0.0, 1.0):
        params = replace(LONG, temperature=temperature, logprobs=4)
        [output] = run(engine_of(models, "itself", 3), [GRAMMARS["regex"]], params)
        matcher = GRAMMARS["regex"].start(TOKENIZER.num_tokens, (EOS,), (EOS,))
        for one in output.logprobs:
            assert all(matcher.allowed[token] for token, _ in one.top)
            assert sum(np.exp(value) for _, value in one.top) <= 1 + 1e-5
            matcher.accept([one.token_id])
        first = output.logprobs[0]
        assert first.token_id in dict(first.top) or temperature > 0


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(models) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    costly = compile_grammar("json_schema", json.dumps(many), TOKENIZER)
    engine = engine_of(models, "itself")
    first = engine.add(PROMPT, LONG, grammar=costly)
    engine.add(PROMPT, LONG, grammar=GRAMMARS["choice"])
    told, texts = [], ""
    while engine.has_work:
        try:
            events = engine.step()
        except LogitsError as error:
            told.append(str(error))
            continue
        told += [str(event.error) for event in events if isinstance(event, Failed) and event.sequence_id == first]
        texts += "".join(e.text for event in events for e in getattr(event, "emitted", ()) if e.sequence_id != first)
        texts += "".join(e.text for e in events if isinstance(e, Finished) and e.sequence_id != first)
    assert len(told) == 1
    assert "the grammar cannot continue" in told[0]
    assert texts in CHOICES


def test_a_grammar_of_another_tokenizer_is_refused(models) -> None:
    with pytest.raises(UsageError, match="another tokenizer"):
        engine_of(models).add(PROMPT, LONG, grammar=compile_grammar("regex", "a", byte_tokenizer()))


# In distribution: the table pair of four letters under a grammar whose masks depend on what came before.
REGEX = "([ab][bcd]|d[ab])*"
ALARM = 1e-6
NUM_DRAWS = 4_000


def allowed_after(output: tuple[int, ...]) -> list[int]:
    if len(output) % 2 == 0:
        return [0, 1, 3]
    return [0, 1] if output[-1] == 3 else [1, 2, 3]


def masked_joint() -> dict[tuple[int, ...], float]:
    target = toy.tables()[0].astype(np.float64)

    def probs(context: tuple[int, ...]) -> np.ndarray:
        allowed = allowed_after(context[len(toy.PROMPT) :])
        weights = np.zeros(toy.NUM_TOKENS)
        weights[allowed] = np.exp(target[context[-2], context[-1]] / toy.PARAMS.temperature)[allowed]
        return weights / weights.sum()

    return enumerate_joint(probs, toy.PROMPT, 3)


class Constrained(Engine):
    """The toy engine, every request under one grammar."""

    grammar = compile_grammar("regex", REGEX, letter_tokens())

    def add(self, *args, **settings):
        return super().add(*args, grammar=self.grammar, **settings)


def p_value(mode: str, num_draws: int = NUM_DRAWS) -> float:
    target, draft = (
        TableLM(stand_in(lambda last, table=table: table[last[-2], last[-1]]), toy.NUM_TOKENS, order=2)
        for table in toy.tables()
    )
    guesser = Drafter("table")
    guesser.load(Resources(lambda _: draft, None, toy.NUM_TOKENS))
    options = EngineOptions(num_speculative_tokens=3, verify=mode, max_num_seqs=512)
    draws = Draws(Constrained(target, guesser, options=options), list(toy.PROMPT), toy.PARAMS, 3)
    draws.run(num_draws, lambda _: None, lambda: False)
    result = check(mode, draws, masked_joint(), toy.NUM_TOKENS)
    assert result.num_accepted_tokens > num_draws // 4
    return result.p_value


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("mode", ["rejection", "block", "gumbel", "exact-match"])
def test_the_joint_of_three_tokens_is_the_masked_targets_own(mode: str) -> None:
    assert p_value(mode) > ALARM


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_the_planted_fault_of_cutting_before_a_refused_draw_is_caught(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cuts_before(guesses, matcher, place):
        fitting, allowed = fit(Guesses(guesses.drafted), matcher, place)
        num = len(fitting.drafted)
        return Guesses(fitting.drafted, guesses.q[:num] if guesses.q is not None and num else None), allowed

    monkeypatch.setattr(stepper_module, "fit", cuts_before)
    assert p_value(mode, 2 * NUM_DRAWS) < ALARM


@pytest.mark.parametrize("is_drawn", [True, False], ids=["with q", "without"])
def test_each_path_of_a_tree_is_cut_at_what_the_grammar_refuses(is_drawn: bool) -> None:
    """A token drawn from q stays, as its path's last; one without q goes, with all after it."""
    matcher = Constrained.grammar.start(toy.NUM_TOKENS, frozenset())
    #      a  d  c | ab  aa  da  dc | abd  aab  daa
    tree = Drafted((0, 3, 2, 1, 0, 0, 2, 3, 1, 0), (-1, -1, -1, 0, 0, 1, 1, 3, 4, 5))
    q = torch.arange(10.0)[:, None].expand(-1, toy.NUM_TOKENS) if is_drawn else None
    fitting, allowed = fit(Guesses(tree, q), matcher, 0)
    kept = [0, 1, 2, 3, 4, 5, 6, 7, 9] if is_drawn else [0, 1, 3, 5, 7, 9]
    assert fitting.drafted == tree.keep(kept)
    assert (fitting.q is None) == (not is_drawn)
    assert fitting.q is None or fitting.q[:, 0].tolist() == kept
    for place, mask in enumerate(allowed):
        path = fitting.drafted.tokens_to(place - 1)
        is_refused = any(path[i] not in allowed_after(path[:i]) for i in range(len(path)))
        expected = range(toy.NUM_TOKENS) if is_refused else allowed_after(path)
        assert np.flatnonzero(mask).tolist() == list(expected)


THOUGHTS = [
    after_thinking(GRAMMARS[kind], ThinkingMarkers(*markers), stand_in(begins))
    for kind, markers, begins in [
        ("regex", ("x", "y"), "thinking"),
        ("choice", ("qq", "ab"), "undecided"),
        ("json_schema", ("2", "1"), "undecided"),
    ]
]


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_thought_before_the_grammar_changes_nothing_with_any_draft(models, temperature: float) -> None:
    """`gumbel` and greedy text is plain decoding's at every k, and what follows the thought matches."""
    verify = {"verify": "gumbel"} if temperature else {}
    params = replace(LONG, temperature=temperature)
    plain = run(engine_of(models, **stand_in(verify)), THOUGHTS, params)
    for draft, k in [("stranger", 3), ("itself", 4), ("ngram", 5)]:
        outputs = run(engine_of(models, draft, k, **verify), THOUGHTS, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain], (draft, k)
    [thought, choice, _] = plain
    head, end, answer = thought.text.partition("y")
    assert thought.finish_reason == "length" or (end and matches("regex", answer)), head
    if not choice.text.startswith("qq"):
        assert choice.text in CHOICES


def test_an_end_token_does_not_end_a_thought(models) -> None:
    eager = replace(LONG, logit_bias={EOS: 1e6, TOKENIZER.encode("y", False)[0]: 1e3})
    [output] = run(engine_of(models, "ngram", 4), THOUGHTS[:1], eager)
    assert output.text[0] == "y"
    assert matches("regex", output.text[1:])
    assert output.token_ids[-1] == EOS
