"""Trees through the whole engine: the output is that of plain decoding, and the cache's blocks add up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from specdec_cli.drafted import Drafted
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Drafter, Resources
from specdec_cli.engine.engine import Engine, EngineOptions
from specdec_cli.engine.jobs.async_engine import AsyncEngine
from specdec_cli.engine.sequence import Sequence as Running
from specdec_cli.errors import UsageError
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES

V, END = 11, 10
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6] * 9, [7, 8, 9, 7, 8, 9, 7], [2, 2, 2]]
STATIC = ["4,2,1", "2,2,2,2,1,1", "16", "3,3,2"]
DYNAMIC = ["dynamic:4", "dynamic:16", "dynamic:60"]


class CheckedLM(TableLM):
    """A table that checks at every call that free and used blocks are all there are."""

    def score(self, rows: Sequence[Row]):
        logits = super().score(rows)
        self.check_integrity()
        return logits


def table(seed: int = 0, num_blocks: int = 4096, max_context: int = 200) -> CheckedLM:
    """Logits that end a text now and then."""
    random = TableLM.random(V, order=2, seed=seed, scale=2.0)
    return CheckedLM(
        random._function, V, order=2, num_blocks=num_blocks, block_size=4, max_context=max_context, name=f"table-{seed}"
    )


def drafter(draft: str) -> Drafter:
    """A random model, the target itself, or n-gram."""
    made = create("ngram", {"min": 1}) if draft == "ngram" else create("model", {"model": draft})
    made.load(Resources(lambda name: table(0 if draft == "itself" else 5), None, V))
    return made


def engine(draft: str, tree: str | None, k: int = 6, target: TableLM | None = None, **options) -> Engine:
    given = EngineOptions(num_speculative_tokens=k, tree=tree, **options)
    return Engine(target or table(), drafter(draft), options=given, eos_token_ids=(END,))


def params(temperature: float = 0.0, **more) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "temperature": temperature, "seed": 3, **more})


def decode(one: Engine, sampling: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in one.generate(list(prompts), sampling)]


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("tree", STATIC + DYNAMIC)
@pytest.mark.parametrize("draft", ["random", "itself", "ngram"])
def test_greedy_output_is_that_of_plain_decoding(draft: str, tree: str, max_num_seqs: int) -> None:
    plain = decode(engine("random", None, k=0, max_num_seqs=max_num_seqs), params())
    one = engine(draft, tree, max_num_seqs=max_num_seqs)
    assert decode(one, params()) == plain
    assert one.target.num_free_blocks == one.target.num_blocks


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("tree", ["3,2,1,1,1,1", "dynamic:16"])
def test_every_depth_gives_plain_decodings_output(tree: str, k: int) -> None:
    plain = decode(engine("random", None, k=0), params())
    one = engine("itself", tree)
    assert [output.token_ids for output in one.generate(PROMPTS, params(), num_speculative_tokens=k)] == plain


@pytest.mark.parametrize("tree", ["4,2,1", "dynamic:16"])
@pytest.mark.parametrize("draft", ["random", "itself", "ngram"])
def test_gumbel_output_is_that_of_plain_decoding(draft: str, tree: str) -> None:
    plain = decode(engine("random", None, k=0, verify="gumbel"), params(0.9, top_k=6))
    assert decode(engine(draft, tree, verify="gumbel"), params(0.9, top_k=6)) == plain


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("tree", ["4,2,1", "dynamic:16"])
@pytest.mark.parametrize("verify", ["auto", "gumbel", "exact-match"])
def test_sampled_text_is_the_same_alone_and_in_company(verify: str, tree: str) -> None:
    sampling = params(0.9, top_p=0.9, presence_penalty=0.5, min_tokens=5)
    together = decode(engine("random", tree, verify=verify, max_num_seqs=5), sampling)
    alone = decode(engine("random", tree, verify=verify, max_num_seqs=1), sampling)
    assert together == alone


def test_rows_with_their_own_trees_share_a_step() -> None:
    plain = decode(engine("random", None, k=0), params())
    one = engine("itself", None, max_num_seqs=8)
    trees = [None, "4,2,1", "dynamic:16", "2,2", "dynamic:60"]
    ids = [one.add(prompt, params(), tree=tree) for prompt, tree in zip(PROMPTS, trees, strict=True)]
    found: dict[int, list[int]] = {i: [] for i in ids}
    while one.has_work:
        for event in one.step():
            if isinstance(event, Stepped):
                for emitted in event.emitted:
                    found[emitted.sequence_id] += emitted.tokens
    assert list(found.values()) == plain


@pytest.mark.parametrize("tree", ["4,2,1", "dynamic:60"])
def test_a_draft_that_is_the_target_is_accepted_to_the_depth(tree: str) -> None:
    outputs = engine("itself", tree, k=3).generate([[4]], params(ignore_eos=True, max_new_tokens=41))
    assert outputs[0].speculative.acceptance_length == 4


@pytest.mark.parametrize("tree", ["4,2,1", "dynamic:30"])
def test_blocks_are_reserved_for_every_node(tree: str) -> None:
    plain = decode(engine("random", None, k=0), params())
    tight = engine("itself", tree, target=table(num_blocks=34))
    assert decode(tight, params()) == plain
    assert tight.target.num_free_blocks == 34


def test_a_tree_at_the_contexts_end() -> None:
    plain = decode(engine("random", None, k=0, target=table(max_context=24)), params(ignore_eos=True))
    one = engine("itself", "4,2,2", target=table(max_context=24))
    assert decode(one, params(ignore_eos=True)) == plain
    assert max(len(prompt) + len(out) for prompt, out in zip(PROMPTS, plain, strict=True)) == 24


def test_a_shape_without_siblings_is_the_chain() -> None:
    one = engine("random", "1,1,1", k=6, verify="block")
    chain = engine("random", None, k=3, verify="block")
    assert decode(one, params(0.9)) == decode(chain, params(0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "4,2", "verify": "block"}, "`block` judges chains alone, and the tree is"),
        ({"tree": "4,2", "verify": "typical"}, "`typical` judges chains alone"),
        ({"tree": "auto"}, "the tree `auto` is for `sweep-k`, which looks for the best shape"),
        ({"tree": "2,1,1,1,1,1,1"}, "`7` deep, and num_speculative_tokens is `6`"),
        ({"tree": "4,2", "depth_policy": "adaptive"}, "`adaptive` does not fit the tree"),
    ],
)
def test_what_does_not_fit_a_tree_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine("random", **options).add([1], params(0.9))


def test_a_model_or_draft_without_trees_is_refused_at_load() -> None:
    chain = table()
    chain.scores_trees = False
    with pytest.raises(UsageError, match="this model cannot score a drafted tree"):
        engine("random", "4,2", target=chain)
    none = create("none", {})
    with pytest.raises(UsageError, match="the draft `none` builds no trees"):
        Engine(table(), none, options=EngineOptions(tree="4,2"))
    plain = Engine(table(), none)
    with pytest.raises(UsageError, match="the draft `none` builds no trees"):
        plain.add([1], tree="4,2")


def test_nodes_depths_and_ranks_are_counted() -> None:
    drafted = Drafted((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))
    sequence = Running(0, [1, 2], 1, params(), frozenset(), RULES["greedy"], 3, 40, None)
    counts = SpeculativeCounts()
    for path in [(0, 3, 4), (0,), (1,), ()]:
        counts.add(sequence.extend(drafted, path, 3, []))
    assert (counts.num_draft_nodes, counts.num_draft_tokens, counts.num_accepted_tokens) == (20, 12, 5)
    assert counts.per_position_acceptance_rates == [0.75, 0.25, 0.25]
    # The context's end had two children in all steps, node 0 in two of them, node 3 one child in one.
    assert counts.acceptance_by_rank == [3 / 7, 2 / 6]
    document = counts.as_dict()
    assert (document["num_draft_nodes"], document["acceptance_by_rank"]) == (20, [3 / 7, 2 / 6])


def test_a_cut_path_counts_as_far_as_it_stands() -> None:
    drafted = Drafted((5, 6, 7), (-1, -1, 0))
    sequence = Running(0, [1, 2], 1, params(), frozenset({5}), RULES["greedy"], 2, 40, None)
    emitted = sequence.extend(drafted, (0, 2), 3, [])
    assert (emitted.tokens, emitted.num_accepted, emitted.ranks) == ((5,), 1, ((1, 2),))


def test_chains_have_no_figures_of_trees() -> None:
    outputs = engine("random", None, k=3).generate([[4]], params())
    assert outputs[0].speculative.num_draft_nodes == outputs[0].speculative.num_draft_tokens
    assert not {"num_draft_nodes", "acceptance_by_rank"} & outputs[0].speculative.as_dict().keys()


def drafted_by(one: Engine, **wishes: Any) -> set[tuple[int, int]]:
    """Depth and nodes of a request's steps."""
    one.add([4], params(ignore_eos=True), **wishes)
    events = [event for _ in range(100) if one.has_work for event in one.step()]
    emitted = [found for event in events if isinstance(event, Stepped) for found in event.emitted]
    assert sum(len(found.tokens) for found in emitted) == 40
    return {(found.num_drafted, found.num_nodes) for found in emitted[1:-4]}


def test_a_request_has_its_own_tree_or_a_chain() -> None:
    one = engine("itself", "4,2,1", k=3)
    assert drafted_by(one) == {(3, 20)}
    assert drafted_by(one, tree="none") == {(3, 3)}
    assert drafted_by(one, tree="2,1,1,1,1") == {(5, 10)}  # as deep as it is, whatever the engine's k
    assert drafted_by(one, tree="2,1", num_speculative_tokens=6) == {(2, 4)}
    assert drafted_by(one, tree="1,1,1,1") == {(4, 4)}
    assert {depth for depth, _ in drafted_by(one, tree="dynamic:12")} == {3}
    with pytest.raises(UsageError, match="`3` deep, and num_speculative_tokens is `2`"):
        one.add([4], tree="2,1,1", num_speculative_tokens=2)


def test_a_tree_that_the_cache_cannot_hold_is_refused_by_what_it_needs() -> None:
    with pytest.raises(UsageError, match="needs 80 tokens of KV cache, drafted ones included, and there are `40`"):
        engine("itself", None, target=table(num_blocks=10)).add([4], params(max_new_tokens=19), tree="dynamic:60")


def test_a_task_asks_for_a_tree() -> None:
    async def run(**wishes: Any) -> tuple[list[int], int, int]:
        async with AsyncEngine(engine("itself", None)) as one:
            deltas = [delta async for delta in one.stream([4], params(ignore_eos=True), **wishes)]
        tokens = [token for delta in deltas for token in delta.token_ids]
        steps = [step for delta in deltas for step in delta.steps]
        return tokens, sum(step.num_drafted for step in steps), sum(step.num_nodes for step in steps)

    chain, tree = asyncio.run(run()), asyncio.run(run(tree="4,2,1"))
    assert tree[0] == chain[0]
    assert chain[1] == chain[2]
    assert tree[2] > tree[1] > 0
