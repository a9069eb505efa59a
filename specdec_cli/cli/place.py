"""A place where a measuring command's prompts are decoded, and arms as a place that gives ways of decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from specdec_cli.cli.screen import open_screen
from specdec_cli.engine.driver import never
from specdec_cli.engine.promise import Promise
from specdec_cli.measure.machine.load import Load, look_at_load

if TYPE_CHECKING:
    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.shared import Shared
    from specdec_cli.engine.arms import Arm
    from specdec_cli.engine.prompts import PromptRow, PromptSet
    from specdec_cli.lm.door import LM
    from specdec_cli.measure.bench.against import PeerArm
    from specdec_cli.measure.bench.bench import Bench
    from specdec_cli.measure.bench.compare import Contender
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.report.view import Screen

PLAIN = "without a draft"
"""Name of the arm that decodes without one."""


@dataclass(slots=True)
class Place:
    """Place where a measuring command's prompts are decoded: a server, or one that has arms.

    Attributes:
        screen: shows the progress.
        load_before: of the machine, before anything was decoded.
        stopped: whether Ctrl-C was pressed.
    """

    keeps_journal: ClassVar[bool] = False
    """Whether an interrupted run can be continued."""

    drafts: Sequence[Resolved]
    names: Sequence[str]
    options: MeasurementOptions
    prompts: PromptSet
    shared: Shared
    screen: Screen = field(init=False)
    load_before: Load = field(init=False)
    stopped: Callable[[], bool] = field(init=False, default=never)

    def __post_init__(self) -> None:
        """Open the screen."""
        self.screen = open_screen(self.shared.quiet, streams_text=False)

    @property
    def resolved(self) -> Resolved:
        """The recipe as given; of several drafts, that of the first."""
        return self.drafts[0]

    @property
    def recipe(self) -> Recipe:
        """The recipe that is measured; of several drafts, what they have in common."""
        return self.resolved.recipe

    @property
    def rows(self) -> Sequence[PromptRow]:
        """The prompts' rows."""
        return self.prompts.rows

    def open(self) -> None:
        """Load what is loaded once, and say what a reader should know beforehand."""
        self.load_before = look_at_load()

    def machine(self, outputs: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
        """Device, dtype and decoder of the models, for `envelope`; empty if they are not loaded here."""
        return {}

    def commands(self) -> dict[str, str]:
        """Command lines by arm; empty where nothing is started."""
        return {}

    def warnings(self) -> list[str]:
        """Sentences about what is not done as the recipe says, before anything runs."""
        return []

    def showing_failures(self) -> AbstractContextManager[None]:
        """Show more of a failure than its sentence."""
        return nullcontext()


@dataclass(slots=True)
class Arms(Place, ABC):
    """Ways of decoding that a measuring command compares, with drafts and without.

    Args:
        against: other engines to load in this process.

    Attributes:
        in_turn: whether the arms take turns; else each is started, measured and stopped before the next.
        workload: the prompts as requests, once it is open.
        peers: other engines in this process, once they are loaded.
    """

    in_turn: ClassVar[bool]

    against: Sequence[str] = ()
    workload: Workload = field(init=False)
    peers: list[PeerArm] = field(init=False, default_factory=list)

    @property
    @abstractmethod
    def promise(self) -> Promise:
        """Promise of the verification rule."""

    @abstractmethod
    def arm(self, name: str, k: int | None, draft: int = 0) -> Arm:
        """A way of decoding under a name.

        Args:
            name: what a report calls it.
            k: tokens to draft; 0 for none; None for the recipe's.
            draft: place of its draft.
        """

    @abstractmethod
    def contenders(self) -> list[Contender]:
        """The drafts as a comparison takes them."""

    @property
    def target(self) -> LM | None:
        """The model that decodes, where it is loaded here."""
        return None

    def cut_drafts(self) -> list[str]:
        """Sentences about drafts that go less deep than the recipe asks."""
        return []

    def notices(self) -> list[str]:
        """Sentences that a reader needs beside the figures."""
        return []

    def section(self) -> dict[str, Any]:
        """The document's part about another engine."""
        return {}

    def explain(self, bench: Bench) -> None:
        """Ask an arm that is up about the differences of its text."""
