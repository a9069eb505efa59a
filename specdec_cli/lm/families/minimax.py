"""MiniMax-Text-01's lightning attention. Tested with transformers 5.17 to 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.families.recurrences import linear
from specdec_cli.lm.families.renamed import with_globals

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def lightning_attention(mixer: Mixer, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """`MiniMaxLightningAttention`: linear attention whose keys fade at one rate for each head."""
    num_heads, size = module.num_attention_heads, module.head_dim
    store, order = mixer.next_states((num_heads, size, size))
    states = module.act_fn(module.qkv_proj(hidden_states))[0].view(-1, num_heads, 3 * size)
    query, key, value = (order.turn(tensor.float()) for tensor in states.split(size, 2))
    decay = torch.exp(-module.slope_rate.float()).expand(len(query), -1, -1, -1)
    output = linear(
        order,
        store,
        decay,
        lambda rows: key[rows, ..., None] * value[rows, :, None],
        lambda kept, rows: (kept * query[rows, ..., None]).sum(2),
    )
    normed = module.norm(output.flatten(1)[None].to(hidden_states.dtype))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * normed), None


CLASSES = {"MiniMaxLightningAttention": lightning_attention}


def prepare(module: Any) -> None:
    """Let the model take a block cache: its forward refuses any cache but its own class's."""
    if type(module).__name__ == "MiniMaxModel":
        module.forward = with_globals(module, {"MiniMaxCache": BlockCache})
