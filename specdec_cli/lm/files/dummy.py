"""Models without weights: any architecture from its configuration alone, with random numbers, and shapes by name.

A shape (`shape:llama-2-70b`, `shape:llama-2-70b?layers=2`) is a published configuration that comes with this package;
where its numbers are from stands in its file. What a model of random numbers says means nothing, what it costs does.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.backend_tokenizer import BackendTokenizer
from specdec_cli.lm.files.classes import auto_class_of
from specdec_cli.lm.files.names import SHAPE, SHAPES, check_own_name
from specdec_cli.lm.machine.device_memory import check_room

_NUM_NUMBERS = (1 << 20) + 7  # prime, so that no two rows of a matrix are alike


def is_dummy(name: str, load_format: str) -> bool:
    """Whether a model's weights are random numbers: asked for, or a shape, which has no others."""
    return load_format == "dummy" or name.startswith(SHAPE)


def shape_folder(name: str) -> Path:
    """The folder with a shape's configuration.

    Raises:
        UsageError: there is no such shape.
    """
    check_own_name(name)
    return SHAPES / name.removeprefix(SHAPE).partition("?")[0]


def shape_changes(name: str) -> dict[str, int]:
    """Changes to a shape's configuration by its name: `?layers=N` keeps N layers.

    Raises:
        UsageError: something else stands behind the question mark.
    """
    _, asks, message = name.partition("?") if name.startswith(SHAPE) else (name, "", "")
    layers = re.fullmatch(r"layers=([1-9]\d{0,3})", message)
    if asks and layers is None:
        raise UsageError(f"`{message}` of `{name}` is not layers=N", f"for example `{SHAPE}llama-2-70b?layers=2`")
    return {"num_hidden_layers": int(layers[1])} if layers else {}


def on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model on the meta device: every size, no memory."""
    with torch.device("meta"):
        return auto_class_of(config).from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )


def num_parameters(model: Any) -> int:
    """Weights of a model, each counted once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def build(
    name: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool,
) -> Any:
    """The transformers model with random weights, made where and as they stay; equal configurations get equal ones.

    Raises:
        RunError: there is no memory for the weights.
    """
    weight_bytes = num_parameters(on_meta(config, dtype, trust_remote_code)) * dtype.itemsize
    hint = f"choose a smaller model or dtype, or fewer layers: `{SHAPE}llama-2-70b?layers=2`"
    check_room(name, weight_bytes, str(dtype).removeprefix("torch."), device, hint)
    from transformers.initialization import no_init_weights

    with no_init_weights(), device:
        model = auto_class_of(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    fill(model)
    return model


@torch.no_grad()
def fill(model: Any) -> None:
    """Random matrices that keep the size of what they multiply, norms of one, biases of zero; whatever the model.

    One row of normal numbers is laid over all of them, each matrix from another place on, as fast as memory is
    written.
    """
    numbers = torch.randn(_NUM_NUMBERS, generator=torch.Generator().manual_seed(0))
    for place, (name, parameter) in enumerate({id(p): (n, p) for n, p in model.named_parameters()}.values()):
        flat = parameter.data.view(-1)
        if parameter.dim() < 2:
            flat.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        scaled = numbers.roll(-7919 * place) * parameter.shape[-1] ** -0.5
        scaled = scaled.to(flat.device, flat.dtype)
        for first in range(0, len(flat), _NUM_NUMBERS):
            piece = flat[first : first + _NUM_NUMBERS]
            piece.copy_(scaled[: len(piece)])


class StandIn(BackendTokenizer):
    """The tokenizer of a model that has none."""

    is_stand_in = True


def stand_in_tokenizer(config: Any) -> StandIn:
    """A tokenizer for a configuration that has none: text becomes its bytes, every further token is `<its id>`.

    It is named `dummy`. Bytes for which a small vocabulary has no room become token 0.
    """
    import tokenizers

    text = config.get_text_config()
    num_tokens = min(int(text.vocab_size), int(getattr(text, "num_tokenizer_tokens", text.vocab_size)))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter not in "ĠĊ", letter))
    known = [*alphabet, *(f"<{i}>" for i in range(len(alphabet), num_tokens))][:num_tokens]
    model = tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(known)},
        merges=[],
        unk_token=known[0] if num_tokens < len(alphabet) else None,
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return StandIn(made, {}, "dummy")
