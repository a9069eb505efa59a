from collections import Counter

import torch
from typed import not_none

from specdec_cli.drafted import NOTHING
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.draft import ChildrenWanted, draft_children, likely_children
from specdec_cli.sampling.noise import Purpose, gumbel, uniforms
from specdec_cli.sampling.params import SamplingParams

V = 30


def q_of(params):
    logits = 2 * torch.randn(len(params), V, generator=torch.Generator().manual_seed(3))
    return distribution(logits, [ChainRow(one, [1, 2], 1, NOTHING, frozenset()) for one in params], V)


def draft_tokens(q, params, shares_noise, positions, offset):
    """One token for each row of q: the nodes of chains."""
    rows = zip(params, positions, shares_noise, strict=True)
    wanted = [ChildrenWanted(one, 1, position, offset, offset, True, shared) for one, position, shared in rows]
    return [token for (token,) in draft_children(q, wanted)]


def test_each_row_draws_with_the_noise_that_it_is_asked_for() -> None:
    params = [SamplingParams(temperature=t, seed=s, index=i) for t, s, i in [(1.0, 4, 0), (0.0, 4, 1), (0.8, 5, 2)]]
    q = q_of(params)
    tokens = draft_tokens(q, params, [False, False, True], [10, 20, 30], 2)
    assert tokens[0] == int(q.sample([float(uniforms(4, 0, 10, Purpose.DRAFT, 3)[2])] * 3)[0])
    assert tokens[1] == int(q.argmax[1])
    assert tokens[2] == int((q.probs[2].log() + gumbel(5, 2, 32, V)).argmax())


def test_shared_noise_depends_on_the_absolute_position_alone_and_others_on_the_step() -> None:
    params = [SamplingParams(temperature=1.5, index=i) for i in range(60)]
    q = q_of(params)

    def draw(is_shared, position, offset):
        return draft_tokens(q, params, [is_shared] * 60, [position] * 60, offset)

    assert draw(True, 10, 3) == draw(True, 12, 1)
    assert draw(False, 10, 3) != draw(False, 12, 1)
    assert draw(False, 10, 0) != draw(False, 10, 1)


def test_greedy_rows_give_their_argmax() -> None:
    params = [SamplingParams(), SamplingParams(seed=9)]
    q = q_of(params)
    assert draft_tokens(q, params, [False, True], [5, 5], 0) == q.argmax.tolist()


def test_a_row_alone_and_in_company_draws_the_same() -> None:
    params = [SamplingParams(temperature=1.0, index=i) for i in range(80)]
    q = q_of(params)
    shared = [i % 3 > 0 for i in range(80)]
    together = draft_tokens(q, params, shared, list(range(80)), 1)
    logits = 2 * torch.randn(80, V, generator=torch.Generator().manual_seed(3))
    for i in range(0, 80, 13):
        alone = distribution(logits[i : i + 1], [ChainRow(params[i], [1, 2], 1, NOTHING, frozenset())], V)
        assert draft_tokens(alone, [params[i]], [shared[i]], [i], 1) == [together[i]]


def test_siblings_are_drawn_without_replacement() -> None:
    params = [SamplingParams(temperature=1.2, index=i, top_k=4) for i in range(4000)]
    logits = 2 * torch.randn(1, V, generator=torch.Generator().manual_seed(3)).expand(4000, V)
    q = distribution(logits, [ChainRow(one, [1, 2], 1, NOTHING, frozenset()) for one in params], V)
    pairs = draft_children(q, [ChildrenWanted(one, 2, 7, 0, 5) for one in params])
    probs = not_none(q.probs)[0].double()
    support = probs.nonzero()[:, 0].tolist()
    expected = {(a, b): float(probs[a] * probs[b] / (1 - probs[a])) for a in support for b in support if a != b}
    assert len(expected) == 12
    counts = Counter(map(tuple, pairs))
    assert set(counts) <= set(expected)
    statistic = sum((counts[pair] - 4000 * share) ** 2 / (4000 * share) for pair, share in expected.items())
    assert statistic < 31.3, "chi-square, 11 degrees of freedom, p = 0.001"


def test_no_more_siblings_than_tokens_that_can_occur() -> None:
    params = [SamplingParams(temperature=1.0, top_k=k) for k in (3, 1, 5)]
    q = q_of(params)
    wanted = [ChildrenWanted(one, 4, 7, 0, 4 * i, i < 2) for i, one in enumerate(params)]
    found = draft_children(q, wanted)
    assert [len(tokens) for tokens in found] == [3, 1, 4]
    assert all(q.probs[i, tokens].all() and len(set(tokens)) == len(tokens) for i, tokens in enumerate(found))


def test_siblings_use_uniform_numbers_one_after_another() -> None:
    params = [SamplingParams(temperature=1.0)]
    q = q_of(params)
    first = draft_children(q, [ChildrenWanted(params[0], 2, 7, 1, 3)])[0][0]
    assert first == draft_children(q, [ChildrenWanted(params[0], 1, 7, 1, 3)])[0][0]
    assert first == int(q.sample([float(uniforms(0, 0, 7, Purpose.DRAFT, 4)[3])])[0])


def test_shared_noise_ranks_the_siblings() -> None:
    params = [SamplingParams(temperature=0.8, seed=s) for s in (5, 5, 6)]
    q = q_of(params)
    found = draft_children(q, [ChildrenWanted(one, 3, 30, 2, 9, shares_noise=True) for one in params])
    for i, one in enumerate(params):
        values = q.probs[i].log() + gumbel(one.seed, 0, 32, V)
        assert found[i] == values.argsort(descending=True)[:3].tolist()


def test_likely_children_descend_and_greedy_ones_have_a_probability() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.5)]
    q = q_of(params)
    for i, (found, expected) in enumerate(
        zip(likely_children(q, [3, 5]), (q.scores.softmax(-1), q.probs), strict=True)
    ):
        top = expected[i].topk((3, 5)[i])
        assert [token for token, _ in found] == top.indices.tolist()
        assert [value for _, value in found] == top.values.tolist()
    assert draft_children(q, [ChildrenWanted(params[0], 3, 7, 0, 0)] * 2)[0] == [
        t for t, _ in likely_children(q, [3, 0])[0]
    ]
