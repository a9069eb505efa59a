"""GPT-Neo's attention, whose masks go by the number of keys: it runs for each span of a forward.

Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.cache.cache import running_cache
from specdec_cli.lm.forward.apart import parts, with_company


def attend_each_span(model: Any) -> bool:
    """Replace the attention of a GPT-Neo model's modules; False for any other model."""
    modules = [module for module in model.modules() if type(module).__name__ == "GPTNeoSelfAttention"]
    for module in modules:
        if "_attn" not in vars(module):
            module._attn = _attention_of(module)
    return bool(modules)


def _attention_of(module: Any) -> Callable[..., Any]:
    """GPT-Neo's attention of queries [1, H, n, D] to joined keys, whose number its masks go by."""
    own: Callable[..., Any] = module._attn

    @wraps(own)
    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        cache = running_cache()
        if cache is None or cache.layout is None:
            return own(query, key, value, attention_mask)
        outputs, spans = [], cache.layout.spans
        begins = list(accumulate((span.num_keys for span in spans), initial=0))
        for index, span in parts(cache.layout, query):
            keys = slice(begins[index], begins[index] + span.num_keys)
            outputs.append(own(query[:, :, span.start : span.stop], key[:, :, keys], value[:, :, keys])[0])
        return with_company(torch.cat(outputs, 2), query.shape[2], 2), None

    return attend
