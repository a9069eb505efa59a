"""Traces of drafts: a distribution along the text, one by depth at every start, or guesses.

Letters: N output tokens of all prompts one after another, K the largest k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdec_cli.drafted import MOST_NODES
from specdec_cli.lm.files.origin import Origin

RANK_BEYOND = MOST_NODES
"""The rank of tokens that no tree reaches: it has at most MOST_NODES siblings."""
NUM_LIKELIEST = 10
"""Tokens among which llama.cpp's drafts compute the probability that p-min bounds (`common/speculative.cpp`)."""

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Int16Array = npt.NDArray[np.int16]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """A draft model along the text, with the chain that p went through.

    Args:
        log_q: [N] float32, nats of the emitted token; -inf where q gives it nothing or the draft could not read so far.
        is_argmax: [N] whether the emitted token is the draft's likeliest one.
        is_gumbel: [N] whether argmax(log q + g), g the text's own noise, is the emitted token.
        max_context: the draft's context limit.
        origin: the draft as it was loaded.
        rank: [N] uint8, how many tokens the draft finds likelier than the emitted one; RANK_BEYOND for that many and
            more, and where the draft gives it no probability or could not read so far. None in a file of an earlier
            version.
        confidence: [N] float32, probability of the draft's likeliest token among its NUM_LIKELIEST at temperature 1; 1
            where the draft could not read so far. None in a file of an earlier version and from a server.
    """

    log_q: Float32Array
    is_argmax: BoolArray
    is_gumbel: BoolArray
    max_context: int | None
    origin: Origin | None = None
    rank: UInt8Array | None = None
    confidence: Float32Array | None = None

    @property
    def most_depth(self) -> None:
        """None: it serves every k."""
        return None


@dataclass(frozen=True, slots=True)
class GuessTrace:
    """A draft without a distribution along the text: what it proposed at every start, for every k.

    Its tokens have no ranks, so this trace predicts chains alone.

    Args:
        num_guessed: [N, K] tokens that it proposed before each output position when asked for 1…K.
        num_matching: [N, K] how many of them, from the first on, are the text's.
        max_context: the draft's context limit, or None.
        origin: the model that it guesses with, as it was loaded; None without one, and in a file of an earlier version.
    """

    num_guessed: Int16Array
    num_matching: Int16Array
    max_context: int | None
    origin: Origin | None = None

    @property
    def most_depth(self) -> int:
        """Most tokens that it was asked for."""
        return int(self.num_guessed.shape[1])


@dataclass(frozen=True, slots=True)
class DepthTrace:
    """A draft whose distributions depend on where a step begins: what it says of the K tokens behind every start.

    Each token's distribution is that behind the text's tokens between the start and it, as the draft has it there.

    Args:
        log_q: [N, K] float32, nats of the token 0…K-1 places behind an output position if the step begins there; -inf
            where q gives it nothing, the output ends before or the draft could not read so far.
        is_argmax: [N, K] whether it is the likeliest one.
        is_gumbel: [N, K] whether argmax(log q + g), g the text's own noise, is it.
        max_context: the draft's context limit, or None.
        origin: the draft as it was loaded; None where its weights are the target's.
        limit: most tokens that it drafts one after another, however many are wanted; None has no limit.
        rank: [N, K] uint8, as in a ModelTrace, of the token at each depth; RANK_BEYOND where the output ends before.
        confidence: [N, K] float32, as in a ModelTrace, at each depth; 1 where the output ends before.
    """

    log_q: Float32Array
    is_argmax: BoolArray
    is_gumbel: BoolArray
    max_context: int | None
    origin: Origin | None = None
    limit: int | None = None
    rank: UInt8Array | None = None
    confidence: Float32Array | None = None

    @property
    def most_depth(self) -> int:
        """Largest k, K."""
        return int(self.log_q.shape[1])

    @classmethod
    def empty(
        cls, num: int, k_max: int, max_context: int | None, origin: Origin | None, limit: int | None
    ) -> DepthTrace:
        """One to be filled, of N positions."""
        log_q = np.full((num, k_max), -np.inf, dtype=np.float32)
        is_argmax, is_gumbel = np.zeros(log_q.shape, dtype=np.bool_), np.zeros(log_q.shape, dtype=np.bool_)
        rank = np.full(log_q.shape, RANK_BEYOND, dtype=np.uint8)
        return cls(log_q, is_argmax, is_gumbel, max_context, origin, limit, rank, np.ones_like(log_q))

    def at(self, depth: int) -> ModelTrace:
        """The draft's tokens at one depth, counted from 0, by start."""
        return ModelTrace(
            self.log_q[:, depth],
            self.is_argmax[:, depth],
            self.is_gumbel[:, depth],
            self.max_context,
            self.origin,
            confidence=None if self.confidence is None else self.confidence[:, depth],
        )


ReadTrace = ModelTrace | DepthTrace
"""A draft with distributions."""
DraftTrace = ModelTrace | GuessTrace | DepthTrace
