"""DFlash, DFlash2 and DSpark drafts: guesses against the formulas, and texts against the target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import CHANCE, FEATURE_FAULTS, GREEDY, TEXT, check_depth_trace, loaded
from safetensors.torch import save_file
from table_loop import Table
from tiny_dflash import BLOCK, LAYER, MASK, BlockReference, publish_dflash, random_block_weights
from tiny_engine import PROMPTS, Checked, decode, preempted, tokens
from tiny_heads import HIDDEN, features_of
from tiny_models import VOCAB
from torch import Tensor
from tree_loop import sampled_p_value
from typed import not_none, stand_in

from specdec_cli import drafters
from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.heads.dflash import default_layers
from specdec_cli.lm.heads.draft_sequences import Ahead
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

LAYERS = (1, 2, 3)


def reference(lm, weights: dict[str, Tensor], **options: Any) -> BlockReference:
    head = weights.get("lm_head.weight", lm.head(torch.eye(HIDDEN)).T.clone())
    windows = options.pop("windows", (None, None))
    return BlockReference(weights, lm.embed(list(range(VOCAB))), head, windows, options)


def row(context: Sequence[int], features: Tensor | None, k: int = 4, params=GREEDY, **more: Any) -> DraftRow:
    more = {"p_min": 0.0} | more
    return DraftRow(
        0, list(context), 3, k, params, frozenset(), params.temperature > 0, False, features=features, **more
    )


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Of each the form, how its weights are made, keys of its configuration, and how the reference reads them.
    "z-lab": ("z-lab", {}, {}, {}),
    "from the anchor": ("z-lab", {}, {"sample_from_anchor": True}, {"from_anchor": True}),
    "sliding": ("z-lab", {}, SLIDING, {"windows": (None, (7, True))}),
    "sliding both ways": ("z-lab", {}, SLIDING | {"causal": False}, {"windows": (None, (7, False))}),
    "causal": ("z-lab", {}, {"causal": True}, {"windows": ((999, True), (999, True))}),
    "use_swa": ("z-lab", {}, {"use_swa": True, "swa_window_size": 6, "causal": False}, {"windows": ((6, False),) * 2}),
    "scales": (
        "z-lab", {},
        {"output_multiplier": 0.7, "final_logit_softcapping": 5.0, "input_embedding_scale": 1.3},
        {"multiplier": 0.7, "softcap": 5.0, "scale": 1.3},
    ),
    "speculators": ("speculators", {}, {}, {}),
    "speculators, anchor": ("speculators", {}, {"sample_from_anchor": True}, {"from_anchor": True}),
    "speculators, sliding": ("speculators", {}, SLIDING, {"windows": (None, (7, True))}),
    "speculators, sliding both ways": (
        "speculators", {}, SLIDING | {"sliding_window_non_causal": True}, {"windows": (None, (7, False))}
    ),
    "speculators, 40 tokens": ("speculators", {"drafted": 40}, {}, {}),
    "DSpark": ("dspark", {"dspark": "vanilla"}, {}, {"from_anchor": True}),
    "DSpark, gated": ("dspark", {"dspark": "gated"}, {"markov_head_type": "gated"}, {"from_anchor": True}),
    "DSpark, filling in": ("dspark", {"dspark": "vanilla"}, {"sample_from_anchor": False}, {}),
    "DSpark, 40 tokens": ("dspark", {"dspark": "vanilla", "drafted": 40}, {}, {"from_anchor": True}),
    "DSpark, rnn": ("dspark", {"dspark": "rnn"}, {"markov_head_type": "rnn"}, {"from_anchor": True}),
    "DSpark, unsaid": ("dspark", {"dspark": "vanilla"}, {"sample_from_anchor": None}, {"from_anchor": True}),
    "JetSpec": ("z-lab", {}, {"causal_head": True}, {"windows": ((999, True), (999, True))}),
    "DFlash2": ("dflash2", {"dflash2": True}, {}, {}),
    "DFlash2, both ways": (
        "dflash2", {"dflash2": True},
        SLIDING | {"is_causal": False, "causal": True, "output_multiplier": 0.7, "final_logit_softcapping": 5.0},
        {"windows": (None, (7, False)), "multiplier": 0.7, "softcap": 5.0},
    ),
    "DFlash2, sliding": ("dflash2", {"dflash2": True}, SLIDING, {"windows": (None, (7, True))}),
    "DFlash2, speculators": ("dflash2 speculators", {"dflash2": True}, SLIDING, {"windows": (None, (7, False))}),
    "DeepSpec": ("deepspec", {"dspark": "vanilla"}, {}, {"from_anchor": True}),
}  # fmt: skip


def expected_logits(given: BlockReference, states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [drafted] by the formulas, behind the tokens that were drafted."""
    block = given.giving(given.states(states[: len(context) - 1], context, [len(context) - 1]))[0]
    before = torch.tensor([context[-1], *drafted[:-1]])
    return given.logits(block[: len(drafted)], before)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("params", [GREEDY, CHANCE])
@pytest.mark.parametrize("form", FORMS)
def test_rounds_draw_from_what_the_formulas_say(lm, form: str, params, tmp_path: Path) -> None:
    kind, made, keys, read = FORMS[form]
    weights = random_block_weights(seed=3, **made)
    drafter = loaded(lm, publish_dflash(tmp_path / "draft", weights, kind, **keys))
    assert drafter.taps == LAYERS
    states, given = features_of(lm, TEXT, LAYERS), reference(lm, weights, **read)
    ids = torch.arange(40) + weights["d2t"] if "d2t" in weights else torch.arange(VOCAB)
    known = 0
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end in (9, 14, 16, 17, 17):
        features = states[known : end - 1] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, 8, params)])[0]
        known, drafted = end - 1, list(guess.drafted.tokens)
        assert len(drafted) == (BLOCK if read.get("from_anchor") else BLOCK - 1), "as many as the block gives"
        logits = expected_logits(given, states, TEXT[:end], drafted)
        if params is GREEDY:
            assert ids[logits.argmax(-1)].tolist() == drafted
            assert guess.q is None
        else:
            q = torch.zeros(len(drafted), VOCAB)
            q[:, ids] = logits.softmax(-1)
            torch.testing.assert_close(guess.q, q, atol=2e-5, rtol=0)


def test_mask_rows_read_the_mask_embedding(lm, tmp_path: Path) -> None:
    weights, mask = random_block_weights(seed=3), torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    states = features_of(lm, TEXT, LAYERS)
    for i, saved in enumerate((mask, {"embedding": mask[None], "mask_token_id": 5000})):
        folder = publish_dflash(tmp_path / str(i), weights, "z-lab", mask_token_id=5000)
        torch.save(saved, folder / "mask_embedding.pt")
        guess = loaded(lm, folder).propose([row(TEXT[:9], states[:8])])[0]
        logits = expected_logits(reference(lm, weights, mask=mask), states, TEXT[:9], guess.drafted.tokens)
        assert logits.argmax(-1).tolist() == list(guess.drafted.tokens)
        without = expected_logits(reference(lm, weights), states, TEXT[:9], guess.drafted.tokens)
        assert without.argmax(-1).tolist() != list(guess.drafted.tokens)


def test_a_shorter_chain_is_the_first_of_a_longer_one(lm, tmp_path: Path) -> None:
    states = features_of(lm, TEXT, LAYERS)
    drafter = loaded(lm, publish_dflash(tmp_path / "draft", random_block_weights(), "z-lab"))
    long = drafter.propose([row(TEXT[:9], states[:8], 4)])[0].drafted.tokens
    for k in (1, 2, 3):
        assert drafter.propose([row(TEXT[:9], None, k)])[0].drafted.tokens == long[:k]


def test_a_guess_ends_where_its_draft_knows_banned_tokens_alone(lm, tmp_path: Path) -> None:
    """As a selector's candidates and a reduced vocabulary may be; it is no failure, which other requests would feel."""
    states = features_of(lm, TEXT, LAYERS)
    folder = publish_dflash(tmp_path / "draft", random_block_weights(dflash2=True), "dflash2", selector_top_k=1)
    drafter = loaded(lm, folder)
    whole = drafter.propose([row(TEXT[:9], states[:8])])[0].drafted.tokens
    early = replace(GREEDY, min_tokens=24)
    for place, token in enumerate(whole[:2]):
        rows = [replace(row(TEXT[:9], None, params=early), stop_ids=frozenset({token})), row(TEXT[:9], None)]
        assert [guess.drafted.tokens for guess in drafter.propose(rows)] == [whole[:place], whole]
    weights = random_block_weights(drafted=40)
    drafter = loaded(lm, publish_dflash(tmp_path / "reduced", weights, "speculators"))
    known = frozenset((torch.arange(40) + weights["d2t"]).tolist())
    for tree in (None, TreeShape.parse("2,1"), TreeShape.parse("dynamic:5")):
        one = row(TEXT[:9], states[:8] if tree is None else None, params=early, tree=tree)
        assert drafter.propose([one])[0].drafted
        assert not drafter.propose([replace(one, features=None, stop_ids=known)])[0].drafted


def test_default_layers() -> None:
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_layers(28, 1) == (14,)


@pytest.mark.parametrize("form", ["z-lab", "DSpark", "DSpark, rnn", "DFlash2"])
@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:10"])
def test_a_trees_siblings_are_the_likeliest_behind_their_paths(lm, tree: str, form: str, tmp_path: Path) -> None:
    kind, made, keys, read = FORMS[form]
    weights = random_block_weights(seed=4, **made)
    drafter = loaded(lm, publish_dflash(tmp_path / "draft", weights, kind, **keys))
    states, given = features_of(lm, TEXT, LAYERS), reference(lm, weights, **read)
    for begin, end in ((0, 8), (8, 12)):
        guess = drafter.propose([row(TEXT[: end + 1], states[begin:end], tree=TreeShape.parse(tree))])[0].drafted
        assert len(guess) > 4
        for node in range(-1, len(guess)):
            children = [guess.tokens[one] for one in guess.children(node)]
            if children:
                path = [*guess.tokens_to(node), 0]
                logits = expected_logits(given, states, TEXT[: end + 1], path)[-1]
                assert children == logits.topk(len(children)).indices.tolist()


def best_prefixes(marginals: Tensor, num: int) -> set[tuple[int, ...]]:
    """The likeliest paths of log-probabilities [depth, V] as DDTree finds them, one at a time (arXiv 2604.12989)."""
    values, tokens = marginals.sort(-1, descending=True)
    found = set[tuple[int, ...]]()
    heap: list[tuple[float, tuple[int, ...]]] = [(-float(values[0, 0]), (0,))]
    while len(found) < num:
        cost, ranks = heappop(heap)
        found.add(tuple(int(tokens[depth, rank]) for depth, rank in enumerate(ranks)))
        depth, rank = len(ranks), ranks[-1]
        sibling = float(values[depth - 1, rank] - values[depth - 1, rank + 1])
        heappush(heap, (cost + sibling, (*ranks[:-1], rank + 1)))
        if depth < len(values):
            heappush(heap, (cost - float(values[depth, 0]), (*ranks, 0)))
    return found


@pytest.mark.parametrize("form", ["z-lab", "JetSpec"])
@pytest.mark.parametrize("num", [6, 40])
def test_a_dynamic_tree_of_one_pass_has_the_likeliest_prefixes(lm, form: str, num: int, tmp_path: Path) -> None:
    kind, made, keys, read = FORMS[form]
    weights = random_block_weights(seed=4, **made)
    drafter = loaded(lm, publish_dflash(tmp_path / "draft", weights, kind, **keys))
    states, given = features_of(lm, TEXT, LAYERS), reference(lm, weights, **read)
    tree = TreeShape.parse(f"dynamic:{num}")
    guess = drafter.propose([row(TEXT[:9], states[:8], params=CHANCE, tree=tree)])[0].drafted
    marginals = expected_logits(given, states, TEXT[:9], [0] * (BLOCK - 1)).log_softmax(-1)
    assert {guess.tokens_to(node) for node in range(len(guess))} == best_prefixes(marginals, num)


def trained(lm, text: Sequence[int], first: int, form: str, steps: int = 60) -> dict[str, Tensor]:
    """Weights fitted to one text in the layout of training, from a position on."""
    is_dspark = form == "dspark"
    weights = random_block_weights(seed=8, dspark="vanilla" if is_dspark else None, dflash2=form == "dflash2")
    for name in weights:  # as training begins: a plain DFlash draft
        if "conv." in name or "codebook" in name:
            weights[name] *= 0.1
            weights[name] += torch.tensor([1.0, 0.0])[:, None] if "base_kernel" in name else 0
    given = reference(lm, {name: one.requires_grad_() for name, one in weights.items()}, from_anchor=is_dspark)
    starts = list(range(first, len(text) - BLOCK))
    states = features_of(lm, text, LAYERS)
    num = BLOCK if is_dspark else BLOCK - 1
    wanted = torch.tensor([text[start + 1 : start + 1 + num] for start in starts])
    before = torch.tensor([text[start : start + num] for start in starts])
    trainable = [one for name, one in weights.items() if "confidence" not in name]
    optimizer = torch.optim.Adam(trainable, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        rows = given.giving(given.states(states, text, starts))
        every = [given.logits(rows, before).clamp(min=-30), *([given.unary(rows)] if form == "dflash2" else [])]
        losses = [torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) for logits in every]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return {name: one.detach() for name, one in weights.items()}


@pytest.fixture(scope="module", params=["z-lab", "dspark", "dflash2"])
def fitted(request: pytest.FixtureRequest, lm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    params = SamplingParams(max_new_tokens=42)
    text = [*PROMPTS[1], *tokens(decode(lm, None, 0, [PROMPTS[1]], params=params))[0]]
    weights = trained(lm, text, len(PROMPTS[1]), request.param)
    return publish_dflash(tmp_path_factory.mktemp("fitted") / "draft", weights, request.param), text


def test_an_overfitted_draft_is_always_right(lm, fitted) -> None:
    (folder, text), prompt = fitted, PROMPTS[1]
    [found] = decode(lm, loaded(lm, folder), BLOCK - 1, [prompt], params=SamplingParams(max_new_tokens=32))
    assert found.token_ids == text[len(prompt) : len(prompt) + 32]
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


@pytest.mark.parametrize("fault", [None, *FEATURE_FAULTS])
def test_planted_faults_are_seen(lm, fitted, fault: str | None) -> None:
    drafter, prompt = loaded(lm, fitted[0]), PROMPTS[1]
    propose = drafter.propose

    def faulty(rows: Sequence[DraftRow]) -> list[Guesses]:
        found: list[Guesses] = propose([one if fault is None else FEATURE_FAULTS[fault](one) for one in rows])
        return found

    drafter.propose = faulty
    [found] = decode(lm, drafter, BLOCK - 1, [prompt], params=SamplingParams(max_new_tokens=32))
    assert found.token_ids == fitted[1][len(prompt) : len(prompt) + 32], "faults cost acceptance alone"
    stats = found.speculative
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (fault is None)


def test_preempted_sequences_go_on_as_before(lm, fitted) -> None:
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=18, check=False)
    expected = tokens(decode(lm, None, 0, params=GREEDY))
    for prefix_caching in (False, True):
        drafter = loaded(tight, fitted[0])
        drafter.sequences.hold(60)
        engine = Checked(tight, drafter, None, EngineOptions(max_num_seqs=4, prefix_caching=prefix_caching))
        found, num = preempted(engine, GREEDY)
        assert num > 0
        assert tokens(found) == expected
        drafter.sequences.cache.check()


def test_a_cached_prefix_drafts_as_a_new_one(lm, fitted) -> None:
    drafter = loaded(lm, fitted[0])
    prompt = fitted[1][:30]
    first, again = (
        decode(lm, drafter, 4, [prompt], params=SamplingParams(max_new_tokens=12), prefix_caching=True)[0]
        for _ in range(2)
    )
    assert first.token_ids == again.token_ids
    assert first.speculative.acceptance_histogram == again.speculative.acceptance_histogram
    assert drafter.sequences.adopt(99, prompt, "") % lm.block_size == 0
    drafter.release(99)


def test_the_confidence_head_decides_how_many_are_drafted(lm, tmp_path: Path) -> None:
    weights = random_block_weights(seed=6, dspark="vanilla")
    drafter = loaded(lm, publish_dflash(tmp_path / "draft", weights, "dspark"))
    states, given = features_of(lm, TEXT, LAYERS), reference(lm, weights, from_anchor=True)
    drafter.propose([row(TEXT[:9], states[:8])])
    numbers = set()
    for end in range(10, 40):
        whole = list(drafter.propose([row(TEXT[:end], states[end - 2 : end - 1])])[0].drafted.tokens)
        block = given.states(states[: end - 1], TEXT[:end], [end - 1])[0]
        before = torch.tensor([TEXT[end - 1], *whole[:-1]])
        sure = (given.confidence(block[:4], before) >= 0.6).tolist()
        num = sure.index(False) if False in sure else 4
        cut = drafter.propose([row(TEXT[:end], None, p_min=0.6)])[0].drafted.tokens
        assert list(cut) == whole[:num]
        numbers.add(num)
    assert len(numbers) > 2


def test_temperatures_beside_a_draft_divide_its_confidences(lm, tmp_path: Path) -> None:
    folder = publish_dflash(tmp_path / "draft", random_block_weights(seed=6, dspark="vanilla"), "dspark")
    states, temperatures = features_of(lm, TEXT, LAYERS)[:20], [0.5, 2.0, 1.0, 4.0, 3.0]

    def logits() -> Tensor:
        drafter = loaded(lm, folder)
        drafter.propose([row(TEXT[:21], states, k=BLOCK)])
        return torch.cat([sure for _, sure in drafter.confidences]).logit()

    raw = logits()
    path = Path(folder) / "dspark_sts.json"
    path.write_text(json.dumps({"temperatures": temperatures[:BLOCK]}), encoding="utf-8")
    torch.testing.assert_close(logits() * torch.tensor(temperatures[:BLOCK]), raw, atol=1e-4, rtol=1e-4)
    for wrong in (temperatures[: BLOCK - 1], [0.0] * BLOCK, "none"):
        path.write_text(json.dumps({"temperatures": wrong}), encoding="utf-8")
        with pytest.raises(RunError, match=f"does not have {BLOCK} `temperatures` above 0"):
            loaded(lm, folder)


class TableBlocks:
    """A block draft by tables: logits by anchor and depth, corrected by the token before, or two candidates alone.

    Its confidence in a row depends on the token before the row's.
    """

    most_tokens, is_recorded = 2, False

    def __init__(self, table: Any, has_selector: bool = False) -> None:
        self.table, self.has_selector = torch.tensor(table, dtype=torch.float32), has_selector

    def feed(self, new: object, depths: object) -> None:
        pass

    def can_draft(self, handle: int) -> bool:
        return True

    def release(self, handle: int) -> None:
        pass

    def ahead(self, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        rows = [self.table[token, :depth] for _, token, depth in ends]
        return Ahead(rows, rows, self.behind, self.confidence)

    def behind(self, logits: Tensor, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        logits = logits + 2 * self.table[[tokens[-1] for tokens in before], 3]
        if not self.has_selector:
            return logits
        best = logits.topk(2, -1)
        return torch.full_like(logits, -torch.inf).scatter(1, best.indices, best.values)

    def confidence(self, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        return self.sure([tokens[-1] for tokens in before])

    def sure(self, tokens: Sequence[int]) -> Tensor:
        return self.table[list(tokens), 1, 3].sigmoid()


class TableDrafter(drafters.get("dflash")):  # type: ignore[misc]
    """Drafts by tables; `fault` spoils what verification is told of a guess, or which guesses it is given."""

    taps = ()
    fault: str | None = None
    p_min = 0.0

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        found: list[Guesses] = super().propose([replace(one, p_min=self.p_min) for one in rows])
        for one, guess in zip(rows, found, strict=True):
            table, tokens = self.sequences.table, guess.drafted.tokens
            if self.fault == "q without the Markov head":
                depths = [guess.drafted.depth(node) - 1 for node in range(len(guess.drafted))]
                guess.q = table[one.context[-1], depths].softmax(-1)
            if self.fault == "q of all tokens":
                q = not_none(guess.q)
                guess.q = torch.where(q > 0, 0.7 * q, 0.15)
            if self.fault == "a cut by the token that it scores":
                is_sure = (self.sequences.sure(tokens) >= 0.5).tolist()
                num = is_sure.index(False) if False in is_sure else len(tokens)
                guess.drafted, guess.q = Drafted.chain(tokens[:num]), not_none(guess.q)[:num] if num else None
        return found


def table_drafter(table: Table, fault: str | None, p_min: float = 0.0, has_selector: bool = False) -> TableDrafter:
    drafter = TableDrafter("table", "0")
    drafter._sequences, drafter.fault, drafter.p_min = stand_in(TableBlocks(table.q, has_selector)), fault, p_min
    drafter._num_tokens, drafter._max_context = 4, 1 << 20
    return drafter


SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    # How the tables draft, and the fault that each of them can have.
    "Markov": ({}, "q without the Markov head"),
    "selector": ({"has_selector": True}, "q of all tokens"),
    "confidence": ({"p_min": 0.5}, "a cut by the token that it scores"),
}


@pytest.mark.in_turn(6, every=8)
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    ("kind", "tree", "verify"),
    [
        ("Markov", None, "rejection"), ("selector", None, "block"), ("Markov", None, "block"),
        ("selector", None, "rejection"), ("Markov", "2,2", "auto"), ("selector", "2,2", "auto"),
        ("confidence", None, "rejection"),
    ],
)  # fmt: skip
def test_sampled_text_follows_the_target(kind: str, tree: str | None, verify: str, is_wrong: bool) -> None:
    table, (how, fault) = Table.random(num_tokens=4, seed=1, sharpness=2.0), SAMPLED[kind]
    drafter = table_drafter(table, fault if is_wrong else None, **how)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    p_value, length = sampled_p_value(table, drafter, params, 1_500, verify, tree)
    assert 1.1 < length < 2.9
    assert (p_value > 1e-6) is not is_wrong


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_a_trace_foretells_the_engines_counts(lm, fitted, rule: str) -> None:
    params = GREEDY if rule == "greedy" else replace(CHANCE, temperature=0.5)
    check_depth_trace(lm, loaded(lm, fitted[0]), params, 7, rule)


def test_doctor_says_what_the_folder_holds(lm, tmp_path: Path) -> None:
    def found(form: str, **keys: Any):
        weights = random_block_weights(dspark="vanilla" if form == "dspark" else None, dflash2=form == "dflash2")
        folder = publish_dflash(tmp_path / f"{form}-{'-'.join(keys)}", weights, form, **keys)
        return preflight(resolve(sets=[f"target.model={lm.name}", f"draft.model={folder}"]).recipe, look())

    pair = found("z-lab")
    said = "reads the outputs of layers 1, 2, 3; drafts up to 4 tokens in one pass"
    assert pair.head == f"DFlash draft, z-lab format: {said}; 97 of 97 tokens"
    assert (pair.draft, pair.draft_method, pair.taps, pair.errors) == (None, "dflash", (1, 2, 3), [])
    pair = found("dspark")
    said = "drafts up to 5 tokens in one pass, with a Markov head of rank 6 and a confidence head"
    assert said in not_none(pair.head)
    assert not_none(pair.head).startswith("DSpark draft, speculators 0.9.0 format")
    said = "in one pass, with convolutions over 2 rows and a selector among 6 candidates; 97 of 97 tokens"
    pair = found("dflash2")
    assert not_none(pair.head).endswith(said)
    assert not_none(pair.head).startswith("DFlash2 draft, z-lab format: reads the outputs of layers 1, 2, 3")
    assert (pair.draft_method, pair.errors) == ("dflash", [])
    pair = found("z-lab", target_layer_ids=None)
    assert pair.taps == (1, 3), "two layers that read one state each: 1 and 6 - 3"
    [problem] = found("z-lab", target_hidden_size=64).errors
    assert "reads hidden states of width 64" in problem.message


BAD: dict[str, tuple[str, Any, str]] = {
    "a missing tensor": ("z-lab", lambda c, w: w.pop("fc.weight"), "lacks the tensor `fc.weight`"),
    "a wrong shape": ("z-lab", lambda c, w: w.update({"norm.weight": torch.ones(7)}), r"`norm.weight` .* shape \[7\]"),
    "a stranger": ("z-lab", lambda c, w: w.update({"layers.0.mlp_conv": torch.ones(7)}), "`layers.0.mlp_conv`"),
    "another width": ("speculators", lambda c, w: c.update(target_hidden_size=64), "states of width 64, and .* has 32"),
    "another vocabulary": ("z-lab", lambda c, w: c.update(vocab_size=500), "made for 500 tokens"),
    "another depth": ("deepspec", lambda c, w: c.update(target_layer_ids=[1, 9, 30]), "layer `9`, and .* has 6"),
    "no numbers": ("z-lab", lambda c, w: w["fc.weight"].fill_(torch.nan), "`fc.weight` .* not finite"),
    "two spellings": ("z-lab", lambda c, w: w.update({"model.fc.weight": 2 * w["fc.weight"]}), "`fc.weight` twice"),
    "no factor": ("z-lab", lambda c, w: c.update(output_multiplier=float("nan")), "`output_multiplier` .*finite"),
    "no mask": ("z-lab", lambda c, w: c["dflash_config"].pop("mask_token_id"), "has no `mask_token_id`"),
    "a mask beyond": ("z-lab", lambda c, w: c["dflash_config"].update(mask_token_id=500), "is `500`, and it knows 97"),
    "no block": ("z-lab", lambda c, w: c.update(block_size=1), "`block_size` .* not `1`"),
    "no layers": ("speculators", lambda c, w: c.pop("aux_hidden_state_layer_ids"), "no list of layers: `None`"),
    "embeddings": ("deepspec", lambda c, w: c.update(target_layer_ids=[-1, 2, 3]), "reads its target's embeddings"),
    "no selector": ("dflash2", lambda c, w: w.pop("candidate_selector.successor_codebook"), "lacks the tensor"),
    "no convolution": ("z-lab", lambda c, w: c.update(architectures=["DFlash2DraftModel"]), "lacks the tensor"),
    "other candidates": ("dflash2", lambda c, w: c["dflash_config"].update(selector_top_k=0), "`selector_top_k` .*0`"),
    "uneven groups": ("dflash2", lambda c, w: c["dflash_config"].update(conv_group_size=7), "`7`, .* 32 channels"),
    "a reduced DFlash2": ("dflash2", lambda c, w: c.update(draft_vocab_size=40), "drafts 40 of 97 tokens"),
    "another kind": ("speculators", lambda c, w: c.update(speculators_model_type="dflash9"), "of the kind `dflash9`"),
    "Domino": ("z-lab", lambda c, w: c["dflash_config"].update(projector_type="domino"), "of the kind `domino`"),
    "sinks": ("z-lab", lambda c, w: c["dflash_config"].update(attention_sink_bias=True), "`attention_sink_bias: True`"),
    "no window": ("z-lab", lambda c, w: c["dflash_config"].update(use_swa=True), "sliding layers without a window"),
    "another Markov head": ("dspark", lambda c, w: c.update(markov_head_type="lstm"), "of the type `lstm`"),
    "no joint product": ("dspark", lambda c, w: c.update(markov_head_type="rnn"), "`markov_head.joint_proj.weight`"),
    "MLA": ("z-lab", lambda c, w: c.update(model_type="deepseek_v3"), "`deepseek_v3` layers"),
    "no layer": ("speculators", lambda c, w: c.pop("transformer_layer_config"), "no `transformer_layer_config`"),
}  # fmt: skip


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence(lm, case: str, tmp_path: Path) -> None:
    form, spoil, said = BAD[case]
    weights = random_block_weights(seed=2, dspark="vanilla" if form in ("dspark", "deepspec") else None,
                                   dflash2=form == "dflash2")  # fmt: skip
    folder = publish_dflash(tmp_path / "draft", weights, form)
    config = json.loads((folder / "config.json").read_text())
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    with pytest.raises((RunError, UsageError), match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_a_broken_mask_embedding_is_one_sentence(lm, tmp_path: Path) -> None:
    folder = publish_dflash(tmp_path / "draft", random_block_weights(), "z-lab")
    torch.save(torch.ones(7), folder / "mask_embedding.pt")
    with pytest.raises(UsageError, match=r"mask_embedding\.pt` is no embedding of 32 numbers"):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_an_engine_plans_room_for_whole_blocks(lm, tmp_path: Path) -> None:
    assert LAYER["vocab_size"] > MASK
    folder = publish_dflash(tmp_path / "draft", random_block_weights(), "z-lab")
    engine = Engine.load(lm.name, str(folder), num_speculative_tokens=2, max_num_seqs=2, max_model_len=32, check=False)
    prompts = [[one % 80 + 3 for one in TEXT[:20]], [one % 80 + 3 for one in TEXT[5:26]]]
    found = engine.generate(prompts, SamplingParams(max_new_tokens=12))
    assert engine.drafters.num_failures["dflash"] == 0
    assert sum(one.speculative.num_draft_tokens for one in found) > 0
