"""A pair without networks: logits from a table, so that hundreds of thousands of draws take minutes."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.model import Drafter
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.measure.audit.chisquare import enumerate_joint
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.params import SamplingParams

NUM_TOKENS = 4
NUM_SPECULATIVE_TOKENS = 3
TREE = "2,2,1"
PROMPT = (0, 1)
PARAMS = SamplingParams(temperature=0.8, ignore_eos=True)
_SHARPNESS, _DISAGREEMENT = 1.5, 1.0


@cache
def tables() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The target's logits and the draft's, related and different, always the same."""
    random = np.random.default_rng(0)
    target = _SHARPNESS * random.standard_normal((NUM_TOKENS,) * 3)
    draft = target + _DISAGREEMENT * random.standard_normal(target.shape)
    return target.astype(np.float32), draft.astype(np.float32)


def engine(verify: str, num_speculative_tokens: int, max_num_seqs: int, tree: str | None = None) -> Engine:
    """An engine on the two tables.

    Args:
        verify: the verification mode.
        num_speculative_tokens: k.
        max_num_seqs: most sequences that run together.
        tree: shape of the drafted trees; None drafts chains.
    """
    target, draft = (_lm(table) for table in tables())
    drafter = Drafter("table")
    drafter.load(Resources(lambda _: draft, None, NUM_TOKENS))
    options = EngineOptions(
        num_speculative_tokens=num_speculative_tokens, verify=verify, tree=tree, max_num_seqs=max_num_seqs
    )
    return Engine(target, drafter, options=options)


def _lm(table: npt.NDArray[np.float32]) -> TableLM:
    return TableLM(lambda last: table[last[-2], last[-1]], NUM_TOKENS, order=2)


def joint(length: int) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the first tokens, by plain arithmetic that shares no line with the engine's chain."""
    target = tables()[0].astype(np.float64)

    def probs(context: tuple[int, ...]) -> npt.NDArray[np.floating]:
        logits = target[context[-2], context[-1]] / PARAMS.temperature
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())

    return enumerate_joint(probs, PROMPT, length)
