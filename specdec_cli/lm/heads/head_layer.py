"""The decoder layer of published draft heads: a Llama or Qwen 3 layer whose attention may read a wider input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.reading import first_line, quiet
from specdec_cli.transfer import sent


@dataclass(slots=True)
class LayerFeed:
    """One sequence's new slots.

    Args:
        keys: [key heads, slots, head size] of all sequences; the layer fills in the new ones.
        values: the same.
        slots: of the sequence's places: a slice, or [places] int64 where they do not lie in one piece.
        places: of the new slots, in order.
        end: how many places may be read, the new ones included.
        visible: [new, end] bool, the places that each new one attends to; None where each sees those before it.
    """

    keys: Tensor
    values: Tensor
    slots: slice | Tensor
    places: Sequence[int]
    end: int
    visible: Tensor | None = None

    def of_layer(self, index: int, num_layers: int) -> LayerFeed:
        """The same for one of several layers, whose heads stand one behind the other."""
        keys, values = (tensor.view(num_layers, -1, *tensor.shape[1:])[index] for tensor in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    @property
    def num_each(self) -> int:
        """New slots of a sequence."""
        return len(self.places)

    def around(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How far before each new slot, a neighbour of the others, each place is, and whether it may be read.

        Returns:
            Distances [new, end] int64, negative behind the slot; and [new, end] bool.
        """
        every = torch.arange(self.end, device=device)
        behind = every[self.places[0] :, None] - every
        return behind, torch.ones_like(behind, dtype=torch.bool)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """File new keys and values [key heads, new, head size]."""
        first, num = self.places[0], len(self.places)
        if isinstance(self.slots, Tensor):
            at: slice | Tensor = self.slots[sent(self.places, torch.int64, keys.device)]
        elif self.places[-1] == first + num - 1:
            at = slice(self.slots.start + first, self.slots.start + first + num)
        else:
            at = sent(self.places, torch.int64, keys.device) + self.slots.start
        self.keys[:, at], self.values[:, at] = keys, values

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [key heads, end, head size]; views where they lie in one piece."""
        if isinstance(self.slots, Tensor):
            at: slice | Tensor = self.slots[: self.end]
        else:
            at = slice(self.slots.start, self.slots.start + self.end)
        return self.keys[:, at], self.values[:, at]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """File the new keys and values; what the new queries find [new, heads * head size].

        Args:
            queries: [heads, new, head size], with their rotary embedding.
            keys: [key heads, new, head size], likewise.
            values: [key heads, new, value size].
        """
        num, visible = len(self.places), self.visible
        self.write(keys, values)
        if visible is None and num > 1:
            visible = torch.ones(num, self.end, dtype=torch.bool, device=queries.device).tril(self.places[0])
        its_keys, its_values = self.read()
        attended = functional.scaled_dot_product_attention(
            queries[None], its_keys[None], its_values[None], visible, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)


class HeadLayer:
    """One decoder layer. Its caller computes what goes into attention and what is added to its output.

    Args:
        config: a transformers configuration of a Llama or a Qwen 3 model.
        weights: the layer's tensors, named as below `layers.0.`.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.epsilon = float(config.rms_norm_eps)
        self._activation = transformers.activations.ACT2FN[config.hidden_act]
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_size = self.value_size = head_size(config)
        device = next(iter(weights.values())).device
        self._rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).to(device)

    @classmethod
    def shapes(cls, config: Any, width: int, start: str = "") -> dict[str, tuple[int, ...]]:
        """The tensors that a layer must have and their shapes, but for the norm before attention.

        Args:
            config: as for the class.
            width: of what attention reads.
            start: before their names.
        """
        hidden, inner = int(config.hidden_size), int(config.intermediate_size)
        shapes = cls.attention_shapes(config, width) | {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "post_attention_layernorm.weight": (hidden,),
        }
        if getattr(config, "mlp_bias", False):
            names = ("gate", "up", "down")
            shapes |= {f"mlp.{name}_proj.bias": shapes[f"mlp.{name}_proj.weight"][:1] for name in names}
        return {start + name: shape for name, shape in shapes.items()}

    @classmethod
    def attention_shapes(cls, config: Any, width: int) -> dict[str, tuple[int, ...]]:
        """The shapes of attention's tensors; arguments as for `shapes`."""
        size = head_size(config)
        queries, keys = int(config.num_attention_heads) * size, int(config.num_key_value_heads) * size
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (int(config.hidden_size), queries),
        }
        if config.model_type == "qwen3":
            shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
        if getattr(config, "attention_bias", False):
            shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in "qkvo"}
        return shapes

    @classmethod
    def cached_numbers(cls, config: Any, num_layers: int) -> int:
        """Numbers that so many layers keep of each token, as keys and values."""
        return 2 * num_layers * int(config.num_key_value_heads) * head_size(config)

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, computed in float32."""
        return rms_norm(hidden, weight, self.epsilon)

    def run(self, residual: Tensor, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The layer's output [n, hidden]: h = residual + attention(inputs); h + mlp(norm(h)).

        Args:
            residual: [n, hidden] of all new slots, sequence after sequence.
            inputs: [n, width] that attention reads.
            positions: [n] int64, for the rotary embedding.
            feeds: the sequences.
        """
        return self.finish(residual, self._attend(inputs, positions, feeds))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [n, hidden] of what attention found: [n, heads * head size] before its projection."""
        hidden = residual + self._linear(attended, "self_attn.o_proj")
        return hidden + self._mlp(self.norm(hidden, self._weights["post_attention_layernorm.weight"]))

    def rotate(self, positions: Tensor, *heads: Tensor) -> list[Tensor]:
        """Queries or keys, each [heads, n, head size], with the rotary embedding of positions [n] int64."""
        cos, sin = self._rotary(heads[0][:1], positions[None])
        return [
            transformers.models.llama.modeling_llama.apply_rotary_pos_emb(head[None], head[None, :0], cos, sin)[0][0]
            for head in heads
        ]

    def remember(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> None:
        """File the keys and values of new slots that give no output; arguments as for `run`."""
        keys, values = (self.heads(inputs, name) for name in ("k", "v"))
        [keys], begin = self.rotate(positions, keys), 0
        for feed in feeds:
            new = slice(begin, begin + len(feed.places))
            feed.write(keys[:, new], values[:, new])
            begin = new.stop

    def _attend(self, inputs: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """Attention's result [n, heads * head size], before its projection."""
        queries, keys, values = self.projected(inputs, positions)
        outputs, begin = [], 0
        for feed in feeds:
            new = slice(begin, begin + len(feed.places))
            outputs.append(feed.attend(queries[:, new], keys[:, new], values[:, new]))
            begin = new.stop
        return torch.cat(outputs)

    def projected(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [heads, n, size] of what attention reads, with their rotary embedding."""
        queries, keys, values = (self.heads(inputs, name) for name in ("q", "k", "v"))
        queries, keys = self.rotate(positions, queries, keys)
        return queries, keys, values

    def heads(self, inputs: Tensor, name: str) -> Tensor:
        """Queries, keys or values [heads, n, head size] before the rotary embedding."""
        projected = self._linear(inputs, f"self_attn.{name}_proj").view(len(inputs), -1, self.head_size)
        weight = self._weights.get(f"self_attn.{name}_norm.weight")
        return (projected if weight is None else self.norm(projected, weight)).transpose(0, 1)

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate = self._activation(self._linear(hidden, "mlp.gate_proj"))
        return self._linear(gate * self._linear(hidden, "mlp.up_proj"), "mlp.down_proj")

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))


def read_layer_config(name: str, kind: Any, content: Mapping[str, Any]) -> Any:
    """The configuration of a draft's layers, as its folder has it.

    Args:
        name: of the draft, for messages.
        kind: transformers' class of it.
        content: its keys.

    Raises:
        RunError: they are not those of such layers.
        UsageError: an activation that is not known.
    """
    try:
        with quiet():
            config = kind.from_dict(dict(content))
            transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    except Exception as error:
        message = f"the configuration of `{name}` is not valid: {first_line(error)}"
        raise RunError(message, "copy or download the draft again") from error
    if config.hidden_act not in transformers.activations.ACT2FN:
        message = f"the layers of `{name}` have the activation `{config.hidden_act}`, which is not supported"
        raise UsageError(message, "choose another draft, or `--draft ngram`")
    return config


def head_size(config: Any) -> int:
    """Numbers in each attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)
