"""Sweeps over k at several batch sizes: one trace, a profile, a prediction and a choice for each, one table of k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec_cli.measure.bench.bench import Progress
from specdec_cli.measure.bench.passes import Differences, Track
from specdec_cli.measure.bench.sweep import Sweep
from specdec_cli.measure.predict.replay import Replay
from specdec_cli.measure.predict.traced import Traced


@dataclass(frozen=True, slots=True)
class Sweeps:
    """One sweep for each batch size, ascending; most runs have one alone.

    Args:
        by_size: the sweeps.
        traced: what their predictions rest on; None where no trace can tell.
    """

    by_size: tuple[Sweep, ...]
    traced: Traced | None = None

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

    def table(self) -> Replay | None:
        """Predicted acceptance with the recommended table of k, up to the largest batch; None for one size."""
        known = self.k_by_batch()
        if self.traced is None or len(known) < 2:
            return None
        return self.traced.table({1: next(iter(known.values())), **known}, max(known))

    def tracks(self) -> list[Track]:
        """Every arm of every batch size."""
        return [track for one in self.by_size if one.bench is not None for track in one.bench.tracks]

    def differences(self) -> Differences:
        """Every output with a draft against the same request's without, of all batch sizes."""
        found = Differences()
        for one in self.by_size:
            found.include(one.differences())
        return found

    def notices(self) -> list[str]:
        """The notes of the trace, the profiles and the passes, each once."""
        found = [] if self.traced is None else [*self.traced.trace.notices]
        found += [one.costs.warning for one in self.by_size if one.prediction is not None and one.costs.warning]
        found += [text for one in self.by_size if one.bench is not None for text in one.bench.notices]
        return list(dict.fromkeys(found))
