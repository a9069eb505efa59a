"""A smaller model from a language model: fewer layers, and narrower ones that keep what is most active over some texts.

Transformers makes the narrower model from a configuration with smaller widths, and it gets the weights of the
hidden channels, feed-forward units and attention heads that stay. Their importance is that of Minitron (Muralidharan
et al. 2024, arXiv 2407.14679, section 2.2): the mean size of an activation over each text, and the L2 norm of these
means over the texts. Channels sum it over all norms of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specdec_cli.errors import UsageError
from specdec_cli.lm.forward.taps import decoder_layers
from specdec_cli.train.language_model import cap_scores
from specdec_cli.train.samples import Sample
from specdec_cli.train.widths import Widths

_NORMS = ("norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
          "post_feedforward_layernorm")  # fmt: skip
_AXES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(_NORMS, ("channels",)),
    **dict.fromkeys(("embed_tokens", "lm_head"), (None, "channels")),
    **dict.fromkeys(("q_proj",), ("heads", "channels")),
    **dict.fromkeys(("k_proj", "v_proj"), ("groups", "channels")),
    "o_proj": ("channels", "heads"),
    "q_norm": ("heads",),
    "k_norm": ("groups",),
    **dict.fromkeys(("gate_proj", "up_proj"), ("units", "channels")),
    "down_proj": ("channels", "units"),
}
"""Of each module's weight, what its dimensions count; a bias counts what the first one does. A group of query heads
shares a key/value head."""

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layer_rope_theta")
"""Keys of configurations that have a value for each layer."""


@dataclass(slots=True)
class Importance:
    """How active the parts of a model are over some texts; zero before the first one.

    Args:
        channels: [hidden] of the hidden states.
        units: of each layer [units].
        heads: of each layer [query heads].
    """

    channels: Tensor
    units: list[Tensor]
    heads: list[Tensor]

    def of_layers(self, layers: Sequence[int]) -> Importance:
        """Importance in a model that has these layers alone."""
        return Importance(self.channels, [self.units[i] for i in layers], [self.heads[i] for i in layers])


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


def importance_of(model: Any, samples: Sequence[Sample]) -> Importance:
    """Measure how active the parts of a model are."""
    widths, layers = Widths.of(model.config.get_text_config()), decoder_layers(model)
    norms, units, heads = (_Means() for _ in range(3))
    hooks = [
        module.register_forward_hook(norms.output_hook(name))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NORMS and _width_of(module) == widths.hidden_size
    ]
    for number, layer in enumerate(layers):
        for means, module in ((units, _down(layer)), (heads, _output(layer))):
            if module is not None:
                hooks.append(module.register_forward_pre_hook(means.input_hook(number, means is heads, widths)))
    try:
        with torch.no_grad():
            for sample in samples:
                model(input_ids=torch.tensor([list(sample.tokens)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    device = model.device
    return Importance(
        sum((square.sqrt() for square in norms.sums.values()), torch.zeros(widths.hidden_size, device=device)),
        [units.sums.get(i, torch.zeros(widths.intermediate_size or 0, device=device)) for i in range(len(layers))],
        [heads.sums.get(i, torch.zeros(widths.num_attention_heads, device=device)) for i in range(len(layers))],
    )


@dataclass(slots=True)
class _Means:
    """Sums over texts of the squared means of activations, by place.

    Attributes:
        sums: at each place [parts].
    """

    sums: dict[Any, Tensor] = field(default_factory=dict)

    def output_hook(self, place: Any) -> Callable[..., None]:
        """Hook for a module whose outputs [1, N, parts] are the activations."""
        return lambda _, __, output: self._add(place, output[0].float().abs())

    def input_hook(self, place: Any, is_of_heads: bool, widths: Widths) -> Callable[..., None]:
        """Hook for a module that reads activations [1, N, parts], or those of heads [1, N, heads * head size]."""

        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2).float()
            self._add(place, rows.view(len(rows), -1, widths.head_dim).norm(dim=-1) if is_of_heads else rows.abs())

        return hook

    def _add(self, place: Any, sizes: Tensor) -> None:
        self.sums[place] = self.sums.get(place, 0) + sizes.mean(0) ** 2


def check_pruning(skeleton: Any, layers: Sequence[int], widths: Widths | None) -> None:
    """Refuse a model whose layout is unknown, or sizes that it cannot have.

    Args:
        skeleton: the whole model of transformers on the meta device, which loses its other layers.
        layers: that stay.
        widths: wanted; None for the model's own.

    Raises:
        UsageError: it cannot be pruned.
    """
    kind = skeleton.config.model_type
    keep_layers(skeleton, layers)
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    if {name: tensor.shape for name, tensor in _empty(skeleton, None).state_dict().items()} != shapes:
        message = f"the configuration of a `{kind}` model cannot say that it has layers {list(layers)} alone"
        raise UsageError(message, "begin with a smaller model: --start-from MODEL")
    if widths is not None:
        _check_narrowing(skeleton, widths)


def _check_narrowing(skeleton: Any, widths: Widths) -> None:
    kind, whole = skeleton.config.model_type, Widths.of(skeleton.config.get_text_config())
    for layer in decoder_layers(skeleton):
        if widths.intermediate_size != whole.intermediate_size and _down(layer) is None:
            message = f"the feed-forward layers of a `{kind}` model cannot be made narrower"
            raise UsageError(message, "leave --intermediate-size out")
        if widths.num_attention_heads != whole.num_attention_heads and _output(layer) is None:
            raise UsageError(f"the attention of a `{kind}` model cannot lose heads", "leave --num-attention-heads out")
    shapes = {name: tensor.shape for name, tensor in _empty(skeleton, widths).state_dict().items()}
    is_strict = widths.without_units != whole.without_units
    for name, tensor in skeleton.state_dict().items():
        axes = _axes(name, tensor, whole)
        shape = tensor.shape if axes is None else _size(tensor.shape, axes, widths)
        if shapes.get(name) != shape or (is_strict and axes is None):
            message = f"a `{kind}` model cannot be made narrower: the layout of `{name}` is unknown"
            raise UsageError(message, "leave the narrower sizes out, and prune layers with --num-layers")


def narrowed(model: Any, widths: Widths, importance: Importance) -> Any:
    """The model with these widths, which keeps the most important parts in their order."""
    whole = Widths.of(model.config.get_text_config())
    channels = _largest(importance.channels, widths.hidden_size)
    kept = [
        _Kept.of(channels, units, heads, whole, widths)
        for units, heads in zip(importance.units, importance.heads, strict=True)
    ]
    decoder = next(name for name, module in model.named_modules() if module is decoder_layers(model))
    made, cut = _empty(model, widths), {}
    for name, tensor in model.state_dict().items():
        inside = name.removeprefix(f"{decoder}.")
        places = kept[int(inside.split(".")[0]) if inside != name else 0]
        for dim, axis in enumerate(_axes(name, tensor, whole) or ()):
            if axis is not None:
                tensor = tensor.index_select(dim, getattr(places, axis))
        cut[name] = tensor
    made.load_state_dict(cut)
    made.tie_weights()
    made.generation_config = model.generation_config
    return made.train(model.training)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Indices, ascending, of what stays of a layer: of channels, units, and rows of query and key/value heads."""

    channels: Tensor
    units: Tensor
    heads: Tensor
    groups: Tensor

    @classmethod
    def of(cls, channels: Tensor, units: Tensor, heads: Tensor, whole: Widths, widths: Widths) -> _Kept:
        """The largest units; the groups whose largest heads sum to most, and these heads.

        Args:
            channels: that stay in all layers.
            units: their importance.
            heads: their importance.
            whole: the model's widths.
            widths: wanted.
        """
        grouped = heads.view(whole.num_key_value_heads, -1)
        best = [_largest(group, widths.heads_of_group) for group in grouped]
        sums = torch.stack([group[its].sum() for group, its in zip(grouped, best, strict=True)])
        groups = _largest(sums, widths.num_key_value_heads)
        queries = (torch.stack(best)[groups] + groups[:, None] * whole.heads_of_group).flatten()
        rows = torch.arange(whole.head_dim, device=heads.device)
        return cls(
            channels,
            _largest(units, widths.intermediate_size or 0),
            (queries[:, None] * whole.head_dim + rows).flatten(),
            (groups[:, None] * whole.head_dim + rows).flatten(),
        )


def _largest(values: Tensor, num: int) -> Tensor:
    """Indices of the largest values, ascending; the first of equal ones."""
    return values.argsort(descending=True, stable=True)[:num].sort().values


def _axes(name: str, weight: Tensor, whole: Widths) -> tuple[str | None, ...] | None:
    """The axis of each dimension of a weight, None where that never shrinks; None for a weight of unknown layout."""
    module, _, kind = name.rpartition(".")
    axes = _AXES.get(module.rpartition(".")[2])
    if axes is None or (kind, weight.dim()) not in (("weight", len(axes)), ("bias", 1)):
        return None
    sizes = whole.sizes
    if weight.dim() == 1 and "norm" in module and weight.shape[0] == whole.head_dim != sizes[str(axes[0])]:
        return (None,)  # a norm over each head alone
    axes = axes[: weight.dim()]
    fits = all(axis is None or size == sizes[axis] for axis, size in zip(axes, weight.shape, strict=True))
    return axes if fits else None


def _size(shape: torch.Size, axes: Sequence[str | None], widths: Widths) -> torch.Size:
    return torch.Size(size if axis is None else widths.sizes[axis] for size, axis in zip(shape, axes, strict=True))


def _empty(model: Any, widths: Widths | None) -> Any:
    """A model of the same class, with other widths if there are any, where the model is, and with any weights.

    Raises:
        UsageError: the class has no such widths.
    """
    config = deepcopy(model.config)
    cap_scores(config)
    if widths is not None:
        widths.write(config.get_text_config())
    with torch.device(model.device):
        return type(model)(config).to(model.dtype)


def _down(layer: Any) -> Any:
    """The last projection of a gated feed-forward layer; None for other layers."""
    parts = [getattr(getattr(layer, "mlp", None), name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return parts[-1] if all(isinstance(part, nn.Linear) for part in parts) else None


def _output(layer: Any) -> Any:
    """The output projection of attention with separate query, key and value projections; None for other layers."""
    attention = getattr(layer, "self_attn", None)
    parts = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    return parts[-1] if all(isinstance(part, nn.Linear) for part in parts) else None


def _width_of(norm: Any) -> int | None:
    weight = getattr(norm, "weight", None)
    return None if weight is None else int(weight.shape[-1])
