"""Whole blocks found again by what stands up to their end: shared, never written, given up when room is needed."""

from pathlib import Path

import pytest
import torch
from invariance import holds
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.drafted import Drafted
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm

TEXT = [(11 * i * i + 3 * i) % 97 for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def lm(folder):
    return load_lm(folder, block_size=4, max_num_seqs=2, extra_tokens=0)


def test_the_longest_prefix_of_whole_blocks(lm) -> None:
    expected = lm.score([Row(9, TEXT[:30], 2)])
    lm.release(9)
    assert lm.adopt(0, TEXT[:30], "") == 0, "what shares with nobody is not found"
    lm.score([Row(0, TEXT[:30], 1)])
    assert lm.adopt(1, TEXT[:30], "") == 0, "blocks can be found once a context has grown past them"
    lm.release(1)
    lm.release(0)
    assert lm.adopt(2, TEXT[:30], "") == 28
    assert torch.allclose(lm.score([Row(2, TEXT[:30], 2)]), expected, atol=1e-5)
    for handle, context, num in ((3, TEXT[:28], 24), (4, TEXT[:29], 28), (5, TEXT[:5], 4), (6, TEXT[:4], 0)):
        assert lm.adopt(handle, context, "") == num
    assert lm.adopt(7, [*TEXT[:10], 0, *TEXT[11:30]], "") == 8
    assert lm.adopt(8, TEXT[:30], "other") == 0
    lm.check_integrity()
    for handle in range(9):
        lm.release(handle)
    assert lm.num_free_blocks == lm.num_blocks
    lm.check_integrity()


def test_a_shared_block_is_never_written(lm) -> None:
    """One of two that share a block goes back into its middle and on with other tokens."""
    lm.adopt(0, TEXT[:30], "")
    lm.score([Row(0, TEXT[:30], 1)])
    lm.release(0)
    assert lm.adopt(1, TEXT[:30], "") == lm.adopt(2, TEXT[:30], "") == 28
    other = [*TEXT[:26], 1, 2, 3]
    expected = lm.score([Row(9, other, 2)])
    assert torch.allclose(lm.score([Row(1, other, 2)]), expected, atol=1e-5)
    lm.check_integrity()
    expected = lm.score([Row(8, TEXT[:30], 2)])
    assert torch.allclose(lm.score([Row(2, TEXT[:30], 2)]), expected, atol=1e-5)


def test_a_block_that_is_written_anew_is_not_found_under_its_old_tokens(lm) -> None:
    lm.adopt(0, TEXT[:30], "")
    lm.score([Row(0, TEXT[:30], 1)])
    lm.score([Row(0, TEXT[:31], 1)])
    lm.score([Row(0, [*TEXT[:26], 1, 2, 3], 1)])
    assert lm.adopt(1, TEXT[:30], "") == 24
    lm.release(0)
    assert lm.adopt(2, [*TEXT[:26], 1, 2, 3], "") == 28
    lm.check_integrity()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "qwen3"])
def test_a_reused_prefix_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    lm = load_lm(str(make_tiny(family, tmp_path)), dtype="bfloat16")
    for length in (33, 50, 66, 81, 100):
        expected = lm.score([Row(0, TEXT[:length], 1)])
        lm.release(0)
        assert lm.adopt(1, TEXT[:length], f"{length}") == 0
        for end in range(length - 9, length + 1, 3):  # written by steps, as an output is
            lm.score([Row(1, TEXT[:end], 1)])
        lm.release(1)
        assert lm.adopt(2, TEXT[:length], f"{length}") > 0
        assert torch.equal(lm.score([Row(2, TEXT[:length], 1)]), expected)
        lm.release(2)


def test_long_rope_shares_what_was_read_with_short_frequencies(tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("phi3_long", tmp_path)), block_size=4)
    text = TEXT[:40]
    expected = lm.score([Row(0, text[:30], 2), Row(1, text[:20], 2)])
    for handle, end in ((2, 20), (3, 30), (4, 30), (5, 20)):
        lm.adopt(handle, text[:end], "")
        got = lm.score([Row(handle, text[:end], 2)])
        assert torch.allclose(got, expected[:2] if end == 30 else expected[2:], atol=1e-4)
        lm.release(handle)
    lm.check_integrity()


def test_pool_gives_up_what_was_left_first_and_a_sequences_end_before_its_beginning() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in (*first, *second):
        pool.publish(block, b"%d" % block)
    pool.free(first)
    pool.free(second)
    assert pool.num_free == 6
    taken = pool.allocate(3)
    assert first[1] in taken
    assert pool.share(b"%d" % first[1]) is None
    assert pool.share(b"%d" % first[0]) == first[0]
    assert pool.num_free == 2
    pool.check([*taken, first[0]])
    assert not pool.withdraw(not_none(pool.share(b"%d" % first[0]))), "two hold it"
    pool.free([first[0]])
    assert pool.withdraw(first[0])
    assert pool.share(b"%d" % first[0]) is None
    pool.publish(taken[0], b"%d" % second[0])
    assert pool.share(b"%d" % second[0]) == second[0], "the one that was there first stays"
    pool.free([second[0]])
    pool.free([*taken, first[0]])
    pool.check([])
    assert pool.num_free == 6


def test_a_drafted_chain_is_scored_as_text(lm) -> None:
    expected = lm.score([Row(0, TEXT[:10], 4)])
    lm.release(0)
    assert lm.score([Row(0, TEXT[:7], 4, Drafted.chain(TEXT[7:10]))]).equal(expected)
