"""In distribution: the engine's joint first tokens, drawn many times, against their exact enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specdec_cli.drafted import NOTHING
from specdec_cli.engine.driver import Driver
from specdec_cli.events import Event, Finished, SpeculativeCounts, Stepped
from specdec_cli.lm.door import LM, Row
from specdec_cli.measure.audit.chisquare import chi_square, detectable_shift, enumerate_joint
from specdec_cli.measure.documents.audit import FALSE_ALARM, DistributionCheck
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

FULL_POWER_SHIFT = 0.01
NUM_JOINT_TOKENS = 3
MIN_DRAWS = 500
MAX_CHOICES = 8
_CHOICES = 4  # fewer cells find a smaller shift with the same draws
_LIFT = 100.0
_HANDLE = -1  # engines count from 0, and none is running while contexts are scored

Joint = dict[tuple[int, ...], float]


def full_power_draws(num_cells: int) -> int:
    """Draws that find a total-variation shift of FULL_POWER_SHIFT with 99 % power at FALSE_ALARM.

    A shift d of N draws gives Pearson's statistic a noncentral chi-square distribution with noncentrality
    N Σ δ²/p >= N (Σ|δ|)² = 4 N d² (Cauchy-Schwarz: no way of shifting by d shows less). `detectable_shift` solves for
    the d whose noncentrality reaches the critical value with 99 % power; here it is solved for N. (Cohen 1988,
    "Statistical power analysis", chapter 7.) It gives 217,000 draws for 16 cells and 317,000 for 64.
    """
    many = 10**9
    return int(np.ceil(many * (detectable_shift(many, num_cells - 1, FALSE_ALARM) / FULL_POWER_SHIFT) ** 2))


@dataclass(slots=True)
class Draws:
    """Draws sequences through an engine: the same prompt again and again, the draw's number as the noise's index.

    A sequence may emit k + 1 tokens past the joint ones, so that its first steps draft k; it is aborted once it has
    enough. Everything begun is finished, also past the time limit: dropping the slow ones, whose drafts were refused,
    would bias the counts.

    Args:
        engine: idle; sampled sequences run on it max_num_seqs at a time.
        prompt: token ids.
        params: sampling parameters of every draw.
        length: tokens of a draw.
    """

    engine: Engine
    prompt: list[int]
    params: SamplingParams
    length: int = NUM_JOINT_TOKENS
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)

    @property
    def num(self) -> int:
        """Draws so far."""
        return self.counts.total()

    def run(self, num: int, watch: Callable[[int], None], is_late: Callable[[], bool]) -> None:
        """Draw `num` sequences, fewer (but MIN_DRAWS) when `is_late` turns true.

        Args:
            num: most draws.
            watch: called with the number of draws after each step.
            is_late: asked before a draw begins.
        """
        drawn: dict[int, list[int]] = {}
        indices = _indices(num, is_late)
        with Driver(self.engine) as driver:
            self._begin(driver, indices, drawn)
            for events in driver.steps():
                self._observe(events, drawn, driver)
                watch(self.num)
                self._begin(driver, indices, drawn)

    def _begin(self, driver: Driver, indices: Iterator[int], drawn: dict[int, list[int]]) -> None:
        """Begin as many draws as there are free places."""
        options = self.engine.options
        params = replace(self.params, max_new_tokens=self.length + options.num_speculative_tokens + 1)
        for index in islice(indices, options.max_num_seqs - len(drawn)):
            drawn[driver.add(self.prompt, replace(params, index=index))] = []

    def _observe(self, events: Sequence[Event], drawn: dict[int, list[int]], driver: Driver) -> None:
        ended = {event.sequence_id for event in events if isinstance(event, Finished)}
        for emitted in (emitted for event in events if isinstance(event, Stepped) for emitted in event.emitted):
            self.speculative.add(emitted)
            tokens = drawn[emitted.sequence_id]
            tokens += emitted.tokens
            if len(tokens) >= self.length or emitted.sequence_id in ended:
                driver.abort(emitted.sequence_id)
                self.counts[tuple(tokens[: self.length])] += 1
                del drawn[emitted.sequence_id]


def _indices(num: int, is_late: Callable[[], bool]) -> Iterator[int]:
    """Numbers of the draws to begin; once it is late, MIN_DRAWS of them."""
    for index in range(num):
        if index >= MIN_DRAWS and is_late():
            return
        yield index


def check(configuration: str, draws: Draws, joint: Mapping[tuple[int, ...], float], vocab: int) -> DistributionCheck:
    """Test the draws against the exact joint distribution."""
    result = chi_square(draws.counts, joint)
    return DistributionCheck(
        configuration=configuration,
        vocab=vocab,
        draws=draws.num,
        statistic=result.statistic if np.isfinite(result.statistic) else None,
        p_value=result.p_value,
        degrees_of_freedom=result.dof,
        cells=len(joint),
        detectable_shift=detectable_shift(draws.num, max(result.dof, 1), FALSE_ALARM),
        num_draft_tokens=draws.speculative.num_draft_tokens,
        num_accepted_tokens=draws.speculative.num_accepted_tokens,
    )


@dataclass(frozen=True, slots=True)
class Question:
    """Samples from a pair, and the exact distribution."""

    prompt: list[int]
    params: SamplingParams
    num_choices: int
    joint: Joint


def ask_pair(engine: Engine, base_prompt: Sequence[int], params: SamplingParams) -> Question:
    """A question about the user's own pair that can be enumerated, with its answer from the target alone.

    The target's few likeliest tokens after the base prompt are lifted above all others by a bias, so that top-k keeps
    exactly these at every position: rounding at top-k's edge cannot pass for a fault. The prompt drawn from holds
    every pair of them, so that prompt lookup has something to propose. End tokens are ordinary tokens here.

    Args:
        engine: idle.
        base_prompt: token ids.
        params: the recipe's sampling parameters; a temperature of 0 becomes 1.
    """
    given = params.top_k if params.top_k is not None and 2 <= params.top_k <= MAX_CHOICES else _CHOICES
    num = min(given, engine.num_tokens)
    free = replace(
        params,
        temperature=params.temperature or 1.0,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
        min_tokens=0,
        logprobs=None,
    )
    scores, _ = _next_token(engine.target, engine.num_tokens, list(base_prompt), len(base_prompt), free)
    choices = np.argsort(-scores, kind="stable")[:num].tolist()
    bias = dict(free.logit_bias) | {token: free.logit_bias.get(token, 0.0) + _LIFT for token in choices}
    narrow = replace(free, top_k=num, logit_bias=bias)
    prompt = [base_prompt[0], *_every_pair(choices)]
    joint = enumerate_joint(
        lambda context: _next_token(engine.target, engine.num_tokens, list(context), len(prompt), narrow)[1],
        prompt,
        NUM_JOINT_TOKENS,
    )
    return Question(prompt, narrow, num, joint)


def _next_token(
    lm: LM, num_tokens: int, context: list[int], num_prompt: int, params: SamplingParams
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The target's scores and probabilities [V] after one context, alone and from an empty cache."""
    logits = lm.score([Row(_HANDLE, context, 1)])
    lm.release(_HANDLE)
    p = distribution(logits, [ChainRow(params, context, num_prompt, NOTHING, frozenset())], num_tokens)
    return p.scores[0].double().cpu().numpy(), p.dense()[0].double().cpu().numpy()


def _every_pair(choices: Sequence[int]) -> list[int]:
    """A sequence in which every ordered pair of different choices occurs, once."""
    return [token for pair in combinations(choices, 2) for token in pair] + [choices[0]]
