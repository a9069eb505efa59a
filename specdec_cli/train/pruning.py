"""A smaller model from a language model: fewer layers, and fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.errors import UsageError
from specdec_cli.lm.forward.taps import decoder_layers
from specdec_cli.train.language_model import cap_scores

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layer_rope_theta")
"""Keys of configurations that have a value for each layer."""


def keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Drop the decoder layers of a transformers model that are not named, and number the others again.

    Raises:
        UsageError: its layers stand in no list.
    """
    whole = decoder_layers(model)
    kept = [whole[i] for i in layers]
    decoder = model.get_decoder()
    name = next(name for name, module in decoder.named_children() if module is whole)
    setattr(decoder, name, nn.ModuleList(kept))
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    for name in _BY_LAYER:
        if getattr(config, name, None) is not None:
            setattr(config, name, [getattr(config, name)[i] for i in layers])


def keep_tokens(model: Any, ids: Tensor) -> None:
    """Drop all tokens from a transformers model but those named, whose numbers become their places among these.

    Args:
        model: of transformers.
        ids: the tokens [D] int64 that stay.
    """
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = [layer.weight.detach()[ids] for layer in layers]
    model.resize_token_embeddings(len(ids), mean_resizing=False)
    with torch.no_grad():
        for layer, kept in zip((model.get_input_embeddings(), model.get_output_embeddings()), rows, strict=True):
            layer.weight.copy_(kept)
    config = model.config.get_text_config()
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None  # their numbers are the target's


def check_layers(skeleton: Any, layers: Sequence[int]) -> None:
    """Refuse a model whose configuration cannot describe some of its layers alone.

    Args:
        skeleton: the whole model of transformers on the meta device, which loses its other layers.
        layers: that stay.

    Raises:
        UsageError: its layers stand in no list, or differ in a way that the configuration says by their numbers.
    """
    keep_layers(skeleton, layers)
    config = deepcopy(skeleton.config)
    cap_scores(config)
    with torch.device(skeleton.device):
        described = type(skeleton)(config)
    shapes, wanted = (
        {name: tensor.shape for name, tensor in model.state_dict().items()} for model in (described, skeleton)
    )
    if shapes != wanted:
        message = (
            f"the configuration of a `{config.model_type}` model cannot say that it has layers {list(layers)} alone"
        )
        raise UsageError(message, "begin with a smaller model: --start-from MODEL")
