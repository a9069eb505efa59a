"""Drafts on our own engine: traced, priced and predicted at every k before the best is measured.

A trace predicts every k of every draft; then each is measured at the k predicted best (or at every k), all taking
turns with each other and with the same plain arm.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specdec_cli.engine.arms import EngineArm
from specdec_cli.engine.depth.draft_limit import cut_drafts, depths_within
from specdec_cli.errors import UsageError
from specdec_cli.measure.bench.bench import Progress
from specdec_cli.measure.bench.compare import Contender, DraftComparison
from specdec_cli.measure.predict.cost import Costs
from specdec_cli.measure.predict.predict import predict
from specdec_cli.measure.predict.profiling import profile
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import Tell, Watch, in_phase, trace_draft, trace_target, untold

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.text.shared_vocabulary import SharedVocabulary

_PROFILE_SECONDS = 15.0  # of all drafts together, at least the next for each
_MIN_PROFILE_SECONDS = 4.0


@dataclass(slots=True, eq=False)
class LoadedContender(Contender):
    """A draft that is loaded here.

    Args:
        engine: the shared target with this draft.
    """

    engine: Engine = field(kw_only=True)

    def arm(self, k: int) -> EngineArm:
        """The engine with this draft at a k."""
        return EngineArm(f"{self.draft} k={k}", self.engine, k)

    def sizes(self) -> tuple[int | None, int | None]:
        """Parameters and bytes (weights and KV cache) of what drafts; 0 without any, None where they are not known."""
        return self.engine.drafter.sizes

    def deepest(self, k_max: int) -> int:
        """The largest k up to k_max that the draft can reach."""
        return depths_within(self.engine.drafter, k_max)[0]

    def limits(self, k_max: int) -> list[str]:
        """That the draft goes less deep than k_max, or than the tree; nothing where it does not."""
        options, drafter = self.engine.options, self.engine.drafter
        shape = options.shape_of(options.tree)
        return depths_within(drafter, k_max)[1] if shape is None else cut_drafts(drafter, k_max, shape)

    @property
    def most_depth(self) -> int | None:
        """The largest k that the draft can reach; None without a limit."""
        return self.engine.drafter.most_depth

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """Vocabulary that a draft with another tokenizer shares with the target; None of others."""
        return self.engine.drafter.shared_vocabulary


@dataclass(slots=True, eq=False)
class LoadedComparison(DraftComparison):
    """A comparison on our own engine.

    Args:
        contenders: drafts around one target.
        verify: the rule of verification.
        trace: the target's text; made where it is not given.
    """

    contenders: Sequence[LoadedContender]
    verify: str = "auto"
    trace: Trace | None = None

    def study(self, is_predictable: bool = True, tell: Tell = untold) -> None:
        """Trace the target once, every draft along it, and price their steps.

        Args:
            is_predictable: whether a trace knows this verification at all.
            tell: told what is being done, and how far it is.

        Raises:
            UsageError: a draft whose acceptance no trace tells, unless every k is measured.
        """
        rivals = [contender for contender in self.contenders if contender.drafts]
        for contender in rivals:
            self.notices += [f"{contender.draft}: {said}" for said in contender.limits(self.k_max)]
        if self.trace is not None:
            self.trace.check_target(rivals[0].engine.target.origin)
            self.notices += self.trace.notices
        if self.trace is None and is_predictable:
            watch = in_phase(tell, "tracing the target")
            self.trace = trace_target(rivals[0].engine, self.workload.requests, watch)
        seconds = max(_PROFILE_SECONDS / len(rivals), _MIN_PROFILE_SECONDS)
        for contender in rivals:
            share = in_phase(tell, f"measuring the cost of a step with {contender.draft} costs")
            contender.costs = self._costs(contender, seconds, share)
            if self.trace is not None and is_predictable:
                self._predict(contender, contender.costs, self.trace, in_phase(tell, f"tracing {contender.draft}"))

    def _costs(self, contender: LoadedContender, seconds: float, watch: Callable[[float], None]) -> Costs:
        if self.journal is None:
            return self._profile(contender, seconds, watch)
        return self.journal.costs(contender.draft, lambda: self._profile(contender, seconds, watch))

    def _profile(self, contender: LoadedContender, seconds: float, watch: Callable[[float], None]) -> Costs:
        requests = self.workload.requests
        lengths = [len(request.token_ids) for request in requests]
        ends = [len(request.token_ids) + request.params.max_new_tokens for request in requests]
        return profile(
            contender.engine,
            contender.deepest(self.k_max),
            sorted({int(np.median(lengths)), int(np.median([*lengths, *ends])), int(np.median(ends))}),
            text=self._text(),
            params=requests[0].params,
            time_limit_seconds=seconds,
            batch_size=self.batch_size,
            watch=watch,
        )

    def _text(self) -> list[int]:
        """A text of the workload's own, so that a draft finds in it what it will find."""
        if self.trace is not None:
            longest = max(self.trace.prompts, key=lambda prompt: len(prompt.output))
            return [*longest.token_ids, *longest.output]
        return max((request.token_ids for request in self.workload.requests), key=len)

    def _predict(self, contender: LoadedContender, costs: Costs, trace: Trace, watch: Watch) -> None:
        k_max = contender.deepest(self.k_max)
        try:
            trace.drafts[contender.draft] = trace_draft(
                trace, contender.engine.drafter, k_max, watch, contender.engine.target
            )
        except UsageError as error:
            if not self.is_exhaustive:
                raise
            self.notices.append(f"{error.message}: it is measured, not predicted")
            return
        contender.prediction = predict(replay(trace, contender.draft, self.verify, k_max), costs)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Generator[Progress, None, None]:
        """Measure: every draft at its own best k, or at every k, and one plain arm, taking turns.

        Args:
            stopped: asked between steps and passes; what is whole by then is kept.
        """
        drafts = [one for one in self.contenders if one.drafts]
        arms = [(one, k, one.arm(k)) for one in drafts for k in self._depths(one)]
        yield from self.measure(arms, EngineArm("without a draft", drafts[0].engine, 0), stopped)

    def _depths(self, contender: LoadedContender) -> list[int]:
        options = contender.engine.options
        shape = options.shape_of(options.tree)
        if shape is not None and not self.is_exhaustive:  # a trace predicts chains alone
            return [min(contender.deepest(self.k_max), shape.depth)]
        best = contender.predicted_best()
        if self.is_exhaustive or best is None:
            return list(range(1, contender.deepest(self.k_max) + 1))
        return [best.k]
