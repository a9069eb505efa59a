"""xLSTM's matrix memory. Tested with transformers 5.17 to 5.24."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.families.recurrences import matrix_memory

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def mlstm(mixer: Mixer, module: Any, x: Tensor, *_: Any) -> Any:
    """`xLSTMLayer`: its backend's recurrence, token by token."""
    backend = module.mlstm_backend

    def scan(query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any) -> tuple[Tensor, None]:
        num_heads, size = query.shape[1], query.shape[3]
        store, order = mixer.next_states((num_heads, size, value.shape[3] + 2))
        turned = (order.turn(tensor[0].transpose(0, 1).float()) for tensor in (query, key, value, igate, fgate))
        queries, keys, values, inputs, forgets = turned
        gates = inputs, F.logsigmoid(forgets)
        output = matrix_memory(order, store, queries * size**-0.5, keys, values, gates, module.config.eps)
        return output.transpose(0, 1)[None].to(query.dtype), None

    backend.forward = scan
    try:
        return mixer.own(x)
    finally:
        del backend.forward


CLASSES = {"xLSTMLayer": mlstm}


def prepare(module: Any) -> None:
    """Let the model read a whole prompt at once, which it would cut into pieces."""
    if type(module).__name__ == "xLSTMModel":
        module.config.max_inference_chunksize = sys.maxsize
