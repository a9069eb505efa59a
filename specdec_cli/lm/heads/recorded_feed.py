"""New slots of all sequences of a recorded forward, whose places and masks are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.cache.layout import DraftedNodes, Layout, Span
from specdec_cli.lm.heads.head_layer import LayerFeed


@dataclass(slots=True, kw_only=True)
class RecordedFeed(LayerFeed):
    """B sequences in one feed, R new slots of each: `slots` are [B, T], `places` only count n = B·R.

    Args:
        at: their places, 0 where one only fills the shape [B, R] int64.
        write_slots: of each new slot [n] int64.
        kernels: attention for all sequences at once (`lm.split_attention`); None without a GPU or without Triton.
        nodes: drafted nodes among the new slots; None where each sees the places before it and its own.
    """

    at: Tensor
    write_slots: Tensor
    kernels: Any
    nodes: DraftedNodes | None = None

    @classmethod
    def new(
        cls,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        places: Tensor,
        nowhere: int,
        kernels: Any,
        nodes: DraftedNodes | None = None,
    ) -> RecordedFeed:
        """New slots, each of which sees the places before it and its own, or what its tree lets it see.

        All of it is on the device.

        Args:
            keys: [key heads, slots, head size] of all sequences.
            values: the same.
            slots: of every place of each sequence [B, T] int64.
            places: of the new slots [B, R] int64; negative, or T and more, where one only fills the shape.
            nowhere: the slot that takes what only fills the shape.
            kernels: as above.
            nodes: as above.
        """
        num_keys = slots.shape[1]
        at = places.clamp(0, num_keys - 1)
        write_slots = torch.where(at == places, slots.gather(1, at), nowhere).view(-1)
        every = torch.arange(num_keys, device=slots.device)
        visible = (every <= at[:, :, None] if nodes is None else nodes.is_seen).view(-1, num_keys)
        new = range(places.numel())
        more: dict[str, Any] = {"at": at, "write_slots": write_slots, "kernels": kernels, "nodes": nodes}
        return cls(keys, values, slots, new, num_keys, visible, **more)

    @property
    def positions(self) -> Tensor:
        """Positions of the new slots in their texts [n] int64."""
        return (self.at if self.nodes is None else self.nodes.key_positions.gather(1, self.at)).flatten()

    @property
    def num_each(self) -> int:
        """New slots of each sequence."""
        return self.at.shape[1]

    def around(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """As `LayerFeed.around`; places behind a sequence's last new slot are not read."""
        every = torch.arange(self.end, device=device)
        may_be_read = (every <= self.at[:, -1:, None]).expand(-1, self.at.shape[1], -1)
        return self.at.reshape(-1, 1) - every, may_be_read.reshape(-1, self.end).contiguous()

    def write(self, keys: Tensor, values: Tensor) -> None:
        """File new keys and values [key heads, new, head size]."""
        if self.kernels is not None:
            self.kernels.write(keys[None], values[None], self.keys[None], self.values[None], self.write_slots)
            return
        self.keys.index_copy_(1, self.write_slots, keys)
        self.values.index_copy_(1, self.write_slots, values)

    def layout(self, positions: Tensor) -> Layout:
        """The same for a forward of transformers.

        Args:
            positions: of the new slots [n] int64.
        """
        assert isinstance(self.slots, Tensor), "slots of a recorded forward are on the device"
        each, num = self.num_each, len(self.places)
        spans = [Span(i * each, (i + 1) * each, self.end, 0, row_slots) for i, row_slots in enumerate(self.slots)]
        layout = Layout([], [], spans, [], wanted=[], num_written=num, device=positions.device)
        layout.position_ids = positions.view(1, -1)
        layout.kernels, layout.slots, layout.write_slots = self.kernels, self.slots, self.write_slots
        layout.nodes = self.nodes
        return layout

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `LayerFeed.attend`, for all sequences at once."""
        assert isinstance(self.slots, Tensor), "slots of a recorded forward are on the device"
        assert self.visible is not None, "a recorded forward says what its queries see"
        self.write(keys, values)
        if self.kernels is not None:
            stored = self.keys[None], self.values[None]
            scale = queries.shape[2] ** -0.5
            attended: Tensor = self.kernels.attend(queries[None], *stored, self.slots, self.visible, scale, None, None)
            return attended[0].flatten(1)
        num_rows, num_heads, size = len(self.slots), queries.shape[0], queries.shape[2]
        visible = self.visible.view(num_rows, -1, self.end)
        is_hidden = ~visible.any(1)[:, None, :, None]  # others' may be no numbers, and nothing times NaN is NaN
        its_keys, its_values = (
            tensor[:, self.slots].transpose(0, 1).masked_fill(is_hidden, 0) for tensor in (self.keys, self.values)
        )
        its_queries = queries.reshape(num_heads, num_rows, -1, size).transpose(0, 1)
        result = functional.scaled_dot_product_attention(
            its_queries, its_keys, its_values, visible[:, None], enable_gqa=True
        )
        return result.transpose(1, 2).flatten(0, 1).flatten(1)
