"""Several processes: a batch in parts has the whole batch's gradient, and what a launcher says is checked."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import batch_of, method_of, samples_of

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.train.launcher import check_launcher, launched_index
from specdec_cli.train.method import BatchLoss, DraftModule, TrainingMethod
from specdec_cli.train.processes import EndedElsewhere, Processes
from specdec_cli.train.samples import TrainingBatch

SAMPLES = samples_of(((9, 23), (4, 15), (2, 31)))
SEEDS = [11, 12, 13]
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"depth": 3, "draft_vocab_size": 40},
    "dflash": {"depth": 3, "num_anchors": 4},
    "dflash2": {"depth": 3, "num_anchors": 4},
    "dspark": {"depth": 3, "num_anchors": 4},
    "pard": {"depth": 4},
    "medusa": {"depth": 3},
    "distill": {"num_layers": 2},
}


class Meeting:
    """Adds up what threads bring, as accelerate does for processes."""

    def __init__(self, num: int) -> None:
        self._barrier, self._parts = Barrier(num), [torch.zeros(()) for _ in range(num)]

    def total(self, index: int, tensor: Tensor) -> Tensor:
        self._parts[index] = tensor.detach()
        self._barrier.wait()
        found = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return found


def gradients(module: DraftModule, batch: TrainingBatch) -> tuple[BatchLoss, dict[str, Tensor]]:
    found = module(batch)
    found.value.backward()
    return found, {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def part_of(lm: TransformersLM, method: TrainingMethod, places: Sequence[int]) -> TrainingBatch:
    """Samples with their seeds; without any, one that counts nothing."""
    batch = batch_of(lm, method, [SAMPLES[i] for i in places or [0]])
    counts = batch.is_counted if places else torch.zeros_like(batch.is_counted)
    return replace(batch, is_counted=counts, seeds=[SEEDS[i] for i in places or [0]])


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("loss", ["kl", "hybrid"])
@pytest.mark.parametrize("name", METHODS)
def test_parts_of_a_batch_have_its_gradient(lm: TransformersLM, start: str, name: str, loss: str) -> None:
    more = {"start_from": start} if name == "pard" else {}
    method = method_of(lm, name, loss=loss, **METHODS[name], **more)
    method.prepare(SAMPLES)
    whole, wanted = gradients(method.build(), part_of(lm, method, [0, 1, 2]))
    parts = [part_of(lm, method, places) for places in ([0, 2], [1], [])]
    modules, meeting = [method.build() for _ in parts], Meeting(len(parts))
    for index, module in enumerate(modules):
        module.loss.total = lambda tensor, index=index: meeting.total(index, tensor)  # type: ignore[misc]
    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(gradients, modules, parts))
    torch.testing.assert_close(sum((one.value for one, _ in found), torch.zeros(())), whole.value)
    assert sum((one.num_counted for one, _ in found), torch.zeros(())).tolist() == whole.num_counted.tolist()
    for key, expected in wanted.items():
        total = sum((its[key] for _, its in found if key in its), torch.zeros(()))
        torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-5, msg=key)


def test_one_process_has_everything() -> None:
    its = Processes("cpu")
    assert (its.num, its.index, its.is_main, its.own_device("cpu")) == (1, 0, True, "cpu")
    assert its.share([1, 2, 3]) == [1, 2, 3]
    assert its.total(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert (its.any(True), its.any(False)) == (True, False)
    assert its.joined([4, 5]) == [4, 5]
    assert [work(lambda: 7) for work in (its.each, its.from_main, its.together)] == [7, 7, 7]
    with pytest.raises(UsageError, match="no"), its.guarded():
        its.each(refuse)


def refuse() -> None:
    raise UsageError("no")


@pytest.mark.parametrize(("index", "num", "part"), [(0, 2, [0, 1]), (1, 2, [2, 3, 4]), (2, 7, [1]), (0, 7, [])])
def test_shares_are_neighbours(index: int, num: int, part: list[int]) -> None:
    its = Processes("cpu")
    its.index, its.num = index, num
    assert its.share(range(5)) == range(5)[part[0] : part[-1] + 1] if part else not its.share(range(5))


def test_an_error_of_one_process_names_it_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    its = Processes("cpu")
    its.index, its.num = 1, 2
    monkeypatch.setattr(its, "joined", lambda items: [False, *items])
    with pytest.raises(RunError, match="process 2 of 2: no") as raised, its.guarded():
        its.together(refuse)
    assert raised.value.exit_code == 2
    monkeypatch.setattr(its, "joined", lambda items: [True, *items])
    for work in (refuse, lambda: None):
        with pytest.raises(EndedElsewhere), its.guarded():
            its.together(work)


def test_a_process_that_is_gone_is_told_of_when_the_launcher_does_not_end_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec_cli.train.processes._SECONDS_FOR_THE_LAUNCHER", 0.0)
    its = Processes("cpu")
    its.num = 2
    with pytest.raises(RunError, match="another process of the run has ended"), its.guarded():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2891")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "`WORLD_SIZE` is `two`, which is no number"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "`RANK` is `-1`, which is no number"),
        ({"WORLD_SIZE": "2"}, "`WORLD_SIZE` is set without `RANK`"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "`WORLD_SIZE` is set without `MASTER_ADDR`"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "`accelerate launch --cpu` starts one process"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_refused(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        check_launcher()


def test_variables_of_a_launcher_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launcher()
    assert launched_index() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    check_launcher()
    assert launched_index() == 1


def test_a_sample_s_draws_depend_on_its_seed_alone(lm: TransformersLM) -> None:
    method = method_of(lm, "dflash", depth=3, num_anchors=4)
    method.prepare(SAMPLES)
    module: Any = method.build()
    whole, alone = part_of(lm, method, [0, 1, 2]), part_of(lm, method, [2])
    anchors, is_real = module.anchors(whole)
    assert anchors[2][is_real[2]].tolist() == module.anchors(alone)[0][0].tolist()
    other = module.anchors(replace(alone, seeds=[99]))[0][0]
    assert anchors[2].tolist() != other.tolist()
