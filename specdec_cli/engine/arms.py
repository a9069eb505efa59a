"""Arms: ways of decoding that are compared, each with `start`, `run(requests)` and `stop`.

Comparisons get arms and know nothing else: our engine with a draft or without, transformers, a server, or
another engine as a subprocess, which `start` launches and waits for, `run` asks, and `stop` ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from specdec_cli.engine.decoding import Decoding, Request, Stopped, decode
from specdec_cli.events import Event

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.timing import Timing


@dataclass(frozen=True, slots=True)
class ArmRun:
    """Counts and times of an arm that decoded some requests together.

    Args:
        token_ids: each request's output; None from an arm that says how many tokens there are, and not which.
        timing: of all of them as one.
        num_first_tokens: tokens that were there when the decode clock began.
        events: what an engine of ours said; empty for others.
        sequence_ids: by which the events name the requests, in their order; empty for others.
        counted: number of each request's output tokens, where `token_ids` is None.
        counters: what a server counted of speculation; None from an arm that is none.
        outcomes: its steps by drafted and accepted tokens, where it lists them.
        lost_share: share of its time that other programs took; None from an arm that computes in this process, whose
            own waiting tells, and where it is not known.
    """

    token_ids: tuple[tuple[int, ...], ...] | None
    timing: Timing
    num_first_tokens: int
    events: tuple[Event, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    counters: Mapping[str, int] | None = None
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    lost_share: float | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of each request's output tokens."""
        return self.counted if self.token_ids is None else tuple(map(len, self.token_ids))


class Arm(Protocol):
    """One way of decoding."""

    @property
    def name(self) -> str:
        """Its name in reports, unique in a comparison."""
        ...

    @property
    def is_computing(self) -> bool | None:
        """Whether threads of this process compute while it runs, so that it loses what other processes take.

        None where another process computes for it on this machine, so that its runs say themselves what they lost.
        """
        ...

    def start(self) -> None:
        """Make ready whatever must stand before the first run; called once.

        Raises:
            RunError: that is not possible.
        """
        ...

    def run(self, requests: Sequence[Request], stopped: Stopped) -> ArmRun | None:
        """Decode requests together; None where `stopped` turned true before all of them had ended.

        Raises:
            RunError: it failed.
        """
        ...

    def stop(self) -> None:
        """End what `start` and `run` left running; called once, whatever happened, started or not."""
        ...


@dataclass(frozen=True, slots=True)
class EngineArm:
    """Our engine at a k of its own.

    Args:
        name: what a report calls it.
        engine: idle between two runs; arms that take turns may share one.
        num_speculative_tokens: k; 0 is plain decoding, None whatever the engine's options say.
        tree: shape of its drafted trees, `none` for chains; None whatever the engine's options say.
    """

    name: str
    engine: Engine
    num_speculative_tokens: int | None
    tree: str | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the target runs on this machine's cores."""
        return self.engine.target.device.type == "cpu"

    def start(self) -> None:
        """Nothing: the engine is loaded."""

    def run(self, requests: Sequence[Request], stopped: Stopped) -> ArmRun | None:
        """Decode requests together; None where it was stopped before the end."""
        events: list[Event] = []
        decoding = Decoding(self.name, self.num_speculative_tokens, tree=self.tree)
        self.engine.drafters.clear()  # a draft that has read this pass's answers would know them
        decode(self.engine, decoding, requests, lambda _, event: events.append(event), stopped)
        outputs = decoding.passes[0].by_id  # in the order of the requests
        if any(output.finish_reason in (None, "abort") for output in outputs.values()):
            return None
        tokens = tuple(tuple(output.token_ids) for output in outputs.values())
        return ArmRun(tokens, decoding.passes[0].timing(), len(outputs), tuple(events), tuple(outputs))

    def stop(self) -> None:
        """Nothing: an engine between two runs does nothing."""
