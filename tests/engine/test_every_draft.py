"""Every promise of the engine with every draft: the registry's methods, variants of them, and pairs.

Random drafts of a random target agree on nothing, so most texts are of a few tokens that a bias allows: there about a
third of what is drafted is accepted, and drafts that are accepted, partly accepted and refused follow one another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_draft import KINDS, METHODS, NAMES, Drafts
from invariance import holds
from planted import drafted_nodes_kept, refused_keys_kept
from test_engine_bits import Recorded
from tiny_engine import PROMPTS, preempted, tokens
from tiny_heads import features_of
from typed import not_none

from specdec_cli import drafters
from specdec_cli.drafted import NOTHING
from specdec_cli.drafters import method_of, parse_spec
from specdec_cli.drafters.contract import DraftRow, WithoutFeatures
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.drafting import Drafters
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.outputs import Output
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.events import Stepped
from specdec_cli.lm.door import Row
from specdec_cli.lm.files.origin import Origin
from specdec_cli.measure.audit.chisquare import chi_square, enumerate_joint
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.measure.predict import trace as traces
from specdec_cli.measure.predict.draft_trace import GuessTrace
from specdec_cli.measure.predict.profiling import profile
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.traced import _holds
from specdec_cli.measure.predict.tracing import draft_origin, trace_draft, trace_target
from specdec_cli.measure.predict.tree_replay import replay_tree
from specdec_cli.recipe.resolve import resolve
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

FEW = dict.fromkeys((5, 9, 17, 44), 100.0)
GREEDY = SamplingParams(max_new_tokens=12, logit_bias=FEW)
FREE = SamplingParams(max_new_tokens=8)
SAMPLED = replace(GREEDY, temperature=1.0, seed=3)
SHAPES: list[dict[str, Any]] = [{"k": 1}, {"k": 6}, {"k": 3, "tree": "2,2,1"}, {"k": 4, "tree": "dynamic:9"}]
SHARED = [(11 * i * i + 3 * i) % 89 + 2 for i in range(40)]
PREFIXES = [[*SHARED[:30], 7, 9], [*SHARED[:30], 11], SHARED[:18], SHARED[10:35]]
ALARM = 1e-6


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    return Drafts(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    """With a target in bfloat16, where bits are promised."""
    if not holds(torch.bfloat16):
        pytest.skip("this machine's kernels are not row-invariant in bfloat16")
    return Drafts(tmp_path_factory.mktemp("halves"), "bfloat16")


def shapes_of(drafts: Drafts, name: str) -> list[dict[str, Any]]:
    """The shapes that a draft can guess in."""
    builds_trees = drafts.drafter(name).builds_trees
    return [shape for shape in SHAPES if builds_trees or "tree" not in shape]


def decode(engine: Engine, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Output]:
    """The outputs of prompts together; the draft has not failed."""
    outputs = engine.generate([list(prompt) for prompt in prompts], params)
    assert not sum(engine.drafters.num_failures.values()), engine.drafters.notices
    return outputs


def counts(outputs: Sequence[Output]) -> tuple[int, int, int]:
    """Steps, tokens drafted and tokens accepted."""
    every = [output.speculative for output in outputs]
    names = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    steps, drafted, accepted = (sum(getattr(one, name) for one in every) for name in names)
    return steps, drafted, accepted


def test_every_method_is_here(drafts: Drafts) -> None:
    found = {part for name in NAMES for part in method_of(drafts.drafter(name)).split("+")}
    assert found == set(METHODS) - {"none"}


@pytest.mark.in_turn(3, every=7)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_plain_decoding(drafts: Drafts, name: str) -> None:
    plain = tokens(drafts.once(decode, GREEDY))
    for shape in shapes_of(drafts, name):
        found = decode(drafts.engine(name, **shape), GREEDY)
        assert tokens(found) == plain, shape
        _, drafted, accepted = counts(found)
        assert 0 < accepted < drafted or name == "self-int8", shape
    assert tokens(decode(drafts.engine(name), GREEDY, PROMPTS[2:3])) == plain[2:3], "alone"
    assert tokens(decode(drafts.engine(name), FREE)) == tokens(drafts.once(decode, FREE))


@pytest.mark.in_turn(3, every=7)
@pytest.mark.parametrize("name", NAMES)
def test_gumbel_text_does_not_depend_on_the_draft(drafts: Drafts, name: str) -> None:
    chain, *trees = shapes_of(drafts, name)[1:]
    edited = replace(FREE, temperature=0.9, seed=11, top_k=40, presence_penalty=0.4)
    for params, shapes in ((SAMPLED, [chain, *trees[:1]]), (edited, trees[1:] or [chain])):
        plain = tokens(drafts.once(decode, params, verify="gumbel"))
        for shape in shapes:
            assert tokens(decode(drafts.engine(name, verify="gumbel", **shape), params)) == plain, shape


def recorded(engine: Engine) -> list[torch.Tensor]:
    """The logits that each prompt's tokens were chosen from."""
    engine._stepper = Recorded.of(engine)
    decode(engine, GREEDY)
    return [torch.cat(Recorded.logits[i]) for i in sorted(Recorded.logits)]


@pytest.mark.in_turn(7, every=8)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_bits(halves: Drafts, name: str) -> None:
    expected = halves.once(recorded, max_num_seqs=1)
    for shape in shapes_of(halves, name)[1::2]:
        found = recorded(halves.engine(name, **shape))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), shape


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_text_alone_and_in_company(halves: Drafts, name: str) -> None:
    for place, verify in enumerate(("rejection", "block")):
        together = tokens(decode(halves.engine(name, verify=verify, max_num_seqs=4), SAMPLED))
        alone = decode(halves.engine(name, verify=verify), replace(SAMPLED, index=place), PROMPTS[place : place + 1])
        assert tokens(alone) == together[place : place + 1]


DRAWN = replace(SAMPLED, max_new_tokens=3, temperature=1.2)


def p_of(drafts: Drafts, text: tuple[int, ...]) -> Any:
    """The target's distribution after a text [V]."""
    lm, context = drafts.target, list(text)
    logits = lm.score([Row(10**6, context, 1)])
    lm.release(10**6)
    row = ChainRow(DRAWN, context, len(PROMPTS[0]), NOTHING, frozenset())
    return distribution(logits, [row], drafts.tokenizer.num_tokens).dense()[0].double().numpy()


@pytest.fixture(scope="module")
def joint(drafts: Drafts) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first two tokens."""
    return enumerate_joint(lambda text: p_of(drafts, text), tuple(PROMPTS[0]), 2)


@pytest.mark.in_turn(4, every=8)
@pytest.mark.parametrize("num", [120, pytest.param(1_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_samples_follow_the_targets_distribution(
    drafts: Drafts, joint: dict[tuple[int, ...], float], name: str, num: int
) -> None:
    for shape in ({"k": 2, "verify": "rejection"}, {"k": 2}, {"k": 2, "tree": "2,2"}):
        if "tree" in shape and not drafts.drafter(name).builds_trees:
            continue
        engine = drafts.engine(name, max_num_seqs=64, **shape)
        found = engine.generate([PROMPTS[0]] * num, [replace(DRAWN, index=i) for i in range(num)])
        assert not sum(engine.drafters.num_failures.values()), engine.drafters.notices
        drawn = Counter(tuple(output.token_ids[:2]) for output in found)
        assert chi_square(drawn, joint).p_value > ALARM, shape
    turned = {cell: joint[other] for cell, other in zip(joint, reversed(joint), strict=True)}
    assert chi_square(drawn, turned).p_value < ALARM, "another distribution is noticed"


@pytest.mark.in_turn(0, every=6)
@pytest.mark.parametrize("name", NAMES)
def test_cached_prefixes_change_nothing(drafts: Drafts, name: str) -> None:
    plain = tokens(drafts.once(decode, SAMPLED, PREFIXES, verify="gumbel"))
    without = counts(decode(drafts.engine(name, verify="gumbel"), SAMPLED, PREFIXES))
    engine = drafts.engine(name, verify="gumbel", prefix_caching=True)
    for _ in range(2):
        found = decode(engine, SAMPLED, PREFIXES)
        assert tokens(found) == plain
        assert counts(found) == without or "suffix" in name, "which guesses by outputs of the first pass"


@contextmanager
def tight(drafts: Drafts, num_blocks: int) -> Iterator[None]:
    """A target with so few blocks that sequences are preempted."""
    before = drafts.target.num_blocks
    drafts.target.hold(num_blocks)
    try:
        yield
    finally:
        drafts.target.hold(before)


@pytest.mark.in_turn(5, every=7)
@pytest.mark.parametrize(("name", "caches"), [(name, caches) for name in NAMES for caches in (False, True)])
def test_preempted_sequences_go_on(drafts: Drafts, name: str, caches: bool) -> None:
    params = replace(GREEDY, max_new_tokens=20)
    plain = tokens(drafts.once(decode, params))
    shape = shapes_of(drafts, name)[1:3][-caches]
    with tight(drafts, 22):
        engine = drafts.engine(name, max_num_seqs=4, prefix_caching=caches, **shape)
        found, num = preempted(engine, params)
    assert tokens(found) == plain
    assert num > 0


def written_by(engine: Engine, params: SamplingParams, regex: str) -> list[Output]:
    """The outputs of all prompts that match a regular expression."""
    return preempted(engine, params, grammar=compile_grammar("regex", regex, not_none(engine.tokenizer)))[0]


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_holds(drafts: Drafts, name: str) -> None:
    source = "(ab|[0-9]){2,9}x?"
    for params, verify in ((SamplingParams(24), "auto"), (SamplingParams(24, temperature=0.9, seed=2), "gumbel")):
        plain = drafts.once(written_by, params, source, verify=verify)
        assert all(re.fullmatch(source, output.text) for output in plain)
        for shape in shapes_of(drafts, name)[1 if verify == "auto" else 2 : 3]:
            found = written_by(drafts.engine(name, verify=verify, **shape), params, source)
            assert tokens(found) == tokens(plain), shape


@pytest.mark.in_turn(3, every=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_foretells_the_engines_counts(drafts: Drafts, name: str) -> None:
    for params, verify in ((GREEDY, "greedy"), (SAMPLED, "gumbel")):
        each = [replace(params, index=i) for i in range(len(PROMPTS))]
        requests = [Request(PromptRow(i, ""), *both) for i, both in enumerate(zip(PROMPTS, each, strict=True))]
        engine = drafts.engine(name, max_num_seqs=4, verify=verify)
        trace = replace(drafts.once(trace_target, requests, max_num_seqs=4, verify=verify), drafts={})
        if "+" in name and engine.drafter.draws and verify == "gumbel":
            with pytest.raises(UsageError, match="samples and is not a language model"):
                trace_draft(trace, engine.drafter, 3, target=drafts.target)
            continue
        trace.drafts[name] = trace_draft(trace, drafts.drafter(name), 3, target=drafts.target)
        for one in replay(trace, name, verify, 3)[0 if params is GREEDY else 2 :: 2]:
            found = decode(drafts.engine(name, one.k, max_num_seqs=4, verify=verify), params)
            steps, _, accepted = counts(found)
            assert (one.num_steps.sum(), one.num_accepted_tokens.sum()) == pytest.approx((steps, accepted)), one.k


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("name", NAMES)
def test_a_profile_has_what_a_draft_costs_in_decoding(
    drafts: Drafts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is fed nothing new has its guesses at hand: only real steps tell what they cost."""
    engine, step, seconds = drafts.engine(name), Engine._step, 7.0

    def slow_to_draft(self: Engine) -> Any:
        first, *others = step(self)
        return [replace(first, draft_seconds=seconds) if isinstance(first, Stepped) else first, *others]

    monkeypatch.setattr(Engine, "_step", slow_to_draft)
    costs = profile(engine, 2, (8, 16), time_limit_seconds=0.0, repeats=(2, 2), is_warm=True)
    assert (costs.draft_seconds[:, 0] == 0).all()
    assert (costs.draft_seconds[:, 1:] == seconds).all() == bool(engine.drafter.taps)
    assert (costs.target_seconds > 0).all()


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("tree", ["2,2,1", "3,2+1,1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_foretells_what_a_tree_accepts(drafts: Drafts, name: str, tree: str) -> None:
    drafter, shape = drafts.drafter(name), TreeShape.parse(tree)
    requests = [Request(PromptRow(i, ""), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    trace = replace(drafts.once(trace_target, requests, max_num_seqs=4), drafts={})
    trace.drafts[name] = trace_draft(trace, drafter, shape.depth, target=drafts.target)
    if isinstance(trace.drafts[name], GuessTrace):
        with pytest.raises(UsageError, match="has no distribution"):
            replay_tree(trace, name, shape.parents)
        return
    one = replay_tree(trace, name, shape.parents)
    found = decode(drafts.engine(name, shape.depth, max_num_seqs=4, tree=tree), GREEDY)
    steps, _, accepted = counts(found)
    assert (one.num_steps.sum(), one.num_accepted_tokens.sum()) == pytest.approx((steps, accepted))
    assert accepted > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_traces_file_serves_the_draft_that_it_is_of(drafts: Drafts, name: str, tmp_path: Path) -> None:
    requests = [Request(PromptRow(0, ""), PROMPTS[1], replace(GREEDY, max_new_tokens=4))]
    trace, drafter = replace(drafts.once(trace_target, requests), drafts={}), drafts.drafter(name)
    trace.drafts[name] = trace_draft(trace, drafter, 2, target=drafts.target)
    trace.save(tmp_path / "trace")
    kept = traces.load(tmp_path / "trace")
    assert _holds(kept, name, drafter, needs_ranks=False)
    assert kept.notices == []
    assert kept.drafts[name].origin == draft_origin(drafter)
    if kept.drafts[name].origin is not None:
        other = replace(kept.drafts[name], origin=Origin("another", revision="1"))
        assert not _holds(replace(kept, drafts={name: other}), name, drafter, needs_ranks=False)
        assert "other weights" in kept.notices[-1]


READING = [name for name in METHODS if drafters.get(name).taps is not WithoutFeatures.taps]


@pytest.mark.parametrize("name", [*READING, *KINDS, "ngram+eagle3"])
def test_a_row_without_a_distribution_leaves_the_others_their_guesses(drafts: Drafts, name: str) -> None:
    """Those are asked again in the same step, with the features that they have brought already."""
    drafter, prompt = drafts.drafter(name), list(range(2, 22))
    states = features_of(drafts.target, prompt, drafter.taps)[:-1]

    def row(handle: int, features: torch.Tensor) -> DraftRow:
        return DraftRow(handle, prompt, 3, 3, DRAWN, frozenset(), True, False, 0.0, features=features)

    asked = Drafters(drafter, {}, drafts.tokenizer.num_tokens)
    [alone] = asked.propose([(asked.own_name, row(900, states))])
    asked.release(900)
    broken = states.clone()
    broken[-1] = torch.nan
    troubled, fine = asked.propose([(asked.own_name, row(901, broken)), (asked.own_name, row(902, states))])
    assert asked.num_failures[asked.own_name] == 1
    assert not troubled.drafted
    assert alone.drafted
    assert fine.drafted == alone.drafted
    for handle in (901, 902):
        asked.release(handle)


ANEW = 10**7  # a handle of no engine


def is_as_anew(drafts: Drafts, name: str, params: SamplingParams, **shape: Any) -> bool:
    """Whether each guess of some decoding is that of a sequence which has drafted nothing before."""
    drafter, lm, seen = drafts.drafter(name), drafts.target, list[tuple[DraftRow, Any]]()
    engine, propose = drafts.engine(name, **shape), drafter.propose

    def watched(rows: Sequence[DraftRow]) -> Any:
        guesses = propose(rows)
        seen.extend(
            (replace(row, context=list(row.context)), guess.read()) for row, guess in zip(rows, guesses, strict=True)
        )
        return guesses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", watched)
        _, drafted, accepted = counts(decode(engine, params))
    assert 0 < accepted < drafted
    right = True
    for row, guess in seen:
        states = features_of(lm, row.context, drafter.taps)[:-1] if drafter.taps else None
        anew = drafter.propose([replace(row, handle=ANEW, features=states)])[0].read()
        drafter.release(ANEW)
        right &= guess.drafted == anew.drafted
        if guess.q is not None and anew.q is not None:
            right &= guess.q.shape == anew.q.shape and torch.allclose(guess.q, anew.q, atol=1e-3)
    return right


OF_REFUSALS: dict[str | None, Callable[[pytest.MonkeyPatch], None]] = {
    None: lambda _: None,
    "nodes": drafted_nodes_kept,
    "keys": refused_keys_kept,
}
"""What may be left of refused tokens: a node's output, or keys and values."""


def keeps(drafter: Any, part: str | None) -> bool:
    """Whether a draft keeps nodes, which blocks and masks run without, or keys."""
    if part == "keys":
        cache = drafter.sequences.planned_cache
        return cache is not None and cache.cache.bytes_per_slot > 0
    return part == "nodes" and not drafter.one_pass


@pytest.mark.in_turn(8, every=27)
@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault in OF_REFUSALS for name in (*READING, *KINDS)])
def test_nothing_stays_of_refused_tokens(
    drafts: Drafts, name: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    OF_REFUSALS[fault](monkeypatch)
    found = [is_as_anew(drafts, name, params, **shape) for params in (GREEDY, SAMPLED) for shape in SHAPES[1:3]]
    assert all(found) != keeps(drafts.drafter(name), fault)


PAUSES: tuple[tuple[int, int], ...] = ((16, 0), (24, 6), (34, 0), (44, 6))
"""By the context's length, two pauses of drafting: over each, a text grows by more tokens than a step can give."""


def left_behind(row: DraftRow, holes: Sequence[tuple[int, int]], is_behind: bool) -> DraftRow:
    """The row of a draft that is given nothing of the tokens decoded in pauses but the newest one."""
    context = list(row.context)
    for begin, end in holes:
        context[begin:end] = [context[begin - 1]] * (end - begin)
    features = row.features
    if is_behind and features is not None:
        features = features[:1].expand_as(features)
    return replace(row, context=context, features=features)


@pytest.mark.in_turn(4, every=12)
@pytest.mark.parametrize(("name", "is_left_behind"), [(name, late) for name in NAMES for late in (False, True)])
def test_a_draft_reads_what_was_decoded_while_drafting_paused(
    drafts: Drafts, name: str, is_left_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafts.drafter(name)
    propose, lengths, holes = drafter.propose, dict[int, int](), dict[int, list[tuple[int, int]]]()

    def after_pauses(rows: Sequence[DraftRow]) -> Any:
        given = []
        for row in rows:
            end = len(row.context)
            before = end if row.handle == ANEW else lengths.get(row.handle, end)
            lengths[row.handle], its = end, holes.setdefault(row.handle, [])
            is_behind = end - before > 7
            its.extend([(before, end - 1)] * is_behind)
            given.append(left_behind(row, its, is_behind) if is_left_behind else row)
        return propose(given)

    monkeypatch.setattr(drafter, "propose", after_pauses)
    found = is_as_anew(drafts, name, replace(SAMPLED, max_new_tokens=24), k=6, k_by_context=PAUSES)
    assert sum(map(len, holes.values())) >= 3, "all but one text drafts before a pause"
    assert found != is_left_behind


@pytest.mark.in_turn(6, every=8)
@pytest.mark.parametrize("name", NAMES)
def test_doctor_has_no_doubt(drafts: Drafts, name: str) -> None:
    flags = {"draft": (parse_spec(drafts.specs[name]), "--draft")}
    recipe = resolve(sets=[f"target.model={drafts.target.name}"], flags=flags).recipe
    found = preflight(recipe, look())
    assert found.errors == []
    drafter = drafts.drafter(name)
    assert found.draft_method.rpartition("+")[2] == method_of(drafter).rpartition("+")[2]
    assert found.taps == tuple(drafter.taps)
    assert found.one_pass == drafter.one_pass
