"""Replace what a model's family keeps from running on a block cache through transformers' interfaces alone.

A file's `FUNCTIONS` replace what forwards call by these names, its `CLASSES` the forwards of whole modules, and its
`prepare` settles what a module would do by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_cli.errors import UsageError
from specdec_cli.lm.families import delta_net, inkling, mamba, minimax, qwen4, recurrent_gemma, rwkv, xlstm, zaya
from specdec_cli.lm.families.alibi import bias_by_position
from specdec_cli.lm.families.gpt_neo import attend_each_span
from specdec_cli.lm.families.latent_attention import keep_latents
from specdec_cli.lm.families.mixer import Function, Mixer
from specdec_cli.lm.families.own_attention import attend_each_sequence
from specdec_cli.lm.families.renamed import names_in_forward
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.forward.apart import take_apart
from specdec_cli.lm.forward.implementations import APART, JOINED, NAME
from specdec_cli.lm.forward.packed import PackedForward, Patches, not_running
from specdec_cli.lm.kernels.replaced import own_forward

FUNCTIONS: dict[str, Function] = {**mamba.FUNCTIONS, **delta_net.FUNCTIONS}
CLASSES: dict[str, Function] = {
    name: forward
    for family in (inkling, minimax, qwen4, recurrent_gemma, rwkv, xlstm, zaya)
    for name, forward in family.CLASSES.items()
}


def packed_forward(model: Any, name: str) -> PackedForward:
    """The forward of a patched model over rows of several sequences; of fake tensors too.

    Raises:
        UsageError: a patch of its family does not fit the installed transformers.
    """
    is_bitwise = model.device.type == "cpu" and model.dtype != torch.float32
    try:
        patches = _patch(model, is_bitwise)
    except UsageError:
        raise
    except Exception as error:
        raise not_running(model, name, first_line(error)) from error
    return PackedForward(model, name, patches, is_bitwise)


def _patch(model: Any, is_bitwise: bool) -> Patches:
    text_config = model.config.get_text_config()
    if getattr(text_config, "use_bidirectional_attention", None) == "vision":
        text_config.use_bidirectional_attention = None  # Gemma 4 asks for a mask of images, and there is text alone
    runs_apart = take_apart(model) or attend_each_span(model)
    if is_bitwise and not runs_apart and text_config._attn_implementation not in (NAME, JOINED, APART):
        attend_each_sequence(model)
    keep_latents(model)
    return Patches(runs_apart, bias_by_position(model), carry_states(model))


def carry_states(model: Any) -> bool:
    """Put every stateful layer of a model over the block cache; whether there are any."""
    for module in model.modules():
        for family in (minimax, rwkv, xlstm):
            family.prepare(module)
    stateful = [
        module for module in model.modules() if type(module).__name__ in CLASSES or names_in_forward(module, FUNCTIONS)
    ]
    for number, module in enumerate(stateful):
        if not isinstance(own_forward(module), Mixer):
            module.forward = Mixer(module, number, FUNCTIONS, CLASSES.get(type(module).__name__))
    return bool(stateful)
