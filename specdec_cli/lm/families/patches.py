"""Replace what a model's family keeps from running on a block cache through transformers' interfaces alone.

A file's `FUNCTIONS` replace what forwards call by these names, its `CLASSES` the forwards of whole modules.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_cli.errors import UsageError
from specdec_cli.lm.families import delta_net, inkling, mamba, qwen4
from specdec_cli.lm.families.latent_attention import keep_latents
from specdec_cli.lm.families.mixer import Function, Mixer
from specdec_cli.lm.families.renamed import names_in_forward
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.forward.apart import take_apart
from specdec_cli.lm.forward.packed import PackedForward, Patches, not_running
from specdec_cli.lm.kernels.replaced import own_forward

FUNCTIONS: dict[str, Function] = {**mamba.FUNCTIONS, **delta_net.FUNCTIONS}
CLASSES: dict[str, Function] = {**inkling.CLASSES, **qwen4.CLASSES}


def packed_forward(model: Any, name: str) -> PackedForward:
    """The forward of a patched model over rows of several sequences; of fake tensors too.

    Args:
        model: a causal LM, its attention set as `lm.load` does.
        name: the model's, for messages.

    Raises:
        UsageError: a patch of its family does not fit the installed transformers.
    """
    try:
        patches = _patch(model)
    except UsageError:
        raise
    except Exception as error:
        raise not_running(model, name, first_line(error)) from error
    is_bitwise = model.device.type == "cpu" and model.dtype != torch.float32
    return PackedForward(model, name, patches, is_bitwise)


def _patch(model: Any) -> Patches:
    text_config = model.config.get_text_config()
    if getattr(text_config, "use_bidirectional_attention", None) == "vision":
        text_config.use_bidirectional_attention = None  # Gemma 4 asks for a mask of images, and there is text alone
    keep_latents(model)
    return Patches(take_apart(model), carry_states(model))


def carry_states(model: Any) -> bool:
    """Put every stateful layer of a model over the block cache; whether there are any."""
    stateful = [
        module for module in model.modules() if type(module).__name__ in CLASSES or names_in_forward(module, FUNCTIONS)
    ]
    for number, module in enumerate(stateful):
        if not isinstance(own_forward(module), Mixer):
            module.forward = Mixer(module, number, FUNCTIONS, CLASSES.get(type(module).__name__))
    return bool(stateful)
