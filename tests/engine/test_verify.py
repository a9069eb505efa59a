from dataclasses import replace

import numpy as np
import pytest
import torch
from table_loop import PROMPT, Loop, Table, measured, numbered
from typed import not_none

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine.verify import Verdict, VerifyRow, verify
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.noise import Purpose, uniforms
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import MODES, RULES, resolve_mode, rule_of

TABLE = Table.random()
SAMPLED = [name for name, rule in RULES.items() if rule.samples and rule.is_lossless]
# A true sampler falls below this once in a million runs, and the seeds are fixed.
ALARM = 1e-6
PROCESSORS = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.15},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
]


@pytest.mark.in_turn(8, every=30)
@pytest.mark.parametrize(("options", "mode"), [(options, mode) for options in PROCESSORS for mode in SAMPLED], ids=str)
def test_joint_of_three_tokens_is_the_targets_own(mode, options) -> None:
    params = SamplingParams(**options)
    loop = Loop(TABLE, params, mode, k=2)
    assert measured(loop, params, 3).p_value > ALARM
    assert 0.05 < loop.num_accepted / loop.num_drafted < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*SAMPLED])
def test_joint_is_exact_for_mixed_lengths_with_and_without_chance(mode) -> None:
    params = SamplingParams(temperature=1.1, logit_bias={2: 0.7})
    loop = Loop(TABLE, params, mode, k=lambda index: index % 5, without_chance=(1, 2))
    assert measured(loop, params, 3).p_value > ALARM
    assert loop.num_accepted > 0


@pytest.mark.slow
def test_block_accepts_more_than_rejection_and_both_more_than_exact_match() -> None:
    table, params = Table.random(seed=3), SamplingParams(temperature=1.0)
    length = {}
    for mode in ("block", "rejection", "exact-match"):
        loop = Loop(table, params, mode, k=4, num_draws=5000)
        loop.run(3)
        length[mode] = loop.num_accepted / loop.num_steps
    assert length["block"] > length["rejection"] + 0.02 > length["exact-match"]


def test_typical_is_lossy_and_chi_square_sees_it() -> None:
    params = SamplingParams(temperature=1.0)
    assert measured(Loop(TABLE, params, "typical", k=3), params, 3).p_value < ALARM


@pytest.mark.in_turn(0, every=6)
@pytest.mark.parametrize("options", PROCESSORS, ids=str)
def test_gumbel_text_is_the_same_with_any_draft_any_k_or_none(options) -> None:
    params = SamplingParams(**options)
    other = Table(TABLE.p, Table.random(seed=8).q)
    texts = [
        Loop(table, params, "gumbel", k, num_draws=300, without_chance=certain).run(8)
        for table, k, certain in [(TABLE, 0, ()), (TABLE, 1, ()), (TABLE, 4, ()), (other, 3, ()), (other, 4, (0, 1, 3))]
    ]
    assert all(text == texts[0] for text in texts)
    assert len({tuple(text) for text in texts[0]}) > 100


@pytest.mark.parametrize("mode", MODES)
def test_temperature_zero_gives_the_argmax_path_in_every_mode(mode) -> None:
    params = SamplingParams(repetition_penalty=1.2)
    plain = Loop(TABLE, params, "greedy", k=0, num_draws=4).run(12)
    loop = Loop(TABLE, params, mode, k=3, num_draws=4)
    assert loop.run(12) == plain
    assert len(set(map(tuple, plain))) == 1
    assert Loop(Table(TABLE.p, TABLE.p), params, mode, k=3, num_draws=4).run(12) == plain


def step_of(mode, num, position=7, k=3, table=TABLE, **options):
    """Rows of one step of `num` draws and their p, drafted by the loop itself."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    loop = Loop(table, params, mode, k=lambda index: (index + k) % (k + 1), num_draws=num, without_chance=(3,))
    contexts = [[*PROMPT, *(i % table.num_tokens for i in range(position - 2))] for _ in range(num)]
    drafted, q_rows = loop.propose(contexts, range(num))
    chain = [loop.chain_row(contexts[i], i, drafted[i]) for i in range(num)]
    seen = [contexts[i][-2:] + drafted[i] for i in range(num)]
    logits = [torch.from_numpy(table.p[s[j], s[j + 1]]).float() for s in seen for j in range(len(s) - 1)]
    guesses = [Guesses(Drafted.chain(drafted[i]), torch.stack(q_rows[i]) if q_rows[i] else None) for i in range(num)]
    rows = [VerifyRow(rule_of(mode, params.temperature), loop.params[i], position, guesses[i]) for i in range(num)]
    return torch.stack(logits), chain, rows


def test_a_rows_verdict_does_not_depend_on_its_neighbours_modes_or_lengths() -> None:
    parts = [step_of(mode, 40, position=5 + m) for m, mode in enumerate(SAMPLED)]
    parts += [step_of("typical", 40), step_of("greedy", 40, temperature=0.0)]
    order = np.random.default_rng(0).permutation(sum(len(part[2]) for part in parts)).tolist()
    chain = [one for part in parts for one in part[1]]
    rows = [one for part in parts for one in part[2]]
    logits = torch.cat([part[0] for part in parts]).split([len(one.guesses.drafted) + 1 for one in rows])
    shuffled = distribution(torch.cat([logits[i] for i in order]), [chain[i] for i in order], TABLE.num_tokens)
    together = verify(shuffled, [rows[i] for i in order])
    for place, i in enumerate(order[:80]):
        alone = verify(distribution(logits[i], [chain[i]], TABLE.num_tokens), [rows[i]])
        assert alone == [together[place]]


def naive_block(p, q, tokens, u):
    """Sun et al. 2024, algorithm 2, one row, as in the paper: how many tokens stand and the residual."""
    k, kept, num_accepted, residual = len(tokens), 1.0, 0, np.maximum(p[0] - q[0], 0)
    for i in range(1, k + 1):
        kept = min(1.0, kept * p[i - 1][tokens[i - 1]] / q[i - 1][tokens[i - 1]])
        if i == k:
            h, rest = kept, p[k]
        else:
            rest = np.maximum(kept * p[i] - q[i], 0)
            h = 1.0 if kept == 1.0 else rest.sum() / (rest.sum() + 1 - kept)
        if u[i - 1] < h:
            num_accepted, residual = i, rest
    return num_accepted, residual


def naive_rejection(p, q, tokens, u):
    for i, token in enumerate(tokens):
        if u[i] >= min(1.0, p[i][token] / q[i][token]):
            return i, np.maximum(p[i] - q[i], 0)
    return len(tokens), p[len(tokens)]


@pytest.mark.parametrize(("mode", "naive"), [("block", naive_block), ("rejection", naive_rejection)])
def test_verdicts_are_the_papers_row_by_row(mode: str, naive) -> None:
    logits, chain, rows = step_of(mode, 300, k=4)
    p = distribution(logits, chain, TABLE.num_tokens)
    verdicts = verify(p, rows)
    first = 0
    for one, verdict in zip(rows, verdicts, strict=True):
        tokens, k = list(one.guesses.drafted.tokens), len(one.guesses.drafted)
        q = np.eye(TABLE.num_tokens)[tokens] if one.guesses.q is None else one.guesses.q.double().numpy()
        if not k:
            q = np.zeros((1, TABLE.num_tokens))
        u = uniforms(0, one.params.index, one.position, Purpose.ACCEPT, k)
        num_accepted, residual = naive(not_none(p.probs)[first : first + k + 1].double().numpy(), q, tokens, u)
        own = uniforms(0, one.params.index, one.position, Purpose.OWN, 5)[num_accepted]
        token = int(np.searchsorted(np.cumsum(residual) / residual.sum(), own, side="right"))
        assert verdict == Verdict(tuple(range(num_accepted)), token)
        first += k + 1


def one_step(mode, p, q, tokens, num=4000, temperature=1.0):
    """Verdicts of `num` draws of one step with given p [k+1, V] and q [k, V]."""
    params = numbered(SamplingParams(temperature=temperature), num)
    logits = torch.tensor(p, dtype=torch.float32).log().repeat(num, 1)
    drafted = Drafted.chain(tokens)
    chain = [ChainRow(one, [0, 0], 2, drafted, frozenset()) for one in params]
    guesses = Guesses(drafted, None if q is None else torch.tensor(q, dtype=torch.float32))
    dist = distribution(logits, chain, len(p[0]))
    return verify(dist, [VerifyRow(rule_of(mode, temperature), one, 2, guesses) for one in params])


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_p_equal_to_q_accepts_everything(mode: str) -> None:
    p = [[0.1, 0.2, 0.7]] * 4
    verdicts = one_step(mode, p, p[:3], [0, 1, 2])
    assert np.mean([len(one.path) == 3 for one in verdicts]) > 0.999


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_an_empty_residual_draws_from_p(mode: str) -> None:
    p = [[0.25, 0.75], [0.5, 0.5]]
    verdicts = one_step(mode, p, [[1.0, 0.9]], [1])
    refused = [one for one in verdicts if len(one.path) == 0]
    assert len(refused) > 300
    assert 0.15 < np.mean([one.own == 0 for one in refused]) < 0.35


@pytest.mark.parametrize("mode", SAMPLED)
def test_a_draft_without_chance_stands_with_probability_p_and_is_never_the_own_token_after_a_refusal(mode) -> None:
    verdicts = one_step(mode, [[0.3, 0.6, 0.1], [0.5, 0.25, 0.25]], None, [0])
    refused = [one.own for one in verdicts if len(one.path) == 0]
    assert len(refused) / len(verdicts) == pytest.approx(0.7, abs=0.03)
    assert 0 not in refused
    assert np.mean([own == 1 for own in refused]) == pytest.approx(6 / 7, abs=0.03)


def test_typical_accepts_by_the_entropy_threshold() -> None:
    flat = [0.04] * 25
    threshold = min(0.09, 0.3 * np.exp(-np.log(25.0)))
    assert threshold < 0.04
    assert all(len(one.path) == 1 for one in one_step("typical", [flat, flat], None, [3], num=20))
    sharp = [0.9, 0.08, 0.02]
    entropy = -sum(x * np.log(x) for x in sharp)
    assert min(0.09, 0.3 * np.exp(-entropy)) > 0.08
    assert all(len(one.path) == 0 for one in one_step("typical", [sharp, sharp], None, [1], num=20))
    owns = [one.own for one in one_step("typical", [sharp, sharp], None, [1])]
    assert np.mean([own == 0 for own in owns]) == pytest.approx(0.9, abs=0.03)


def test_no_guesses_give_one_own_token_from_p() -> None:
    for mode in SAMPLED:
        verdicts = one_step(mode, [[0.2, 0.8]], None, [])
        assert {len(one.path) for one in verdicts} == {0}
        assert np.mean([one.own for one in verdicts]) == pytest.approx(0.8, abs=0.03)


def test_greedy_rows_keep_a_wide_vocabulary_as_indices() -> None:
    logits = torch.randn(3 * 3, 5000, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(dim=-1).tolist()
    drafts = list(map(Drafted.chain, [best[0:2], [best[3], best[4] + 1], [best[6] + 1, best[7]]]))
    chain = [ChainRow(SamplingParams(), [1], 1, drafted, frozenset()) for drafted in drafts]
    p = distribution(logits, chain, 5000)
    verdicts = verify(p, [VerifyRow(RULES["greedy"], SamplingParams(), 1, Guesses(drafted)) for drafted in drafts])
    assert p.probs is None
    assert verdicts == [Verdict((0, 1), best[2]), Verdict((0,), best[4]), Verdict((), best[6])]


def test_a_drafted_token_with_no_probability_under_its_q_is_a_broken_drafter() -> None:
    with pytest.raises(AssertionError, match="probability under the q"):
        one_step("rejection", [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0]], [1], num=1)


def test_seeds_and_indices_change_the_text_and_nothing_else_does() -> None:
    params = SamplingParams(temperature=1.0)
    loop = Loop(TABLE, params, "block", k=3, num_draws=50)
    first = loop.run(10)
    assert Loop(TABLE, params, "block", k=3, num_draws=50).run(10) == first
    assert Loop(TABLE, params, "block", k=3, num_draws=20).run(10) == first[:20]
    assert Loop(TABLE, replace(params, seed=1), "block", k=3, num_draws=50).run(10) != first
    assert len(set(map(tuple, first))) > 30


@pytest.mark.parametrize(
    ("mode", "temperature", "expected"),
    [("auto", 0.0, "greedy"), ("auto", 0.7, "block"), ("block", 0.0, "block"), ("typical", 1.0, "typical")],
)
def test_mode_resolution(mode: str, temperature: float, expected: str) -> None:
    assert resolve_mode(mode, temperature) == expected


@pytest.mark.parametrize(("mode", "temperature"), [("greedy", 0.5), ("greedyy", 0.0), ("", 1.0)])
def test_a_mode_that_does_not_fit_is_refused(mode: str, temperature: float) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_mode(mode, temperature)
    assert f"`{mode}`" in caught.value.message
    assert caught.value.hint


# Every first token, and two that follow each of them; one branch goes on.
TREE = Drafted((0, 1, 2, 3, 4, *(0, 3) * 5, 1), (*(-1,) * 5, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5))
STOP_IDS = frozenset({2})


def row_by_row(mode, drafted, params, context):
    """The path that plain decoding takes through a tree, one token after the other, and its next token."""
    node, path = CONTEXT_END, []
    while True:
        text = [*context, *drafted.tokens_to(node)]
        logits = torch.from_numpy(TABLE.p[text[-2], text[-1]]).float()[None]
        p = distribution(logits, [ChainRow(params, text, len(PROMPT), NOTHING, STOP_IDS)], TABLE.num_tokens)
        if mode == "greedy":
            token = p.likeliest[0]
        elif mode == "gumbel":
            noisy = not_none(p.probs)[0].double().log() + noise.gumbel(0, params.index, len(text), TABLE.num_tokens)
            token = int(noisy.argmax())
        else:
            u = uniforms(0, params.index, len(context), Purpose.OWN, len(path) + 1)[-1:]
            token = int(p.sample(u)[0])
        child = next((i for i in range(len(drafted)) if (drafted.parents[i], drafted.tokens[i]) == (node, token)), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


@pytest.mark.parametrize(("mode", "temperature"), [("greedy", 0.0), ("gumbel", 1.0), ("exact-match", 1.0)])
@pytest.mark.parametrize("drafted", [TREE, Drafted.chain([0, 2, 4]), NOTHING], ids=["tree", "chain", "nothing"])
def test_the_targets_own_choices_walk_a_tree_as_they_walk_plain_text(mode: str, temperature: float, drafted) -> None:
    """Penalties and processors included: each node sees the context and its own path."""
    table = TableLM(lambda text: torch.from_numpy(TABLE.p[text[-2], text[-1]]), TABLE.num_tokens, order=2)
    params = SamplingParams(temperature=temperature, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=4)
    rows, lm_rows, chain, expected = [], [], [], []
    for i in range(60):
        one = replace(params, index=i)
        context = [*PROMPT, i % 5, i // 5 % 5]
        lm_rows.append(Row(i, context, len(drafted) + 1, drafted))
        chain.append(ChainRow(one, context, len(PROMPT), drafted, STOP_IDS))
        rows.append(VerifyRow(rule_of(mode, temperature), one, len(context), Guesses(drafted)))
        expected.append(row_by_row(mode, drafted, one, context))
    p = distribution(table.score(lm_rows), chain, TABLE.num_tokens)
    assert verify(p, rows) == expected
    assert drafted is not TREE or {len(one.path) for one in expected} >= {1, 2}
