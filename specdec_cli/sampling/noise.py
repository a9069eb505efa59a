"""Keyed noise: each random number is a function of (seed, index, position, purpose, offset); nothing is remembered.

The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the key
(seed, index) and the counter (offset // 4, position, purpose, 0), so two streams can never overlap. A few streams at a
time come from numpy's own Philox; for many, the same rounds run over all of them at once. Both give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec_cli.transfer import sent

Uint64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]


class _Philox(threading.local):
    """A thread's generator, which takes a stream's key and counter: to make one takes four times as long."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = self._philox.state

    def uniforms(self, key: tuple[int, int], counter: tuple[int, int, int, int], n: int) -> Float64Array:
        """The first n uniform numbers of a stream."""
        self._state["state"]["key"][:], self._state["state"]["counter"][:] = key, counter
        self._philox.state = self._state
        return self._generator.random(n)


class Purpose(IntEnum):
    """The purpose of a random number, which is part of its key."""

    DRAFT = 0
    ACCEPT = 1
    OWN = 2
    GUMBEL = 3


_PHILOX = _Philox()
_WORD = (1 << 64) - 1
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_NUM_ROUNDS = 10
# From about 70 streams on, the rounds over arrays are cheaper than the generator for each, if streams are short.
_MANY_STREAMS = 70
_SHORT_STREAM = 64


def uniforms(seed: int, index: int, position: int, purpose: Purpose, n: int) -> Float64Array:
    """The first n uniform numbers [n] float64 in [0, 1) of one stream."""
    return _PHILOX.uniforms((seed & _WORD, index & _WORD), (0, position, purpose, 0), n)


def uniforms_many(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int], purpose: Purpose, n: int
) -> Float64Array:
    """The first n uniform numbers of each of B streams: [B, n] float64, row b equal to `uniforms` of its key."""
    if len(seeds) < _MANY_STREAMS or n > _SHORT_STREAM:
        streams = np.empty((len(seeds), n))
        for row, seed, index, position in zip(streams, seeds, indices, positions, strict=True):
            row[:] = uniforms(seed, index, position, purpose, n)
        return streams
    num_blocks = -(-n // 4)
    key = [np.array([value & _WORD for value in values], dtype=np.uint64)[:, None] for values in (seeds, indices)]
    # numpy's Philox counts up before it draws, so a stream's first block has the counter 1.
    blocks = np.arange(1, num_blocks + 1, dtype=np.uint64)[None, :]
    shape = (len(seeds), num_blocks)
    counter = [
        np.broadcast_to(blocks, shape),
        np.broadcast_to(np.array(positions, dtype=np.uint64)[:, None], shape),
        np.full(shape, int(purpose), dtype=np.uint64),
        np.zeros(shape, dtype=np.uint64),
    ]
    words = np.stack(_philox(key, counter), axis=-1).reshape(len(seeds), 4 * num_blocks)[:, :n]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _philox(key: list[Uint64Array], counter: list[Uint64Array]) -> list[Uint64Array]:
    """Ten rounds of Philox4x64 over arrays: the four words of every block."""
    key_0, key_1 = key
    word_0, word_1, word_2, word_3 = counter
    for _ in range(_NUM_ROUNDS):
        high_0, low_0 = _multiply(_MULTIPLIERS[0], word_0)
        high_1, low_1 = _multiply(_MULTIPLIERS[1], word_2)
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = key_0 + _KEY_STEPS[0], key_1 + _KEY_STEPS[1]
    return [word_0, word_1, word_2, word_3]


def _multiply(multiplier: int, words: Uint64Array) -> tuple[Uint64Array, Uint64Array]:
    """High and low 64 bits of the 128-bit products, from products of 32-bit halves."""
    multiplier_low, multiplier_high = np.uint64(multiplier & 0xFFFFFFFF), np.uint64(multiplier >> 32)
    low, high = words & _LOW_HALF, words >> _HALF
    high_by_low = multiplier_high * low
    cross = ((multiplier_low * low) >> _HALF) + (high_by_low & _LOW_HALF) + multiplier_low * high
    return multiplier_high * high + (high_by_low >> _HALF) + (cross >> _HALF), np.uint64(multiplier) * words


def gumbel(seed: int, index: int, position: int, num_tokens: int) -> Tensor:
    """Gumbel noise [V] float64 of one absolute position: the same whichever draft, k or step asks for it."""
    return gumbel_many([seed], [index], [position], num_tokens)[0]


def gumbel_many(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int], num_tokens: int) -> Tensor:
    """Gumbel noise [B, V] float64, row b equal to `gumbel` of its key."""
    uniform = np.maximum(uniforms_many(seeds, indices, positions, Purpose.GUMBEL, num_tokens), 2.0**-54)
    return torch.from_numpy(-np.log(-np.log(uniform)))


def gumbel_on(
    device: torch.device, seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int], num_tokens: int
) -> Tensor:
    """The same [B, V] on a device. A GPU computes it itself, with the same uniform numbers, and the host does not wait.

    Its logarithms may differ from the host's in the last bit.
    """
    if device.type == "cpu":
        return gumbel_many(seeds, indices, positions, num_tokens)
    keys = [sent(words(values), torch.int64, device) for values in (seeds, indices, positions)]
    return gumbel_of(keys[0], keys[1], keys[2], num_tokens)


def words(values: Sequence[int]) -> list[int]:
    """Integers as 64-bit words, in the int64 of the same bits."""
    return [_signed(value & _WORD) for value in values]


def gumbel_of(seeds: Tensor, indices: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise [B, V] float64 of `words` [B] int64 in torch's operators, on their device."""
    blocks = torch.arange(1, -(-num_tokens // 4) + 1, device=seeds.device).expand(len(seeds), -1)
    zeros = torch.zeros_like(blocks)
    counter = [blocks, zeros + positions[:, None], zeros + int(Purpose.GUMBEL), zeros]
    drawn = _torch_philox([seeds[:, None], indices[:, None]], counter)
    uniform = ((torch.stack(drawn, -1).flatten(1)[:, :num_tokens] >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    return -torch.log(-torch.log(uniform.clamp(min=2.0**-54)))


def _torch_philox(key: list[Tensor], counter: list[Tensor]) -> list[Tensor]:
    """`_philox` over int64 of the same bits."""
    (key_0, key_1), (word_0, word_1, word_2, word_3) = key, counter
    for _ in range(_NUM_ROUNDS):
        (high_0, low_0), (high_1, low_1) = _products(_MULTIPLIERS[0], word_0), _products(_MULTIPLIERS[1], word_2)
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = key_0 + _signed(int(_KEY_STEPS[0])), key_1 + _signed(int(_KEY_STEPS[1]))
    return [word_0, word_1, word_2, word_3]


def _products(multiplier: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """`_multiply` over int64 of the same bits."""
    half = int(_LOW_HALF)
    multiplier_low, multiplier_high = multiplier & half, multiplier >> 32
    low, high = words & half, (words >> 32) & half
    high_by_low = multiplier_high * low
    cross = (((multiplier_low * low) >> 32) & half) + (high_by_low & half) + multiplier_low * high
    above = multiplier_high * high + ((high_by_low >> 32) & half) + ((cross >> 32) & half)
    return above, _signed(multiplier) * words


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def gumbel_argmax(probs: Tensor, seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Tokens [n] int64 drawn from probs [n, V] float32 by argmax(log p + g), g keyed by the absolute position.

    Draft and target that share g choose the same token as often as such a coupling can promise (Daliri, Musco, Suresh
    2024), and what the target chooses depends on p and the key alone.
    """
    return perturbed(probs, seeds, indices, positions).argmax(dim=-1)


def perturbed(probs: Tensor, seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """log p + g [n, V] float64 of probs [n, V] float32, g keyed by the absolute position."""
    keys = list(zip(seeds, indices, positions, strict=True))
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    seeds, indices, positions = zip(*number, strict=True)
    noise = gumbel_on(probs.device, seeds, indices, positions, probs.shape[1])
    if len(number) < len(keys):  # places of a tree at the same depth share their noise
        noise = noise[sent([number[key] for key in keys], torch.int64, probs.device)]
    return noise.add_(probs.log())
