"""The tensors that a published head must have, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.head_files import HeadConfig
from specdec_cli.lm.heads.head_layer import layer_shapes

_HINT = "choose a draft that was made for this target, or `--draft ngram`"
_NOT_READ = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")


def check_shapes(config: HeadConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """See that all tensors that a head needs are there and fit, and no others.

    Args:
        config: the head's.
        shapes: of its tensors, by common names.

    Raises:
        UsageError: one is missing or has another shape,
            or there is one that such a head has not.
    """
    wanted = _eagle3_shapes(config) if config.method == "eagle3" else _eagle_shapes(config)
    for name, shape in wanted.items():
        found = shapes.get(name.rstrip("?"))
        if found is None and not name.endswith("?"):
            raise UsageError(f"the draft head `{config.name}` lacks the tensor `{name}`", "copy or download it again")
        if found is not None and found != shape:
            said = f"the tensor `{name.rstrip('?')}` of `{config.name}` has the shape {_shape(found)}"
            raise UsageError(f"{said}, where {_shape(shape)} is expected", "copy or download the draft again")
    known = {name.rstrip("?") for name in wanted}
    strange = next((name for name in shapes if name not in known and name not in _NOT_READ), None)
    if strange is not None:
        raise UsageError(f"the draft head `{config.name}` has a tensor `{strange}`, which is not supported", _HINT)


def _shape(shape: Any) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _eagle_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """By name; what ends in `?` may be missing."""
    size = int(config.layer.hidden_size)
    shapes = {"fc.weight": (size, 2 * size), "fc.bias?": (size,), "embed_tokens.weight?": (config.vocab_size, size)}
    return shapes | _within_layer(layer_shapes(config.layer, size))


def _eagle3_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """By name; what ends in `?` may be missing."""
    size, vocabulary, drafted = int(config.layer.hidden_size), config.vocab_size, config.draft_vocab_size
    joined = config.num_taps * config.target_hidden_size
    layer = layer_shapes(config.layer, 2 * size) | {"input_layernorm.weight": (size,), "hidden_norm.weight": (size,)}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, joined), "norm.weight": (size,)}
    own = "" if size != config.target_hidden_size else "?"
    shapes[f"embed_tokens.weight{own}"] = (vocabulary, size)
    has_maps = drafted != vocabulary
    shapes["lm_head.weight" if has_maps or own == "" else "lm_head.weight?"] = (drafted, size)
    shapes["d2t" if has_maps else "d2t?"] = (drafted,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (joined,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(config.num_taps)}
    return shapes | _within_layer(layer)


def _within_layer(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"layers.0.{name}": shape for name, shape in shapes.items()}
