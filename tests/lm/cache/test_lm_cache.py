"""The cache is a function of the context: prefixes kept, rejected tokens given back, blocks counted."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny

from specdec_cli.errors import RunError
from specdec_cli.lm.cache import budget
from specdec_cli.lm.cache.blocks import BlockPool
from specdec_cli.lm.cache.budget import device_room
from specdec_cli.lm.cache.cache_plan import Room
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.forward import on_its_device
from specdec_cli.lm.load import load_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def lm(folder):
    return load_lm(folder, block_size=4)


def fed(lm, monkeypatch: pytest.MonkeyPatch):
    """How many tokens every forward is given from now on."""
    counts, run = [], lm._forward.run

    def counting(layout):
        counts.append(len(layout.tokens))
        return run(layout)

    monkeypatch.setattr(lm._forward, "run", counting)
    return counts


def test_only_what_is_missing_is_fed(lm, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = fed(lm, monkeypatch)
    context = list(range(1, 21))
    lm.score([Row(0, context, 1)])
    lm.score([Row(0, [*context, 30, 31, 32], 4)])
    lm.score([Row(0, [*context, 30, 40], 1)])
    lm.score([Row(0, [*context, 30, 40], 0)])
    lm.score([Row(0, context[:5], 2)])
    assert counts == [20, 4, 1, 2]


def test_wanted_positions_are_recomputed_and_equal(lm) -> None:
    context = list(range(1, 21))
    first = lm.score([Row(0, context, 20)])
    again = lm.score([Row(0, context, 7)])
    assert torch.allclose(first[-7:], again, atol=1e-5)


def test_a_tuple_is_a_context_too(lm) -> None:
    context = list(range(1, 21))
    expected = lm.score([Row(0, context, 1)])
    assert torch.allclose(lm.score([Row(0, tuple(context), 1)]), expected, atol=1e-5)


def test_the_caller_may_change_its_list(lm) -> None:
    context = list(range(1, 21))
    lm.score([Row(0, context, 1)])
    context[3] = 50
    changed = lm.score([Row(0, context, 1)])
    assert torch.allclose(changed, lm.score([Row(1, context, 1)]), atol=1e-5)


def test_blocks_come_and_go(lm) -> None:
    total = lm.num_blocks
    lm.score([Row(0, list(range(17)), 1), Row(1, list(range(4)), 1)])
    assert total - lm.num_free_blocks == 5 + 1
    lm.score([Row(0, [*range(17), 1, 2, 3, 4], 5)])
    assert total - lm.num_free_blocks == 6 + 1
    lm.score([Row(0, [*range(17), 9], 1)])
    assert total - lm.num_free_blocks == 5 + 1
    lm.check_integrity()
    lm.release(0)
    lm.release(0)
    lm.release(1)
    lm.release(99)
    assert lm.num_free_blocks == total
    lm.check_integrity()


def test_sequences_do_not_see_each_other(lm) -> None:
    contexts = [[7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], [50, 40, 30, 20]]
    alone = [lm.score([Row(i, context, 1)]) for i, context in enumerate(contexts)]
    together = lm.score([Row(10 + i, context, 1) for i, context in enumerate(contexts)])
    assert torch.allclose(torch.cat(alone), together, atol=1e-5)


def test_rows_without_logits(lm) -> None:
    assert lm.score([Row(0, [1, 2, 3], 0)]).shape == (0, lm.vocab_size)
    assert lm.score([Row(0, [1, 2, 3], 0)]).shape == (0, lm.vocab_size)
    both = lm.score([Row(0, [1, 2, 3, 4], 0), Row(1, [5, 6], 2)])
    assert torch.allclose(both, lm.score([Row(2, [5, 6], 2)]), atol=1e-5)


def test_logits_may_be_written_into(lm) -> None:
    logits = lm.score([Row(0, [1, 2, 3], 2)])
    logits[0, 5] = -torch.inf
    assert logits.dtype == torch.float32


def test_a_full_cache_is_one_sentence(folder) -> None:
    lm = load_lm(folder, max_num_seqs=1, block_size=4, extra_tokens=0, max_model_len=16)
    assert lm.num_blocks == 4
    lm.score([Row(0, list(range(12)), 1)])
    with pytest.raises(RunError, match=r"KV cache of `.*` is full: 2 blocks wanted, 1 free"):
        lm.score([Row(1, list(range(8)), 1)])
    lm.release(1)
    lm.check_integrity()
    assert lm.score([Row(0, list(range(16)), 1)]).shape[0] == 1


def test_the_cache_keeps_to_its_memory(folder) -> None:
    lm = load_lm(folder, kv_cache_bytes=256 * 16 * 20)
    assert (lm.num_blocks, lm.kv_bytes_per_token) == (20, 256)
    with pytest.raises(RunError, match="no room for the KV cache"):
        load_lm(folder, kv_cache_bytes=1000)


def test_context_limits(folder) -> None:
    assert load_lm(folder).max_context == 128
    assert load_lm(folder, max_model_len=50).max_context == 50
    assert load_lm(folder, max_model_len=5000).max_context == 128


def test_long_rope_switches_where_transformers_does(tmp_path: Path) -> None:
    """Keys of the short frequencies are of no use past the threshold, in either direction."""
    import transformers

    folder = make_tiny("phi3_long", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    lm = load_lm(str(folder))
    text = [(7 * i) % 97 for i in range(40)]

    def plain(length):
        with torch.no_grad():
            return model(torch.tensor([text[:length]])).logits[0, -1]

    straddling = lm.score([Row(0, text[:27], 7), Row(1, text[:10], 1)])
    expected = torch.stack([*(plain(length) for length in range(21, 28)), plain(10)])
    assert torch.allclose(straddling, expected, atol=1e-4)
    assert torch.allclose(lm.score([Row(0, text[:23], 1)])[0], plain(23), atol=1e-4)
    assert torch.allclose(lm.score([Row(0, text[:30], 1)])[0], plain(30), atol=1e-4)
    lm.check_integrity()


def test_pool_prefers_neighbours_and_leaves_room() -> None:
    pool = BlockPool(32)
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert first == [0, 1, 2]
    assert second[1] == second[0] + 1
    assert second[0] > 8, "a second sequence starts far from the first, which may grow"
    assert pool.allocate(2, after=2) == [3, 4]
    pool.free(second)
    assert pool.num_free == 27
    pool.check([0, 1, 2, 3, 4])
    assert sorted(pool.allocate(27)) == list(range(5, 32))


def test_pool_notices_what_is_wrong() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="5 blocks wanted"):
        pool.allocate(5)
    with pytest.raises(AssertionError, match="free \\+ used"):
        pool.check(blocks[:1])
    with pytest.raises(AssertionError, match="holders differ"):
        pool.check([0, 0, 1])
    pool.free(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.free(blocks[:1])


def test_memory_of_a_gpu_is_promised_once(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache takes its memory in the first forward, and another model may be loaded before that."""
    first, second = (load_lm(folder, decoder="transformers", check=False) for _ in range(2))
    first.device = second.device = torch.device("cuda")
    second.num_blocks = 0
    promised = first.num_blocks * first.block_size * first.kv_bytes_per_token
    assert first.promised_bytes == promised
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (promised * 2, promised * 2))
    monkeypatch.setattr(budget, "_LOADED", {first, second})
    assert device_room(second.device, 7) == Room(promised, promised * 2, 7)
    first.device = torch.device("cpu")
    assert device_room(second.device, 7) == Room(promised * 2, promised * 2, 7)


def test_a_forward_runs_with_its_own_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, whatever the tensors' is."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())

    class Somewhere:
        device = torch.device("cuda:1")

        @on_its_device
        def forward(self, rows, *, more):
            return rows + more

    assert Somewhere().forward(1, more=2) == 3
    assert entered == [torch.device("cuda:1")]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_no_number_stays_with_its_own_sequence(folder, dtype: str) -> None:
    """In 16 bits transformers' attention reads whole grains of keys, masked, whoever filed them."""
    four_blocks: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_bytes": 4 * 16 * 128}
    right = load_lm(folder, dtype=dtype, decoder="transformers").score([Row(0, [5, 6, 7], 1)])
    lm = load_lm(folder, dtype=dtype, decoder="transformers", **four_blocks)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[9] = torch.nan
    text = [5, 6, 7] * 16
    assert lm.adopt(0, text, "salt") == 0
    assert not lm.score([Row(0, text, 1)]).isnan().any()
    lm.release(0)
    assert lm.adopt(1, [*text, 9], "salt") == lm.adopt(2, [*text, 8], "salt") == 48
    assert lm.score([Row(1, [*text, 5, 6, 7, 5, 9], 1)]).isnan().all()
    lm.check_integrity()
    lm.release(1)
    assert torch.equal(lm.score([Row(3, [5, 6, 7], 1)]), right)
    lm.release(3)
    assert not lm.score([Row(2, [*text, 8], 1)]).isnan().any(), "what they share is left alone"
    lm.release(2)
    lm.check_integrity()
