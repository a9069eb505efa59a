"""Trees from ranks alone against a real walk: trees that the drafter builds, judged by the target."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from expected_counts import expected_counts
from typed import stand_in

from specdec_cli.drafters import create
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine, EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.engine.verify import VerifyRow, verify
from specdec_cli.errors import RunError, UsageError
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.predict.draft_trace import GuessTrace
from specdec_cli.measure.predict.ranking import ranking_of
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.measure.predict.tree_replay import acceptance_by_rank, replay_oracle, replay_tree
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import RULES

V, EOS = 12, 11
SHAPES = ("4,2,1", "1,1,1,1", "3", "2,3,2", "1,4", "6,1,1,1,1", "9,3")


def pair(max_context=4096):
    """A target, and a draft that often has the target's token second or third."""
    rng = np.random.default_rng(5)
    base = rng.normal(0, 1.0, (V, V, V))
    base[..., EOS] -= 1.5
    other = base + rng.normal(0, 0.7, base.shape)
    target, draft = (
        TableLM(stand_in(lambda c, t=table: t[c[-2] if len(c) > 1 else 0, c[-1]]), V, order=2, name=name)
        for table, name in ((base, "target"), (other, "draft"))
    )
    draft.max_context = max_context
    return target, draft


def drafter_of(lm):
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: lm, None, V))
    return drafter


@cache
def traced(max_context=4096, temperature=0.0) -> Trace:
    target, draft = pair(max_context)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, frequency_penalty=0.3)
    rows = [PromptRow(i, "", category="ab"[i % 2]) for i in range(40)]
    requests = [Request(r, [r.index % V, 1, 2][: 1 + r.index % 3], replace(params, index=r.index)) for r in rows]
    engine = Engine(target, drafter_of(draft), None, EngineOptions(), eos_token_ids=(EOS,))
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, engine.drafter, 1)
    return trace


@dataclass
class Walked:
    num_steps: int = 0
    num_drafts: int = 0
    at_depth: Counter[int] = field(default_factory=Counter)
    drafted_to: Counter[int] = field(default_factory=Counter)
    by_rank: Counter[int] = field(default_factory=Counter)


def walk(trace, target, draft, shape) -> Walked:
    """Decode every prompt step by step with built trees, and count."""
    counts, drafter = Walked(), drafter_of(draft)
    for handle, prompt in enumerate(trace.prompts):
        tokens = [*prompt.token_ids, prompt.output[0]]
        stop_ids = trace.stop_ids(prompt)
        while tokens[-1] not in stop_ids and len(tokens) < prompt.max_tokens:
            step(counts, handle, prompt, tokens, stop_ids, target, drafter, shape)
        assert tuple(tokens[len(prompt.token_ids) :]) == prompt.output, "the walk keeps the target's tokens"
    return counts


def step(counts, handle, prompt, tokens, stop_ids, target, drafter, shape) -> None:
    num_prompt, params = len(prompt.token_ids), prompt.params
    room = min(prompt.max_tokens - len(tokens) - 1, drafter.max_context - len(tokens) + 1)
    row = DraftRow(handle, list(tokens), num_prompt, max(room, 0), params, stop_ids, False, False, 0.0, tree=shape)
    guesses = drafter.propose([row])[0]
    drafted = guesses.drafted
    logits = target.score([Row(handle, list(tokens), len(drafted) + 1, drafted)])
    p = distribution(logits, [ChainRow(params, tokens, num_prompt, drafted, stop_ids)], V)
    verdict = verify(p, [VerifyRow(RULES["greedy"], params, len(tokens), guesses)])[0]
    emitted = [*(drafted.tokens[node] for node in verdict.path), verdict.own]
    end = next((i + 1 for i, token in enumerate(emitted) if token in stop_ids), len(emitted))
    tokens += emitted[:end]
    counts.num_steps += 1
    counts.num_drafts += bool(drafted)
    depth = drafted.max_depth if drafted else 0
    counts.drafted_to.update(range(1, depth + 1))
    before = -1
    for node in [*verdict.path[:end], None][: min(end, depth)]:
        children = drafted.children(before)
        if node is not None:
            counts.at_depth[drafted.depth(node)] += 1
            counts.by_rank[children.index(node)] += 1
            before = node


@pytest.mark.in_turn(4, every=8)
@pytest.mark.parametrize("max_context", [4096, 14])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_ranks_predict_every_count_of_a_real_walk(shape, max_context: int) -> None:
    target, draft = pair(max_context)
    trace = traced(max_context)
    tree = TreeShape.parse(shape)
    by_depth, counts = replay_tree(trace, "draft", tree.parents), walk(trace, target, draft, tree)
    depths = range(1, tree.depth + 1)
    assert by_depth.num_steps.sum() == counts.num_steps
    assert by_depth.num_drafts.sum() == counts.num_drafts
    assert by_depth.accepted_at_least.sum(axis=0).tolist() == [counts.at_depth[i] for i in depths]
    assert by_depth.drafted_at_least.sum(axis=0).tolist() == [counts.drafted_to[i] for i in depths]
    emitted = sum(len(prompt.output) - 1 for prompt in trace.prompts)
    assert by_depth.tokens_per_step().median == pytest.approx(emitted / counts.num_steps)
    assert counts.by_rank[1] > 5 or tree.is_chain, "siblings of the first child are accepted, too"


@pytest.mark.parametrize("shape", ["4,2,1", "2,3,2", "9,3"])
def test_ranks_predict_what_the_engine_counts(shape: str) -> None:
    target, draft = pair()
    trace, tree, counts = traced(), TreeShape.parse(shape), SpeculativeCounts()
    options = EngineOptions(num_speculative_tokens=tree.depth, max_num_seqs=64, tree=shape)
    engine = Engine(target, drafter_of(draft), None, options, eos_token_ids=(EOS,))
    for prompt in trace.prompts:
        engine.add(list(prompt.token_ids), prompt.params)
    while engine.has_work:
        for event in engine.step():
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                counts.add(emitted)
    found = replay_tree(trace, "draft", tree.parents)
    assert found.num_steps.sum() == counts.num_steps
    predicted, counted = expected_counts(found), counts.as_dict()
    for name, value in predicted.items():
        assert value == pytest.approx(counted[name]), name


def test_a_chain_is_the_tree_without_siblings() -> None:
    trace = traced()
    for chain in replay(trace, "draft", "greedy", 4):
        tree = replay_tree(trace, "draft", range(-1, chain.k - 1))
        assert expected_counts(tree) == expected_counts(chain)


@pytest.mark.parametrize(("width", "depth", "shape"), [(1, 4, "1,1,1,1"), (2, 3, "2,2,2"), (3, 2, "3,3")])
def test_an_oracle_is_the_full_tree(width: int, depth: int, shape: str) -> None:
    trace = traced()
    tree = replay_tree(trace, "draft", TreeShape.parse(shape).parents)
    assert expected_counts(replay_oracle(trace, "draft", width, depth)) == expected_counts(tree)


def test_a_ranking_says_what_chains_trees_and_an_oracle_could_give() -> None:
    trace = traced()
    found = ranking_of(trace, "draft", 4)
    assert found is not None
    vector, lengths = acceptance_by_rank(trace, "draft"), [found.trees[num].median for num in ("8", "16", "32")]
    assert found.recall == pytest.approx({"1": vector[0], "4": vector[:4].sum(), "16": 1.0})
    assert found.chain == replay(trace, "draft", "greedy", 4)[-1].acceptance_length()
    assert found.chain.median < lengths[0] < lengths[1] < lengths[2] < found.oracle.median
    assert lengths[1] >= replay_tree(trace, "draft", TreeShape.parse("4,2").parents).acceptance_length().median


def test_a_draft_that_always_has_the_token_second_needs_trees() -> None:
    trace = traced()
    second = replace(stand_in(trace.drafts["draft"]), rank=np.ones_like(trace.ranks("draft")))
    found = ranking_of(replace(trace, drafts={"draft": second}), "draft", 4)
    assert found is not None
    assert (found.recall["1"], found.recall["4"], found.chain.median) == (0, 1, 1)
    assert found.trees["8"] == found.oracle, "8 nodes are two children at each of four depths"


def test_no_ranking_is_made_up() -> None:
    assert ranking_of(traced(temperature=1.0), "draft", 4) is None
    trace, nothing = traced(), np.zeros((sum(len(prompt.output) for prompt in traced().prompts), 4), dtype=np.int16)
    unranked = replace(stand_in(trace.drafts["draft"]), rank=None)
    for draft in (GuessTrace(nothing, nothing, None), unranked):
        assert ranking_of(replace(trace, drafts={"draft": draft}), "draft", 4) is None


def test_siblings_of_different_widths_are_followed() -> None:
    """The second child alone has children here."""
    trace = traced()
    found = replay_tree(trace, "draft", [-1, -1, -1, 1, 1])
    ranks = trace.ranks("draft")
    first, deep, wide = 0, 0, 0
    for prompt in trace.prompts:
        start = 1
        while start < len(prompt.output):
            room = prompt.max_tokens - len(prompt.token_ids) - start - 1
            path = [int(r) for r in ranks[first + start : first + min(start + 2, len(prompt.output))]]
            one = room >= 1 and path[0] < 3
            two = one and path[0] == 1 and room >= 2 and len(path) == 2 and path[1] < 2
            wide, deep, start = wide + one, deep + two, start + 1 + one + two
        first += len(prompt.output)
    assert found.accepted_at_least.sum(axis=0).tolist() == [wide, deep]
    assert deep > 5


def test_the_acceptance_vector_counts_ranks() -> None:
    trace = traced()
    vector = acceptance_by_rank(trace, "draft")
    chain = replay(trace, "draft", "greedy", 1)[0]
    accepted, num = chain.first.sum(axis=0)
    assert vector[0] == pytest.approx(accepted / num)
    assert vector.shape == (64,)
    assert vector.sum() == pytest.approx(1.0), "no token of a small vocabulary is beyond all ranks"
    assert not vector[V:].any()


def test_trees_that_a_trace_cannot_predict_are_refused() -> None:
    with pytest.raises(UsageError, match="temperature 0 alone"):
        replay_tree(traced(temperature=1.0), "draft", [-1])
    trace = traced()
    with pytest.raises(UsageError, match="`0` nodes"):
        replay_tree(trace, "draft", [])
    with pytest.raises(UsageError, match="`65` nodes"):
        replay_tree(trace, "draft", [-1] * 65)
    with pytest.raises(RunError, match="not before it"):
        replay_tree(trace, "draft", [-1, 2, -1])
