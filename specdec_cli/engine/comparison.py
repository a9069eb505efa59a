"""One draft against none: the same requests decoded both ways, interleaved, as `generate --compare` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from specdec_cli.engine.decoding import Decoding, Request, Stopped, Watch, decode, named
from specdec_cli.engine.outputs import Output, Outputs, first_difference
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

WITHOUT = "without a draft"
"""Name of the plain arm."""
_NUM_WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Comparison:
    """The same requests with a draft and without, group by group, in the order A B B A.

    Args:
        draft: decodes with the draft.
        plain: decodes without.
        tokens_must_agree: whether both arms promise the same tokens (`Rule.keeps_tokens`).
    """

    draft: Decoding
    plain: Decoding = field(default_factory=lambda: Decoding(WITHOUT, 0))
    tokens_must_agree: bool = True

    def run(self, engine: Engine, requests: Sequence[Request], watch: Watch, stopped: Stopped) -> None:
        """Warm both arms up, uncounted, then decode every group in both."""
        _check(engine, requests)
        for arm in (self.draft, self.plain):
            self._warm_up(engine, arm, requests[0], stopped)
        for arm, group in self._turns(requests, engine.options.max_num_seqs):
            if stopped() and arm is self.plain:
                continue
            decode(engine, arm, group, watch, stopped)

    def ratios(self) -> list[float]:
        """Decode speed-up of each group that both arms finished."""
        pairs = zip(self.draft.passes, self.plain.passes, strict=False)
        rates = [
            (a.timing().decode_tokens_per_second, b.timing().decode_tokens_per_second)
            for a, b in pairs
            if _is_whole(a) and _is_whole(b)
        ]
        return [a / b for a, b in rates if a and b]

    def speedup(self) -> float | None:
        """Median of the ratios, or None without one."""
        ratios = self.ratios()
        return median(ratios) if ratios else None

    def differences(self) -> list[tuple[int, int]]:
        """Where tokens differ: (row, position in the output) of each row's first difference."""
        differences = []
        for a, b in self._pairs():
            position = first_difference(a.token_ids, b.token_ids)
            if position is not None:
                differences.append((a.index, position))
        return differences

    @property
    def num_checked_tokens(self) -> int:
        """Tokens of outputs that both arms finished."""
        return sum(len(plain.token_ids) for _, plain in self._pairs())

    @property
    def equal(self) -> bool | None:
        """Whether both arms gave the same tokens; None where that is not promised or nothing was compared."""
        if not self.tokens_must_agree or not self._pairs():
            return None
        return not self.differences()

    def _pairs(self) -> list[tuple[Output, Output]]:
        plain = {output.index: output for output in self.plain.outputs()}
        pairs = [(output, plain[output.index]) for output in self.draft.outputs() if output.index in plain]
        return [(a, b) for a, b in pairs if _is_complete(a) and _is_complete(b)]

    def _turns(self, requests: Sequence[Request], size: int) -> Iterator[tuple[Decoding, Sequence[Request]]]:
        for turn, begin in enumerate(range(0, len(requests), size)):
            arms = (self.draft, self.plain) if turn % 2 == 0 else (self.plain, self.draft)
            for arm in arms:
                yield arm, requests[begin : begin + size]

    def _warm_up(self, engine: Engine, arm: Decoding, request: Request, stopped: Stopped) -> None:
        few = min(_NUM_WARM_UP_TOKENS, request.params.max_new_tokens)
        params = replace(request.params, max_new_tokens=few, min_tokens=0)
        uncounted = Decoding(arm.name, arm.num_speculative_tokens, keeps_errors=arm.keeps_errors)
        decode(engine, uncounted, [replace(request, params=params)], stopped=stopped)


def _check(engine: Engine, requests: Sequence[Request]) -> None:
    """Refuse a bad request before the first group runs, not in the middle of the comparison."""
    for request in requests:
        try:
            engine.abort(engine.add(request.token_ids, request.params, grammar=request.grammar))
        except UsageError as error:
            raise named(error, request, len(requests)) from error


def _is_whole(outputs: Outputs) -> bool:
    return all(map(_is_complete, outputs.finished()))


def _is_complete(output: Output) -> bool:
    return output.finish_reason not in (None, "abort")
