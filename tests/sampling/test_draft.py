import torch

from specdec_cli.drafted import NOTHING
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.draft import draft_tokens
from specdec_cli.sampling.noise import Purpose, gumbel, uniforms
from specdec_cli.sampling.params import SamplingParams

V = 30


def q_of(params):
    logits = 2 * torch.randn(len(params), V, generator=torch.Generator().manual_seed(3))
    return distribution(logits, [ChainRow(one, [1, 2], 1, NOTHING, frozenset()) for one in params], V)


def test_each_row_draws_with_the_noise_that_it_is_asked_for():
    params = [SamplingParams(temperature=t, seed=s, index=i) for t, s, i in [(1.0, 4, 0), (0.0, 4, 1), (0.8, 5, 2)]]
    q = q_of(params)
    tokens = draft_tokens(q, params, [False, False, True], [10, 20, 30], 2)
    assert tokens[0] == int(q.sample([float(uniforms(4, 0, 10, Purpose.DRAFT, 3)[2])] * 3)[0])
    assert tokens[1] == int(q.argmax[1])
    assert tokens[2] == int((q.probs[2].log() + gumbel(5, 2, 32, V)).argmax())


def test_shared_noise_depends_on_the_absolute_position_alone_and_others_on_the_step():
    params = [SamplingParams(temperature=1.5, index=i) for i in range(60)]
    q = q_of(params)

    def draw(is_shared, position, offset):
        return draft_tokens(q, params, [is_shared] * 60, [position] * 60, offset)

    assert draw(True, 10, 3) == draw(True, 12, 1)
    assert draw(False, 10, 3) != draw(False, 12, 1)
    assert draw(False, 10, 0) != draw(False, 10, 1)


def test_greedy_rows_give_their_argmax():
    params = [SamplingParams(), SamplingParams(seed=9)]
    q = q_of(params)
    assert draft_tokens(q, params, [False, True], [5, 5], 0) == q.argmax.tolist()


def test_a_row_alone_and_in_company_draws_the_same():
    params = [SamplingParams(temperature=1.0, index=i) for i in range(80)]
    q = q_of(params)
    shared = [i % 3 > 0 for i in range(80)]
    together = draft_tokens(q, params, shared, list(range(80)), 1)
    logits = 2 * torch.randn(80, V, generator=torch.Generator().manual_seed(3))
    for i in range(0, 80, 13):
        alone = distribution(logits[i : i + 1], [ChainRow(params[i], [1, 2], 1, NOTHING, frozenset())], V)
        assert draft_tokens(alone, [params[i]], [shared[i]], [i], 1) == [together[i]]
