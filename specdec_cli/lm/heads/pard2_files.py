"""Published folders of PARD-2 drafts (arXiv 2605.08632): a PARD draft and a projection of its target's hidden states.

Source: AMD-AGI/PARD (`pard2_infer.py`). `config.json` has `spd_type: pard2` and the layers by their places among the
hidden states of transformers: -1 is the state behind the final norm, -8 the output of the eighth layer from the end.
The projection is in `warp_model.bin` or among the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import transformers

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.head_layer import head_size, layer_shapes, read_layer_config
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

_CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
_AGAIN = "copy or download the draft again"


@dataclass(frozen=True, slots=True)
class Pard2Config(PublishedDraft):
    """The configuration of a PARD-2 draft.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        method: `pard2`.
        layer: transformers configuration of its language model.
        mask_token: whose rows give the second drafted token and those behind it.
        places: of the hidden states that it reads, as its configuration has them.
        target_size: width of these states side by side.
        scale: of the projected states.
        has_bias: whether the projection has one.
        taps: the same states, counted from the first layer: `final`, or the number of the layer whose output it is;
            none until the target is known.
    """

    beside: ClassVar[tuple[str, str]] = ("warp_model.bin", "target_proj.")

    layer: Any
    mask_token: int
    places: tuple[int, ...]
    target_size: int
    scale: float
    has_bias: bool
    taps: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people."""
        named = [f"the output of layer {one}" if one.isdecimal() else "the final hidden states" for one in self.taps]
        reads = ", ".join(named) or "hidden states"
        vocabulary = f"{self.layer.vocab_size} tokens"
        return (
            f"PARD-2 draft: reads {reads}; drafts all tokens in one pass, by mask token {self.mask_token}; {vocabulary}"
        )

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> Pard2Config:
        """With its layers counted from the target's first one."""
        if options.get("layers") is not None:
            return replace(self, taps=tuple(str(options["layers"]).split("-")))
        return replace(self, taps=tuple(_tap(place, num_layers(), self.name) for place in self.places))

    def options(self) -> dict[str, Any]:
        """The layers."""
        return {"layers": "-".join(self.taps)} if self.taps else {}

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """By the width of the hidden states; tokenizers are compared, and what only the draft scores is cut off."""
        if self.target_size != len(self.places) * hidden_size:
            said = (
                f"the draft `{self.name}` reads {len(self.places)} hidden states of {self.target_size} numbers in all"
            )
            hint = "choose a draft that was made for this target"
            raise UsageError(f"{said}, and those of `{target}` have {hidden_size} each", hint)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of every layer."""
        return 2 * int(self.layer.num_hidden_layers) * int(self.layer.num_key_value_heads) * head_size(self.layer)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the language model and the projection."""
        size, vocabulary = int(self.layer.hidden_size), int(self.layer.vocab_size)
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (vocabulary, size),
            "norm.weight": (size,),
            "lm_head.weight?" if self.layer.tie_word_embeddings else "lm_head.weight": (vocabulary, size),
            "target_proj.weight": (size, self.target_size),
            "target_proj.bias" if self.has_bias else "target_proj.bias?": (size,),
        }
        each = layer_shapes(self.layer, size) | {"input_layernorm.weight": (size,)}
        for i in range(int(self.layer.num_hidden_layers)):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in each.items()}
        return shapes

    @staticmethod
    def common_name(name: str) -> str:
        """Without what wraps the language model."""
        return name.removeprefix("base_model.").removeprefix("model.")


def _tap(place: int, num_layers: int, name: str) -> str:
    """The tap of a place among transformers' hidden states: the embedding, each layer's output, the last one normed."""
    at = place if place >= 0 else num_layers + 1 + place
    if not 1 <= at <= num_layers:
        raise UsageError(
            f"the draft `{name}` reads the hidden state `{place}`, and its target has {num_layers} layers",
            "choose a draft that was made for this target",
        )
    return "final" if at == num_layers else str(at - 1)


def read_pard2_config(name: str, folder: Path, content: dict[str, Any]) -> Pard2Config:
    """The configuration of a folder that holds a PARD-2 draft.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    kind, mask, places = content.get("model_type"), content.get("pard_token"), content.get("pard2_target_layers")
    if str(kind) not in _CONFIGS:
        said = f"the PARD-2 draft `{name}` is built of `{kind}` layers, which are not supported"
        raise UsageError(said, "choose another draft, or `--draft ngram`")
    if not isinstance(places, list) or not places or not all(type(one) is int for one in places):
        raise UsageError(f"`pard2_target_layers` of `{name}` is no list of layers: `{places}`", _AGAIN)
    layer = read_layer_config(name, getattr(transformers, _CONFIGS[str(kind)]), content)
    try:
        target_size = int(content.get("pard2_target_dim") or content.get("pard_target_dim") or 4096)
        scale = content.get("pard2_scale", content.get("pard_scale", content.get("feat_scale", 0.02)))
        has_bias = bool(content.get("pard2_proj_bias", content.get("proj_bias", False)))
        scale = float(scale)
    except Exception as error:
        raise RunError(f"the configuration of `{name}` is not valid: {first_line(error)}", _AGAIN) from error
    if type(mask) is not int or not 0 <= mask < layer.vocab_size:
        said = f"`pard_token` of the PARD-2 draft `{name}` is `{mask}`, and its `vocab_size` is `{layer.vocab_size}`"
        raise UsageError(said, _AGAIN)
    return Pard2Config(name, folder, "pard2", layer, mask, tuple(places), target_size, scale, has_bias)


FORMAT = DraftFormat(
    "PARD-2 draft",
    ("pard2",),
    lambda folder, content: content.get("spd_type") == "pard2" or content.get("pard2") is True,
    read_pard2_config,
)
