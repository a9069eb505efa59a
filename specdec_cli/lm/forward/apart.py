"""Attention modules that run once for each span of a forward, over its part of the cache.

They count blocks of keys from a sequence's beginning, or choose among a sequence's keys in a way of their own: sparse
attention by blocks (MiniMax-M3, Qwen4), compressed attention (DeepSeek V4).
Where bits matter, each query of a few runs alone, so that no neighbour changes the shape of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache, cache_parameter, running_cache
from specdec_cli.lm.cache.layout import MOST_ROWS, Layout, Span
from specdec_cli.lm.cache.span_cache import SpanCache
from specdec_cli.lm.forward.attention import MIN_ROWS, RowMasks
from specdec_cli.lm.forward.implementations import APART
from specdec_cli.lm.forward.joined import attend_joined


def take_apart(model: Any) -> bool:
    """Make a family's attention modules run for each span where it needs that; returns whether there are any."""
    modules = [module for module in model.modules() if _is_apart(module)]
    for module in modules:
        if "forward" not in vars(module):
            module.forward = _run_apart(module)
    return bool(modules)


def _is_apart(module: Any) -> bool:
    """Whether a module is an attention over the cache, of a family whose attention runs apart."""
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != APART or not type(module).__name__.endswith("Attention"):
        return False
    return cache_parameter(module.forward) is not None


def _run_apart(module: Any) -> Callable[..., Any]:
    """A module's forward, span by span while a block cache runs."""
    own: Callable[..., Any] = module.forward

    @wraps(own)
    def run(hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        cache = running_cache()
        if cache is None or cache.layout is None:
            return own(hidden_states, *given, **named)
        outputs, num_tokens = [], hidden_states.shape[1]
        for index, span in parts(cache.layout, hidden_states):
            part = _SpanOf(cache, index, span, num_tokens, module, hidden_states)
            named_parts = {key: part.share(argument) for key, argument in named.items()}
            output = own(part.share(hidden_states), *map(part.share, given), **named_parts)[0]
            outputs.append(output[:, : span.stop - span.start])
        return with_company(torch.cat(outputs, 1), num_tokens, 1), None

    return run


def parts(layout: Layout, states: Tensor) -> Iterator[tuple[int, Span]]:
    """Spans with their indices, or each query of a few with its span's index.

    Without the token that only keeps another one company.
    """
    for index, span in enumerate(layout.spans):
        stop = min(span.stop, layout.num_written)
        if not _is_bitwise(states) or not 1 < stop - span.start <= MOST_ROWS:
            yield index, replace(span, stop=stop)
            continue
        for i in range(stop - span.start):
            start, position = span.start + i, span.position + i
            slots = None if span.slots is None else span.slots[: position + 1]
            yield index, Span(start, start + 1, position + 1, span.first_slot, slots, position, span.num_in_order)


def _is_bitwise(states: Tensor) -> bool:
    """Whether a row must get the same bits in any company (`lm.decoders`)."""
    return states.device.type == "cpu" and states.dtype != torch.float32


def _enough(rows: Tensor, dim: int, states: Tensor) -> Tensor:
    """As many rows as a product must have where bits of states matter; the last one is repeated."""
    missing = MIN_ROWS - rows.shape[dim] if _is_bitwise(states) else 0
    if missing <= 0:
        return rows
    return torch.cat((rows, rows.narrow(dim, -1, 1).repeat_interleave(missing, dim)), dim)


def with_company(outputs: Tensor, num_tokens: int, dim: int) -> Tensor:
    """Outputs of all tokens; that of one which only keeps another company is the other's."""
    missing = num_tokens - outputs.shape[dim]
    return torch.cat((outputs, outputs.narrow(dim, -missing, missing)), dim) if missing else outputs


@dataclass(frozen=True, slots=True)
class _SpanOf:
    """One span's share of what a module is given.

    Args:
        cache: of all sequences.
        index: of the span.
        span: its written queries.
        num_tokens: of the forward.
        module: that is given it.
        like: the hidden states, whose dtype masks have.
    """

    cache: BlockCache
    index: int
    span: Span
    num_tokens: int
    module: Any
    like: Tensor

    def share(self, given: Any) -> Any:
        """Its rows of a tensor [1, n, ...], its own mask, its part of the cache; anything else as it is."""
        start, stop = self.span.start, self.span.stop
        if isinstance(given, Tensor) and given.dim() > 1 and given.shape[1] == self.num_tokens:
            return _enough(given[:, start:stop], 1, self.like)
        if isinstance(given, Tensor) and given.dim() > 1 and given.shape[1] == self.num_tokens + self._most_keys:
            keys = given[:, : self.span.num_keys]  # of which the last ones are the queries' own
            queries = _enough(keys[:, start - stop :], 1, self.like)
            return torch.cat((keys[:, : start - stop], queries), 1)
        if isinstance(given, RowMasks):
            mask = given.bias(self.index, 1, self.like.dtype)
            first = start - given.layout.spans[self.index].start
            return _enough(mask[None, None, first : first + stop - start, : self.span.num_keys], 2, self.like)
        if given is self.cache:
            assert self.cache.layout is not None, "a forward began without a layout"
            return SpanCache(self.cache, self.span, self.cache.layout.part(start, stop), self.module)
        if isinstance(given, dict):
            return {key: self.share(value) for key, value in given.items()}
        return tuple(map(self.share, given)) if isinstance(given, tuple | list) else given

    @property
    def _most_keys(self) -> int:
        """Keys of the longest span, which are before the tokens where a model asks for the positions of all."""
        assert self.cache.layout is not None, "a forward began without a layout"
        return len(self.cache.layout.key_positions)


def attend_span(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **named: Any
) -> tuple[Tensor, None]:
    """Attention of one span, as `attend_joined`, which knows no blocks.

    Args:
        module: transformers' attention module.
        query: [1, H, n, D].
        key: [1, heads, T, D].
        value: [1, heads, T, D_v].
        attention_mask: additive [1, 1 or H, n, T].
        named: what `attend_joined` takes, and `block_indices` [1, heads, n, topk], blocks that an indexer chose.

    Returns:
        [1, n, H, D_v], and no weights.
    """
    blocks = named.pop("block_indices", None)
    if blocks is not None:
        sizes = key.shape[2], query.dtype, query.device
        attention_mask = module.indexer.build_block_mask(blocks, attention_mask, *sizes, position_ids=None)
    return attend_joined(module, query, key, value, attention_mask, **named)
