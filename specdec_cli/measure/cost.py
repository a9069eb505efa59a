"""What a step costs: a target's forward by rows and context, a draft's guess by depth, the engine's own work.

Every figure is the median of repeats that take turns with all others, forwards and backwards by turns, so that a
machine's drift meets them alike. Curves are raw: they need not be monotone, and nothing is smoothed.

Draft and target run as in a step, one after the other through the LM's door, and what they give is verified before the
next one, which takes caches from it: the sequences are scored again and again from the same contexts, and their caches
cut themselves back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor

from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.synthetic import conditional
from specdec_cli.engine.verify import VerifyRow, resolve_mode, verify
from specdec_cli.errors import UsageError
from specdec_cli.events import Failed, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.lm.threads import free_cores
from specdec_cli.measure.rounds import ENOUGH, Rounds
from specdec_cli.measure.stats import NUM_RESAMPLES, FloatArray
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

Watch = Callable[[float], None]

CONTEXT_LENGTHS = (32, 128, 256)
MIN_REPEATS, MAX_REPEATS = 3, 15
_VISIT_SECONDS = 0.01  # for so long steps of a kind follow each other, of which the first third is a warm-up, but
_MOST_STEPS = 12  # for no more of them
_LEAST_REAL_STEPS = 4  # of those that tell the engine's own work
_ROUNDS_PER_OVERHEAD = 3  # the engine's own work is a few per cent of a step: fewer samples do
_BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """What else ran: runnable processes in the last minute before and after, and the cores for them."""

    before: float
    after: float
    num_cores: int

    @property
    def warning(self) -> str | None:
        """A sentence when something else was running before the profile began."""
        if self.before <= _BUSY_SHARE * self.num_cores:
            return None
        return f"the machine was busy: load {self.before:.1f} on {self.num_cores} cores; step times are not its own"


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Seconds of the parts of a step, medians.

    Args:
        k_max: largest k.
        context_lengths: [C] tokens before a step, ascending.
        target_seconds: [C, k_max+1] a target's forward of 1…k_max+1 rows in each sequence.
        draft_seconds: [C, k_max+1] a draft's guess of 0…k_max tokens; the first column is 0.
        overhead_seconds: [k_max+1] the engine's own work in a step with k = 0…k_max.
        batch_size: sequences in each.
        num_repeats: measurements behind each median.
        seconds: what the profile took.
        load: of the machine.
        rounds: what the medians are of; None where it is not known, and then they are taken for sure.
    """

    k_max: int
    context_lengths: tuple[int, ...]
    target_seconds: FloatArray
    draft_seconds: FloatArray
    overhead_seconds: FloatArray
    batch_size: int
    num_repeats: int
    seconds: float
    load: Load
    rounds: Rounds | None = None

    @property
    def warning(self) -> str | None:
        """A sentence where intervals that rest on these costs are narrower than they should be."""
        if self.rounds is not None and len(self.rounds) >= ENOUGH:
            return None
        return (
            f"step costs at batch size {self.batch_size} were measured in {self.num_repeats} rounds, and it takes "
            f"{ENOUGH} to tell how sure they are: predicted intervals are too narrow"
        )

    @property
    def flat(self) -> FloatArray:
        """All medians [M] in a row: target, draft, overhead."""
        return np.concatenate([self.target_seconds.ravel(), self.draft_seconds.ravel(), self.overhead_seconds])

    def drawn(self, num_resamples: int = NUM_RESAMPLES) -> FloatArray:
        """The medians [S, M] of rounds drawn anew, in the order of `flat`; without rounds always the same."""
        if self.rounds is None:
            return np.broadcast_to(self.flat, (num_resamples, len(self.flat)))
        return self.rounds.drawn_medians(num_resamples)

    def context_shares(self, context: FloatArray) -> FloatArray:
        """How a cost at each context [B] is made of those at the measured lengths: shares [B, C] that add up to 1."""
        corners = np.eye(len(self.context_lengths))
        return np.stack([_between(context, self.context_lengths, corner) for corner in corners], axis=1)

    def target(self, num_rows: int, context: FloatArray | float) -> FloatArray:
        """Seconds of a forward of rows at a context, between the measured lengths by a straight line."""
        return _between(context, self.context_lengths, self.target_seconds[:, num_rows - 1])

    def draft(self, k: int, context: FloatArray | float) -> FloatArray:
        """Seconds of guessing k tokens at a context."""
        return _between(context, self.context_lengths, self.draft_seconds[:, k])

    def plain(self, context: FloatArray | float) -> FloatArray:
        """Seconds t_AR of a step without a draft: one row and the engine's own work."""
        seconds: FloatArray = self.target(1, context) + self.overhead_seconds[0]
        return seconds

    def draft_seconds_per_token(self, context: float) -> float:
        """Seconds of each drafted token: the slope of the guess's cost over 1…k, by least squares through 0."""
        k = np.arange(1, self.k_max + 1)
        seconds = np.array([float(self.draft(int(i), context)) for i in k])
        return float((k * seconds).sum() / (k * k).sum())

    @property
    def middle_context(self) -> int:
        """The measured context in the middle, at which single figures are quoted."""
        return self.context_lengths[len(self.context_lengths) // 2]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form (INTERFACE's `costs`, and what they rest on)."""
        middle = self.context_lengths.index(self.middle_context)
        return {
            "target_seconds_by_rows": self.target_seconds[middle].tolist(),
            "draft_seconds_per_token": self.draft_seconds_per_token(self.middle_context),
            "draft_seconds_by_k": self.draft_seconds[middle].tolist(),
            "overhead_seconds": float(np.median(self.overhead_seconds)),
            "overhead_seconds_by_k": self.overhead_seconds.tolist(),
            "context_length": self.middle_context,
            "by_context": {
                str(length): {"target_seconds_by_rows": target.tolist(), "draft_seconds_by_k": draft.tolist()}
                for length, target, draft in zip(
                    self.context_lengths, self.target_seconds, self.draft_seconds, strict=True
                )
            },
            "batch_size": self.batch_size,
            "repeats": self.num_repeats,
            "seconds": self.seconds,
            "load": {"before": self.load.before, "after": self.load.after, "cores": self.load.num_cores},
        }


def _between(context: FloatArray | float, lengths: Sequence[int], seconds: FloatArray) -> FloatArray:
    return np.asarray(np.interp(context, lengths, seconds), dtype=np.float64)


def profile(
    engine: Engine,
    k_max: int,
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    *,
    text: Sequence[int] = (1, 2, 3),
    params: SamplingParams | None = None,
    time_limit_seconds: float = 15.0,
    batch_size: int = 1,
    watch: Watch | None = None,
) -> Costs:
    """Measure what steps cost.

    Args:
        engine: idle, with its draft.
        k_max: largest k.
        context_lengths: where to measure; those that leave no room for k_max tokens are moved to the longest that does.
        text: tokens that contexts are made of, repeated as needed; a workload's own have drafts find what they would.
        params: sampling parameters of the workload, on which the costs of draft and verification depend.
        time_limit_seconds: no further repeat begins after this (three are always made).
        batch_size: sequences of each forward.
        watch: told the share of the time limit that has gone.

    Raises:
        UsageError: the KV cache has no room for the contexts, or they for k_max tokens.
    """
    assert not engine.has_work, "costs are measured on an idle engine"
    begin, load_before = perf_counter(), psutil.getloadavg()[0]
    with _Bench(engine, k_max, _fitting(engine, k_max, context_lengths, batch_size), text, params, batch_size) as bench:
        bench.forwards(is_forth=True)
        bench.overheads(is_forth=True)
        bench.forget()
        num = 0
        while num < MIN_REPEATS or (num < MAX_REPEATS and perf_counter() - begin < time_limit_seconds):
            bench.forwards(is_forth=num % 2 == 0)
            if num % _ROUNDS_PER_OVERHEAD == 0:
                bench.overheads(is_forth=num % 2 == 0)
            num += 1
            if watch is not None:
                watch(min(1.0, (perf_counter() - begin) / time_limit_seconds))
    load = Load(load_before, psutil.getloadavg()[0], psutil.cpu_count() or 1)
    return bench.costs(num, perf_counter() - begin, load)


def _fitting(engine: Engine, k_max: int, lengths: Sequence[int], batch_size: int) -> list[int]:
    """Context lengths within both models' limits and the KV cache."""
    limits = [limit for limit in (engine.target.max_context, engine.drafter.max_context) if limit is not None]
    longest = min(limits) - k_max
    if longest < 1:
        raise UsageError(f"a context of `{min(limits)}` tokens has no room for k `{k_max}`", "lower --k-max")
    fitting = sorted({min(max(length, 1), longest) for length in lengths})
    blocks = sum(-(-(length + k_max) // engine.target.block_size) for length in fitting) * batch_size
    if blocks > engine.target.num_free_blocks:
        raise UsageError(
            f"profiling contexts of `{fitting}` tokens needs {blocks} blocks of KV cache, and there are "
            f"`{engine.target.num_free_blocks}`",
            "profile shorter contexts, or raise kv_cache_memory",
        )
    return fitting


class _Bench:
    """The repeated measurements, one list of seconds for each configuration; releases every sequence at its end."""

    def __init__(
        self,
        engine: Engine,
        k_max: int,
        lengths: Sequence[int],
        text: Sequence[int],
        params: SamplingParams | None,
        batch_size: int,
    ) -> None:
        self.engine, self.k_max, self.lengths, self.batch_size = engine, k_max, tuple(lengths), batch_size
        self.params = replace(params or SamplingParams(), stop=(), logprobs=None)
        self.verify = resolve_mode(
            engine.options.verify if self.params.temperature else "auto", self.params.temperature
        )
        self.rates = conditional(engine.options.synthetic_acceptance_rates or ())
        enough = max(lengths) + k_max + batch_size
        self.text = [token for _ in range(-(-enough // len(text))) for token in text]
        self.seconds: dict[tuple[str, int, int], list[float]] = {}
        self.overhead_rounds: list[list[float]] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in (self._handle(place, b) for place in range(len(self.lengths)) for b in range(self.batch_size)):
            self.engine.target.release(handle)
            self.engine.drafter.release(handle)

    def _handle(self, place: int, sequence: int) -> int:
        return -1 - place * self.batch_size - sequence

    def forwards(self, is_forth: bool) -> None:
        """Draft and target once at every context and k, forth or back."""
        tasks = [(place, k) for place in range(len(self.lengths)) for k in range(self.k_max + 1)]
        for place, k in tasks if is_forth else tasks[::-1]:
            self._forward(place, k)

    def overheads(self, is_forth: bool) -> None:
        """A few real steps with every k, forth or back."""
        ks = range(self.k_max + 1)
        before = [len(self.seconds.get(("overhead", 0, k), ())) for k in ks]
        for k in ks if is_forth else ks[::-1]:
            self._overhead(k)
        self.overhead_rounds.append([float(np.median(self.seconds["overhead", 0, k][before[k] :])) for k in ks])

    def forget(self) -> None:
        """Drop what was measured: a warm-up."""
        self.seconds.clear()
        self.overhead_rounds.clear()

    def costs(self, num_repeats: int, seconds: float, load: Load) -> Costs:
        """Medians of everything measured, and what they are of."""

        def table(what: str) -> FloatArray:
            places, ks = range(len(self.lengths)), range(self.k_max + 1)
            taken = np.array([[self.seconds[what, place, k] for k in ks] for place in places])
            return np.ascontiguousarray(np.moveaxis(taken, 2, 0))

        last = np.arange(num_repeats) // _ROUNDS_PER_OVERHEAD
        rounds = Rounds(table("target"), table("draft"), np.array(self.overhead_rounds)[last])
        overhead = np.array([np.median(self.seconds["overhead", 0, k]) for k in range(self.k_max + 1)])
        return Costs(
            self.k_max,
            self.lengths,
            np.median(rounds.target, axis=0),
            np.median(rounds.draft, axis=0),
            overhead,
            self.batch_size,
            num_repeats,
            seconds,
            load,
            rounds,
        )

    def _add(self, what: str, place: int, k: int, seconds: float) -> None:
        self.seconds.setdefault((what, place, k), []).append(seconds)

    def _forward(self, place: int, k: int) -> None:
        """Steps at a context, one after the other as in decoding: the median of all but the first few is kept.

        Small models' weights stay in caches from step to step, and what ran before has pushed them out.
        """
        begin, steps = perf_counter(), list[tuple[float, float]]()
        while not _are_enough(len(steps), perf_counter() - begin):
            with free_cores():
                steps.append(self._step(place, k))
        drafted, scored = np.median(steps[len(steps) // 3 :], axis=0)
        self._add("draft", place, k, drafted)
        self._add("target", place, k, scored)

    def _step(self, place: int, k: int) -> tuple[float, float]:
        """Seconds of one step's draft and target: k tokens guessed, k+1 rows scored whatever was guessed."""
        length = self.lengths[place]
        contexts = [self.text[b : b + length] for b in range(self.batch_size)]
        guesses = [Guesses([]) for _ in contexts]
        begin = perf_counter()
        if k:
            proposed = self.engine.drafter.propose(list(self._draft_rows(place, contexts, k)))
            guesses = [guess.read() for guess in proposed]
        drafted = perf_counter() - begin if k else 0.0
        rows = []
        for b, (context, guess) in enumerate(zip(contexts, guesses, strict=True)):
            tokens = [*guess.tokens, *self.text[b + length + len(guess.tokens) : b + length + k]]
            rows.append(Row(self._handle(place, b), context + tokens, k + 1))
        begin = perf_counter()
        logits = self.engine.target.score(rows)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        scored = perf_counter() - begin
        self._verify(contexts, guesses, logits)
        return drafted, scored

    def _verify(self, contexts: Sequence[list[int]], guesses: Sequence[Guesses], logits: Tensor) -> None:
        """Do with logits [B (k+1), V] what a step does before the next one begins."""
        own = zip(logits.chunk(len(contexts)), guesses, strict=True)
        taken = torch.cat([rows[: len(guess.tokens) + 1] for rows, guess in own])
        each = [(replace(self.params, index=b), *one) for b, one in enumerate(zip(contexts, guesses, strict=True))]
        chain = [ChainRow(params, context, 0, guess.tokens, frozenset()) for params, context, guess in each]
        p = distribution(taken, chain, self.engine.num_tokens)
        verify(p, [VerifyRow(self.verify, params, len(context), guess, self.rates) for params, context, guess in each])

    def _draft_rows(self, place: int, contexts: Sequence[list[int]], k: int) -> Iterator[DraftRow]:
        for b, context in enumerate(contexts):
            params = replace(self.params, index=b)
            yield DraftRow(self._handle(place, b), context, len(context), k, params, frozenset(), self.verify, 0.0)

    def _overhead(self, k: int) -> None:
        """Some real steps; what they spend outside draft and target."""
        prompt = self.text[: min(8, self.lengths[-1])]
        target = self.engine.target
        # The contexts of the forwards keep their blocks: a few steps fit beside them, more where there is room.
        room = target.num_free_blocks // self.batch_size * target.block_size - len(prompt) - k
        few = min(
            (k + 1) * _MOST_STEPS + 2, max(room, (k + 1) * _LEAST_REAL_STEPS + 2), target.max_context - len(prompt)
        )
        ids = []
        for b in range(self.batch_size):
            params = replace(self.params, max_new_tokens=few, min_tokens=0, ignore_eos=True, stop_token_ids=(), index=b)
            ids.append(self.engine.add(prompt, params, k))
        begin, spent = perf_counter(), list[float]()
        while self.engine.has_work and not _are_enough(len(spent), perf_counter() - begin, _LEAST_REAL_STEPS):
            for event in self.engine.step():
                if isinstance(event, Stepped) and event.emitted and not event.emitted[0].from_prefill:
                    spent.append(event.overhead_seconds)
                elif isinstance(event, Failed):
                    raise event.error
        for seconds in spent[len(spent) // 3 :]:
            self._add("overhead", 0, k, seconds)
        for sequence_id in ids:
            self.engine.abort(sequence_id)


def _are_enough(num_steps: int, seconds: float, least: int = 1) -> bool:
    """Whether so many steps of a kind, which took so long, tell what one costs."""
    return num_steps >= least and (num_steps >= _MOST_STEPS or seconds >= _VISIT_SECONDS)
