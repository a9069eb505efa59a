"""Attention on a GPU over the block cache: few queries of each sequence, many keys, in Triton.

A few queries leave a GPU idle if one program walks all their keys. So the keys are split: each program takes some of a
sequence's keys for the queries of one key head, and a second kernel joins what they found (Dao et al. 2023,
Flash-Decoding). Keys and values are read where they lie, by the slot of each place; nothing is copied. What a query may
see is a mask: a chain and a drafted tree are the same to the kernel, except that a tree's keys stand in another order
than a chain's would, so that sums round otherwise.

Letters: B sequences, R queries of each, n = B·R, H heads, K key heads, G = H/K, D head size, T keys, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_cli.lm.kernels.few_rows import early

# Of a program: the same for every number of queries, keys and sequences, so that a query gets the same bits with any.
_ROWS = 16  # queries of all heads that share a key head
_KEYS = 64
_PIECES_AT_ONCE = 16
_WARPS = 2


@triton.jit
def _write_kernel(
    key, value, keys, values, slots, num_slots, key_row, value_row, key_head, value_head,
    D: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """New keys and values [K, n, D] of one token and one head, into [K, S, D]."""
    token, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + token)
    column = tl.arange(0, PADDED)
    is_in = column < D
    to = (head.to(tl.int64) * num_slots + slot) * D + column
    tl.store(keys + to, tl.load(key + head * key_head + token * key_row + column, is_in), is_in)
    tl.store(values + to, tl.load(value + head * value_head + token * value_row + column, is_in), is_in)


@triton.jit
def _part_kernel(
    query, keys, values, slots, allowed, part, most, total,
    scale, softcap, num_slots, num_queries, num_keys, query_row, query_head,
    GROUPS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head, some queries, some keys: their weighted values, largest score and sum of weights."""
    tile, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    tiles = tl.cdiv(num_queries * GROUPS, ROWS)
    sequence = tile // tiles
    row = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_queries * GROUPS
    # A row is one query of one of the heads that share this key head.
    place = sequence * num_queries + row // GROUPS
    own_head = head * GROUPS + row % GROUPS
    column = tl.arange(0, PADDED)
    is_in = column < D
    at = piece * KEYS + tl.arange(0, KEYS)
    is_key = at < num_keys
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + sequence * num_keys + at, is_key, 0)
    where = (head.to(tl.int64) * num_slots + slot) * D
    both = is_key[:, None] & is_in[None, :]
    k = tl.load(keys + where[:, None] + column[None, :], both, 0.0)
    v = tl.load(values + where[:, None] + column[None, :], both, 0.0)
    q = tl.load(
        query + own_head[:, None] * query_head + place[:, None] * query_row + column[None, :],
        is_row[:, None] & is_in[None, :], 0.0,
    )  # fmt: skip
    may = tl.load(allowed + place[:, None] * num_keys + at[None, :], is_row[:, None] & is_key[None, :], 0)
    is_seen = tl.max(may.to(tl.int32), 0) != 0
    v = tl.where(is_seen[:, None], v, tl.zeros_like(v))  # others' may be no numbers, and nothing times NaN is NaN
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
    scores = tl.where(may != 0, scores, float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    num_places = tl.num_programs(0) // tiles * num_queries
    out = (piece.to(tl.int64) * num_places + place) * (num_heads * GROUPS) + own_head
    tl.store(part + out[:, None] * D + column[None, :], weighted, is_row[:, None] & is_in[None, :])
    tl.store(most + out, largest, is_row)
    tl.store(total + out, tl.sum(weights, 1), is_row)


@triton.jit
def _join_kernel(
    part, most, total, sinks, output, num_rows, num_pieces, num_heads,
    D: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr, HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One query of one head: what its keys' pieces found, by their weights."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_in = column < D
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best, weight = float("-inf"), 0.0
    if HAS_SINKS:
        best, weight = tl.load(sinks + row % num_heads).to(tl.float32), 1.0
    weighted = tl.zeros([PADDED], tl.float32)
    for first in range(0, num_pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        at = piece.to(tl.int64) * num_rows + row
        largest = tl.load(most + at, piece < num_pieces, float("-inf"))
        better = tl.maximum(best, tl.max(largest, 0))
        known = tl.where(better == float("-inf"), 0.0, better)
        share, shrink = tl.exp(largest - known), tl.exp(best - known)
        weight = weight * shrink + tl.sum(tl.load(total + at, piece < num_pieces, 0.0) * share, 0)
        pieces = tl.load(part + at[:, None] * D + column[None, :], (piece < num_pieces)[:, None] & is_in[None, :], 0.0)
        weighted = weighted * shrink + tl.sum(pieces * share[:, None], 0)
        best = better
    weighted = weighted / tl.where(weight == 0, 1.0, weight)
    tl.store(output + row * D + column, weighted.to(output.dtype.element_ty), is_in)


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """File new keys and values.

    Args:
        key: [1, K, n, D], its last dimension dense.
        value: likewise.
        keys: the cache, [1, K, S, D] dense.
        values: likewise.
        slots: of each token [n] int64.
    """
    _, num_heads, num_tokens, size = key.shape
    jitted: Any = _write_kernel
    jitted[num_tokens, num_heads](
        key, value, keys, values, slots, keys.shape[2], key.stride(2), value.stride(2), key.stride(1), value.stride(1),
        D=size, PADDED=triton.next_power_of_2(size), num_warps=1, **early(key.device),
    )  # fmt: skip


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of every sequence's queries to its own keys.

    Args:
        query: [1, H, n, D], R queries of each sequence together, its last dimension dense.
        keys: the cache, [1, K, S, D] dense.
        values: likewise.
        slots: where the key of each place lies [B, T] int64.
        allowed: whether a query may look at a place [n, T] bool, dense. Of a drafted tree's nodes it sees its path.
        scale: factor of the scores.
        softcap: scores become softcap·tanh(scores / softcap).
        sinks: one logit per head [H], which takes weight and gives nothing.

    Returns:
        [1, n, H, D] in the query's dtype; zeros where a query may look at nothing.
    """
    _, num_heads, num_places, size = query.shape
    num_sequences, num_keys = slots.shape
    num_key_heads, groups = keys.shape[1], num_heads // keys.shape[1]
    num_queries = num_places // num_sequences
    tiles = num_sequences * triton.cdiv(num_queries * groups, _ROWS)
    num_pieces, num_rows = triton.cdiv(num_keys, _KEYS), num_places * num_heads
    part = query.new_empty((num_pieces, num_rows, size), dtype=torch.float32)
    most, total = query.new_empty((2, num_pieces, num_rows), dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(size))
    parts: Any = _part_kernel
    parts[tiles, num_key_heads, num_pieces](
        query, keys, values, slots, allowed.view(torch.uint8), part, most, total,
        scale, softcap or 1.0, keys.shape[2], num_queries, num_keys, query.stride(2), query.stride(1),
        GROUPS=groups, D=size, PADDED=padded, ROWS=_ROWS, KEYS=_KEYS,
        HAS_CAP=softcap is not None, num_warps=_WARPS, **early(query.device),
    )  # fmt: skip
    output = query.new_empty((1, num_places, num_heads, size))
    join: Any = _join_kernel
    join[(num_rows,)](
        part, most, total, most if sinks is None else sinks, output, num_rows, num_pieces, num_heads,
        D=size, PADDED=padded, PIECES=_PIECES_AT_ONCE, HAS_SINKS=sinks is not None, num_warps=2,
        **early(query.device),
    )  # fmt: skip
    return output
