"""Rules that judge sampled trees: exactly, by enumeration; row by row, as the papers say; and in distribution."""

from collections import Counter

import numpy as np
import pytest
import torch
from host_waits import HostWaits
from table_loop import PROMPT, Table
from test_engine_grammar import REGEX, allowed_after
from tiny_grammar import letter_tokens
from tree_loop import TREES, TreeLoop, masked_probs, measured_tree
from typed import not_none

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.residual import Residuals
from specdec_cli.engine.verify import RowGroup, Verdict, VerifyRow, verify
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.chisquare import enumerate_joint
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.noise import Purpose, uniforms
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import AUTO, RULES, check_trees

TABLE = Table.random(num_tokens=4)
ALARM = 1e-6
PLAIN = SamplingParams(temperature=1.0)
JUDGES = ("traversal", "rejection")
WALKS = ("exact-match", "gumbel")


def q_of(q, node, children, tokens):
    """A node's q; of a draft without chance one-hot at the child that is tried."""
    return q[node] if q[node] is not None else np.eye(len(next(iter(q.values()))))[tokens[children[0]]]


def naive_traversal(drafted, p, q):
    """Weng et al. 2025, leaf by leaf: each tested node with its chance and what its own token is drawn from.

    `p[node]` [V] follows a node; `q[node]` [V] is what its children were drawn from, None of a draft without chance.
    """
    p, q, a = dict(p), dict(q), {CONTEXT_END: 1.0}
    alive = {node: drafted.children(node) for node in range(CONTEXT_END, len(drafted))}
    tests = []

    def enter(node) -> None:
        for child in alive[node]:
            x = drafted.tokens[child]
            chance = 1.0 if q[node] is None else q[node][x]
            a[child] = min(1.0, a[node] * p[node][x] / chance)
            enter(child)

    enter(CONTEXT_END)
    while True:
        leaf = CONTEXT_END
        while alive[leaf]:
            leaf = alive[leaf][0]
        tests.append((leaf, a[leaf], p[leaf]))
        if leaf == CONTEXT_END:
            return tests
        parent, x = drafted.parents[leaf], drafted.tokens[leaf]
        alive[parent].remove(leaf)
        its_q = np.eye(len(p[parent]))[x] if q[parent] is None else q[parent]
        residual = np.maximum(a[parent] * p[parent] - its_q, 0)
        total = residual.sum()
        if parent != CONTEXT_END:
            left = total + 1 - a[parent]
            a[parent] = total / left if left > 0 else 1.0
        p[parent] = residual / total if total > 0 else p[parent]
        if q[parent] is not None:
            rest = np.where(np.arange(len(its_q)) == x, 0.0, its_q)
            q[parent] = rest / rest.sum() if rest.sum() > 0 else rest
        enter(parent)


def naive_rejection(drafted, p, q, node=CONTEXT_END):
    """Jeon et al. 2024: each child with the chance that it stands, what follows it, and the own token's weights."""
    its_p, its_q, tests = p[node], q[node], []
    for child in drafted.children(node):
        x = drafted.tokens[child]
        one = np.eye(len(its_p))[x] if its_q is None else its_q
        tests.append((child, min(1.0, its_p[x] / one[x]), naive_rejection(drafted, p, q, child)))
        residual = np.maximum(its_p - one, 0)
        its_p = residual / residual.sum() if residual.sum() > 0 else its_p
        if its_q is not None:
            rest = np.where(np.arange(len(one)) == x, 0.0, one)
            its_q = rest / rest.sum() if rest.sum() > 0 else rest
    return node, tests, its_p


def outcomes(mode, drafted, p, q):
    """Each node that may be the last to stand: its probability and what the own token is drawn from."""
    if mode == "traversal":
        left = 1.0
        for node, chance, weights in naive_traversal(drafted, p, q):
            yield node, left * chance, weights
            left *= 1 - chance
        return
    going = [(1.0, naive_rejection(drafted, p, q))]
    while going:
        left, (node, tests, weights) = going.pop()
        for _, chance, after in tests:
            going.append((left * chance, after))
            left *= 1 - chance
        yield node, left, weights


def last_node(mode, drafted, p, q, u):
    """The last node that stands where node i has the uniform number u[i], and the own token's weights."""
    if mode == "traversal":
        tests = naive_traversal(drafted, p, q)
        return next((node, w) for node, chance, w in tests if node == CONTEXT_END or u[node] < chance)
    node, tests, weights = naive_rejection(drafted, p, q)
    while (after := next((then for child, chance, then in tests if u[child] < chance), None)) is not None:
        node, tests, weights = after
    return node, weights


def trees_of(parents, q_after):
    """Every tree that a draft can sample without replacement, with its probability."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for node, parent in enumerate(parents):
        longer = {}
        for tokens, probability in known.items():
            tree = Drafted(tokens, parents[:node])
            q = q_after(tree.tokens_to(parent))
            for sibling in tree.children(parent):
                q = np.where(np.arange(len(q)) == tokens[sibling], 0.0, q)
            for token in np.flatnonzero(q).tolist():
                longer[(*tokens, token)] = probability * q[token] / q.sum()
        known = longer
    return [(Drafted(tokens, parents), probability) for tokens, probability in known.items()]


@pytest.mark.parametrize("mode", JUDGES)
@pytest.mark.parametrize("parents", [TREES["2,2"], (-1, -1, 0, 1), (-1, 0, 0, -1, 3), (-1, -1, -1, 1, 1)], ids=str)
def test_by_enumeration_a_step_leaves_the_targets_distribution_as_it_is(mode, parents) -> None:
    """Three tokens: every tree that can be drafted, every way to judge it, and plain decoding after the step."""
    table, small = Table.random(num_tokens=3, seed=2), SamplingParams(temperature=0.8)

    def after(which, output):
        return masked_probs(Table(which, which), small, (*PROMPT, *output))

    def joint(output, length):
        return enumerate_joint(lambda text: after(table.p, text[len(PROMPT) :]), (*PROMPT, *output), length)

    found = Counter()
    for drafted, drawn in trees_of(parents, lambda path: after(table.q, path)):
        nodes = range(CONTEXT_END, len(drafted))
        p, q = ({node: after(which, drafted.tokens_to(node)) for node in nodes} for which in (table.p, table.q))
        for node, probability, weights in outcomes(mode, drafted, p, q):
            for own in np.flatnonzero(weights).tolist():
                output = (*drafted.tokens_to(node), own)
                for more, chance in joint(output, 3 - len(output)).items():
                    found[(*output, *more)] += drawn * probability * weights[own] / weights.sum() * chance
    expected = joint((), 3)
    assert found.keys() == expected.keys()
    assert max(abs(found[key] - expected[key]) for key in expected) < 1e-12


def judged(mode, parents, num=300, is_drawn: bool = True, table=TABLE):
    """One step of many draws: the distribution, its rows, and the verdicts."""
    loop = TreeLoop(table, PLAIN, mode, parents, num, is_drawn=is_drawn)
    contexts = [[*PROMPT, i % 4, i // 4 % 4] for i in range(num)]
    guesses = loop.propose(contexts, range(num))
    rows = [VerifyRow(RULES[mode], loop.params[i], len(contexts[i]), guesses[i]) for i in range(num)]
    lm_rows = [Row(i, contexts[i], len(g.drafted) + 1, g.drafted) for i, g in enumerate(guesses)]
    chain = [
        ChainRow(row.params, text, len(PROMPT), row.guesses.drafted, frozenset())
        for row, text in zip(rows, contexts, strict=True)
    ]
    p = distribution(loop.target.score(lm_rows), chain, table.num_tokens)
    return p, rows, verify(p, rows)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("is_drawn", [True, False], ids=["by chance", "without"])
@pytest.mark.parametrize("mode", JUDGES)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_verdicts_on_trees_are_the_papers_row_by_row(mode, parents, is_drawn: bool) -> None:
    p, rows, verdicts = judged(mode, parents, is_drawn=is_drawn)
    first, lengths = 0, set()
    for row, verdict in zip(rows, verdicts, strict=True):
        drafted = row.guesses.drafted
        nodes = range(CONTEXT_END, len(drafted))
        its_p = {node: p.probs[first + node + 1].double().numpy() for node in nodes}
        q = dict.fromkeys(nodes)
        if is_drawn:
            q |= {drafted.parents[node]: row.guesses.q[node].double().numpy() for node in range(len(drafted))}
        key = row.params.seed, row.params.index, row.position
        node, weights = last_node(mode, drafted, its_p, q, uniforms(*key, Purpose.ACCEPT, len(drafted)))
        path = drafted.path(node)
        u = uniforms(*key, Purpose.OWN, len(path) + 1)[-1]
        own = int(np.searchsorted(np.cumsum(weights) / weights.sum(), u, side="right"))
        assert verdict == Verdict(path, own)
        lengths.add(len(path))
        first += len(drafted) + 1
    assert lengths == set(range(max(row.guesses.drafted.max_depth for row in rows) + 1))
    waits = HostWaits()
    with waits:
        found = verify(p, rows)
    assert found == verdicts, "a GPU judges otherwise"
    assert waits.num == 1, waits.lines


def numbers_of_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is tried by the random number of the next one."""
    drawn = RowGroup.acceptance_uniforms
    monkeypatch.setattr(RowGroup, "acceptance_uniforms", lambda group: [[*u[1:], *u[:1]] for u in drawn(group)])


def residuals_not_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Residuals._refuse_drawn

    def forgets(residuals, nodes):
        refuse(residuals, nodes)
        residuals.total[:] = 1.0

    monkeypatch.setattr(Residuals, "_refuse_drawn", forgets)


def probabilities_of_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has the p(x) of the one before it."""
    refuse = Residuals._refuse_drawn

    def mistakes(residuals, nodes):
        refuse(residuals, nodes)
        for node in nodes:
            if residuals.forest.is_followed(node):
                residuals.p[residuals.forest.next[node]] = residuals.p[node]

    monkeypatch.setattr(Residuals, "_refuse_drawn", mistakes)


@pytest.mark.parametrize("fault", [numbers_of_siblings, residuals_not_normalized, probabilities_of_siblings])
@pytest.mark.parametrize("mode", JUDGES)
def test_planted_faults_are_seen_row_by_row(mode, fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_verdicts_on_trees_are_the_papers_row_by_row(mode, TREES["3,1,1"], True)


@pytest.mark.parametrize("is_drawn", [True, False], ids=["by chance", "without"])
def test_traversal_of_a_chain_is_block_verification_bit_for_bit(is_drawn: bool) -> None:
    for k in (1, 2, 5):
        p, rows, verdicts = judged("traversal", tuple(range(-1, k - 1)), is_drawn=is_drawn)
        assert verify(p, [VerifyRow(RULES["block"], one.params, one.position, one.guesses) for one in rows]) == verdicts


def test_trees_chains_and_nothing_in_one_call_are_judged_as_alone() -> None:
    parts = [judged(mode, parents, 12) for mode in (*JUDGES, *WALKS) for parents in TREES.values()]
    rows = [row for _, its, _ in parts for row in its]
    verdicts = [verdict for _, _, its in parts for verdict in its]
    logits = torch.cat([p.scores for p, _, _ in parts])
    rows.append(VerifyRow(RULES["traversal"], PLAIN, 3, Guesses(NOTHING)))
    chain = [ChainRow(row.params, [0, 1], 2, row.guesses.drafted, frozenset()) for row in rows]
    p = distribution(torch.cat((logits, logits[:1])), chain, TABLE.num_tokens)
    assert verify(p, rows)[:-1] == verdicts
    waits = HostWaits()
    with waits:
        assert verify(p, rows)[:-1] == verdicts, "a GPU judges otherwise"
    assert waits.num == len({row.rule for row in rows}), waits.lines


@pytest.mark.in_turn(10, every=11)
@pytest.mark.parametrize(
    ("mode", "parents"),
    [(mode, parents) for mode in (*JUDGES, *WALKS) for parents in TREES.values()],
)
def test_joint_of_three_tokens_is_the_targets_own(mode, parents) -> None:
    loop = TreeLoop(TABLE, PLAIN, mode, parents)
    assert measured_tree(loop, PLAIN).p_value > ALARM
    assert 0.1 < loop.num_accepted / loop.num_steps < 2.5


@pytest.mark.in_turn(6, every=7)
@pytest.mark.parametrize("mode", [*JUDGES, *WALKS])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3, "top_k": 2},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.6, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_joint_with_processors_is_the_targets_own(mode, options) -> None:
    """Top-k leaves fewer tokens than a node has children."""
    params = SamplingParams(**options)
    assert measured_tree(TreeLoop(TABLE, params, mode, TREES["ragged"]), params).p_value > ALARM


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("mode", [*JUDGES, *WALKS])
def test_joint_under_a_grammar_is_the_masked_targets_own(mode) -> None:
    grammar = compile_grammar("regex", REGEX, letter_tokens())
    loop = TreeLoop(TABLE, PLAIN, mode, TREES["2,2"], grammar=grammar)
    assert measured_tree(loop, PLAIN, allowed_after=allowed_after).p_value > ALARM


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("mode", JUDGES)
def test_joint_of_a_tree_without_chance_is_the_targets_own(mode) -> None:
    loop = TreeLoop(TABLE, PLAIN, mode, TREES["2,2"], is_drawn=False)
    assert measured_tree(loop, PLAIN).p_value > ALARM


def test_without_chance_no_rule_accepts_more_than_the_walk() -> None:
    """A node stands with the target's probability of its path, whichever rule judges it."""
    length = {}
    for mode in (*JUDGES, *WALKS):
        _, _, verdicts = judged(mode, TREES["3,1,1"], 2_000, is_drawn=False)
        length[mode] = np.mean([len(one.path) for one in verdicts])
    assert max(length.values()) - min(length.values()) < 0.1


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("parents", [TREES["3,1,1"], (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5), (-1, -1, 0, 1, 2, 3)], ids=str)
def test_traversal_accepts_longer_paths_than_recursive_rejection(parents) -> None:
    """Both judge the same trees by the same random numbers."""
    lengths = [[len(one.path) for one in judged(mode, parents, 2_000, table=Table.random())[2]] for mode in JUDGES]
    longer = np.subtract(lengths[0], lengths[1])
    assert longer.mean() > 4 * longer.std() / np.sqrt(len(longer))


@pytest.mark.parametrize("mode", [mode for mode, rule in RULES.items() if not rule.judges_trees])
def test_a_mode_without_an_honest_rule_for_trees_is_refused(mode) -> None:
    with pytest.raises(UsageError, match=f"`{mode}` judges chains alone") as caught:
        check_trees(mode, 1.0)
    assert "traversal" in not_none(caught.value.hint)
    check_trees(mode, 0.0)


@pytest.mark.parametrize("mode", ["traversal", "rejection", "gumbel", "exact-match", "synthetic", AUTO])
def test_modes_that_judge_trees_pass(mode) -> None:
    check_trees(mode, 0.0)
    if mode != AUTO:
        check_trees(mode, 0.7)
