"""Interrupted passes: what counts as one, how often it is repeated, and what is said of a machine that stays busy."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from toy_engine import LetterTokenizer, toy_engine
from typed import not_none

from specdec_cli.engine.arms import ArmRun, EngineArm
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.journal import Journal, open_journal
from specdec_cli.measure.machine import interruption
from specdec_cli.measure.machine.interruption import MachineUsage, Usage
from specdec_cli.measure.machine.load import Conditions, Load
from specdec_cli.measure.workload.workload import tokenize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import Timing

LOOK = interruption.look_at_usage  # before the fixture that plants a quiet machine
LOOK_AT_MACHINE = interruption.look_at_machine
HEAD = {
    "specdec_version": "1", "schema": "s/1", "recipe": {}, "plan": {}, "workload": "w", "environment": {},
}  # fmt: skip


def usage(wall=1.0, cpu=1.0, waited: float | None = 0.0, switches: int | None = 0) -> Usage:
    return Usage(wall, cpu, waited, switches)


START = usage(0.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("after", "is_computing", "lost"),
    [
        (usage(), True, 0.0),
        (usage(waited=0.86, cpu=0.14), True, 0.86),  # one thread beside four busy processes on two cores
        (usage(waited=0.42, cpu=1.46, switches=54), True, 0.42),  # two threads that spin for each other: CPU time is up
        (usage(waited=1.9, cpu=0.4), True, 1.0),
        (usage(cpu=0.5), True, 0.5),  # stopped by a quota, or swapped out
        (usage(cpu=0.1), False, 0.0),  # waits for a GPU
        (usage(waited=None, switches=1000), False, 0.5),
        (usage(waited=None, switches=60), True, 0.03),  # a quiet machine's
        (usage(waited=None, switches=None), True, None),
        (usage(waited=-0.5), True, 0.0),  # a thread ended meanwhile, with all that it had waited
        (usage(wall=0.0), True, 0.0),
    ],
)
def test_what_other_processes_cost(after, is_computing: bool, lost: float | None) -> None:
    assert after.lost_share_since(START, is_computing) == pytest.approx(lost)


@pytest.mark.parametrize(
    ("seconds", "idle", "own", "share"),
    [
        (10.0, 10.0, 10.0, 0.0),  # two cores, of which the measurement used one
        (10.0, 0.0, 10.0, 0.5),  # and another program the other
        (10.0, 15.0, 4.0, 0.05),
        (10.0, 12.0, 8.1, 0.0),  # clocks that differ by a tick
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_what_other_programs_use_is_what_is_neither_idle_nor_ours(
    seconds: float, idle: float, own: float, share: float
) -> None:
    after = MachineUsage(100 + seconds, 5 + idle, 7 + own, 2)
    assert after.others_share_since(MachineUsage(100.0, 5.0, 7.0, 2)) == pytest.approx(share)


def test_our_own_work_is_nobody_elses() -> None:
    """A busy loop of this process and one that is said to be a server's; what else runs meanwhile only adds."""
    before, seconds = LOOK_AT_MACHINE(0.0), time.process_time()
    while time.process_time() < seconds + 0.3:
        pass
    after = LOOK_AT_MACHINE(0.0)
    assert after.own_seconds - before.own_seconds >= 0.3
    assert after.num_cores == psutil.cpu_count()
    without = MachineUsage(after.wall_seconds, after.idle_seconds, before.own_seconds, after.num_cores)
    gap = without.others_share_since(before) - after.others_share_since(before)
    wall = after.wall_seconds - before.wall_seconds
    assert gap == pytest.approx(0.3 / (wall * after.num_cores), rel=0.4)


def test_this_process_looks_at_itself() -> None:
    before, after = LOOK(), LOOK()
    assert after.wall_seconds > before.wall_seconds
    assert after.cpu_seconds >= before.cpu_seconds > 0
    if os.path.exists("/proc/self/schedstat"):
        assert not_none(after.waited_seconds) >= not_none(before.waited_seconds) >= 0


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_a_system_that_tells_nothing_of_threads_is_no_quiet_one(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(interruption, "_THREADS", str(tmp_path / "none" if missing == "folder" else tmp_path))
    assert LOOK().waited_seconds is None


def test_a_thread_that_ends_while_it_is_looked_at_waited_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interruption, "_THREADS", str(tmp_path))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("10 2000000000 3\n")
    monkeypatch.setattr(os, "listdir", lambda _: ["1", "2"])
    assert LOOK().waited_seconds == 2.0


@dataclass
class Busy:
    """A benchmark on a machine that takes these shares of one attempt after the other, and then nothing more."""

    monkeypatch: pytest.MonkeyPatch
    shares: Iterable[float]
    num_prompts: int = 6
    journal: Journal | None = None
    attempts: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = [PromptRow(i, "ab ab") for i in range(self.num_prompts)]
        encode, params = LetterTokenizer().encode, SamplingParams(max_new_tokens=4)
        work = tokenize(rows, "mine", lambda row: encode(row.prompt), params, 512)
        engine = toy_engine()
        self.bench = Bench(
            work, EngineArm("draft", engine, 2), EngineArm("plain", engine, 0), repeats=1, journal=self.journal
        )
        self.now = self.waited = 0.0
        self.is_warming, self.coming = True, iter(self.shares)
        self.monkeypatch.setattr(EngineArm, "run", lambda arm, requests, _: self.decode(arm, requests))
        look = lambda: Usage(self.now, self.now, self.waited, 0)  # noqa: E731
        self.monkeypatch.setattr(interruption, "look_at_usage", look)

    def decode(self, arm: EngineArm, requests: list[Request]) -> ArmRun:
        share = 0.0 if self.is_warming else next(self.coming, 0.0)
        if not self.is_warming:
            self.attempts.append((not_none(arm.num_speculative_tokens), requests[0].row.index))
        seconds = (1.0 if arm.num_speculative_tokens else 2.0) / (1 - share)
        self.now += seconds
        self.waited += seconds * share
        return ArmRun(((1,) * 4,), Timing(0.0, seconds, seconds, None), 1)

    def run(self, stopped=lambda: False) -> Bench:
        for at in self.bench.run(stopped):
            self.is_warming = at.arm.startswith("warming")
        return self.bench

    @property
    def conditions(self) -> Conditions:
        return Conditions.of_passes(Load(0.1, 2), self.bench.passes)


def test_an_interrupted_pass_is_decoded_again_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, [0.0, 0.6, 0.3, 0.0])
    found = busy.run()
    assert busy.attempts[:5] == [(2, 0), (0, 0), (0, 0), (0, 0), (0, 1)], "again at once: pairs stay close together"
    assert not_none(found.speedup("decode")).ci95 == (2.0, 2.0)
    assert [one.num_discarded for one in found.plain.passes[:2]] == [2, 0]
    assert busy.conditions.num_discarded_passes == 2
    assert (busy.conditions.num_interrupted_passes, busy.conditions.busy, busy.conditions.lost_share) == (0, None, 0.0)
    assert "discarded 2 passes that other processes interrupted" in not_none(busy.conditions.discarded)


def test_of_attempts_that_were_all_interrupted_the_least_interrupted_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, [0.5, 0.2, 0.4])
    [first, *_] = busy.run().draft.passes
    assert (first.lost_share, first.num_discarded, first.is_interrupted) == (pytest.approx(0.2), 2, True)
    assert busy.conditions.num_interrupted_passes == 1
    assert busy.conditions.busy is None, "a median does not mind one of twelve"


def test_a_little_waiting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, [0.04] * 100)
    busy.run()
    assert (len(busy.attempts), busy.conditions.num_discarded_passes) == (12, 0)
    assert busy.conditions.lost_share == pytest.approx(0.04)


def test_a_machine_that_is_always_busy_is_measured_and_said_to_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, repeat(0.7))
    found = busy.run()
    assert len(found.draft.passes) == len(found.plain.passes) == 6
    assert len(busy.attempts) == 12 + 6, "half as many again, and then it is measured as it is"
    assert busy.conditions.as_json() == {
        "load_before": 0.1, "load_after": 0.0, "num_cores": 2, "num_interrupted_passes": 12, "num_discarded_passes": 6,
        "lost_share": pytest.approx(0.7),
        "busy": "the machine was busy: 12 of 12 passes lost more than 5 % of their time to other processes or a CPU "
        "quota (load 0.1 on 2 cores before)",
    }  # fmt: skip


def test_stopping_while_a_pass_is_repeated_keeps_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(monkeypatch, repeat(0.7))
    found = busy.run(lambda: len(busy.attempts) >= 1)
    assert [len(found.draft.passes), len(found.plain.passes)] == [1, 0]


def test_a_resumed_run_knows_what_was_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = Busy(monkeypatch, repeat(0.7), journal=open_journal(path, HEAD, resume=False))
    first.run()
    again = Busy(monkeypatch, [], journal=open_journal(path, HEAD, resume=True))
    again.run()
    assert again.attempts == []
    assert again.conditions == first.conditions


@pytest.mark.parametrize(
    ("load", "lost_share", "is_busy"),
    [(0.4, 0.0, False), (2.3, 0.0, False), (6.5, 0.0, True), (0.4, None, False), (0.6, None, True), (6.5, 0.01, True)],
)
def test_the_load_alone_says_it_where_it_is_high_or_nothing_else_is_known(
    load: float, lost_share: float | None, is_busy: bool
) -> None:
    """On two cores; two runs of this program one after the other leave a load of 2 behind."""
    measured: Any = SimpleNamespace(lost_share=lost_share, seconds=1.0, num_discarded=0)
    found = Conditions.of_passes(Load(load, 2), [measured] * 12)
    assert (found.busy is not None) is is_busy
    assert not is_busy or f"load {load} on 2 cores" in not_none(found.busy)
