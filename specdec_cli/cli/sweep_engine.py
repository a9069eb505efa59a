"""`sweep-k --engine`: every k of another engine predicted from a few of its starts, the best few measured there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.draft_reader import DraftReader, SyntheticReader, draft_reader
from specdec_cli.cli.engine_arms import EngineArms
from specdec_cli.cli.measurement_options import (
    check_files,
    check_regression,
    chosen_prompts,
    depth_within_rates,
    num_prompts_words,
)
from specdec_cli.cli.other_engine import OtherEngine, at_k
from specdec_cli.cli.place import PLAIN
from specdec_cli.cli.screen import timed_progress
from specdec_cli.cli.sweep_run import SweepOptions, SweepRun
from specdec_cli.draft_shape import DraftShape
from specdec_cli.drafters.elsewhere import TRACED
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.documents.engine_sweep import engine_sweep_result
from specdec_cli.measure.elsewhere.server_arm import DYING_SECONDS
from specdec_cli.measure.endpoint.refusal import EndpointError
from specdec_cli.recipe.schema import Draft
from specdec_cli.report.pace import Waiting

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep
    from specdec_cli.measure.elsewhere.server_arm import ServerArm
    from specdec_cli.measure.gates import Pairs
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.recipe import Recipe

_NUM_MEASURED = 2
_P_MINS = (0.2, 0.4, 0.6, 0.75, 0.9)
_NUM_MEASURED_OF_PAIRS = 3
_FIXED = "leave it out, or measure it: bench --engine"
_CPU_LOG = "cpu_worker.py"
"""Stands in vLLM's log where it runs on a CPU."""


def engine_sweep_run(other: OtherEngine, options: SweepOptions, shared: Shared, dry_run: bool) -> EngineSweepRun:
    """A search for the best k of another engine.

    Raises:
        UsageError: a draft that cannot be traced, sampling without a prediction, a file that cannot be written.
    """
    given, recipe = other.resolved, other.resolved.recipe
    reader = _reader(recipe, shared.trust_remote_code)
    check_regression(recipe, shared)
    check_files(shared, {"--write-recipe": options.write_recipe})
    other = other.without_prefix_caching()
    k_max, capped = depth_within_rates(recipe.speculation, options.k_max)
    options = replace(options, k_max=k_max)
    prompts = chosen_prompts(recipe.workload, options.chat, only_at_hand=dry_run)
    at_most = replace(other, resolved=at_k(other.resolved, options.k_max))
    arms = EngineArms([other.resolved], [reader.name], options, prompts, shared, engines=[at_most])
    p_mins, notices = _p_mins(recipe, options.batch_sizes, reader)
    notices += capped
    in_use = DraftShape(other.k, p_min=recipe.speculation.least_confidence)
    return EngineSweepRun(arms, options, given, notices, in_use, reader, at_most.server().speculation, p_mins)


def _p_mins(recipe: Recipe, batch_sizes: tuple[int, ...], reader: DraftReader) -> tuple[tuple[float, ...], list[str]]:
    """The p-mins to sweep, the recipe's own among them, and a sentence where they are left out."""
    if recipe.engine.name != "llamacpp" or not reader.has_confidence:
        return (), []
    if len(batch_sizes) > 1:
        return (), ["p-min was not swept, because it would be another one at each batch size: sweep them one by one"]
    return tuple(sorted({*_P_MINS, recipe.speculation.least_confidence} - {0.0})), []


def _reader(recipe: Recipe, trust_remote_code: bool) -> DraftReader:
    """The reader of the draft as the engine runs it; refuses what no trace tells, before an engine is started."""
    from specdec_cli.measure.predict.remote_trace import check_sampling

    check_sampling(recipe.sampling)
    alone = recipe.draft.model_copy(update={"first": None})  # that another engine asks no draft before it, it warns of
    if recipe.engine.name == "llamacpp":
        if recipe.speculation.depth_policy not in ("fixed", "confidence"):
            raise UsageError("`speculation.depth_policy` has no effect here: drafts of k tokens are predicted", _FIXED)
        if recipe.draft.method == "ngram":
            alone = Draft(method=TRACED, size_n=recipe.draft.options["max"])
    reader = draft_reader(recipe.model_copy(update={"draft": alone}), trust_remote_code=trust_remote_code)
    if not recipe.speculation.is_synthetic:
        return reader
    if recipe.engine.name != "llamacpp" or not reader.has_confidence:
        raise UsageError("synthetic acceptance leaves nothing to predict", "leave it out, or run `bench --engine`")
    return SyntheticReader(recipe)


def _rule(recipe: Recipe, config: Mapping[str, Any]) -> str:
    """The engine's rule, as a trace replays it."""
    from specdec_cli.measure.predict.engine_rules import engine_rule

    if recipe.speculation.is_synthetic:
        return "rejection"
    if recipe.sampling.temperature == 0:
        return "greedy"
    setting = config.get("rejection_sample_method") or config.get("draft_sample_method")
    rule = engine_rule(recipe.engine.name, needs=setting).rule
    assert rule is not None, "a default has a rule"
    return rule


@dataclass(slots=True)
class EngineSweepRun(SweepRun["EngineSweep"]):
    """One run of the command on another engine.

    Args:
        arms: where it decodes.
        options: the command's own.
        given: the recipe without what the measurement changed.
        notices: what a reader should know of k_max and of the predictions.
        in_use: the recipe's own k.
        reader: reads the target's text with the draft.
        config: the engine's settings of speculation.
        p_mins: that are swept beside every k.
    """

    order = "A A B B"

    arms: EngineArms
    in_use: DraftShape
    reader: DraftReader
    config: Mapping[str, Any]
    p_mins: tuple[float, ...] = ()
    _running: ServerArm | None = field(init=False, default=None)
    _tell: Waiting = field(init=False, default_factory=Waiting)
    _seconds: float = field(init=False, default=0.0)

    def pairs(self) -> Pairs:
        """How many pairs the run makes for its intervals to rest on: rounds of prompts."""
        from specdec_cli.measure.gates import Pairs

        rows, size = self.arms.rows, self.options.first_batch_size
        return Pairs(rows[: len(rows) - len(rows) % size], size, repeats=1)

    def plan(self, num: int | None) -> tuple[dict[str, Any], str]:
        """The ks and p-mins, and the number of starts."""
        options, prompts = self.options, num_prompts_words(self.arms.recipe.workload, num)
        body = {"k_max": options.k_max, "repeats": options.repeats, "batch_sizes": list(options.batch_sizes)}
        if not self.p_mins:
            return body, f"# would predict k = 1 to {options.k_max} over {prompts} from three starts"
        beside = ", ".join(f"{p_min:g}" for p_min in self.p_mins)
        text = (
            f"# would predict k = 1 to {options.k_max}, each also with p-min {beside}, over {prompts} from four starts"
        )
        return body | {"p_mins": list(self.p_mins)}, text

    def opened(self) -> None:
        """Read the draft's configuration, before the engine is started."""
        self.reader.check()

    def study(self) -> EngineSweep:
        """The sweep, of which nothing has run yet."""
        from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep

        options, recipe = self.options, self.arms.recipe
        return EngineSweep(
            start=self._start,
            rows=self.arms.rows,
            sampling=recipe.sampling,
            chat=options.chat,
            k_max=options.k_max,
            p_mins=self.p_mins,
            batch_sizes=options.batch_sizes,
            num_measured=_NUM_MEASURED_OF_PAIRS if self.p_mins else _NUM_MEASURED,
            rule=_rule(recipe, self.config),
            trace_draft=self._read,
            in_use=self.in_use,
            repeats=options.repeats,
            tell=lambda words: self._tell(words),
            stopped=lambda: self.arms.stopped(),
            check=self._check,
            cpu_seconds=lambda: self.running.process.cpu_seconds,
            protocol=self.arms.engines[0].protocol,
        )

    def measure(self, study: EngineSweep, stopped: Callable[[], bool]) -> None:
        """Start the engine with one shape after the other."""
        begin = perf_counter()
        with timed_progress(self.arms.screen) as self._tell:
            study.run()
        self._seconds = perf_counter() - begin
        self.running.acceptance_from = study.acceptance_from
        assert study.traced is not None, "a sweep that has run has a trace"
        self.keep_trace(study.traced)

    def engine_sweep(self, study: EngineSweep) -> dict[str, Any]:
        """The document's part about the engine's starts."""
        return engine_sweep_result(study, self.config, self._seconds)

    @property
    def running(self) -> ServerArm:
        """The engine that runs."""
        assert self._running is not None, "asked between a start and its end"
        return self._running

    @contextmanager
    def _start(self, shape: DraftShape) -> Iterator[str]:
        """An engine's address; one that ends meanwhile gives its own reason in place of the connection's."""
        self.arms.tell = lambda words: self._tell(words)
        self._running = arm = self.arms.arm(str(shape) if shape.k else PLAIN, shape.k, p_min=shape.p_min)
        try:
            arm.start()
            try:
                yield arm.plan.address.root
            except RunError as error:
                arm.process.check(DYING_SECONDS if isinstance(error, EndpointError) else 0.0)
                raise
        finally:
            arm.stop()

    def _check(self, version: str | None) -> None:
        refuse_faulty(self.arms.recipe, version, is_cpu=_CPU_LOG in self.running.process.log_text)

    def _read(self, trace: Trace) -> str:
        """Read the target's text with the draft, until Ctrl-C."""

        def watch(done: int, total: int) -> None:
            if self.arms.stopped():
                raise KeyboardInterrupt
            self._tell("tracing the draft", done, total)

        self.reader.read(trace, self.options.k_max, watch)
        return self.reader.name


def refuse_faulty(recipe: Recipe, version: str | None, *, is_cpu: bool) -> None:
    """Refuse a build whose sampled text with speculation is not the target's.

    Raises:
        RunError: the recipe samples, and it is such a build.
    """
    from specdec_cli.measure.predict.engine_rules import sampled_faults

    faults = sampled_faults(recipe.engine.name, version) if is_cpu and recipe.sampling.temperature else []
    if faults:
        raise RunError(faults[0], "sweep at --temperature 0, or on a GPU")
