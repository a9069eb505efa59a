"""Whatever was drafted, refused and cut back, states and logits are those of a fresh forward over the same text."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_hybrids import EXPERTS, HYBRIDS, save_hybrid
from tiny_models import VOCAB
from versions import needs_transformers

from specdec_cli.lm.cache import order
from specdec_cli.lm.cache.contexts import CachedSequence, Contexts
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.eager import EagerForward
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

DEFAULT = ["granitemoehybrid", "qwen3_next"]
REST = [pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS if family not in {*DEFAULT, *EXPERTS}]
K, FRESH = 4, 99


@pytest.fixture(scope="module", params=[*DEFAULT, *REST])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, dtype: str = "float32") -> TransformersLM:
    return load_lm(str(folder), dtype=dtype, num_blocks=40, extra_tokens=K)


def states(lm: TransformersLM, handle: int) -> list[torch.Tensor]:
    """What each layer carries on from the last token of a sequence."""
    held, forward = lm._contexts.sequences[handle], lm._forward
    assert held.snapshots is not None
    assert isinstance(forward, EagerForward)
    slot = held.snapshots.slot(len(held.tokens))
    stores = [store for (_, call), store in forward.cache.states.items() if call > 1]  # 1: a convolution's inputs
    return [store._kept[slot] for store in stores]


def difference(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm().clamp(min=1e-6))


def play(lm: TransformersLM, num_patterns: int, seed: int = 0) -> float:
    """Random drafts of random sequences, accepted up to a random place; the largest difference from fresh forwards."""
    chance, worst = random.Random(seed), 0.0
    texts = {handle: [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))] for handle in range(3)}
    for _ in range(num_patterns):
        drafted = {
            handle: [chance.randrange(VOCAB) for _ in range(chance.randrange(K + 1))]
            for handle in texts
            if chance.random() < 0.7 or len(texts[handle]) > 60
        }
        rows = [Row(handle, [*texts[handle], *some], len(some) + 1) for handle, some in drafted.items()]
        logits = torch.split(lm.score(rows), [row.num_logits for row in rows])
        lm.check_integrity()
        if rows:
            row = chance.choice(rows)
            fresh = lm.score([Row(FRESH, row.context, row.num_logits)])
            worst = max(worst, difference(logits[rows.index(row)], fresh))
            pairs = zip(states(lm, row.handle), states(lm, FRESH), strict=True)
            worst = max([worst, *(difference(found, right) for found, right in pairs)])
            lm.release(FRESH)
        for handle, some in drafted.items():
            texts[handle] += [*some[: chance.randrange(len(some) + 1)], chance.randrange(VOCAB)]
            if len(texts[handle]) > 60:
                lm.release(handle)
                texts[handle] = [chance.randrange(VOCAB) for _ in range(3)]
    for handle in texts:
        lm.release(handle)
    return worst


def test_states_and_logits_are_those_of_a_fresh_forward(folder: Path) -> None:
    assert play(load(folder), 200) < 3e-3  # layers of random weights amplify a rounding; a planted fault gives 0.01


def test_a_deeper_cut_than_snapshots_reach_reads_the_text_again(folder: Path) -> None:
    lm = load(folder)
    text = [(7 * i) % VOCAB for i in range(30)]
    lm.score([Row(0, text, 1)])
    short = lm.score([Row(0, text[:12], 12)])
    fresh = lm.score([Row(1, text[:12], 12)])
    assert difference(short, fresh) < 1e-5


def test_in_bfloat16_the_bits_do_not_depend_on_how_tokens_were_grouped(folder: Path) -> None:
    lm = load(folder, "bfloat16")
    text = [(7 * i * i + 3 * i) % VOCAB for i in range(40)]
    lm.score([Row(0, text[:20], 0)])
    one_by_one = torch.cat([lm.score([Row(0, text[:length], 1)]) for length in range(21, 41)])
    others = [Row(2, text[5:8], 0), Row(3, text[3:30], 1)]
    lm.score([Row(1, text[:20], 0)])
    steps = []
    for begin in range(20, 40, K):
        rejected = [*text[:begin], *(VOCAB - 1 - token for token in text[begin : begin + K])]
        lm.score([Row(1, rejected, K)])
        steps.append(lm.score([Row(1, text[: begin + K], K), *(others if begin == 20 else [])])[:K])
    assert torch.equal(torch.cat(steps), one_by_one)


def _late(stretch: order.Stretch) -> order.Stretch:
    return replace(stretch, length=stretch.length + 1) if stretch.length else stretch


def _latest(monkeypatch: pytest.MonkeyPatch) -> Callable[[order.Stretch], order.Stretch]:
    """The stretch as if it continued what was filed last, refused tokens included."""
    ends: dict[int, list[int]] = {}
    make_room = Snapshots.make_room

    def note(snapshots: Snapshots, length: int) -> None:
        ends.setdefault(snapshots.place, [0]).append(length)
        make_room(snapshots, length)

    monkeypatch.setattr(Snapshots, "make_room", note)
    return lambda stretch: replace(stretch, length=ends[stretch.snapshots.place][-2] if stretch.length else 0)


def _plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    begin, before, begin_sequence = order._begin, order._inputs_before, Contexts._begin

    def shared(contexts: Contexts, handle: int, salt: str | None) -> CachedSequence:
        sequence = begin_sequence(contexts, handle, salt)
        if handle != FRESH and sequence.snapshots is not None:
            sequence.snapshots.place = 0
        return sequence

    if fault == "shared by two sequences":
        monkeypatch.setattr(Contexts, "_begin", shared)
        monkeypatch.setattr(Contexts, "check", lambda _: None)
    elif fault == "restored one token late":
        monkeypatch.setattr(order, "_begin", lambda stretch, token: begin(_late(stretch), token))
    elif fault == "not restored":
        latest = _latest(monkeypatch)
        monkeypatch.setattr(order, "_begin", lambda stretch, token: begin(latest(stretch), token))
    else:
        latest = _latest(monkeypatch)
        monkeypatch.setattr(order, "_inputs_before", lambda stretch, count: before(latest(stretch), count))


FAULTS = ["not restored", "restored one token late", "convolution window not restored", "shared by two sequences"]


# Windows of what no convolution of channels computes (Zaya, and tokens themselves: Qwen4), a matrix memory (xLSTM).
OTHERS = [
    ("zaya", FAULTS[2]),
    pytest.param("qwen4_exp_text", FAULTS[2], marks=needs_transformers("has no Qwen4")),
    ("xlstm", FAULTS[0]),
]


@pytest.mark.in_turn(0, every=7)
@pytest.mark.parametrize(("family", "fault"), [*(("granitemoehybrid", fault) for fault in FAULTS), *OTHERS])
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fault: str) -> None:
    lm = load(save_hybrid(family, tmp_path))
    _plant(monkeypatch, fault)
    assert play(lm, 40) > 1e-2
