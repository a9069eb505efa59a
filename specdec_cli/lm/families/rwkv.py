"""RWKV-4. Tested with transformers 5.17 to 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.families.recurrences import shifted, weighted_values

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def time_mix(mixer: Mixer, module: Any, hidden: Tensor, state: BlockCache, **_: Any) -> Any:
    """`RwkvSelfAttention`: values weighted by exponentials of keys, which fade at a rate of each channel."""
    before = shifted(mixer, hidden)
    key, value, receptance = (
        layer(hidden * share + before * (1 - share))
        for layer, share in (
            (module.key, module.time_mix_key),
            (module.value, module.time_mix_value),
            (module.receptance, module.time_mix_receptance),
        )
    )
    store, order = mixer.next_states((3, key.shape[2]))
    keys, values = (order.turn(tensor[0].float()) for tensor in (key, value))
    decay = -torch.exp(module.time_decay.float())
    output = weighted_values(order, store, keys, values, decay, module.time_first.float())
    return module.output(torch.sigmoid(receptance) * output[None].to(key.dtype)), state


def channel_mix(mixer: Mixer, module: Any, hidden: Tensor, state: BlockCache, **_: Any) -> Any:
    """`RwkvFeedForward`: a feed-forward layer that reads the token before, too."""
    before = shifted(mixer, hidden)
    key, receptance = (
        layer(hidden * share + before * (1 - share))
        for layer, share in (
            (module.key, module.time_mix_key),
            (module.receptance, module.time_mix_receptance),
        )
    )
    return torch.sigmoid(receptance) * module.value(torch.square(torch.relu(key))), state


CLASSES = {"RwkvSelfAttention": time_mix, "RwkvFeedForward": channel_mix}


def prepare(module: Any) -> None:
    """Scale weights down now, as the model's forward would do in place before the first token."""
    if type(module).__name__ == "RwkvModel" and not module.training:
        module._rescale_layers()
