"""Qwen 4's n-gram embeddings and their convolution. Tested with transformers 5.23 to 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_cli.lm.families.recurrences import convolve, look_back

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def ngrams(mixer: Mixer, module: Any, input_ids: Tensor, *_: Any) -> Tensor:
    """`Qwen4ExpTextNGramEmbedding`: embeddings of the last tokens together; before a text, all of them end one."""
    store, order = mixer.next_states((), torch.int64, module.context_len)
    windows = look_back(order, store, input_ids[0] - module.eos_token_id, module.ngram_size) + module.eos_token_id
    embeddings: Tensor = mixer.own(windows, None)[:, -1]
    return embeddings[None]


def ngram_layer(mixer: Mixer, module: Any, *given: Any, **named: Any) -> Any:
    """`Qwen4ExpTextPLELayer`: a convolution of every third input, as one with zeros between its weights."""
    weight, dilation = module.conv1d.weight[:, 0], module.conv1d.dilation[0]
    spread = weight.new_zeros(len(weight), (weight.shape[1] - 1) * dilation + 1)
    spread[:, ::dilation] = weight

    def convolved(hidden_states: Tensor, _: Any) -> Tensor:
        store, order = mixer.next_states(hidden_states.shape[2:], hidden_states.dtype, spread.shape[1] - 1)
        return F.silu(convolve(order, store, hidden_states[0], spread, None).to(hidden_states.dtype))[None]

    module._short_conv = convolved
    try:
        return mixer.own(*given, **named)
    finally:
        del module._short_conv


CLASSES = {"Qwen4ExpTextNGramEmbedding": ngrams, "Qwen4ExpTextPLELayer": ngram_layer}
