"""A layer that carries a state, over the states that the block cache keeps.

Such a layer's forward calls a convolution and a scan by their names in its module, or writes its recurrence into its
own forward. While it runs over a block cache, the names mean a family's functions, or the family's forward runs
instead: they take a forward's rows of several sequences apart. Projections, norms and gates stay transformers' own, and
read all rows together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.cache.order import Order
from specdec_cli.lm.cache.state_store import StateStore
from specdec_cli.lm.families.renamed import with_globals

Function = Callable[..., Any]


class Mixer:
    """A stateful layer's forward, in the place of the module's own.

    Args:
        module: of transformers.
        number: of it among the model's, by which the cache knows its states.
        functions: what the names in its forward mean over a block cache; each is given the mixer first.
        forward: what runs over a block cache in the place of its forward, likewise; None for `functions`.

    Attributes:
        own: the module's own forward.
    """

    def __init__(
        self, module: Any, number: int, functions: dict[str, Function], forward: Function | None = None
    ) -> None:
        self.own: Function = module.forward
        self._number = number
        self._num_calls = 0
        self._cache: BlockCache | None = None
        self._over_cache: Function
        if forward is None:
            self._over_cache = with_globals(module, {name: partial(run, self) for name, run in functions.items()})
        else:
            self._over_cache = partial(forward, self, module)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module's output [1, n, hidden]; over another cache, or none, the module computes it as ever."""
        self._cache = next(
            (argument for argument in (*given, *named.values()) if isinstance(argument, BlockCache)), None
        )
        self._num_calls = 0
        return (self.own if self._cache is None else self._over_cache)(*given, **named)

    def next_states(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, width: int = 1
    ) -> tuple[StateStore, Order]:
        """The states of this forward's next call, `width` of which go on together, and the order to go through them."""
        assert self._cache is not None, "a scan was called outside its layer"
        self._num_calls += 1
        return self._cache.states_of((self._number, self._num_calls), tuple(shape), dtype, width)
