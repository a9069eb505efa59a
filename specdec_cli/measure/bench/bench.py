"""The benchmark: an arm with a draft and one without, other arms beside them, taking turns prompt by prompt.

The arms' order is turned round with every group and every repeat (A B, B A, …), so that a machine that drifts does it
to all of them. Arms that do not fit into memory together run one after the other instead, the plain one first. Warm-up
is thrown away, prompts are tokenized before, and nothing is drawn while a clock runs: `run` yields between the passes.
A pass that other processes interrupted is decoded again, a few times at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from specdec_cli.engine.driver import never
from specdec_cli.events import Noticed
from specdec_cli.measure.bench import passes
from specdec_cli.measure.bench.passes import Group, Kind, Pass, Track
from specdec_cli.measure.machine import interruption
from specdec_cli.measure.workload.workload import Workload, task_of
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.document import DifferencesResult, Interval
    from specdec_cli.engine.arms import Arm
    from specdec_cli.engine.decoding import Request
    from specdec_cli.measure.bench.journal import Journal

_NUM_WARM_UP_TOKENS = 16
_MOST_ATTEMPTS = 3  # of one pass
_MOST_DISCARDED = 0.5  # of all passes: a machine that is always busy is measured as it is


@dataclass(frozen=True, slots=True)
class Progress:
    """Between two passes: how many are done, and which arm comes next."""

    done: int
    total: int
    arm: str


@dataclass(slots=True)
class Bench:
    """A benchmark, before, while and after it runs.

    Args:
        workload: what is decoded.
        draft_arm: decodes with the draft.
        plain_arm: decodes without.
        others: further plain arms.
        batch_size: requests that are decoded together, of whatever tasks; those left over make a smaller group.
        repeats: how often every arm decodes every group.
        in_turn: whether the arms take turns; else each is started, measured and stopped before the next.
        notices: for the reader of the report.
        journal: takes every finished pass, and gives those that an earlier run finished; None keeps none.
    """

    workload: Workload
    draft_arm: Arm
    plain_arm: Arm
    others: Sequence[Arm] = ()
    batch_size: int = 1
    repeats: int = 2
    in_turn: bool = True
    notices: list[str] = field(default_factory=list)
    journal: Journal | None = None
    draft: Track = field(init=False)
    plain: Track = field(init=False)
    against: dict[str, Track] = field(init=False)

    def __post_init__(self) -> None:
        """Give every arm its track."""
        self.draft, self.plain = Track(self.draft_arm.name), Track(self.plain_arm.name)
        self.against = {other.name: Track(other.name) for other in self.others}

    @property
    def order(self) -> str:
        """The order of two arms A and B over two groups."""
        return "A B B A" if self.in_turn else "A A B B"

    @property
    def tracks(self) -> list[Track]:
        """The passes of every arm."""
        return [self.draft, self.plain, *self.against.values()]

    def run(self, stopped: Callable[[], bool] = never) -> Generator[Progress, None, None]:
        """Warm up, then measure. Yields before every pass, when the display may be drawn.

        Args:
            stopped: asked between steps and passes; what is whole by then is kept.
        """
        groups = self.groups()
        self._note_what_is_left(groups)
        done = 0
        for sitting in self._sittings():
            with ExitStack() as started:
                for arm, _ in sitting:
                    if not self.in_turn:  # a start takes minutes
                        yield Progress(done, len(groups) * self.repeats * len(self.tracks), f"start {arm.name}")
                    started.callback(arm.stop)
                    arm.start()
                done = yield from self._measure(sitting, groups, done, stopped)
                if done < 0:
                    return

    def _sittings(self) -> list[list[tuple[Arm, Track]]]:
        """The arms that are up together, with their tracks."""
        arms = (self.draft_arm, self.plain_arm, *self.others)
        together = list(zip(arms, self.tracks, strict=True))
        if self.in_turn:
            return [together]
        with_draft, plain, *others = together
        return [[plain], [with_draft], *([other] for other in others)]

    def _measure(
        self, sitting: Sequence[tuple[Arm, Track]], groups: Sequence[Group], done: int, stopped: Callable[[], bool]
    ) -> Generator[Progress, None, int]:
        """Measure the running arms; returns the number of passes so far, -1 when it was stopped."""
        total = len(groups) * self.repeats * len(self.tracks)
        for arm, _ in sitting:
            yield Progress(done, total, f"warming up {arm.name}")
            arm.run(_short(groups[0].requests), stopped)
        names = [arm.name for arm, _ in sitting]
        for repeat in range(self.repeats):
            for group in groups:
                kept = {} if self.journal is None or stopped() else self.journal.turn(group, repeat, names)
                for arm, track in sitting if (group.place + repeat) % 2 == 0 else reversed(sitting):
                    yield Progress(done, total, arm.name)
                    pass_ = kept.get(arm.name) or self._undisturbed(arm, group, repeat, total, stopped)
                    if pass_ is None:
                        return -1
                    if self.journal is not None and not kept:
                        self.journal.keep(arm.name, pass_)
                    track.add(pass_)
                    self._note(pass_)
                    done += 1
        yield Progress(done, total, "")
        return done

    def _undisturbed(
        self, arm: Arm, group: Group, repeat: int, num_passes: int, stopped: Callable[[], bool]
    ) -> Pass | None:
        """A pass that nothing interrupted, or the least interrupted of a few; None when it was stopped."""
        best: Pass | None = None
        for attempt in range(_MOST_ATTEMPTS):
            pass_ = None if stopped() else self._watched(arm, group, repeat, stopped)
            if pass_ is None:
                return best
            best = pass_ if best is None or (pass_.lost_share or 0.0) < (best.lost_share or 0.0) else best
            best = replace(best, num_discarded=attempt)
            if not pass_.is_interrupted or self.num_discarded + attempt >= _MOST_DISCARDED * num_passes:
                break
        return best

    def _watched(self, arm: Arm, group: Group, repeat: int, stopped: Callable[[], bool]) -> Pass | None:
        before = interruption.look_at_usage()
        run = arm.run(group.requests, stopped)
        after, is_computing = interruption.look_at_usage(), arm.is_computing
        if run is None:
            return None
        lost = run.lost_share if is_computing is None else after.lost_share_since(before, is_computing)
        return Pass(group, repeat, run, lost)

    @property
    def passes(self) -> list[Pass]:
        """Counted passes of all arms."""
        return [pass_ for track in self.tracks for pass_ in track.passes]

    @property
    def num_discarded(self) -> int:
        """Interrupted passes that were decoded again."""
        return sum(pass_.num_discarded for pass_ in self.passes)

    def groups(self) -> list[Group]:
        """The workload in groups of the batch's size."""
        return groups_of(self.workload, self.batch_size)

    def group_sizes(self) -> dict[int, int]:
        """How many groups there are of each size, the batch's own first."""
        return dict(Counter(len(group.requests) for group in self.groups()))

    @property
    def hidden_tasks(self) -> str | None:
        """A notice if groups hold several tasks, because their times cannot be separated, or None."""
        if self.batch_size == 1 or len(self.workload.tasks) < 2:
            return None
        return (
            f"a batch of {self.batch_size} holds prompts of several tasks: by task the acceptance is known, times "
            "and speed-ups are not"
        )

    def tasks(self) -> list[str]:
        """Tasks that both of our arms decoded; none where no prompt names one."""
        decoded = self.draft.task_counts.keys() & self.plain.task_counts.keys()
        return [task for task in self.workload.tasks if task in decoded]

    def speedup(self, kind: Kind, task: str | None = None, against: Track | None = None) -> Interval | None:
        """Speed-up by the draft: a pair is a group, each arm at the median of its repeats.

        Args:
            kind: `decode` (after the first token) or `latency` (from arrival to the end).
            task: only this one's groups; None comes back where groups hold several.
            against: another arm than our own without a draft.
        """
        return passes.speedup(self.draft, against or self.plain, kind, task)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that one sequence got from one step with the draft."""
        counts = self.draft.counts()
        return counts.num_emitted_tokens / counts.num_steps if counts.num_steps else None

    @property
    def efficiency(self) -> float | None:
        """Speed-up over tokens per step: how much of what the draft gives the engine keeps."""
        speedup, per_step = self.speedup("decode"), self.tokens_per_step
        return speedup.median / per_step if speedup and per_step else None

    def differences(self, against: Track | None = None) -> DifferencesResult:
        """Every output with the draft against the same request's output without."""
        return passes.differences(passes.compared_outputs([self.draft], against or self.plain))

    def _note(self, pass_: Pass) -> None:
        for event in pass_.run.events:
            if isinstance(event, Noticed) and event.message not in self.notices:
                self.notices.append(event.message)

    def _note_what_is_left(self, groups: Sequence[Group]) -> None:
        size, last = self.batch_size, len(groups[-1].requests)
        if last < size:
            num = len(self.workload.requests)
            prompts = f"{counted(num, 'prompt')} {'does' if num == 1 else 'do'}"
            self.notices.append(f"{prompts} not fill batches of {size}: the last is of {last}")


def groups_of(workload: Workload, size: int) -> list[Group]:
    """A workload in groups of a size, the tasks taking turns; what is left over is the last."""
    by_task: dict[str, list[Request]] = {}
    for request in workload.requests:
        by_task.setdefault(task_of(request.row), []).append(request)
    ordered = [request for turn in zip_longest(*by_task.values()) for request in turn if request is not None]
    cut = [tuple(ordered[i : i + size]) for i in range(0, len(ordered), size)]
    is_mixed = size > 1 and len(by_task) > 1
    return [Group(place, "" if is_mixed else task_of(requests[0].row), requests) for place, requests in enumerate(cut)]


def _short(requests: Sequence[Request]) -> list[Request]:
    """The requests with few new tokens, to warm an arm up with."""
    return [
        replace(
            request,
            params=replace(
                request.params,
                max_new_tokens=min(_NUM_WARM_UP_TOKENS, request.params.max_new_tokens),
                min_tokens=min(_NUM_WARM_UP_TOKENS, request.params.min_tokens),
            ),
        )
        for request in requests
    ]
