"""Threads that meet in a forward: all of them, fewer while others have their cores."""

import os
import subprocess
import sys

import pytest
import torch

from specdec_cli.engine.build import LoadSettings, load_engine
from specdec_cli.lm import native
from specdec_cli.lm.threads import Crew

FORWARD = 0.001
TWO_ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.threads import Crew

learned, learn = [], Crew.learn

def watch(crew, *what):
    learned.append(what)
    learn(crew, *what)

Crew.learn = watch
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


def work(crew, clock, num, lost=0.0, most=2):
    """So many forwards, each of whose threads but one loses so much where there are several; their sizes."""
    sizes = []
    for _ in range(num):
        sizes.append(crew.size(most))
        seconds = FORWARD + (lost if sizes[-1] > 1 else 0.0)
        clock.now += seconds
        crew.learn(sizes[-1], seconds, lost if sizes[-1] > 1 else 0.0)
    return sizes


@pytest.fixture
def clock():
    return Clock()


def test_undisturbed_all_work(clock):
    assert work(Crew(clock), clock, 100, lost=0.2 * FORWARD) == [2] * 100


def test_an_interruption_that_is_over_leaves_nobody_out(clock):
    crew = Crew(clock)
    for _ in range(5):
        work(crew, clock, 1, lost=16 * FORWARD)
        assert work(crew, clock, 200) == [2] * 200


def test_beside_a_busy_process_one_works_alone_almost_always(clock):
    crew = Crew(clock)
    sizes = work(crew, clock, 5000, lost=9 * FORWARD)
    assert sizes[:3] == [2, 2, 1]
    assert 2 < sizes.count(2) < 20
    lost = 9 * FORWARD * sizes.count(2)
    assert lost < 0.02 * clock.now


def test_once_the_other_is_gone_all_work_again_and_the_next_one_costs_a_short_rest(clock):
    crew = Crew(clock)
    work(crew, clock, 500, lost=9 * FORWARD)
    work(crew, clock, 10_000)
    assert work(crew, clock, 50) == [2] * 50
    assert work(crew, clock, 3, lost=20 * FORWARD) == [2, 2, 1]
    assert work(crew, clock, 150)[-1] == 2


def test_of_many_one_after_the_other_is_left_out(clock):
    crew = Crew(clock)
    sizes = work(crew, clock, 4, lost=9 * FORWARD, most=8)
    assert sizes == [8, 8, 7, 6]
    assert crew.size(1) == 1


def test_many_that_wait_for_each_other_as_many_do_all_work(clock):
    assert work(Crew(clock), clock, 100, lost=0.7 * FORWARD, most=16) == [16] * 100


def test_one_alone_is_never_left_out(clock):
    crew = Crew(clock)
    assert work(crew, clock, 50, lost=9 * FORWARD, most=1) == [1] * 50


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_two_threads_on_one_core_keep_each_other_waiting():
    """What the compiled half measures."""
    if native.missing() is not None:
        pytest.skip("no compiled decoder")
    subprocess.run([sys.executable, "-c", TWO_ON_ONE_CORE], check=True, timeout=120)


def test_how_long_threads_spin_is_asked_of_nobody_else(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if native.missing() is not None:
        pytest.skip("no compiled decoder")
    native.load(native.SOURCE.read_text(encoding="utf-8"))
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(("decoder", "num_threads"), [("auto", 2), ("transformers", 1)])
def test_a_small_target_takes_one_thread_where_transformers_computes_it(monkeypatch, decoder, num_threads):
    if decoder == "auto" and native.missing() is not None:
        pytest.skip("no compiled decoder")
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load_engine("builtin:draft", "none", settings=LoadSettings(decoder=decoder))
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
