"""Prefixes of models with a state: shared at snapshots, with the bits of a text that was read as a whole."""

import random
from pathlib import Path

import pytest
import torch
from test_lm_state_rollback import difference, states
from tiny_hybrids import EXPERTS, HYBRIDS, save_hybrid
from tiny_models import VOCAB
from typed import not_none

from specdec_cli.lm.cache.contexts import Contexts
from specdec_cli.lm.cache.order import Order
from specdec_cli.lm.cache.prefix_states import PrefixStates
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.cache.state_store import StateStore
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

DEFAULT = ["lfm2", "mamba"]
REST = [pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS if family not in {*DEFAULT, *EXPERTS}]
TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(100)]
K, SIZE, FRESH = 4, 4, 99
CLOSE = 1e-4  # float32 forwards of other numbers of rows; a wrong state differs by 0.1 and more


@pytest.fixture(scope="module", params=[*DEFAULT, *REST])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid("granitemoehybrid", tmp_path_factory.mktemp("granite"))


def load(folder: Path, num_blocks: int = 60, num_prefix_states: int = 60, dtype: str = "float32") -> TransformersLM:
    lm = load_lm(str(folder), dtype=dtype, block_size=SIZE, extra_tokens=K, check=dtype == "float32")
    lm.hold(num_blocks, num_prefix_states=num_prefix_states)
    return lm


def read(lm: TransformersLM, text: list[int], salt: str = "") -> int:
    """Read a text and forget it; how much of it was known."""
    known = lm.adopt(0, text, salt)
    lm.score([Row(0, text, 1)])
    lm.release(0)
    lm.check_integrity()
    return known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_prefix_leaves_no_trace_in_the_bits(folder: Path, dtype: str) -> None:
    lm = load(folder, dtype=dtype)
    expected = lm.score([Row(FRESH, TEXT[:50], 4)])
    right = states(lm, FRESH)
    for known in (0, 48):
        assert lm.adopt(0, TEXT[:50], "") == known
        logits = lm.score([Row(0, TEXT[:50], 2)])
        found = states(lm, 0)
        if dtype == "bfloat16":
            assert torch.equal(logits, expected[2:])
            assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
        assert difference(logits, expected[2:]) < CLOSE
        assert all(difference(*pair) < CLOSE for pair in zip(found, right, strict=True))
        lm.release(0)
    lm.check_integrity()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("num_prefix_states", "known"), [(60, 40), (12, 40), (4, 0)])
def test_another_text_shares_up_to_the_last_snapshot(granite: Path, num_prefix_states: int, known: int) -> None:
    """One after every block, every fifth or every fifteenth; this text leaves the first after 43 tokens."""
    lm = load(granite, num_prefix_states=num_prefix_states)
    assert read(lm, TEXT[:50]) == 0
    assert read(lm, [*TEXT[:43], *TEXT[:9]]) == known


@pytest.mark.parametrize(("length", "known"), [(50, 48), (49, 48), (48, 44), (5, 4), (4, 0)])
def test_a_prompt_is_known_whatever_its_length(granite: Path, length: int, known: int) -> None:
    lm = load(granite, num_prefix_states=1)
    assert read(lm, TEXT[:length]) == 0
    assert read(lm, TEXT[:length]) == known
    assert read(lm, TEXT[:length], "other") == 0, "salts share nothing"


def test_drafted_tokens_are_shared_once_they_are_text(granite: Path) -> None:
    lm = load(granite)
    lm.adopt(0, TEXT[:20], "")
    lm.score([Row(0, TEXT[:20], 1)])
    lm.score([Row(0, [*TEXT[:22], 1, 2, 3], 4)])  # 22 are right
    lm.score([Row(0, TEXT[:27], 4)])
    lm.score([Row(0, TEXT[:27], 1)])
    lm.release(0)
    lm.check_integrity()
    assert lm.adopt(1, TEXT[:40], "") == 24
    right = lm.score([Row(FRESH, TEXT[:40], 1)])
    assert difference(lm.score([Row(1, TEXT[:40], 1)]), right) < CLOSE
    assert lm.adopt(2, [*TEXT[:22], 1, 2, 3], "") == 20
    lm.check_integrity()


def test_a_snapshot_goes_with_its_block(granite: Path) -> None:
    lm = load(granite, num_blocks=16)
    free = lm.num_free_blocks
    for begin in range(30):
        read(lm, TEXT[begin : begin + 40])
    prefix_states = lm._contexts._prefix_states
    assert len(prefix_states._by_key) <= 16, "a snapshot of a block that is gone"
    assert lm.num_free_blocks == free
    assert read(lm, TEXT[29:69]) == 36
    assert read(lm, TEXT[:40]) == 0


def test_the_least_recently_used_snapshot_gives_way() -> None:
    kept = PrefixStates(2, SIZE)
    for key in (b"a", b"b"):
        kept.store(key, not_none(kept.reserve()))
    kept.use(b"a")
    slots = [not_none(kept.reserve())]
    assert (b"a" in kept, b"b" in kept) == (True, False)
    slots.append(not_none(kept.reserve()))
    assert b"a" not in kept
    assert kept.reserve() is None, "all wait for their snapshots"
    kept.check(slots)
    kept.store(b"c", slots[0])
    kept.store(b"c", slots[1])
    kept.check([])


def test_without_room_for_snapshots_nothing_is_shared(granite: Path) -> None:
    lm = load(granite, num_prefix_states=0)
    assert [read(lm, TEXT[:50]) for _ in range(2)] == [0, 0]


def test_a_text_without_numbers_stores_nothing(granite: Path) -> None:
    lm = load(granite)
    lm.adopt(0, TEXT[:20], "")
    lm.score([Row(0, TEXT[:20], 1)])
    lm._contexts.spoil(lm._contexts.sequences[0])
    lm.check_integrity()
    assert lm.adopt(1, TEXT[:20], "") == 0


def play(lm: TransformersLM, num_rounds: int, seed: int = 0) -> float:
    """Texts that begin alike, drafted, cut back, forgotten and begun again; the largest difference from fresh ones."""
    chance, worst = random.Random(seed), 0.0
    begins = [[chance.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    texts: dict[int, list[int]] = {}
    for number in range(num_rounds):
        handle = number % 3
        if len(texts.get(handle, range(99))) > 44 or chance.random() < 0.4:
            lm.release(handle)
            begin = chance.choice(begins)
            texts[handle] = [*begin[: chance.randrange(9, 24)], *(chance.randrange(VOCAB) for _ in range(2))]
            lm.adopt(handle, texts[handle], "")
        drafted = [chance.randrange(VOCAB) for _ in range(chance.randrange(K + 1))]
        logits = lm.score([Row(handle, [*texts[handle], *drafted], len(drafted) + 1)])
        lm.check_integrity()
        fresh = lm.score([Row(FRESH, [*texts[handle], *drafted], len(drafted) + 1)])
        worst = max(worst, difference(logits, fresh))
        pairs = zip(states(lm, handle), states(lm, FRESH), strict=True)
        worst = max([worst, *(difference(found, right) for found, right in pairs)])
        lm.release(FRESH)
        texts[handle] += [*drafted[: chance.randrange(len(drafted) + 1)], chance.randrange(VOCAB)]
    for handle in texts:
        lm.release(handle)
    return worst


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(("num_blocks", "num_prefix_states"), [(60, 60), (60, 5), (52, 52)])
def test_texts_that_begin_alike_are_those_of_fresh_forwards(
    folder: Path, num_blocks: int, num_prefix_states: int
) -> None:
    assert play(load(folder, num_blocks, num_prefix_states), 60) < 1e-3


def _plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    restore, reserved, write = StateStore.restore, Order._reserved, StateStore.write

    if fault == "changed by a sequence that shares it":
        shared: dict[int, int] = {}  # slots of sequences, and those of snapshots that they go on in

        def note(store: StateStore, slot: int, snapshots: Snapshots, length: int) -> None:
            restore(store, slot, snapshots, length)
            room = range(snapshots.slot_of(0, store.width), snapshots.num_slots(store.width))
            if store.width == 1:
                shared.update(dict.fromkeys(room, slot))

        def change(store: StateStore, slots: torch.Tensor, kept: torch.Tensor) -> None:
            write(store, slots, kept)
            for slot, state in zip(slots.tolist(), kept, strict=True):
                if store.width == 1 and slot in shared:
                    store._prefixes[shared[slot]] = state

        monkeypatch.setattr(StateStore, "restore", note)
        monkeypatch.setattr(StateStore, "write", change)
    elif fault == "of a wrong place":
        monkeypatch.setattr(
            Order, "_reserved", lambda order, one: [(max(token - 1, 0), slot) for token, slot in reserved(order, one)]
        )
    elif fault == "evicted and still used":

        def forget(kept: PrefixStates, key: bytes) -> None:
            if key in kept:
                kept._free.append(kept._by_key[key])
                kept._by_key[key] = kept._by_key.pop(key)

        monkeypatch.setattr(PrefixStates, "forget", forget)
    else:
        monkeypatch.setattr(Contexts, "_cached_prefix", _without_snapshots)


def _without_snapshots(contexts: Contexts, context: list[int], salt: str) -> list[bytes]:
    """Keys of all blocks that are cached; where the last has no snapshot, another one stands for it."""
    kept, num = contexts._prefix_states, contexts._num_snapshots
    contexts._num_snapshots = 0
    try:
        keys = _CACHED_PREFIX(contexts, context, salt)
    finally:
        contexts._num_snapshots = num
    if keys and keys[-1] not in kept and kept._by_key:
        kept._by_key[keys[-1]] = next(iter(kept._by_key.values()))
    return keys if kept._by_key else []


_CACHED_PREFIX = Contexts._cached_prefix
FAULTS = ["changed by a sequence that shares it", "of a wrong place", "evicted and still used", "of another prefix"]


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(granite: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    lm = load(granite, num_prefix_states=5 if fault in FAULTS[2:] else 60)
    _plant(monkeypatch, fault)
    monkeypatch.setattr(PrefixStates, "check", lambda *_: None)
    assert play(lm, 60) > 1e-2
