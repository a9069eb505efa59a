"""PARD-2 drafts (arXiv 2605.08632): a language model whose tokens come with the target's states of the position before.

Row t reads the token at position t and the projected states of position t - 1, zeros at the text's beginning. Mask rows
behind the last token repeat its states. So the rows before the last token are what the cache keeps; the last token and
the masks are read again in every step.

Source: AMD-AGI/PARD (`pard2_infer.py`). `config.json` has `spd_type: pard2` and the layers by their places among the
hidden states of transformers: -1 is the state behind the final norm, -8 the output of the eighth layer from the end.
The projection is in `warp_model.bin` or among the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head import PublishedHead
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed, read_layer_config
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.layer_stack import positions_of
from specdec_cli.lm.heads.published import AGAIN, NONE_ELSE, OTHER, PublishedDraft, listed_layers

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.heads.recorded_feed import RecordedFeed

_CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pard2Draft(PublishedDraft):
    """A PARD-2 draft by its folder.

    Args:
        layer: transformers configuration of its language model.
        mask_token: whose rows give the second drafted token and those behind it.
        places: of the hidden states that it reads, as its configuration has them.
        joined_size: width of these states side by side.
        scale: of the projected states.
        has_bias: whether the projection has one.
    """

    beside: ClassVar[str | None] = "target_proj."

    layer: Any
    mask_token: int
    places: tuple[int, ...]
    joined_size: int
    scale: float
    has_bias: bool

    def __str__(self) -> str:
        """For people: what it reads, and what it can draft."""
        named = [
            "the final hidden states" if tap == "final" else f"the output of layer {tap}" for tap in self.taps or ()
        ]
        reads = ", ".join(named) or "hidden states"
        vocabulary = f"{self.layer.vocab_size} tokens"
        return (
            f"PARD-2 draft: reads {reads}; drafts all tokens in one pass, by mask token {self.mask_token}; {vocabulary}"
        )

    def usual_taps(self, num_layers: int) -> tuple[Tap, ...]:
        """The states that its configuration names, counted from the target's first layer."""
        return tuple(_tap(place, num_layers, self.name) for place in self.places)

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """By the width of the hidden states; tokenizers are compared, and what only the draft scores is cut off."""
        if self.joined_size != len(self.places) * hidden_size:
            message = (
                f"the draft `{self.name}` reads {len(self.places)} hidden states of {self.joined_size} numbers in all"
            )
            raise UsageError(f"{message}, and those of `{target}` have {hidden_size} each", OTHER)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of every layer."""
        return HeadLayer.cached_numbers(self.layer, int(self.layer.num_hidden_layers))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the language model and the projection."""
        size, vocabulary = int(self.layer.hidden_size), int(self.layer.vocab_size)
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (vocabulary, size),
            "norm.weight": (size,),
            "lm_head.weight?" if self.layer.tie_word_embeddings else "lm_head.weight": (vocabulary, size),
            "target_proj.weight": (size, self.joined_size),
            "target_proj.bias" if self.has_bias else "target_proj.bias?": (size,),
        }
        for i in range(int(self.layer.num_hidden_layers)):
            shapes |= HeadLayer.shapes(self.layer, size, f"layers.{i}.")
            shapes[f"layers.{i}.input_layernorm.weight"] = (size,)
        return shapes

    @staticmethod
    def common_name(name: str) -> str:
        """Without what wraps the language model."""
        return name.removeprefix("base_model.").removeprefix("model.")


def _tap(place: int, num_layers: int, name: str) -> Tap:
    """The tap of a place among transformers' hidden states: the embedding, each layer's output, the last one normed."""
    at = place if place >= 0 else num_layers + 1 + place
    if not 1 <= at <= num_layers:
        message = f"the draft `{name}` reads the hidden state `{place}`, and its target has {num_layers} layers"
        raise UsageError(message, OTHER)
    return "final" if at == num_layers else at - 1


def read(name: str, source: DraftFolder) -> Pard2Draft:
    """The PARD-2 draft in a folder.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    content = source.content
    kind, mask = content.get("model_type"), content.get("pard_token")
    if str(kind) not in _CONFIGS:
        raise UsageError(f"the PARD-2 draft `{name}` is built of `{kind}` layers, which are not supported", NONE_ELSE)
    places = listed_layers(name, "pard2_target_layers", content.get("pard2_target_layers"))
    layer = read_layer_config(name, getattr(transformers, _CONFIGS[str(kind)]), content)
    sizes = (source.whole_number(content, key) for key in ("pard2_target_dim", "pard_target_dim"))
    joined_size = next(filter(None, sizes), 4096)
    try:
        scale = float(content.get("pard2_scale", content.get("pard_scale", content.get("feat_scale", 0.02))))
        has_bias = bool(content.get("pard2_proj_bias", content.get("proj_bias", False)))
    except Exception as error:
        raise RunError(f"the configuration of `{name}` is not valid: {first_line(error)}", AGAIN) from error
    if type(mask) is not int or not 0 <= mask < layer.vocab_size:
        message = f"`pard_token` of the PARD-2 draft `{name}` is `{mask}`, and its `vocab_size` is `{layer.vocab_size}`"
        raise UsageError(message, AGAIN)
    return Pard2Draft(
        name=name,
        source=source,
        taps=None,
        layer=layer,
        mask_token=mask,
        places=tuple(places),
        joined_size=joined_size,
        scale=scale,
        has_bias=has_bias,
    )


class Pard2Head(PublishedHead):
    """A PARD-2 draft: a row reads a token and the target's states before it."""

    draft: Pard2Draft
    reads_before = is_one_pass = True

    def __init__(self, draft: Pard2Draft, target: LM) -> None:
        super().__init__(draft, target, draft.layer, "target_proj")
        self.vocab_size = int(draft.layer.vocab_size)

    def num_rows(self, depth: int) -> int:
        """The last token's row and the masks'."""
        return depth

    def mix(self, features: Tensor) -> Tensor:
        """The projected states [n, hidden], scaled."""
        return self._join(features.flatten(1)).to(features.dtype) * self.draft.scale

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The last layer's output of rows."""
        return self.layers.run(embedded + feature, positions, feeds)

    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, V of the draft] float32 of the last layer's output."""
        normalized = self.norm(output, "norm")
        if self._head is None:
            return functional.linear(normalized, self.weights["embed_tokens.weight"]).float()
        return self.scores(normalized)

    def ahead(self, sequences: HeadSequences, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """Logits of each last token's row and of the masks behind it."""
        depths = [depth for _, _, depth in ends]
        feeds = [sequences.new_rows(handle, depth) for handle, _, depth in ends]
        tokens = [
            row_token for _, token, depth in ends for row_token in (token, *[self.draft.mask_token] * (depth - 1))
        ]
        states = [sequences.cache.of(handle).outputs[()].expand(depth, -1) for handle, _, depth in ends]
        embedded = self.embed(tokens)
        output = self.run(embedded, torch.cat(states), positions_of(feeds, embedded.device), feeds)
        return Ahead(list(torch.split(self.logits(output), depths)))

    def recorded_ahead(
        self, depth: int, anchors: Tensor, ends: Tensor, feed: Callable[[int], RecordedFeed]
    ) -> RecordedAhead:
        """As `ahead`."""
        rows = feed(depth)
        tokens = torch.cat([anchors[:, None], anchors.new_full((len(anchors), depth - 1), self.draft.mask_token)], 1)
        output = self.run(self.embed(tokens.flatten()), ends.repeat_interleave(depth, 0), rows.positions, [rows])
        return RecordedAhead(self.logits(output).view(len(anchors), depth, -1))


def sequences(draft: Pard2Draft, target: LM, num_tokens: int) -> HeadSequences:
    """The draft's sequences, its weights loaded.

    Raises:
        UsageError: it scores fewer tokens than the target's tokenizer has, or `layers` names other states.
    """
    if len(draft.taps or ()) != len(draft.places):
        message = f"the draft `{draft.name}` reads {len(draft.places)} hidden states"
        raise UsageError(f"{message}, and `layers` names {len(draft.taps or ())}", "leave `layers` out")
    head = Pard2Head(draft, target)
    if head.vocab_size < num_tokens:
        message = f"the draft `{draft.name}` scores {head.vocab_size} tokens, the target has {num_tokens}"
        raise UsageError(message, "choose a draft with the target's tokenizer")
    return HeadSequences([head], target, draft.name, len(draft.places))
