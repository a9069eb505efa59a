"""The recurrences of linear attention and state-space models, and the short convolution before them.

Two recurrences cover most of them: S_t = a_t·S_{t-1} + b_t (Mamba, Mamba-2, lightning attention, RG-LRU), and the delta
rule S_t = a_t·S_{t-1} + k_t ⊗ β_t·(v_t - k_tᵀ·a_t·S_{t-1}) (Gated DeltaNet, Kimi delta attention). States are float32.
Every product of a state is a sum over elements: the bits of a matrix product would depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.cache.order import Order, Windows
from specdec_cli.lm.cache.state_store import StateStore

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer

_NOTHING_YET = -1e38  # the exponent of sums without a weight
_PIECE_BYTES = 32 << 20  # states of a prompt that are in memory together

Step = Callable[[Tensor, slice, Tensor], None]
"""Writes the states after some rows [m, *shape] into its last argument, from those before."""
Read = Callable[[Tensor], Tensor]
"""The outputs [m, ...] of the states after a piece's rows [m, *shape]."""


def convolve(order: Order, store: StateStore, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of each channel.

    Args:
        order: of the tokens.
        store: of earlier inputs, one slot for each.
        inputs: [n, channels].
        weight: [channels, width].
        bias: [channels].

    Returns:
        [n, channels] float32.
    """
    windows = order.windows(weight.shape[1])
    joined, factors = _join(order, store, inputs.float(), windows), weight.float().t().contiguous()
    total = joined[windows.taps[0]] * factors[0]
    for tap, factor in zip(windows.taps[1:], factors[1:], strict=True):
        total.addcmul_(joined[tap], factor)
    if windows.outputs is not None:
        total = total.index_select(0, windows.outputs)
    _keep(store, inputs, joined, windows)
    return total if bias is None else total + bias.float()


def look_back(order: Order, store: StateStore, inputs: Tensor, width: int) -> Tensor:
    """Each token's window of inputs, for what no convolution of channels computes.

    Args:
        order: of the tokens.
        store: of earlier inputs, one slot for each.
        inputs: [n, ...].
        width: of a window.

    Returns:
        [n, width, ...], the oldest input first; zeros before a text.
    """
    windows = order.windows(width)
    joined = _join(order, store, inputs, windows)
    token_windows = torch.stack([joined[tap] for tap in windows.taps], 1)
    _keep(store, inputs, joined, windows)
    return token_windows if windows.outputs is None else token_windows.index_select(0, windows.outputs)


def shifted(mixer: Mixer, hidden: Tensor) -> Tensor:
    """Hidden states [1, n, hidden] of each token's predecessor; zeros before a text."""
    inputs = hidden[0]
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype)
    last = torch.tensor([1.0, 0.0], device=inputs.device).expand(inputs.shape[1], 2)
    return convolve(order, store, inputs, last, None).to(inputs.dtype)[None]


def _join(order: Order, store: StateStore, inputs: Tensor, windows: Windows) -> Tensor:
    """Every sequence's earlier and new inputs, one after another."""
    before = store.read(windows.before, windows.num_slots).to(inputs.dtype)
    parts = []
    for stretch, earlier in zip(order.stretches, torch.split(before, windows.counts), strict=True):
        parts += [earlier, inputs[stretch.start : stretch.stop]]
    return torch.cat(parts)


def _keep(store: StateStore, inputs: Tensor, joined: Tensor, windows: Windows) -> None:
    """Keep the last inputs, also beside prefixes."""
    store.write(windows.slots, inputs.index_select(0, windows.kept))
    if len(windows.prefixes):
        store.store(windows.prefixes, joined.index_select(0, windows.stored))


def linear(
    order: Order,
    store: StateStore,
    decay: Tensor,
    update: Callable[[slice], Tensor],
    read: Callable[[Tensor, slice], Tensor],
) -> Tensor:
    """S_t = decay_t · S_{t-1} + update_t, and what is read of it.

    Args:
        order: of the tokens.
        store: of the states.
        decay: by the order's rows [n, ...], laid over the states.
        update: of some rows [m, *shape].
        read: outputs [m, ...] of the states after some rows [m, *shape].

    Returns:
        The outputs [n, ...] float32, in the forward's order.
    """

    def begin(rows: slice) -> tuple[Step, Read]:
        decays, updates = decay[rows], update(rows)

        def step(before: Tensor, some: slice, after: Tensor) -> None:
            torch.addcmul(updates[some], decays[some], before, out=after)

        return step, lambda states: read(states, rows)

    return scan(order, store, begin)


def delta_rule(
    order: Order, store: StateStore, decay: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor
) -> Tensor:
    """The gated delta rule.

    Args:
        order: of the tokens; all others are by its rows, float32.
        store: of the states [H, K, V].
        decay: [n, H, K or 1].
        query: [n, H, K].
        key: [n, H, K].
        value: [n, H, V].
        beta: [n, H].

    Returns:
        The sums of S_t · query_t over K, [n, H, V] float32, in the forward's order.
    """

    def begin(rows: slice) -> tuple[Step, Read]:
        decays, keys, queries, betas = decay[rows, ..., None], key[rows, ..., None], query[rows, ..., None], beta[rows]
        wanted = value[rows] * betas[..., None]

        def step(before: Tensor, some: slice, after: Tensor) -> None:
            torch.mul(before, decays[some], out=after)
            retrieved = (after * keys[some]).sum(2)
            change = torch.addcmul(wanted[some], retrieved, betas[some, :, None], value=-1)
            after.addcmul_(keys[some], change[:, :, None])

        return step, lambda states: (states * queries).sum(2)

    return scan(order, store, begin)


def weighted_values(
    order: Order, store: StateStore, key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor
) -> Tensor:
    """RWKV's mean of values, weighted by exponentials of keys: sums are kept beside their largest exponent.

    Args:
        order: of the tokens.
        store: of the states [3, channels]: the weighted sum, the weights' sum, the exponent of both.
        key: by the order's rows [n, channels] float32.
        value: likewise.
        decay: what every step adds to the exponent [channels].
        bonus: what a token's own key has more when it is read [channels].

    Returns:
        The means [n, channels] float32, in the forward's order.
    """

    def begin(rows: slice) -> tuple[Step, Read]:
        keys, values = key[rows], value[rows]
        means = torch.empty_like(values)

        def step(before: Tensor, some: slice, after: Tensor) -> None:
            total, weights, kept = before.unbind(1)
            exponent = torch.where(weights == 0, _NOTHING_YET, kept)
            seen, own = _shares(exponent, keys[some] + bonus)[:2]
            means[some] = (seen * total + own * values[some]) / (seen * weights + own)
            seen, own, after[:, 2] = _shares(exponent + decay, keys[some])
            after[:, 0] = seen * total + own * values[some]
            after[:, 1] = seen * weights + own

        return step, lambda _: means

    return scan(order, store, begin)


def matrix_memory(
    order: Order, store: StateStore, query: Tensor, key: Tensor, value: Tensor, gates: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """mLSTM (arXiv:2405.04517): a matrix memory with exponential gates, beside its normalizer and largest exponent.

    Args:
        order: of the tokens; all others are by its rows, float32.
        store: of the states [H, K, V + 2]: the memory, its normalizer, and the exponent of both in every row.
        query: [n, H, K], scaled.
        key: [n, H, K].
        value: [n, H, V].
        gates: exponent of the input gate, and logarithm of the forget gate, [n, H] each.
        eps: added to the divisor.

    Returns:
        [n, H, V] float32, in the forward's order.
    """
    value = F.pad(value, (0, 1), value=1.0)  # the normalizer sums the keys themselves

    def begin(rows: slice) -> tuple[Step, Read]:
        inputs, forgets = (gate[rows] for gate in gates)
        updates, queries = key[rows, ..., None] * value[rows, :, None], query[rows, ..., None]

        def step(before: Tensor, some: slice, after: Tensor) -> None:
            kept, new, exponent = _shares(forgets[some] + before[:, :, 0, -1], inputs[some])
            torch.mul(before[..., :-1], kept[..., None, None], out=after[..., :-1])
            after[..., :-1].addcmul_(updates[some], new[..., None, None])
            after[..., -1] = exponent[..., None]

        def read(states: Tensor) -> Tensor:
            sums = (states[..., :-1] * queries).sum(2)
            divisor = torch.maximum(sums[..., -1:].abs(), torch.exp(-states[:, :, 0, -1:]))
            return sums[..., :-1] / (divisor + eps)

        return step, read

    return scan(order, store, begin)


def _shares(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials of two exponents over that of the larger one, and this."""
    largest = torch.maximum(one, other)
    return torch.exp(one - largest), torch.exp(other - largest), largest


def scan(order: Order, store: StateStore, begin: Callable[[slice], tuple[Step, Read]]) -> Tensor:
    """Carry states through a forward's tokens, one by one, and keep the last ones.

    Args:
        order: of the tokens.
        store: of the layer.
        begin: given some rows of the order, how they are gone through: rows are counted from the first of them.

    Returns:
        The outputs, in the forward's order.
    """
    state = store.read(order.first, order.num_slots)
    outputs = []
    for piece in order.pieces(max(_PIECE_BYTES // store.slot_bytes, 1)):
        step, read = begin(piece.rows)
        states = state.new_empty(piece.rows.stop - piece.rows.start, *store.shape)
        for rows, before in zip(piece.steps, piece.befores, strict=True):
            follows = state[: rows.stop - rows.start] if before is None else state.index_select(0, before)
            step(follows, rows, states[rows])
            state = states[rows]
        if len(piece.slots):
            store.write(piece.slots, states if len(piece.slots) == len(states) else states[piece.kept])
        if len(piece.prefixes):
            store.store(piece.prefixes, states[piece.stored])
        outputs.append(read(states))
    return order.turn_back(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def no_state(like: Tensor) -> Tensor:
    """A stand-in for the last state, which is kept already."""
    return like.new_empty(1, 0)
