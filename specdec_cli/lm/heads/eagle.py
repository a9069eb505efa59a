"""EAGLE heads (Li et al. 2024, arXiv 2401.15077; EAGLE-3: 2503.01840) and P-EAGLE's (2602.01469), as published.

One decoder layer, seldom more, on the target's hidden states. Slot t pairs the states of position t with the token at
position t + 1, and predicts the token at t + 2. The first drafted token follows from the target's own states; each
further one from the head's own output in their stead, or from a mask (P-EAGLE).

Sources: SafeAILab/EAGLE (`cnets.py`, `cnets1.py`), the speculators library (`models/eagle3`), SpecForge's and NVIDIA
ModelOpt's exports. The same layers have two numbers: the top-level key `eagle_aux_hidden_state_layer_ids` names the
layer that a state enters, the one within `eagle_config` the layer that it leaves. Taps are those that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.files.lengths import follows_length
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head import PublishedHead
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed, read_layer_config
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.head_tensors import drafted_size
from specdec_cli.lm.heads.layer_stack import TorchStack
from specdec_cli.lm.heads.published import (
    AGAIN,
    NONE_ELSE,
    PublishedDraft,
    check_has_usual_layers,
    listed_layers,
    vocabulary_shapes,
)

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack
    from specdec_cli.lm.heads.recorded_feed import RecordedFeed

_CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "deepseek_v3": "DeepseekV3Config"}
_LATENT_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_MASKS = ("mask_token_id", "ptd_token_id")
_ALIASES = {
    "hidden_norm.weight": "layers.0.hidden_norm.weight",
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleDraft(PublishedDraft):
    """An EAGLE head by its folder.

    Args:
        layer: transformers configuration of its decoder layers.
        file_format: who writes such folders: `official` or `speculators` with its version.
        num_layers: how many these are.
        norm_before_residual: the normalized feature is what attention's output is added to.
        norm_before_fc: the joined states are normalized before they are projected.
        fc_norm: each layer's states are normalized before they are joined.
        norm_output: the next draft step reads the normalized output.
        mask_token: stands for tokens that are not drafted yet (P-EAGLE); None for other heads.
    """

    layer: Any
    file_format: str = "official"
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None

    @property
    def num_taps(self) -> int:
        """Hidden states that it reads of each position."""
        return 3 if self.taps is None else len(self.taps)

    @property
    def layer_type(self) -> type[HeadLayer]:
        """Of its decoder layers, in torch's operators."""
        if self.layer.model_type != "deepseek_v3":
            return HeadLayer
        from specdec_cli.lm.heads.latent_layer import LatentLayer  # its model's code is imported by few

        return LatentLayer

    @property
    def kv_numbers(self) -> int:
        """Of its layers."""
        return self.layer_type.cached_numbers(self.layer, self.num_layers)

    def __str__(self) -> str:
        """For people: what it is, what it reads, and what it can draft."""
        kind = self.source.kind.what.partition(" ")[2]
        kind = kind if self.file_format == "official" else f"{kind}, {self.file_format} format"
        return f"{kind}: reads {self.reading}; drafts {self.draft_vocab_size} of {self.vocab_size} tokens"

    def usual_taps(self, num_layers: int) -> tuple[Tap, ...]:
        """The states entering layers 2, L//2 and L-3."""
        check_has_usual_layers(self.name, num_layers)
        return default_layers(num_layers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of EAGLE's tensors, or EAGLE-3's and P-EAGLE's."""
        size = int(self.layer.hidden_size)
        if self.method == "eagle":
            table: tuple[int, ...] = (self.vocab_size or 0, size)
            shapes = {"fc.weight": (size, 2 * size), "fc.bias?": (size,), "embed_tokens.weight?": table}
            return shapes | self.layer_type.shapes(self.layer, size, "layers.0.")
        joined = self.num_taps * (self.target_hidden_size or 0)
        shapes = {"fc.weight": (size, joined), "norm.weight": (size,)} | vocabulary_shapes(self, size)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (joined,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size or 0,) for i in range(self.num_taps)}
        if self.mask_token is not None:
            shapes["mask_hidden"] = (1, 1, joined)
        for i in range(self.num_layers):
            shapes |= self.layer_type.shapes(self.layer, size if i else 2 * size, f"layers.{i}.")
            shapes[f"layers.{i}.input_layernorm.weight"] = (size,)
        return shapes | {"layers.0.hidden_norm.weight": (size,)}

    @staticmethod
    def common_name(name: str) -> str:
        """As in speculators folders."""
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        return _ALIASES.get(name, name)


def read(name: str, source: DraftFolder) -> EagleDraft:
    """The EAGLE head in a folder.

    Args:
        name: of the head, for messages.
        source: the folder.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    content, method = source.content, source.kind.method
    file_format = _file_format(name, content)
    own = content["transformer_layer_config"] if file_format != "official" else content.get("model", content)
    layer = _layer_config(name, source, own)
    names = {EagleDraft.common_name(tensor) for tensor in source.tensors}
    nested: Any = content.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    try:
        if (source.whole_number(nested, "parallel_draft_step") or 1) > 1:
            message = f"`{name}` drafts several tokens at once (`parallel_draft_step`), which is not supported"
            raise UsageError(message, NONE_ELSE)
        return EagleDraft(
            name=name,
            source=source,
            taps=("final",) if method == "eagle" else _layers(name, content, nested),
            target_hidden_size=source.whole_number(content, "target_hidden_size") or int(layer.hidden_size),
            vocab_size=int(layer.vocab_size),
            draft_vocab_size=drafted_size(EagleDraft, name, source, content, int(layer.vocab_size)),
            file_format=file_format,
            layer=layer,
            num_layers=1 if method == "eagle" else _num_layers(names, source, own),
            norm_before_residual=bool(content.get("norm_before_residual", False)),
            norm_before_fc=bool(content.get("norm_before_fc", "input_norm.weight" in names)),
            fc_norm=bool(content.get("fc_norm", "fc_norm.0.weight" in names)),
            norm_output=bool(content.get("norm_output", False)),
            mask_token=_mask_token(name, content, layer.vocab_size) if method == "p-eagle" else None,
        )
    except (TypeError, ValueError, OverflowError) as error:
        message = f"`{source.path / 'config.json'}` is not a valid configuration: {first_line(error)}"
        raise RunError(message, AGAIN) from error


def _file_format(name: str, content: Mapping[str, Any]) -> str:
    kind = content.get("speculators_model_type")
    if kind is None:
        return "official"
    if kind not in ("eagle3", "peagle"):
        hint = "the speculators library's eagle3 and peagle heads are supported"
        raise UsageError(f"`{name}` is a draft of the kind `{kind}`, which is not supported", hint)
    if not isinstance(content.get("transformer_layer_config"), dict):
        raise UsageError(f"the configuration of `{name}` has no `transformer_layer_config`", "download the draft again")
    return f"speculators {content.get('speculators_version', '')}".strip()


def _num_layers(names: set[str], source: DraftFolder, own: Mapping[str, Any]) -> int:
    """Decoder layers, by the tensors' names; by the configuration where these are not here."""
    indices = {name.split(".")[1] for name in names if name.startswith("layers.")}
    return len(indices) or source.whole_number(own, "num_hidden_layers") or 1


def _mask_token(name: str, content: Mapping[str, Any], vocab_size: int) -> int:
    """The token of P-EAGLE's masks, by the keys that vLLM goes by."""
    given = next((content[key] for key in _MASKS if content.get(key) is not None), None)
    if type(given) is not int or not 0 <= given < vocab_size:
        message = (
            f"the configuration of `{name}` has no mask token (`{_MASKS[0]}`)"
            if given is None
            else f"the mask token of `{name}` is `{given}`, which is none of its {vocab_size} tokens"
        )
        raise UsageError(message, AGAIN)
    return given


def _layer_config(name: str, source: DraftFolder, content: Any) -> Any:
    kind = content.get("model_type", "llama") if isinstance(content, dict) else None
    kind = "llama" if kind == "eagle" else kind
    if str(kind) not in _CONFIGS:
        raise UsageError(f"the draft head `{name}` is built of `{kind}` layers, which are not supported", NONE_ELSE)
    if kind == "deepseek_v3":
        _check_latents(name, source, content)
    return read_layer_config(name, getattr(transformers, _CONFIGS[str(kind)]), {**content, "num_hidden_layers": 1})


def _check_latents(name: str, source: DraftFolder, content: Mapping[str, Any]) -> None:
    """Refuse sizes of latent attention that are missing or none, for which transformers has those of DeepSeek-V3."""
    for key in _LATENT_SIZES:
        if source.whole_number(content, key, 1) is None:
            raise UsageError(f"the configuration of `{name}` has no `{key}`", AGAIN)
    source.whole_number(content, "q_lora_rank", 1)
    if content["qk_rope_head_dim"] % 2:
        raise UsageError(
            f"`qk_rope_head_dim` of `{name}` is `{content['qk_rope_head_dim']}`, which is no even number", AGAIN
        )
    rope = content.get("rope_parameters") or content.get("rope_scaling")
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else "default"
    if kind not in ("default", "yarn"):
        raise UsageError(
            f"the layers of `{name}` have rotary positions of the type `{kind}`, which is not supported", NONE_ELSE
        )
    factor = rope.get("factor", 1) if isinstance(rope, dict) else 1
    if not isinstance(factor, int | float) or not factor > 0:
        raise UsageError(f"the rotary `factor` of `{name}` is `{factor}`, and must be a number above 0", AGAIN)


def _layers(name: str, content: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose outputs the head reads, by the list that most engines go by where there are two."""
    key = "eagle_aux_hidden_state_layer_ids"
    entered, left = content.get(key), nested.get(key)
    given = entered if entered is not None else left
    if given is None:
        return None
    return tuple(layer - 1 if entered is not None else layer for layer in listed_layers(name, key, given))


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs a head reads unless it says otherwise: the states entering layers 2, L//2 and L-3."""
    return (1, num_layers // 2 - 1, num_layers - 4)


class _EagleLayers(PublishedHead):
    """Base of EAGLE heads: layers of their own, and what stands before and behind them."""

    draft: EagleDraft

    def __init__(self, draft: EagleDraft, target: LM) -> None:
        super().__init__(draft, target, draft.layer, "fc")
        if follows_length(draft.layer):
            self.recording_obstacle = "its rotary positions depend on the context's length"

    def stack(
        self, layer: Any, weights: dict[str, Tensor], target: LM, block_layers: Sequence[BlockLayer] | None
    ) -> LayerStack:
        """Layers with latent attention in torch's operators, all others as this machine runs them fastest."""
        if self.draft.layer_type is HeadLayer:
            return super().stack(layer, weights, target, block_layers)
        return TorchStack(layer, weights, block_layers, self.draft.layer_type)


class EagleHead(_EagleLayers):
    """EAGLE 1 and 2: u = fc([embedding; feature]); no norm before attention; the target's output layer."""

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The layer's output, which stands for the target's final state."""
        joined = torch.cat([embedded, feature], -1)
        inputs = self._join(joined).to(joined.dtype)
        return self.layers.run(inputs, positions, feeds, inputs)

    def logits(self, output: Tensor) -> Tensor:
        """The target's output layer of the output."""
        return self._target.head(output)


class Eagle3Head(_EagleLayers):
    """EAGLE-3: attention reads [norm(embedding); norm(feature)]; the feature joins several layers' states."""

    def mix(self, features: Tensor) -> Tensor:
        """fc of the joined states."""
        if self.draft.fc_norm:
            features = torch.stack([self.norm(features[:, i], f"fc_norm.{i}") for i in range(features.shape[1])], 1)
        joined = features.flatten(1)
        if self.draft.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        return self._join(joined).to(joined.dtype)

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The last layer's output, before any norm; attention's output is added to the feature, normalized or not."""
        normalized = self.norm(feature, "layers.0.hidden_norm")
        inputs = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normalized], -1)
        return self.layers.run(normalized if self.draft.norm_before_residual else feature, positions, feeds, inputs)

    def recycled(self, output: Tensor) -> Tensor:
        """The output before its norm; behind it in EAGLE-3.1 (`norm_output`)."""
        return self.norm(output, "norm") if self.draft.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """Its own output layer, spread over the target's vocabulary."""
        return self.spread(self.scores(self.norm(output, "norm")))


class PEagleHead(Eagle3Head):
    """EAGLE-3 whose further tokens come from masks: a mask token, and one state in the place of the target's."""

    def __init__(self, draft: EagleDraft, target: LM) -> None:
        super().__init__(draft, target)
        self.mask_token, self.is_one_pass = draft.mask_token, True
        self._mask = self.mix(self.weights["mask_hidden"].view(1, draft.num_taps, -1))

    def recycled(self, output: Tensor) -> Tensor:
        """The mask's feature, whatever the output."""
        return self._mask.expand(len(output), -1)

    def ahead(self, sequences: HeadSequences, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """Logits of the last kept position and of the masks behind it."""
        return Ahead(sequences.masked_logits([(handle, depth) for handle, _, depth in ends]))

    def recorded_ahead(
        self, depth: int, anchors: Tensor, ends: Tensor, feed: Callable[[int], RecordedFeed]
    ) -> RecordedAhead:
        """As `ahead`."""
        outputs = ends[:, None]
        if depth > 1:
            masks = feed(depth - 1)
            assert self.mask_token is not None, "such a head has a mask"
            embedded = self.embed(torch.full_like(masks.positions, self.mask_token))
            rows = self.run(embedded, self.recycled(embedded), masks.positions, [masks])
            outputs = torch.cat([outputs, rows.view(len(ends), depth - 1, -1)], 1)
        return RecordedAhead(self.logits(outputs.flatten(0, 1)).view(len(ends), depth, -1))


_HEADS: dict[str, Callable[[EagleDraft, LM], PublishedHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "p-eagle": PEagleHead,
}


def sequences(draft: EagleDraft, target: LM, _num_tokens: int) -> HeadSequences:
    """The head's sequences, its weights loaded."""
    return HeadSequences([_HEADS[draft.method](draft, target)], target, draft.name, len(draft.taps or ()))
