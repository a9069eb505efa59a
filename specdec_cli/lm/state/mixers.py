"""Layers of transformers that carry a state, over the states that the block cache keeps.

Such a layer's forward calls a convolution and a scan by their names in its module. While it runs over a block cache,
these names mean the functions here, which take a forward's rows of several sequences apart; projections, norms and
gates stay transformers' own, and read all rows together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.cache.order import Order
from specdec_cli.lm.cache.state_store import StateStore
from specdec_cli.lm.kernels.own_products import in_whole_vectors
from specdec_cli.lm.kernels.replaced import own_forward
from specdec_cli.lm.state.inline import INLINE, prepare
from specdec_cli.lm.state.recurrences import convolve, delta_rule, linear


class Mixer:
    """A stateful layer's forward, in the place of the module's own.

    Args:
        module: of transformers.
        number: of it among the model's, by which the cache knows its states.

    Attributes:
        own: the module's own forward.
    """

    def __init__(self, module: Any, number: int) -> None:
        self.own: Callable[..., Any] = module.forward
        self._number = number
        self._num_calls = 0
        self._cache: BlockCache | None = None
        inline = INLINE.get(type(module).__name__)
        names = {name: getattr(self, method) for name, method in FUNCTIONS.items()}
        self._over_cache = partial(inline, self, module) if inline else _renamed(module, names)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module's output [1, n, hidden]; over another cache, or none, the module computes it as ever."""
        self._cache = next((one for one in (*given, *named.values()) if isinstance(one, BlockCache)), None)
        self._num_calls = 0
        return (self.own if self._cache is None else self._over_cache)(*given, **named)

    def convolution(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """`causal_conv1d_fn`: hidden states [1, channels, n], weight [channels, width]."""
        inputs = hidden_states[0].t()
        store, order = self.next_states(inputs.shape[1:], hidden_states.dtype, weight.shape[1] - 1)
        output = convolve(order, store, inputs, weight, bias).to(weight.dtype)
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.to(hidden_states.dtype).t()[None]

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """`torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`: query [1, n, heads, K], value [1, n, H, V]."""
        num_heads, dtype = value.shape[2], query.dtype
        store, order = self.next_states((num_heads, key.shape[3], value.shape[3]))
        query, key, value, g, beta = (order.turn(one[0].float()) for one in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (query, key))
        query = query / query.shape[2] ** 0.5
        query, key = (one.repeat_interleave(num_heads // one.shape[1], 1) for one in (query, key))
        decay = g.exp() if g.dim() == 3 else g.exp()[..., None]
        output = delta_rule(order, store, decay, query, key, value, beta)
        return output[None].to(dtype), _nothing(output)

    def mamba2_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """`mamba2_chunk_scan`: hidden states [1, n, H, P], dt [1, n, H], A [H], B and C [1, n, groups, N], D [H]."""
        num_heads, head_dim = hidden_states.shape[2:]
        store, order = self.next_states((num_heads, head_dim, B.shape[3]))
        x = hidden_states[0].float()
        times = order.turn(_times(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).float())
        decay = torch.exp(A.float() * times)[..., None, None]
        scaled = order.turn(x) * times[..., None]
        keys, queries = (
            order.turn(one[0].float()).repeat_interleave(num_heads // one.shape[2], 1)[:, :, None] for one in (B, C)
        )
        output = linear(
            order,
            store,
            decay,
            lambda rows: scaled[rows, ..., None] * keys[rows],
            lambda states, rows: (states * queries[rows]).sum(3),
        )
        return (output if D is None else output + D.float()[:, None] * x)[None], _nothing(output)

    def mamba_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """`mamba_selective_scan`: hidden states, dt and z [1, channels, n], A [channels, N], B and C [1, N, n]."""
        x = hidden_states[0].t().float()
        store, order = self.next_states((x.shape[1], A.shape[1]))
        times = order.turn(_times(dt[0].t(), delta_bias, delta_softplus).float())
        keys, queries = (order.turn(one[0].t().float())[:, None] for one in (B, C))
        scaled = order.turn(x) * times
        output = linear(
            order,
            store,
            torch.exp(A.float() * times[..., None]),
            lambda rows: scaled[rows, ..., None] * keys[rows],
            lambda states, rows: (states * queries[rows]).sum(2),
        )
        if D is not None:
            output = output + D.float() * x
        if z is not None:
            output = output * in_whole_vectors(F.silu, z[0].t().float())
        return output.t()[None], _nothing(output)

    def next_states(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, width: int = 1
    ) -> tuple[StateStore, Order]:
        """The states of this forward's next call, `width` of which go on together, and the order to go through them."""
        assert self._cache is not None, "a scan was called outside its layer"
        self._num_calls += 1
        return self._cache.states_of((self._number, self._num_calls), tuple(shape), dtype, width)


FUNCTIONS = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "gated_delta_rule",
    "mamba2_chunk_scan": "mamba2_scan",
    "mamba_selective_scan": "mamba_scan",
}
"""What the forward of a stateful layer calls, and the method of `Mixer` that stands for it."""


def install(model: Any) -> bool:
    """Put every stateful layer of a model over the block cache; whether there are any."""
    found = [one for one in model.modules() if type(one).__name__ in INLINE or _calls_scans(one)]
    prepare(model)
    for number, module in enumerate(found):
        if not isinstance(own_forward(module), Mixer):
            module.forward = Mixer(module, number)
    for module in model.modules():
        if type(module).__name__ == "MiniMaxModel":  # which takes no other cache than its own
            module.forward = _renamed(module, {"MiniMaxCache": BlockCache})
    return bool(found)


def _renamed(module: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """The forward of a module's class, in which some names of its module mean something else."""
    given = inspect.unwrap(type(module).forward)
    bound = FunctionType(
        given.__code__, given.__globals__ | names, given.__name__, given.__defaults__, given.__closure__
    )
    bound.__kwdefaults__ = given.__kwdefaults__
    found: Callable[..., Any] = bound.__get__(module)
    return found


def _calls_scans(module: Any) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not FUNCTIONS.keys().isdisjoint(code.co_names)


def _times(dt: Tensor, bias: Tensor | None, is_soft: bool) -> Tensor:
    """Step sizes [n, channels], computed in their own dtype as transformers does."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return in_whole_vectors(F.softplus, dt) if is_soft else dt


def _nothing(like: Tensor) -> Tensor:
    """A stand-in for the last state, which is kept already."""
    return like.new_empty(1, 0)
