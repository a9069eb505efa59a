"""Threads that meet in a forward: all of them, fewer while others have their cores."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typed import not_none, stand_in

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.engine.stepper import Stepper
from specdec_cli.lm import invariance
from specdec_cli.lm.door import Row
from specdec_cli.lm.llama import native
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.machine import threads
from specdec_cli.lm.machine.threads import RunQueue, ThreadCount
from specdec_cli.measure.machine.machine import look
from specdec_cli.sampling.params import SamplingParams

FORWARD = 0.001
TWO_ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.machine.threads import ThreadCount

learned, learn = [], ThreadCount.learn

def watch(count, *what):
    learned.append(what)
    learn(count, *what)

ThreadCount.learn = watch
ThreadCount.size = lambda count, most: most  # whoever else wants the cores
lm = load_lm("builtin:target")
torch.set_num_threads(2)
for i in range(20):
    lm.score([Row(0, [*range(10, 90), 200 + i], 1)])
together = [what for what in learned if what[0] == 2]
assert together and all(0 < waited <= 1.01 * seconds for _, seconds, waited in together), learned
assert sum(waited for *_, waited in together) > 0.3 * sum(seconds for _, seconds, _ in together), learned
"""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def work(count, clock, num, lost=0.0, most=2):
    """So many forwards, each of whose threads but one loses so much where there are several; their sizes."""
    sizes = []
    for _ in range(num):
        sizes.append(count.size(most))
        seconds = FORWARD + (lost if sizes[-1] > 1 else 0.0)
        clock.now += seconds
        count.learn(sizes[-1], seconds, lost if sizes[-1] > 1 else 0.0)
    return sizes


class Cores:
    """A machine's run queue: threads of other processes, and those of the own threads that have not gone to sleep."""

    def __init__(self, others=0) -> None:
        self.others, self.own, self.num_looks = others, 1, 0

    def __call__(self):
        self.num_looks += 1
        return self.others + self.own


def unseen(clock):
    """A count on a system that does not tell who else wants its cores."""
    return ThreadCount(clock, lambda: None, num_cores=64)


def work_beside(count, clock, cores, num, most=2, lost=9 * FORWARD):
    """Like `work`, on cores whose neighbours make a forward of more threads than are left wait."""
    sizes = []
    for _ in range(num):
        cores.own = 1
        size = cores.own = count.size(most)
        sizes.append(size)
        waited = lost if size > 1 and size + cores.others > most else 0.0
        clock.now += FORWARD + waited
        count.learn(size, FORWARD + waited, waited)
    return sizes


@pytest.fixture
def clock():
    return Clock()


def test_point_2_beside_neighbours_that_the_system_shows_no_forward_waits(clock) -> None:
    cores = Cores(others=1)
    count = ThreadCount(clock, cores, num_cores=2)
    assert work_beside(count, clock, cores, 5000) == [1] * 5000
    assert cores.num_looks < 0.15 * 5000  # of four microseconds each


def test_once_shown_neighbours_are_gone_all_work_again_soon(clock) -> None:
    cores = Cores(others=4)
    count = ThreadCount(clock, cores, num_cores=2)
    work_beside(count, clock, cores, 1000)
    cores.others = 0
    assert work_beside(count, clock, cores, 30)[-10:] == [2] * 10


def test_a_neighbour_that_arrives_costs_one_wait(clock) -> None:
    cores = Cores()
    count = ThreadCount(clock, cores, num_cores=2)
    assert work_beside(count, clock, cores, 100) == [2] * 100
    cores.others = 1
    assert work_beside(count, clock, cores, 1000) == [2, *[1] * 999]


def test_a_neighbour_that_comes_and_goes_is_met_less_and_less_often(clock) -> None:
    cores = Cores()
    count = ThreadCount(clock, cores, num_cores=2)
    sizes = []
    for turn in range(400):
        cores.others = turn % 2
        sizes += work_beside(count, clock, cores, 8)
    lost = 9 * FORWARD * sum(size == 2 for turn in range(1, 400, 2) for size in sizes[8 * turn : 8 * turn + 8])
    assert lost < 0.1 * clock.now


def test_of_many_cores_those_that_nobody_wants_are_used(clock) -> None:
    cores = Cores(others=4)
    count = ThreadCount(clock, cores, num_cores=16)
    assert work_beside(count, clock, cores, 1000, most=16) == [12] * 1000
    cores.others = 40
    assert work_beside(count, clock, cores, 1000, most=16)[-900:] == [1] * 900


def test_an_interruption_that_the_system_no_longer_shows_leaves_nobody_out(clock) -> None:
    cores = Cores()
    count = ThreadCount(clock, cores, num_cores=2)
    for _ in range(5):
        work(count, clock, 1, lost=16 * FORWARD)
        assert work_beside(count, clock, cores, 200) == [2] * 200


def test_an_undisturbed_crew_looks_at_nothing(clock) -> None:
    cores = Cores()
    work_beside(ThreadCount(clock, cores, num_cores=2), clock, cores, 1000)
    assert cores.num_looks == 1


def test_the_run_queue_shows_a_busy_process() -> None:
    queue = RunQueue()
    if queue() is None:
        pytest.skip("the system does not tell")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            deadline = time.monotonic() + 30
            while not_none(queue()) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not_none(queue()) >= 2
        finally:
            busy.kill()


@pytest.mark.parametrize("text", ["", "1.39 0.91 0.44", "1.39 0.91 0.44 ? 9360"])
def test_a_run_queue_of_another_form_is_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "loadavg").write_text(text)
    queue = RunQueue(str(tmp_path / "loadavg"))
    assert (queue(), queue()) == (None, None)
    assert RunQueue(str(tmp_path / "none"))() is None


def test_undisturbed_all_work(clock) -> None:
    assert work(unseen(clock), clock, 100, lost=0.2 * FORWARD) == [2] * 100


def test_an_interruption_that_is_over_leaves_nobody_out(clock) -> None:
    count = unseen(clock)
    for _ in range(5):
        work(count, clock, 1, lost=16 * FORWARD)
        assert work(count, clock, 200) == [2] * 200


def test_point_2_beside_a_busy_process_one_works_alone_almost_always(clock) -> None:
    count = unseen(clock)
    sizes = work(count, clock, 5000, lost=9 * FORWARD)
    assert sizes[:3] == [2, 2, 1]
    assert 2 < sizes.count(2) < 20
    lost = 9 * FORWARD * sizes.count(2)
    assert lost < 0.02 * clock.now


def test_once_the_other_is_gone_all_work_again_and_the_next_one_costs_a_short_rest(clock) -> None:
    count = unseen(clock)
    work(count, clock, 500, lost=9 * FORWARD)
    work(count, clock, 10_000)
    assert work(count, clock, 50) == [2] * 50
    assert work(count, clock, 3, lost=20 * FORWARD) == [2, 2, 1]
    assert work(count, clock, 150)[-1] == 2


def test_of_many_one_after_the_other_is_left_out(clock) -> None:
    count = unseen(clock)
    sizes = work(count, clock, 4, lost=9 * FORWARD, most=8)
    assert sizes == [8, 8, 7, 6]
    assert count.size(1) == 1


def test_many_that_wait_for_each_other_as_many_do_all_work(clock) -> None:
    assert work(unseen(clock), clock, 100, lost=0.7 * FORWARD, most=16) == [16] * 100


def test_one_alone_is_never_left_out(clock) -> None:
    count = unseen(clock)
    assert work(count, clock, 50, lost=9 * FORWARD, most=1) == [1] * 50


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_two_threads_on_one_core_keep_each_other_waiting() -> None:
    """What the compiled half measures."""
    if native.missing() is not None:
        pytest.skip("no compiled decoder")
    subprocess.run([sys.executable, "-c", TWO_ON_ONE_CORE], check=True, timeout=120)


def test_how_long_threads_spin_is_asked_of_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if native.missing() is not None:
        pytest.skip("no compiled decoder")
    native._built.cache_clear()
    native.layouts()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch):
    """Three threads of torch's, on a machine whose other processes a test decides."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores, before = Cores(), torch.get_num_threads()
    monkeypatch.setattr(threads, "THREADS", ThreadCount(num_runnable=cores, num_cores=3))
    torch.set_num_threads(3)
    yield cores
    torch.set_num_threads(before)


def threads_of(module):
    """How many threads torch has in each of its forwards, of so many."""
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    return seen


def test_a_small_model_takes_one_thread_where_transformers_computes_it_and_no_other_does(torch_threads) -> None:
    engine = Engine.load("builtin:draft", "none", settings=LoadSettings(decoder="transformers"))
    seen = threads_of(stand_in(engine.target).model)
    engine.generate("Once", SamplingParams(max_new_tokens=4))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_a_large_model_takes_the_cores_that_nobody_else_wants(torch_threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL_WEIGHTS_BYTES", 0)
    engine = Engine.load("builtin:draft", "none", settings=LoadSettings(decoder="transformers"))
    seen = threads_of(stand_in(engine.target).model)
    engine.generate("Once", SamplingParams(max_new_tokens=4))
    assert set(seen) == {3}
    stopped = ThreadCount(lambda: 0.0, Cores(others=1), num_cores=3)  # by whose clock no rest from a core ends
    monkeypatch.setattr(threads, "THREADS", stopped)
    seen.clear()
    engine.generate("Once", SamplingParams(max_new_tokens=4))
    assert set(seen) == {2}
    assert torch.get_num_threads() == 3


def test_operators_between_forwards_keep_to_free_cores_too(torch_threads, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load("builtin:draft", "none")
    monkeypatch.setattr(threads, "THREADS", ThreadCount(num_runnable=Cores(others=9), num_cores=3))
    seen, verify = [], Stepper.verify
    monkeypatch.setattr(Stepper, "verify", lambda *of: seen.append(torch.get_num_threads()) or verify(*of))
    engine.generate("Once", SamplingParams(max_new_tokens=4))
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_one_number_of_threads_where_bits_depend_on_it(torch_threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL_WEIGHTS_BYTES", 0)
    monkeypatch.setattr(invariance, "same_bits_on_one_thread", lambda *_: False)
    monkeypatch.setattr(threads, "THREADS", ThreadCount(num_runnable=Cores(others=9), num_cores=3))
    lm = load_lm("builtin:draft", dtype="bfloat16", decoder="transformers")
    seen = threads_of(lm.model)
    with threads.free_cores():  # as a step does
        lm.score([Row(0, [5, 6, 7], 1)])
    assert set(seen) == {3}


def test_a_forward_that_others_interrupt_makes_the_crew_look(clock) -> None:
    cores = Cores()
    count = ThreadCount(clock, cores, num_cores=2)
    assert count.size(2) == 2
    cores.others = 1
    count.learn_of_interruption(2, False)
    assert count.size(2) == 2
    count.learn_of_interruption(2, True)
    assert count.size(2) == 1


def test_a_containers_share_of_the_processors_limits_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        for quota, num_threads in ((1.5, 2), (0.3, 1), (16.0, 3), (None, 3)):
            torch.set_num_threads(3)
            monkeypatch.setattr(threads, "cpu_quota", lambda quota=quota: quota)
            assert threads.allot_threads() == num_threads
            torch.set_num_threads(3)
            assert look().num_threads == num_threads  # as doctor shows them
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setattr(threads, "cpu_quota", lambda: 1.0)
        assert threads.allot_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("depends", "same"), [(True, False), (False, True)])
def test_bits_that_depend_on_the_number_of_threads_are_found(
    torch_threads, monkeypatch: pytest.MonkeyPatch, depends: bool, same: bool
) -> None:
    def pack(weight, bias, kind):
        return lambda rows: rows + (torch.get_num_threads() if depends else 1)

    monkeypatch.setattr(invariance, "pack", pack)
    assert invariance.same_bits_on_one_thread.__wrapped__(torch.bfloat16, "plain") is same
    assert torch.get_num_threads() == 3
