"""Step costs, measured: a target's forward by rows and context, a draft's guess by depth, the engine's own work.

Every figure is the median of repeats that take turns with all others, forwards and backwards by turns, so that a
machine's drift meets them alike. Curves are raw: they need not be monotone, and nothing is smoothed.

Draft and target run through the engine's own step, and what they give is verified before the next one, which takes
caches from it: the sequences are scored again and again from the same contexts, and their caches cut themselves back.
They take nothing of the verdicts. A visit that other processes interrupted is made again, a few times at most.

A draft that reads hidden states remembers what it drafted until it is fed those of kept tokens, so that scoring a
context again costs it almost nothing. What it costs is taken from the engine's real steps, which are short texts; a
head has few layers, and its cost depends little on the context.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.scheduler import StepRow
from specdec_cli.engine.sequence import Sequence
from specdec_cli.engine.stepper import Stepper
from specdec_cli.engine.synthetic import conditional
from specdec_cli.errors import UsageError
from specdec_cli.events import Stepped
from specdec_cli.measure.machine import interruption
from specdec_cli.measure.predict.cost import Costs, ProfileLoad, Rounds
from specdec_cli.measure.stats import FloatArray
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import rule_of

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

Watch = Callable[[float], None]

CONTEXT_LENGTHS = (32, 128, 256)
MIN_REPEATS, MAX_REPEATS = 3, 15
_VISIT_SECONDS = 0.01  # equal steps follow each other for so long; the first third is a warm-up, but
_MOST_STEPS = 12  # for no more of them
_LEAST_REAL_STEPS = 4  # of those that tell the engine's own work
_ROUNDS_PER_OVERHEAD = 3  # the engine's own work is a few per cent of a step: fewer samples do
_MOST_VISITS = 3  # to one configuration in one round, if others are interrupted


def profile(
    engine: Engine,
    k_max: int,
    context_lengths: Items[int] = CONTEXT_LENGTHS,
    *,
    trees: Items[TreeShape] = (),
    text: Items[int] = (1, 2, 3),
    params: SamplingParams | None = None,
    time_limit_seconds: float = 15.0,
    batch_size: int = 1,
    watch: Watch | None = None,
    repeats: tuple[int, int] = (MIN_REPEATS, MAX_REPEATS),
    first: int = 0,
    is_warm: bool = False,
    overhead_seconds: FloatArray | None = None,
) -> Costs:
    """Measure what steps cost.

    Args:
        engine: idle, with its draft.
        k_max: largest k.
        context_lengths: where to measure; those that leave no room for k_max tokens are moved to the longest that does.
        trees: whose steps are measured beside those of chains, at most k_max deep.
        text: tokens that contexts are made of, repeated as needed; a workload's own have drafts find what they would.
        params: sampling parameters of the workload, on which the costs of draft and verification depend.
        time_limit_seconds: no further repeat begins after this, once there are enough.
        batch_size: sequences of each forward.
        watch: called with the share of the profile that is done.
        repeats: how many are enough, and the most.
        first: number of the first repeat, which says whether it goes forth or back.
        is_warm: whether the pair has just decoded and needs no round to warm up.
        overhead_seconds: the engine's own work where it is known already.

    Raises:
        UsageError: the KV cache has no room for the contexts, or they for k_max tokens.
    """
    assert not engine.has_work, "costs are measured on an idle engine"
    begin, load_before = perf_counter(), psutil.getloadavg()[0]
    shapes = [*map(DraftShape, range(k_max + 1)), *map(DraftShape.of, trees)]
    lengths = _fitting(engine, shapes, context_lengths, batch_size)
    with _Profiler(engine, shapes, lengths, text, params, batch_size) as bench:
        bench.feed() if is_warm else bench.warm_up()
        num, (enough, most) = 0, repeats
        while num < enough or (num < most and perf_counter() - begin < time_limit_seconds):
            is_forth = (first + num) % 2 == 0
            bench.forwards(is_forth)
            if bench.drafts_in_real_steps or (overhead_seconds is None and num % _ROUNDS_PER_OVERHEAD == 0):
                bench.real_steps(is_forth)
            num += 1
            if watch is not None:
                watch(_share(num, repeats, perf_counter() - begin, time_limit_seconds))
    load = ProfileLoad(load_before, psutil.getloadavg()[0], psutil.cpu_count() or 1)
    return bench.costs(num, perf_counter() - begin, load, overhead_seconds)


def _share(num: int, repeats: tuple[int, int], seconds: float, limit: float) -> float:
    """Share of a profile that is done: it ends with the most repeats, or with enough of them at the time limit."""
    enough, most = repeats
    in_time = seconds / limit if limit > 0 else 1.0
    return max(num / most, min(1.0, in_time, num / enough))


def _fitting(engine: Engine, shapes: Items[DraftShape], lengths: Items[int], batch_size: int) -> list[int]:
    """Context lengths within both models' limits and the KV cache."""
    limits = [limit for limit in (engine.target.max_context, engine.drafter.max_context) if limit is not None]
    k_max, most = max(shape.k for shape in shapes), max(shape.num_nodes for shape in shapes)
    longest = min(limits) - k_max
    if longest < 1:
        raise UsageError(f"a context of `{min(limits)}` tokens has no room for k `{k_max}`", "lower --k-max")
    fitting = sorted({min(max(length, 1), longest) for length in lengths})
    blocks = sum(-(-(length + most) // engine.target.block_size) for length in fitting) * batch_size
    if blocks > engine.target.num_free_blocks:
        raise UsageError(
            f"profiling contexts of `{fitting}` tokens needs {blocks} blocks of KV cache, and there are "
            f"`{engine.target.num_free_blocks}`",
            "profile shorter contexts, or raise kv_cache_memory",
        )
    return fitting


class _Profiler:
    """The repeated measurements, one list of seconds for each configuration; releases every sequence at its end."""

    def __init__(
        self,
        engine: Engine,
        shapes: Items[DraftShape],
        lengths: Items[int],
        text: Items[int],
        params: SamplingParams | None,
        batch_size: int,
    ) -> None:
        self.engine, self.shapes, self.lengths, self.batch_size = engine, tuple(shapes), tuple(lengths), batch_size
        self.params = replace(params or SamplingParams(), stop=(), logprobs=None)
        self.k_max = max(shape.k for shape in shapes)
        enough = max(lengths) + self.k_max + batch_size
        self.text = [token for _ in range(-(-enough // len(text))) for token in text]
        rates = conditional(engine.options.synthetic_acceptance_rates or ())
        self.stepper = Stepper(engine.target, self._propose, engine.num_tokens, rates)
        self.sequences = [[self._sequence(place, b) for b in range(batch_size)] for place in range(len(lengths))]
        self.drafts_in_real_steps = bool(engine.drafter.taps)
        self.seconds: dict[tuple[str, int, DraftShape], list[float]] = {}
        self.real_rounds: dict[str, list[list[float]]] = {"overhead": [], "draft": []}
        self.num_visits = self.num_repeated = 0

    def __enter__(self) -> _Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in (sequence for together in self.sequences for sequence in together):
            self.engine.target.release(sequence.id)
            self.engine.drafter.release(sequence.id)

    def _sequence(self, place: int, b: int) -> Sequence:
        """A context, as if all of it were output; b is its place in the batch, and in the text."""
        temperature, length = self.params.temperature, self.lengths[place]
        return Sequence(
            id=-1 - place * self.batch_size - b,
            tokens=self.text[b : b + length],
            num_prompt_tokens=0,
            params=replace(self.params, index=b),
            stop_ids=frozenset(),
            rule=rule_of(self.engine.options.verify if temperature else "auto", temperature),
            k=self.k_max,
            max_tokens=self.engine.target.max_context,
            text=None,
        )

    def warm_up(self) -> None:
        """A round that does not count."""
        self.forwards(is_forth=True)
        self.real_steps(is_forth=True)
        self.seconds.clear()
        self.real_rounds = {what: [] for what in self.real_rounds}

    def feed(self) -> None:
        """Put every context into the caches of both models."""
        for place in range(len(self.lengths)):
            if self.engine.drafter.taps:  # it drafts once the target has read the context
                self._step(place, PLAIN)
            self._step(place, DraftShape(self.k_max))

    def forwards(self, is_forth: bool) -> None:
        """Draft and target once at every context and with every shape, forth or back."""
        tasks = [(place, shape) for place in range(len(self.lengths)) for shape in self.shapes]
        for place, shape in tasks if is_forth else tasks[::-1]:
            self._forward(place, shape)

    def real_steps(self, is_forth: bool) -> None:
        """A few real steps with every shape, forth or back: the engine's own work, and the draft's."""
        spent = {shape: self._real_steps(shape) for shape in (self.shapes if is_forth else self.shapes[::-1])}
        for what, rounds in self.real_rounds.items():
            rounds.append([float(np.median(spent[shape][what])) for shape in self.shapes])

    def costs(self, num_repeats: int, seconds: float, load: ProfileLoad, overhead_seconds: FloatArray | None) -> Costs:
        """Medians of everything measured, and what they are of."""
        last = np.arange(num_repeats) // (1 if self.drafts_in_real_steps else _ROUNDS_PER_OVERHEAD)
        if overhead_seconds is None:
            overheads = np.array(self.real_rounds["overhead"])[last]
        else:
            overheads = np.tile(overhead_seconds, (num_repeats, 1))
        target = self._table("target")
        if self.drafts_in_real_steps:
            drafts = np.repeat(np.array(self.real_rounds["draft"])[last][:, None], len(self.lengths), axis=1)
        else:
            drafts = self._table("draft")
        rounds = Rounds(target, drafts, overheads)
        return Costs(
            self.k_max,
            self.lengths,
            np.median(rounds.target, axis=0),
            np.median(rounds.draft, axis=0),
            np.median(rounds.overhead, axis=0),
            self.batch_size,
            num_repeats,
            seconds,
            load,
            rounds,
            trees=tuple(shape.tree for shape in self.shapes if shape.tree is not None),
        )

    def _table(self, what: str) -> FloatArray:
        """Seconds [R, C, W] of every round."""
        places = range(len(self.lengths))
        taken = np.array([[self.seconds[what, place, shape] for shape in self.shapes] for place in places])
        return np.ascontiguousarray(np.moveaxis(taken, 2, 0))

    def _add(self, what: str, place: int, shape: DraftShape, seconds: float) -> None:
        self.seconds.setdefault((what, place, shape), []).append(seconds)

    def _forward(self, place: int, shape: DraftShape) -> None:
        """Visit a configuration until nothing interrupts, a few times at most; the least interrupted visit counts.

        On a machine that is always busy no more than half as many visits again are made.
        """
        self.num_visits += 1
        visits = list[tuple[float, float, float]]()
        is_computing = self.engine.target.device.type == "cpu"
        while not visits or (visits[-1][0] > interruption.INTERRUPTED_SHARE and self._may_repeat(len(visits))):
            before = interruption.look_at_usage()
            drafted, scored = self._visit(place, shape)
            lost = interruption.look_at_usage().lost_share_since(before, is_computing)
            visits.append((lost or 0.0, drafted, scored))
        self.num_repeated += len(visits) - 1
        _, drafted, scored = min(visits, key=lambda visit: visit[0])
        self._add("draft", place, shape, drafted)
        self._add("target", place, shape, scored)

    def _may_repeat(self, num_visits: int) -> bool:
        return num_visits < _MOST_VISITS and self.num_repeated + num_visits <= max(1, self.num_visits // 2)

    def _visit(self, place: int, shape: DraftShape) -> tuple[float, float]:
        """Steps at a context, one after the other as in decoding: the median of all but the first few.

        Small models' weights stay in caches from step to step, and what ran before has pushed them out.
        """
        begin, steps = perf_counter(), list[tuple[float, float]]()
        while not _are_enough(len(steps), perf_counter() - begin):
            steps.append(self._step(place, shape))
        drafted, scored = np.median(steps[len(steps) // 3 :], axis=0)
        return float(drafted), float(scored)

    def _step(self, place: int, shape: DraftShape) -> tuple[float, float]:
        """Seconds of one step's draft and target."""
        for sequence in self.sequences[place]:
            sequence.tree = shape.tree
        taps = self.engine.drafter.taps
        drafting, scoring = self.stepper.run(
            [StepRow(sequence, len(sequence.tokens), shape.k, taps=taps) for sequence in self.sequences[place]]
        )
        return drafting if shape.k else 0.0, scoring

    def _propose(self, asked: Items[tuple[str, DraftRow]]) -> list[Guesses]:
        """The draft's guesses; chains filled up to k tokens, so that k + 1 rows are scored whatever was guessed."""
        if not asked:
            return []
        rows = [row for _, row in asked]
        return [self._filled(row, guess) for row, guess in zip(rows, self.engine.drafter.propose(rows), strict=True)]

    def _filled(self, row: DraftRow, guess: Guesses) -> Guesses:
        """A chain with tokens drafted without chance behind it where it is shorter than k."""
        num = len(guess.drafted)
        if num == row.k or row.tree is not None:
            return guess
        guess, first = guess.read(), row.params.index + len(row.context)  # where the text goes on
        rest = self.text[first + num : first + row.k]
        q = guess.q
        if q is not None:
            sure = torch.nn.functional.one_hot(torch.tensor(rest, device=q.device), q.shape[1])
            q = torch.cat([q, sure.to(q.dtype)])
        return Guesses(Drafted.chain([*guess.drafted.tokens, *rest]), q)

    def _real_steps(self, shape: DraftShape) -> dict[str, list[float]]:
        """Some real steps; what they spend outside draft and target, and on the draft."""
        k = shape.k
        prompt = self.text[: min(8, self.lengths[-1])]
        target = self.engine.target
        # The contexts of the forwards keep their blocks: a few steps fit beside them, more where there is room.
        room = target.num_free_blocks // self.batch_size * target.block_size - len(prompt) - shape.num_nodes
        few = min(
            (k + 1) * _MOST_STEPS + 2, max(room, (k + 1) * _LEAST_REAL_STEPS + 2), target.max_context - len(prompt)
        )
        params = replace(self.params, max_new_tokens=few, min_tokens=0, ignore_eos=True, stop_token_ids=())
        with Driver(self.engine) as driver:
            for b in range(self.batch_size):
                driver.add(prompt, replace(params, index=b), k, tree=shape.asked_tree)
            begin, steps = perf_counter(), list[Stepped]()
            for event in (event for events in driver.steps() for event in events):
                if isinstance(event, Stepped) and event.emitted and not event.emitted[0].from_prefill:
                    steps.append(event)
                if _are_enough(len(steps), perf_counter() - begin, _LEAST_REAL_STEPS):
                    break
        counted = steps[len(steps) // 3 :]
        drafts = [event.draft_seconds if k else 0.0 for event in counted]
        return {"overhead": [event.overhead_seconds for event in counted], "draft": drafts}


def _are_enough(num_steps: int, seconds: float, least: int = 1) -> bool:
    """Whether so many equal steps, which took so long, are enough to know the cost of one."""
    return num_steps >= least and (num_steps >= _MOST_STEPS or seconds >= _VISIT_SECONDS)
