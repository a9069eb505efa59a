"""Sweeps over k at several batch sizes: one trace, a profile, a prediction and a choice for each, one table of k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec_cli.errors import UsageError
from specdec_cli.measure.bench import Progress
from specdec_cli.measure.passes import Differences, Track
from specdec_cli.measure.sweep import Sweep
from specdec_cli.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Sweeps:
    """One sweep for each batch size, ascending; most runs have one alone."""

    by_size: tuple[Sweep, ...]

    def __post_init__(self) -> None:
        """Check the order."""
        sizes = [one.batch_size for one in self.by_size]
        assert sizes, "there is a batch size"
        assert sizes == sorted(set(sizes)), "batch sizes ascend, each once"

    @property
    def first(self) -> Sweep:
        """That of the smallest batch size."""
        return self.by_size[0]

    def run(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[Sweep, Progress]]:
        """Measure one batch size after another, as `Sweep.run`."""
        for one in self.by_size:
            for at in one.run(stopped):
                yield one, at

    def known(self) -> list[Sweep]:
        """Those that a prediction or a measurement can be reported of."""
        return [one for one in self.by_size if one.prediction is not None or one.measured()]

    def k_by_batch(self) -> dict[int, int]:
        """The recommended k of every batch size that is known."""
        return {one.batch_size: one.recommended().k for one in self.known()}

    def tracks(self) -> list[Track]:
        """Every arm of every batch size."""
        benches = [one.bench for one in self.by_size if one.bench is not None]
        return [track for bench in benches for track in (bench.draft, bench.plain, *bench.against.values())]

    def differences(self) -> Differences:
        """Every output with a draft against the same request's without, of all batch sizes."""
        found = Differences()
        for one in self.by_size:
            found.include(one.differences())
        return found

    def notices(self) -> list[str]:
        """What the passes noted, each sentence once."""
        return list(dict.fromkeys(text for one in self.by_size if one.bench is not None for text in one.bench.notices))


def check_sizes(sizes: tuple[int, ...], workload: Workload) -> None:
    """Refuse a batch that there are not enough prompts for.

    Raises:
        UsageError: there is one.
    """
    num = len(workload.requests)
    if sizes[-1] > num:
        raise UsageError(
            f"a batch of `{sizes[-1]}` needs as many prompts, and there are `{num}`",
            "raise --num-prompts, or lower --batch-sizes",
        )
