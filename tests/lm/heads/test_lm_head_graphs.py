"""Chains and trees of a draft head in CUDA graphs: the tokens that it drafts layer by layer, whatever comes before.

On a CPU nothing can be recorded; there what would be recorded runs anew at each replay. On a GPU the same tests take
CUDA's graphs.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_drafts import LAYERS, TEXT, features_of
from head_drafts import loaded as loaded_head
from shortened import mostly_slow
from test_lm_graphs import GPU, Recorder
from tiny_dflash import publish_dflash, random_block_weights
from tiny_engine import PROMPTS, decode, tiny_engine, tokens
from tiny_heads import publish, random_weights
from tiny_medusa import publish_medusa, random_medusa_weights
from tiny_models import VOCAB, make_tiny
from tiny_mtp import make_target
from tiny_pard2 import publish_pard2
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typed import not_none, stand_in

from specdec_cli import drafters
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.engine.caveats import slow_forwards
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.outputs import Outputs
from specdec_cli.errors import RunError
from specdec_cli.lm import decoders
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.forward import graph_draws, graphs, recorded_rounds
from specdec_cli.lm.forward.device_rounds import TargetOnDevice
from specdec_cli.lm.heads import head_graphs, stacks
from specdec_cli.lm.heads.draft_sequences import RecordedAhead
from specdec_cli.lm.heads.medusa import MedusaHead
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

GREEDY = SamplingParams(max_new_tokens=40)
HEADS = ["eagle", "official", "specforge", "norms", "llama 1", "llama 2", "llama 3"]
ONE_PASS = ["p-eagle", "dflash", "dflash-sliding", "pard2", "medusa"]
# Drafts whose tokens change the logits behind them: of these, chains alone are recorded.
CHAINS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash2": ("dflash2", {"dflash2": True}, {}),
    "dspark": ("dspark", {"dspark": "vanilla"}, {}),
}
CHAINS |= {f"dspark-{kind}": ("dspark", {"dspark": kind}, {"markov_head_type": kind}) for kind in ("gated", "rnn")}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
NORMS = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}


class NotRead(TorchFunctionMode):
    """Refuses to have the host read a tensor."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            raise RuntimeError(f"`{func.__name__}` while a graph is recorded")
        return func(*args, **(kwargs or {}))


class OnDevice(TorchDispatchMode):
    """Refuses what has a size that depends on numbers, and tensors that the host brings."""

    NAMES = ("nonzero", "masked_select", "equal", "lift_fresh", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = args[1] if name in ("index", "index_put_") else []
        is_masked = any(one is not None and one.dtype == torch.bool for one in given)
        if name in self.NAMES or is_masked:
            raise RuntimeError(f"`{name}` while a graph is recorded")
        return func(*args, **(kwargs or {}))


class StrictRecorder(Recorder):
    """Stands in for `graphs.record` on a CPU, and refuses what CUDA would."""

    def __call__(self, run, device, pool):
        with torch.inference_mode():
            run()  # as a warm-up makes what is made once
            with NotRead(), OnDevice():
                run()
        return super().__call__(run, device, pool)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture
def recorder(device, monkeypatch: pytest.MonkeyPatch):
    """Counts what is recorded; without a GPU it stands in for one, and heads are built as on one."""
    recorder, real = StrictRecorder(), graphs.record

    def counted(*given):
        recorder.num_recorded += 1
        return real(*given)

    monkeypatch.setattr(graphs, "record", recorder if device == "cpu" else counted)
    if device == "cpu":
        monkeypatch.setattr(decoders, "check_recordable", lambda *_: None)
        monkeypatch.setattr(stacks, "compiles", lambda *_: False)
        monkeypatch.setattr(stacks, "compiled_family", lambda *_: None)
        monkeypatch.setattr(stacks, "multiplies", lambda *_: False)
    return recorder


@pytest.fixture
def both(tmp_path, device, recorder):
    """Makes a target and a draft head on it twice: as they are, and in graphs. Blocks have four tokens."""

    def made(head: str = "official", **options: Any):
        folder = tmp_path / "target"
        kind, _, num = head.partition(" ")
        if num:
            make_target(kind, folder, int(num))
        else:
            make_tiny("llama", folder, 1, num_hidden_layers=6)
            publish_head(tmp_path / "head", head)
        pairs = []
        for decoder in ("transformers", "graphs"):
            lm = load_lm(str(folder), decoder=decoder, device=device, block_size=4, max_num_seqs=4, check=False)
            pairs.append((lm, loaded_mtp(lm) if num else loaded_head(lm, tmp_path / "head", **options)))
        return pairs

    return made


def publish_head(folder, head: str) -> None:
    """Write a head of random weights."""
    if head in CHAINS:
        form, made, keys = CHAINS[head]
        publish_dflash(folder, random_block_weights(seed=3, **made), form, LAYERS, **keys)
    elif head.startswith("dflash"):
        keys = SLIDING if head.endswith("sliding") else {"sample_from_anchor": True}
        publish_dflash(folder, random_block_weights(seed=3), "z-lab", LAYERS, **keys)
    elif head == "medusa":
        publish_medusa(folder, random_medusa_weights(seed=3))
    elif head == "pard2":
        publish_pard2(folder)
    elif head == "p-eagle":
        weights = random_weights(True, seed=3, layers=2, masked=True)
        publish(folder, weights, "peagle", LAYERS, mask_token_id=5)
    else:
        variant = NORMS if head == "norms" else {}
        weights = random_weights(head != "eagle", seed=3, **variant)
        layers = (1, 2, 2) if head == "official" else LAYERS
        publish(folder, weights, "speculators" if head == "norms" else head, layers, **variant)


def loaded_mtp(lm):
    drafter = drafters.create("mtp", {})
    lm.tap(drafter.taps)
    drafter.load(Resources(lambda _: lm, None, VOCAB, lm))
    return drafter


class Round:
    """Sequences whose texts grow, and both drafters' guesses for them."""

    def __init__(self, pairs) -> None:
        (self.lm, self.plain), (_, self.recorded) = pairs
        self.texts: dict[int, list[int]] = {}
        self.num_known: dict[int, int] = {}

    def rows(self, handles, **more) -> list[DraftRow]:
        """Rows with the states that are new."""
        found = []
        for handle in handles:
            text, known = self.texts[handle], self.num_known.get(handle, 0)
            states = features_of(self.lm, text, self.plain.taps)[known : len(text) - 1]
            self.num_known[handle] = len(text) - 1
            features = states if len(states) else None
            found.append(
                DraftRow(handle, text, 3, 4, GREEDY, frozenset(), False, False, 0.0, features=features, **more)
            )
        return found

    def guess(self, rows) -> list[tuple[int, ...]]:
        """What both drafters guess, which is the same."""
        expected = [guess.drafted for guess in self.plain.propose([replace(row) for row in rows])]
        found = self.recorded.propose(rows)
        assert all(guess.unread is not None for guess in found), "the host has not waited"
        for module in self.recorded.sequences.modules:
            module.cache.check()
        assert [guess.read().drafted for guess in found] == expected
        return [drafted.tokens for drafted in expected]

    def go_on(self, drafted, accepted, bonus: int = 5) -> None:
        """Keep some drafted tokens of each sequence, and add another one."""
        for text, guess, num in zip(self.texts.values(), drafted, accepted, strict=True):
            text += [*guess[:num], bonus + len(text) % 7]


@pytest.mark.in_turn(4, every=8)
@pytest.mark.parametrize("head", [*HEADS, *ONE_PASS, *CHAINS])
def test_rounds_in_graphs_draft_the_tokens_of_rounds_without(head: str, both) -> None:
    rounds = Round(both(head))
    # One longer than a graph is made for, one that ends with a block, one that later modules have no slot of.
    rounds.texts = {0: TEXT[:9], 1: [*TEXT, *TEXT[3:23]], 2: TEXT[20:22]}
    for accepted in ([4, 0, 2], [0, 0, 0], [1, 4, 3], [2, 3, 0]):
        rows = rounds.rows(rounds.texts)
        drafted = rounds.guess(rows)
        assert {len(one) for one in drafted} == {4}
        rounds.go_on(drafted, accepted)
    again = rounds.rows(rounds.texts)
    assert rounds.guess(again) == rounds.guess(again), "rows that come again bring the same states"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the kernels in all these tests")
@pytest.mark.slow
@pytest.mark.parametrize("head", ["official", "llama 2", "dflash-sliding"])
def test_the_kernels_of_a_gpu_attend_as_torch_does(head: str, both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton interprets them here."""
    pytest.importorskip("triton", reason="Triton's kernels take Triton, which is for Linux")
    from specdec_cli.lm.kernels import split_attention

    monkeypatch.setattr(head_graphs, "kernels_for", lambda _: split_attention)
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[20:22]}
    rounds.go_on(rounds.guess(rounds.rows(rounds.texts)), [4, 1])
    rounds.go_on(rounds.guess(rounds.rows(rounds.texts, tree=TreeShape.parse("2,2,1"))), [1, 0])
    rows = rounds.rows(rounds.texts, tree=TreeShape.parse("dynamic:3"))
    rounds.guess([replace(row, k=2) for row in rows])


# Of EAGLE's logits here, most have no probability: rounds leave these out.
@pytest.mark.in_turn(5, every=6)
@pytest.mark.parametrize("head", HEADS[1:] + ONE_PASS)
def test_trees_in_graphs_are_those_of_rounds_without(head: str, both) -> None:
    """Beside a chain and trees of other shapes, one cut by its k, and behind texts of all kinds."""
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: [*TEXT, *TEXT[3:23]], 2: TEXT[20:23]}
    shapes = [("3,2,1", "3,2,1", None), ("2,2+1,1", "3,2,1", "4,0+2"), ("1,2,2,1", "1,2,2,1", "1,2,2,1")]
    for trees, accepted in zip(shapes, ([1, 0, 2], [0, 1, 1], [1, 1, 0]), strict=True):
        rows = rounds.rows(rounds.texts)
        rows = [
            replace(row, tree=None if tree is None else TreeShape.parse(tree))
            for row, tree in zip(rows, trees, strict=True)
        ]
        rows[0].k = 2
        drafted = rounds.guess(rows)
        assert [len(one) for one in drafted] == [row.most_nodes for row in rows]
        rounds.go_on(drafted, accepted)
    rounds.guess(rounds.rows(rounds.texts))


@pytest.mark.in_turn(3, every=12)
@pytest.mark.parametrize("head", HEADS + ONE_PASS)
def test_dynamic_trees_in_graphs_are_those_of_rounds_without(head: str, both) -> None:
    """Of several sizes and depths in a call, sampled ones beside them, of which a cut may leave fewer nodes."""
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: [*TEXT, *TEXT[3:23]], 2: TEXT[20:23], 3: TEXT[40:51]}
    cut = SamplingParams(temperature=0.6, top_k=2, seed=5)
    sizes = ([6, 6, 6, 6], [9, 6, 17, 9], [1, 6, 33, 64])
    for nums, ks, accepted in zip(sizes, ([4, 4, 4, 4], [4, 2, 5, 4], [3, 1, 3, 4]), ([2, 0, 1, 3],) * 3, strict=True):
        rows = rounds.rows(rounds.texts)
        rows = [
            replace(row, k=k, tree=TreeShape(budget=num), params=GREEDY if row.handle else cut)
            for row, num, k in zip(rows, nums, ks, strict=True)
        ]
        rounds.go_on(rounds.guess(rows), accepted)
    rounds.guess(rounds.rows(rounds.texts))


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 2}])
@pytest.mark.parametrize("num_rows", mostly_slow([1, 4, 16], [4]))
def test_texts_with_dynamic_trees_are_those_without_graphs(num_rows: int, sampled: dict[str, Any], both) -> None:
    """Of whole paths, parts and nothing accepted; of two tokens, some trees lack nodes."""
    (plain, layer_by_layer), (target, drafter) = both()
    prompts = [TEXT[i : 9 + 2 * i] for i in range(num_rows)]
    params = [SamplingParams(max_new_tokens=12 + i % 4, seed=3, index=i, **sampled) for i in range(num_rows)]
    options: dict[str, Any] = {"tree": "dynamic:7", "verify": "synthetic"}
    options["synthetic_acceptance_rates"] = (0.8, 0.7, 0.5)
    expected = decode(plain, layer_by_layer, 3, prompts, params, **options)
    found = decode(target, drafter, 3, prompts, params, **options)
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative for one in outputs] for outputs in (found, expected)]
    assert list(map(repr, counts[0])) == list(map(repr, counts[1]))
    assert drafter.sequences.cache.pool.num_free == drafter.sequences.num_blocks, "an idle engine holds blocks"


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("verify", mostly_slow(["auto", "synthetic"], ["synthetic"]))
@pytest.mark.parametrize("head", ["official", "llama 2", "dflash"])
def test_texts_with_trees_are_those_without_graphs(head: str, verify: str, both) -> None:
    """Several rows, one of which stops at a token; synthetic verification accepts whole paths, parts, and nothing."""
    (plain, layer_by_layer), (target, drafter) = both(head)
    params = [SamplingParams(max_new_tokens=21, seed=3, index=i) for i in range(len(PROMPTS))]
    params[2] = replace(params[2], stop_token_ids=tuple(range(40, 50)))
    options: dict[str, Any] = {"tree": "2,2,1", "verify": verify}
    if verify == "synthetic":
        params[1] = replace(params[1], temperature=1.0)
        options["synthetic_acceptance_rates"] = (0.8, 0.7, 0.5)
    expected = decode(plain, layer_by_layer, 3, PROMPTS, params, **options)
    found = decode(target, drafter, 3, PROMPTS, params, **options)
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative.num_accepted_tokens for one in outputs] for outputs in (found, expected)]
    assert counts[0] == counts[1]
    assert drafter.sequences.cache.pool.num_free == drafter.sequences.num_blocks, "an idle engine holds blocks"


@pytest.mark.parametrize("head", ["official", "pard2"])
def test_rows_come_and_go_with_depths_of_their_own(head: str, both, recorder) -> None:
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[30:44], 2: TEXT[20:25]}
    for handles, depths in (([0, 1, 2], [4, 1, 3]), ([0], [2]), ([2, 1], [1, 5]), ([0, 2], [3, 3])):
        rows = [replace(row, k=k) for row, k in zip(rounds.rows(handles), depths, strict=True)]
        drafted = dict(zip(handles, rounds.guess(rows), strict=True))
        assert [len(drafted[handle]) for handle in handles] == depths
        rounds.go_on([drafted.get(handle, ()) for handle in rounds.texts], [1 if h in drafted else 0 for h in range(3)])
    before = recorder.num_recorded
    rounds.texts[2] += [7, 8]
    rounds.guess([replace(row, k=3) for row in rounds.rows([2, 0])])
    assert recorder.num_recorded == before, "a shape that was recorded is recorded again"
    rounds.texts[1] += [7, 8]
    rounds.guess(rounds.rows([1]))
    rounds.texts[3] = TEXT[40:46]
    rounds.guess(rounds.rows([3]))  # in the same graph, a text's beginning


@pytest.mark.in_turn(6, every=7)
@pytest.mark.parametrize("head", ["official", "llama 1", "llama 3", *ONE_PASS])
def test_rounds_of_other_kinds_find_the_cache_as_it_should_be(head: str, both) -> None:
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[30:43]}
    others: list[dict[str, Any]] = [
        {
            "tree": TreeShape.parse("2,2,1"),
            "params": SamplingParams(temperature=1.0, presence_penalty=0.1),
            "needs_q": True,
        },
        {"params": SamplingParams(temperature=1.0, seed=5, presence_penalty=0.1)},
        {"p_min": 1e-6},
        {"tree": TreeShape.parse("dynamic:6"), "params": SamplingParams(presence_penalty=0.1)},
    ]
    for other in others:
        drafted = rounds.guess(rounds.rows(rounds.texts))
        rounds.go_on(drafted, [2, 0])
        rows = [replace(row, **other) for row in rounds.rows(rounds.texts)]
        expected, found = (one.propose([replace(row) for row in rows]) for one in (rounds.plain, rounds.recorded))
        assert [guess.drafted for guess in found] == [guess.drafted for guess in expected]
        assert all(guess.unread is None for guess in found)
        rounds.go_on(drafted, [0, 1])
    mixed = rounds.rows(rounds.texts)
    mixed[0] = replace(mixed[0], **others[0])
    expected, found = (one.propose([replace(row) for row in mixed]) for one in (rounds.plain, rounds.recorded))
    assert [guess.unread is None for guess in found] == [True, False]
    assert [guess.read().drafted for guess in found] == [guess.drafted for guess in expected]


@pytest.mark.in_turn(6, every=7)
@pytest.mark.parametrize("cut", [{}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}])
@pytest.mark.parametrize("head", ["official", "specforge", "llama 2", "dflash", "dflash2"])
def test_drawn_chains_are_those_of_rounds_without(head: str, cut: dict[str, Any], device, both) -> None:
    """Beside greedy ones; some come with the q that they were drawn from."""
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[30:43], 2: TEXT[20:22]}
    sampled = SamplingParams(temperature=0.7, seed=5, **cut)
    for accepted in ([2, 0, 1], [0, 4, 0], [4, 1, 2]):
        rows = rounds.rows(rounds.texts)
        rows[0] = replace(rows[0], params=sampled, needs_q=True)
        rows[2] = replace(rows[2], params=replace(sampled, index=1))
        expected = rounds.plain.propose([replace(row) for row in rows])
        drafted = rounds.guess(rows)
        found = rounds.recorded.propose(rows)[0]
        assert found.q is not None
        torch.testing.assert_close(found.q, not_none(expected[0].q), rtol=1e-3, atol=1e-4)
        if device == "cpu":  # a GPU may round what stands at the cut
            assert torch.equal(found.q > 0, not_none(expected[0].q) > 0)
        assert rounds.recorded.propose(rows)[2].q is None
        rounds.go_on(drafted, accepted)


@pytest.mark.in_turn(0, every=5)
@pytest.mark.parametrize("cut", [{}, {"top_k": 20}])
@pytest.mark.parametrize("head", ["official", "llama 2", "dflash", "dspark-gated"])
def test_chains_by_the_targets_noise_are_those_of_rounds_without(head: str, cut: dict[str, Any], both) -> None:
    """Beside a greedy one and a drawn one."""
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[30:43], 2: TEXT[20:22]}
    sampled = SamplingParams(temperature=0.7, seed=5, **cut)
    for accepted in ([2, 0, 1], [0, 4, 0]):
        rows = rounds.rows(rounds.texts)
        rows[0] = replace(rows[0], params=sampled, shares_noise=True)
        rows[2] = replace(rows[2], params=replace(sampled, index=1))
        rounds.go_on(rounds.guess(rows), accepted)
    rows = rounds.rows(rounds.texts)
    rounds.guess([replace(row, params=replace(sampled, index=row.handle), shares_noise=True) for row in rows])


DRAWN_HEADS = ["official", "specforge", "norms", "llama 1", "llama 2", *ONE_PASS]


@pytest.mark.in_turn(18, every=20)
@pytest.mark.parametrize(
    ("head", "cut"),
    [(head, cut) for head in DRAWN_HEADS for cut in ({}, {"top_k": 2}, {"top_p": 0.8, "min_p": 0.05})],
    ids=str,
)
def test_drawn_trees_are_those_of_rounds_without(head: str, cut: dict[str, Any], device, both) -> None:
    """By chance and by the target's noise, beside greedy ones; with few tokens that can be drawn, trees lack nodes."""
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:9], 1: TEXT[30:43], 2: TEXT[20:22], 3: TEXT[40:51]}
    sampled, sizes = SamplingParams(temperature=0.7, seed=5, **cut), set()
    for shape, accepted in (("3,2,1", [1, 0, 1, 0]), ("2,2+1,1+0+2", [0, 2, 1, 1]), ("1,3,1+1,1", [1, 1, 0, 2])):
        rows = [replace(row, tree=TreeShape.parse(shape)) for row in rounds.rows(rounds.texts)]
        rows[0] = replace(rows[0], params=sampled, needs_q=True)
        rows[2] = replace(rows[2], params=replace(sampled, index=1), shares_noise=True)
        rows[3] = replace(rows[3], params=replace(sampled, index=2), needs_q=True, k=2)
        expected = rounds.plain.propose([replace(row) for row in rows])
        drafted = rounds.guess(rows)
        for guess, one in zip(rounds.recorded.propose(rows), expected, strict=True):
            q = guess.read().q
            assert (q is None) == (one.q is None)
            if one.q is not None:
                torch.testing.assert_close(q, one.q, rtol=1e-3, atol=1e-4)
                if device == "cpu":  # a GPU may round what stands at the cut
                    assert torch.equal(not_none(q) > 0, one.q > 0)
        sizes |= {len(its) - row.most_nodes for its, row in zip(drafted, rows, strict=True)}
        rounds.go_on(drafted, accepted)
    assert min(sizes) < 0 or "top_k" not in cut, "no tree lacks a node"


def uniforms_of_siblings(choices, q, nums, most):
    """Each node's first child takes the uniform number of its second one."""
    return real_drawn(choices, q, nums.cumsum(1) - nums + nums.sign(), most)


def drawn_with_replacement(choices, q, nums, most):
    """A sibling may come twice."""
    drawn = [real_drawn(choices, q, nums, 1) for _ in range(most)]
    return torch.cat([its[0] for its in drawn], 2), torch.cat([its[1] for its in drawn], 2)


def children_of_nothing(draft, *depth):
    """Nodes that are missing keep their places."""
    return torch.arange(draft.choices.is_there.shape[1]).repeat(draft.num_rows, 1)


def q_of_the_node_before(draft):
    """A node comes with the q of the node before it."""
    return tuple(its.roll(1, 1) if its.dim() == 2 else its for its in real_q(draft))


Static = recorded_rounds._StaticDraft
real_drawn, real_q = graph_draws.Choices._drawn, vars(Static)["q"].fget


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (graph_draws.Choices, "_drawn", uniforms_of_siblings),
        (graph_draws.Choices, "_drawn", drawn_with_replacement),
        (Static, "_order", property(children_of_nothing)),
        (Static, "q", property(q_of_the_node_before)),
    ],
    ids=lambda one: "" if isinstance(one, type | str) else getattr(one, "fget", one).__name__,
)
def test_a_planted_fault_of_drawn_trees_is_caught(place, name, fault, both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises((AssertionError, RunError)) as caught:
        test_drawn_trees_are_those_of_rounds_without("official", {"top_k": 2}, "cpu", both)
    assert "recorded" not in str(caught.value)


SAMPLED_TEXTS = [("rejection", None), ("block", None), ("gumbel", None), ("exact-match", "2,2,1")]
SAMPLED_TEXTS += [(verify, "3,2,1") for verify in ("rejection", "traversal", "gumbel")]


def test_keys_of_accepted_nodes_that_are_not_moved_are_noticed(both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Graphs, "move", lambda *_: None)
    with pytest.raises(AssertionError):
        test_whole_sampled_texts_are_those_without_graphs("traversal", "3,2,1", both)


@pytest.mark.in_turn(2, every=7)
@pytest.mark.parametrize(("verify", "tree"), SAMPLED_TEXTS)
def test_whole_sampled_texts_are_those_without_graphs(verify: str, tree: str | None, both) -> None:
    (plain, layer_by_layer), (target, drafter) = both()
    params = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.9, seed=3)
    expected = decode(plain, layer_by_layer, 3, PROMPTS, params, verify=verify, tree=tree)
    found = decode(target, drafter, 3, PROMPTS, params, verify=verify, tree=tree)
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative.num_accepted_tokens for one in outputs] for outputs in (found, expected)]
    assert counts[0] == counts[1]


def test_a_path_after_a_chain_has_the_logits_of_one_without(both) -> None:
    rounds = Round(both())
    rounds.texts = {0: TEXT[:9]}
    rounds.go_on(rounds.guess(rounds.rows([0])), [3])
    rows = rounds.rows([0])
    expected, found = (one.path_logits(rows, [[7, 8, 9]])[0] for one in (rounds.plain, rounds.recorded))
    is_scored = expected > -torch.inf
    assert torch.allclose(found[is_scored], expected[is_scored], atol=2e-4)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("head", ["specforge", "llama 2", "dflash", "p-eagle"])
def test_prefixes_are_found_again_as_without_graphs(head: str, both) -> None:
    rounds = Round(both(head))
    rounds.texts = {0: TEXT[:11]}
    both_drafters = rounds.plain, rounds.recorded
    assert [one.adopt(0, TEXT[:11], "salt") for one in both_drafters] == [0, 0]
    rounds.go_on(rounds.guess(rounds.rows([0])), [4])
    drafted = rounds.guess(rounds.rows([0]))
    rounds.texts[1] = [*rounds.texts[0], *drafted[0]]
    num, other = (one.adopt(1, rounds.texts[1], "salt") for one in both_drafters)
    assert num == other >= 8
    rounds.num_known[1] = num
    rounds.guess(rounds.rows([0, 1]))
    for one in both_drafters:
        one.release(0)
        one.release(1)
    num, other = (one.adopt(2, rounds.texts[1], "salt") for one in both_drafters)
    assert num == other >= 12
    rounds.texts[2], rounds.num_known[2] = rounds.texts[1], num
    rounds.guess(rounds.rows([2]))


def stale_keys(bucket, modules, rows, counts):
    """Of several new positions the last ones keep what was drafted in their place."""
    given = real_values(bucket, modules, rows, counts)
    fed = bucket.num_fed
    for at in range(fed, fed * (1 + len(modules))):
        if at % bucket.num_tokens >= 2:
            given[at] = -1
    return given


def one_place_off(bucket, modules, rows, counts):
    """Drafted nodes stand one place behind their own."""
    given = real_values(bucket, modules, rows, counts)
    begin = bucket.num_fed * (1 + len(modules)) + bucket.num_rows
    for at in range(begin, begin + len(rows)):
        given[at] += 1
    return given


def siblings_seen(begin, sees, depths, places, slots):
    """Nodes see all nodes, those of other paths too."""
    return real_nodes(begin, torch.ones_like(sees), depths, places, slots)


def keys_at_their_places(begin, sees, depths, places, slots):
    """A node's position is its place."""
    return real_nodes(begin, sees, torch.arange(depths.shape[1]).expand_as(depths), places, slots)


real_values, real_nodes = head_graphs._values, recorded_rounds.nodes_of


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(
    "trees_of_a_kind",
    [
        test_trees_in_graphs_are_those_of_rounds_without,
        test_dynamic_trees_in_graphs_are_those_of_rounds_without,
    ],
)
@pytest.mark.parametrize("fault", [siblings_seen, keys_at_their_places])
@pytest.mark.parametrize("head", ["official", "llama 1"])
def test_a_planted_fault_of_trees_is_caught(
    head: str, fault, trees_of_a_kind, both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_graphs, "nodes_of", fault)
    with pytest.raises(AssertionError):
        trees_of_a_kind(head, both)


def slots_of_others(draft, before):
    """A new node takes the slot after its own."""
    real_place(draft, before)
    draft._slots = torch.where(draft._slots < draft._num, (draft._slots + 1) % draft._num, draft._slots)


def paths_of_others(draft, before):
    """A node sees the path of the node before its parent."""
    draft._trees = replace(draft._trees, parents=draft._trees.parents.roll(1, 1))
    real_place(draft, before)


def grandparents_lost(draft):
    """Nodes tell the target of their parents alone."""
    nodes = real_result(draft)
    own = torch.arange(nodes.shape[2])
    parent = nodes[1] & ~(1 << own)
    parents_bit = torch.where(parent > 0, 1 << parent.double().clamp(min=1).log2().long(), 0)
    return torch.stack((nodes[0], torch.where(nodes[1] > 0, parents_bit | (1 << own), 0)))


Likeliest = recorded_rounds._LikeliestDraft
real_place, real_result = Likeliest._place, vars(Likeliest)["nodes"].fget


@pytest.mark.parametrize("fault", [slots_of_others, paths_of_others])
def test_a_planted_fault_of_dynamic_trees_is_caught(fault, both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Likeliest, "_place", fault)
    with pytest.raises(AssertionError):
        test_dynamic_trees_in_graphs_are_those_of_rounds_without("official", both)


def test_ancestors_that_the_target_does_not_see_are_noticed(both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Likeliest, "nodes", property(grandparents_lost))
    with pytest.raises(AssertionError):
        test_texts_with_dynamic_trees_are_those_without_graphs(4, {}, both)


def test_a_planted_fault_of_states_before_is_caught(both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_graphs, "_shifted", lambda before, each: each)
    with pytest.raises(AssertionError):
        test_rounds_in_graphs_draft_the_tokens_of_rounds_without("pard2", both)


def test_medusa_heads_begin_with_the_last_state_alone(both) -> None:
    rounds = Round(both("medusa"))
    for handle, begin in ((0, 0), (1, 20)):
        rounds.texts[handle] = TEXT[begin : begin + 11]
        for one in (rounds.plain, rounds.recorded):
            rounds.num_known[handle] = one.adopt(handle, rounds.texts[handle], "salt")
        assert rounds.num_known[handle] == 9
    rounds.go_on(rounds.guess(rounds.rows([0, 1])), [2, 0])
    rounds.guess(rounds.rows([1, 0]))


def test_a_planted_fault_of_medusa_heads_is_caught(both, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_head_for_all(self, depth, anchors, ends, feed) -> RecordedAhead:
        return RecordedAhead(torch.stack([self.logits(ends)] * depth, 1))

    monkeypatch.setattr(MedusaHead, "recorded_ahead", one_head_for_all)
    with pytest.raises(AssertionError):
        test_rounds_in_graphs_draft_the_tokens_of_rounds_without("medusa", both)


@pytest.mark.parametrize("fault", [stale_keys, one_place_off])
def test_a_planted_fault_is_caught(fault, both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_graphs, "_values", fault)
    with pytest.raises(AssertionError):
        test_rounds_in_graphs_draft_the_tokens_of_rounds_without("official", both)


@pytest.mark.in_turn(2, every=10)
@pytest.mark.parametrize("head", ["eagle", "official", "llama 1", "llama 2", *ONE_PASS, "dspark-rnn"])
def test_whole_texts_are_the_targets(head: str, both) -> None:
    (plain, layer_by_layer), (target, drafter) = both(head)
    params = SamplingParams(max_new_tokens=24)
    expected = decode(plain, layer_by_layer, 3, PROMPTS, params)
    found = decode(target, drafter, 3, PROMPTS, params)
    assert tokens(found) == tokens(decode(plain, None, 0, PROMPTS, params))
    counts = [
        [(one.speculative.num_draft_tokens, one.speculative.num_accepted_tokens) for one in outputs]
        for outputs in (found, expected)
    ]
    assert counts[0] == counts[1]
    assert drafter.sequences.cache.pool.num_free == drafter.sequences.num_blocks, "an idle engine holds blocks"


# Of each request what it asks for: guesses of one shape, or of several beside a row without any.
ROWS_OF_A_STEP: dict[str, list[dict[str, Any]]] = {
    "chains": [{}, {}],
    "dynamic trees": [{"tree": "dynamic:6"}, {"tree": "dynamic:6", "num_speculative_tokens": 2}],
    "all kinds": [{}, {"tree": "dynamic:6"}, {"tree": "2,2,1"}, {"draft": "none"}],
}


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("kind", ROWS_OF_A_STEP)
def test_the_target_judges_guesses_before_the_host_reads_them(kind: str, both, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait in a step, whatever guesses come together: the host reads them behind the target's run."""
    (plain, _), (target, drafter) = both()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = tokens(decode(plain, None, 0, PROMPTS, params))
    judged: set[PendingTokens] = set()
    num_read, score, read, launch = 0, target.score, PendingTokens._read, TargetOnDevice.launch

    def scored(rows):
        logits = score(rows)
        judged.update(row.unread for row in rows if row.unread is not None)
        return logits

    def read_when_judged(self):
        nonlocal num_read
        num_read += not self.is_read
        assert self in judged, "the host has waited for a guess before the target judged it"
        return read(self)

    def launched(self, unread):
        launch(self, unread)
        judged.add(unread)

    monkeypatch.setattr(target, "score", scored)
    monkeypatch.setattr(TargetOnDevice, "launch", launched)
    monkeypatch.setattr(PendingTokens, "_read", read_when_judged)
    outputs = Outputs()
    driver = Driver(tiny_engine(target, drafter, 3))
    for prompt, asked in zip(PROMPTS, ROWS_OF_A_STEP[kind], strict=False):
        outputs.add(driver, list(prompt), params=params, **asked)
    for event in (event for events in driver.steps() for event in events):
        outputs.observe(event)
    assert tokens(outputs.finished()) == expected[: len(ROWS_OF_A_STEP[kind])]
    assert num_read >= 6


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("tree", [None, "2,2,1", "dynamic:6"])
def test_a_head_whose_logits_are_no_numbers_is_noticed_after_the_step(tree: str | None, both) -> None:
    (plain, _), (target, drafter) = both()
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    right = tokens(decode(plain, None, 0, PROMPTS, params))
    drafter.sequences.modules[0].head.weights["norm.weight"].fill_(torch.nan)
    engine = tiny_engine(target, drafter, 3, tree=tree)
    assert [output.token_ids for output in engine.generate(PROMPTS, params)] == right
    assert engine.drafters.num_failures["eagle3"] >= 1


def test_a_head_that_cannot_be_recorded_runs_as_it_is_or_is_refused(both, tmp_path, monkeypatch, recorder) -> None:
    (plain, expected), (target, _) = both()
    assert (plain.recording, target.recording) == ("none", "required")
    monkeypatch.setattr(head_graphs, "recorded", refuse)
    with pytest.raises(RunError, match=r"the draft head `.*` cannot be recorded: CUDA error: operation not permitted"):
        loaded_head(target, tmp_path / "head")
    target.recording = "tried"
    drafter = loaded_head(target, tmp_path / "head")
    assert not drafter.sequences.is_recorded
    engine = SimpleNamespace(target=target, drafter=drafter)
    (said,) = slow_forwards(stand_in(engine))
    assert said.startswith("the draft head `")
    assert said.endswith("it runs without CUDA graphs, which is slower")
    texts = [tokens(decode(lm, one, 3, PROMPTS, GREEDY)) for lm, one in ((plain, expected), (target, drafter))]
    assert texts[0] == texts[1]


def refuse(run, device, pool, what) -> None:
    raise RunError(f"{what} cannot be recorded: CUDA error: operation not permitted", "use --decoder transformers")


def test_rotary_positions_by_length_are_refused(both) -> None:
    _, (_, drafter) = both()
    drafter.sequences.modules[0].head.recording_obstacle = "its rotary positions depend on the context's length"
    with pytest.raises(RunError, match="cannot be recorded: its rotary positions depend on the context's length"):
        not_none(drafter.sequences._graphs).try_out()
