"""Where an output leaves plain decoding: how close the two tokens were, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdec_cli.drafted import NOTHING
from specdec_cli.engine.outputs import first_difference
from specdec_cli.errors import SpecdecError
from specdec_cli.lm.door import LM, Row
from specdec_cli.measure.documents.audit import Kind, Mismatch, Recheck
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, distribution

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.engine.engine import Engine
    from specdec_cli.sampling.params import SamplingParams

_HANDLE = -1  # engines count from 0, and none is running while a divergence is judged
# A logit is a sum that two kernels round differently: in 16 bits by what storing the hidden state rounds, in 32 bits by
# the order of long sums, which costs more of the (much smaller) last places.
_ROUNDINGS = {"float32": 64.0, "bfloat16": 4.0, "float16": 4.0}


def tolerance_of(dtype: str, logits: Tensor) -> float:
    """Difference of two logits that rounding explains: 4 (16 bits) or 64 (float32) · eps(dtype) · max |logit|.

    Args:
        dtype: what the target computes in: float32, bfloat16 or float16.
        logits: [V] float32.
    """
    largest = float(logits[logits.isfinite()].abs().amax())
    return _ROUNDINGS[dtype] * torch.finfo(getattr(torch, dtype)).eps * largest


@dataclass(slots=True)
class DivergenceJudge:
    """Scores the context of a divergence again, alone, and classifies it as a near-tie or a bug.

    Args:
        engine: idle; its target decides.
        dtype: what that target computes in.
        load_float32: loads the target in float32; None where it runs in float32 already.
        say: called once if the float32 copy does not load.
    """

    engine: Engine
    dtype: str
    load_float32: Callable[[], LM] | None = None
    say: Callable[[str], None] = lambda _: None
    _float32: LM | None = None

    def judge(
        self,
        row: int,
        configuration: str,
        prompt: Sequence[int],
        params: SamplingParams,
        expected: Sequence[int],
        got: Sequence[int],
        *,
        gumbel: bool,
    ) -> Mismatch | None:
        """The first difference between two outputs of one request, or None if they are equal.

        Args:
            row: the prompt's place.
            configuration: how `got` was decoded.
            prompt: its token ids.
            params: its sampling parameters.
            expected: plain decoding's output.
            got: the output with the draft.
            gumbel: whether the tokens were chosen with Gumbel noise.
        """
        position = first_difference(expected, got)
        if position is None:
            return None
        want = expected[position] if position < len(expected) else None
        have = got[position] if position < len(got) else None
        context = [*prompt, *expected[:position]]
        if want is None or have is None:
            return Mismatch(row, position, configuration, want, have, None, None, "bug")
        scores, tolerance = self._scores(self.engine.target, context, len(prompt), params, gumbel, self.dtype)
        gap, top = _top2(scores)
        kind: Kind = "near-tie" if {want, have} == set(top) and gap <= tolerance else "bug"
        recheck = self._recheck(context, len(prompt), params, gumbel)
        return Mismatch(row, position, configuration, want, have, gap, tolerance, kind, recheck)

    def _scores(
        self, lm: LM, context: list[int], num_prompt: int, params: SamplingParams, gumbel: bool, dtype: str
    ) -> tuple[Tensor, float]:
        """The scores [V] whose argmax is the choice, and their tolerance, both in units of logits."""
        logits = lm.score([Row(_HANDLE, context, 1)])
        lm.release(_HANDLE)
        num_tokens = self.engine.num_tokens
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.engine.eos_token_ids)
        p = distribution(logits, [ChainRow(params, context, num_prompt, NOTHING, stop_ids)], num_tokens)
        tolerance = tolerance_of(dtype, logits[0, :num_tokens])
        if not gumbel or p.probs is None:
            return p.scores[0], tolerance
        perturbed = p.probs[0].double().log().cpu() + noise.gumbel(params.seed, params.index, len(context), num_tokens)
        return params.temperature * perturbed, tolerance

    def _recheck(self, context: list[int], num_prompt: int, params: SamplingParams, gumbel: bool) -> Recheck | None:
        if self.load_float32 is None:
            return None
        if self._float32 is None:
            try:
                self._float32 = self.load_float32()
            except SpecdecError as error:
                self.load_float32 = None
                self.say(f"no float32 re-check: {error.message}")
                return None
        scores, _ = self._scores(self._float32, context, num_prompt, params, gumbel, "float32")
        gap, top = _top2(scores)
        return Recheck(top[0], gap)


def _top2(scores: Tensor) -> tuple[float, tuple[int, ...]]:
    """The gap between the two largest of scores [V], and their tokens."""
    best = scores.topk(2)
    gap = float(best.values[0] - best.values[1])
    return gap if gap < float("inf") else torch.finfo(torch.float32).max, tuple(best.indices.tolist())
