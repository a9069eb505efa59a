import numpy as np
import pytest
import scipy.stats
import torch
from typed import stand_in

from specdec_cli.sampling.noise import (
    Purpose,
    gumbel,
    gumbel_argmax,
    gumbel_many,
    gumbel_of,
    uniforms,
    uniforms_many,
    words,
)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 17])
def test_many_streams_equal_numpys_philox_one_by_one(n: int) -> None:
    seeds = [0, 1, 2**64 - 1, 12345] * 20
    indices = [i * 7919 for i in range(80)]
    positions = [i % 11 for i in range(80)]
    many = uniforms_many(seeds, indices, positions, Purpose.ACCEPT, n)
    for b in range(80):
        alone = uniforms(seeds[b], indices[b], positions[b], Purpose.ACCEPT, n)
        assert np.array_equal(many[b], alone)
        assert np.array_equal(many[b], uniforms_many([seeds[b]], [indices[b]], [positions[b]], Purpose.ACCEPT, n)[0])


def test_a_value_depends_on_its_offset_and_not_on_how_many_are_asked_for() -> None:
    assert np.array_equal(uniforms(3, 1, 40, Purpose.OWN, 9)[:4], uniforms(3, 1, 40, Purpose.OWN, 4))


def test_every_part_of_the_key_matters() -> None:
    base = uniforms(1, 2, 3, Purpose.DRAFT, 4)
    others = [
        uniforms(2, 2, 3, Purpose.DRAFT, 4),
        uniforms(1, 3, 3, Purpose.DRAFT, 4),
        uniforms(1, 2, 4, Purpose.DRAFT, 4),
        uniforms(1, 2, 3, Purpose.ACCEPT, 4),
        uniforms(2, 1, 3, Purpose.DRAFT, 4),
    ]
    assert all(not np.intersect1d(base, other).size for other in others)


def test_streams_never_overlap_however_long() -> None:
    long = uniforms(5, 0, 0, Purpose.DRAFT, 40_000)
    near = [uniforms(5, 0, position, purpose, 200) for position in range(3) for purpose in Purpose]
    assert all(np.intersect1d(long, one).size == 0 for one in near[1:])


def test_a_gpus_own_gumbel_noise_is_the_hosts() -> None:
    keys = [0, 2**63 - 1, 12345, 2**64 - 1], [0, 7919, 5, 2**63], [0, 40, 3, 9]
    seeds, indices, positions = [torch.tensor(words(values)) for values in keys]
    for num_tokens in (1, 6, 997):
        own, hosts = gumbel_of(seeds, indices, positions, num_tokens), gumbel_many(*keys, num_tokens)
        assert torch.allclose(own, hosts, rtol=1e-13, atol=1e-13)


def test_nothing_global_is_read_or_changed() -> None:
    np.random.seed(0)
    before = stand_in(np.random.get_state())[1].copy()
    torch.manual_seed(0)
    torch_before = torch.get_rng_state()
    first = uniforms(1, 1, 1, Purpose.OWN, 3)
    np.random.seed(99)
    assert np.array_equal(first, uniforms(1, 1, 1, Purpose.OWN, 3))
    np.random.seed(0)
    gumbel(1, 1, 1, 8)
    assert np.array_equal(before, stand_in(np.random.get_state())[1])
    assert torch.equal(torch_before, torch.get_rng_state())


def test_uniform_in_the_half_open_interval_over_rows_that_differ_in_index_alone() -> None:
    values = uniforms_many([0] * 20_000, range(20_000), [7] * 20_000, Purpose.OWN, 3)
    assert values.min() >= 0
    assert values.max() < 1
    assert all(scipy.stats.kstest(values[:, j], "uniform").pvalue > 1e-4 for j in range(3))
    assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.03


def test_gumbel_is_standard_and_keyed_by_position() -> None:
    noise = gumbel_many([4] * 3000, range(3000), [9] * 3000, 6)
    assert scipy.stats.kstest(noise.numpy().ravel(), "gumbel_r").pvalue > 1e-4
    assert torch.equal(noise[17], gumbel(4, 17, 9, 6))
    assert not torch.equal(gumbel(4, 17, 9, 6), gumbel(4, 17, 10, 6))


def test_gumbel_argmax_draws_from_probs_and_never_what_cannot_occur() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    tokens = gumbel_argmax(probs.expand(20_000, 4), [1] * 20_000, range(20_000), [5] * 20_000)
    counts = tokens.bincount(minlength=4).numpy()
    assert counts[1] == 0
    assert scipy.stats.chisquare(counts[[0, 2, 3]], [10_000, 6_000, 4_000]).pvalue > 1e-5


def test_no_streams_give_no_numbers() -> None:
    assert uniforms_many([], [], [], Purpose.OWN, 3).shape == (0, 3)
