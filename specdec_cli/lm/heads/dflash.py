"""DFlash drafts (arXiv 2602.06036): a block of mask rows that reads a context made of the target's states.

Every layer's keys and values of the context come from one vector of each position, which joins the target's hidden
states there. A block's rows attend to these and to each other, and each gives one token. JetSpec's drafts
(arXiv 2606.18394) are such drafts with causal rows (`causal_head`). DSpark's and DFlash2's add parts of their own.

Sources: z-lab/dflash (`dflash/model.py`) and the speculators library (`models/dflash`). z-lab names target layers by
the state that leaves them (`target_layer_ids`), speculators by the state that enters them
(`aux_hidden_state_layer_ids`). Where a block's rows predict the token at their own place, the first row gives none;
those with `sample_from_anchor` predict the token behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder, block_keys, block_shape
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head import PublishedHead
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed, read_layer_config
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.head_tensors import drafted_size
from specdec_cli.lm.heads.layer_stack import BlockLayer, positions_of
from specdec_cli.lm.heads.published import (
    AGAIN,
    NONE_ELSE,
    PublishedDraft,
    check_has_usual_layers,
    listed_layers,
    vocabulary_shapes,
)
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.heads.recorded_feed import RecordedFeed

_CAUSAL = ("is_causal", "causal", "causal_head")
"""Keys that say of all layers whether a block's rows see those before them alone, the first that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashDraft(PublishedDraft):
    """A DFlash draft by its folder.

    Args:
        file_format: who writes such folders: `z-lab`, `DeepSpec` or `speculators` with its version.
        layer: transformers configuration of its layers.
        block_layers: how each attends.
        block_size: rows of a block, B.
        mask_token: that all rows but the first read.
        from_anchor: row i predicts the token behind its place, and a block gives B tokens; otherwise the token at its
            place, and a block gives B - 1.
        embedding_scale: of what the rows read.
        logit_scale: of the output layer's results.
        softcap: of the logits; None without one.
    """

    file_format: str
    layer: Any
    block_layers: tuple[BlockLayer, ...]
    block_size: int
    mask_token: int
    from_anchor: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that a block gives."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def num_taps(self) -> int:
        """Hidden states that it reads of each position."""
        return len(self.block_layers) if self.taps is None else len(self.taps)

    @property
    def has_mask_embedding(self) -> bool:
        """Whether mask rows read an embedding of a file of its own."""
        return _mask_file(self.source).is_file()

    @property
    def parts(self) -> list[str]:
        """Its parts beside layers, for people."""
        return []

    def __str__(self) -> str:
        """For people: what it is, what it reads, and what it can draft."""
        more = f", with {' and '.join(self.parts)}" if self.parts else ""
        drafts = f"drafts up to {counted(self.most_tokens, 'token')} in one pass{more}"
        vocabulary = f"{self.draft_vocab_size} of {self.layer.vocab_size} tokens"
        return (
            f"{self.source.kind.title} draft, {self.file_format} format: reads {self.reading}; {drafts}; {vocabulary}"
        )

    def usual_taps(self, num_layers: int) -> tuple[Tap, ...]:
        """Layers spread over the target."""
        if self.num_taps > 1:
            check_has_usual_layers(self.name, num_layers)
        return default_layers(num_layers, self.num_taps)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of every layer."""
        return HeadLayer.cached_numbers(self.layer, len(self.block_layers))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the layers, and of what joins the target's states."""
        size = int(self.layer.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, self.num_taps * (self.target_hidden_size or 0)),
            "hidden_norm.weight": (size,),
            "norm.weight": (size,),
        }
        shapes |= vocabulary_shapes(self, size)
        for i in range(len(self.block_layers)):
            shapes |= HeadLayer.shapes(self.layer, size, f"layers.{i}.")
            shapes[f"layers.{i}.input_layernorm.weight"] = (size,)
        return shapes

    @staticmethod
    def common_name(name: str) -> str:
        """As in speculators folders."""
        name = name.removeprefix("model.")
        return {"draft_id_to_target_id": "d2t"}.get(name, name)


BlockDraft = TypeVar("BlockDraft", bound=DFlashDraft)


def default_layers(num_layers: int, num: int) -> tuple[int, ...]:
    """The layers whose outputs a draft with so many taps reads unless it says otherwise."""
    if num == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (num - 1)) for i in range(num))


def read(name: str, source: DraftFolder) -> DFlashDraft:
    """The DFlash draft in a folder.

    Args:
        name: of the draft, for messages.
        source: the folder.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    return read_block(DFlashDraft, name, source, lambda _: {})


def read_block(
    kind: type[BlockDraft], name: str, source: DraftFolder, parts: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> BlockDraft:
    """The draft in a folder, with the fields of its kind.

    Args:
        kind: its class.
        name: of the draft, for messages.
        source: the folder.
        parts: the fields that the class has beside DFlash's, of the configuration's keys, nested ones among them.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    content = source.content
    keys = block_keys(content)
    is_speculators = "speculators_model_type" in content
    _check_variant(name, keys)
    own = content.get("transformer_layer_config") if is_speculators else content
    if not isinstance(own, dict):
        raise UsageError(f"the configuration of `{name}` has no `transformer_layer_config`", AGAIN)
    layer = _layer_config(name, own)
    try:
        block_size, from_anchor = block_shape(content, source.kind.name)
        return kind(
            name=name,
            source=source,
            taps=_layers(name, keys, is_speculators),
            target_hidden_size=source.whole_number(keys, "target_hidden_size") or int(layer.hidden_size),
            vocab_size=int(layer.vocab_size),
            draft_vocab_size=drafted_size(kind, name, source, keys, int(layer.vocab_size)),
            file_format=_file_format(source),
            layer=layer,
            block_layers=_block_layers(name, keys, own, int(layer.num_hidden_layers), source),
            block_size=_checked_block_size(name, block_size),
            mask_token=_mask_token(name, keys, source, int(layer.vocab_size)),
            from_anchor=from_anchor,
            embedding_scale=_factor(name, keys, "input_embedding_scale") or 1.0,
            logit_scale=_factor(name, keys, "output_multiplier") or 1.0,
            softcap=_factor(name, keys, "final_logit_softcapping"),
            **parts(keys),
        )
    except (TypeError, ValueError, OverflowError) as error:
        message = f"`{source.path / 'config.json'}` is not a valid configuration: {first_line(error)}"
        raise RunError(message, AGAIN) from error


def _file_format(source: DraftFolder) -> str:
    if "speculators_model_type" in source.content:
        return f"speculators {source.content.get('speculators_version', '')}".strip()
    return "DeepSpec" if source.kind.name == "dspark" else "z-lab"


def _check_variant(name: str, keys: Mapping[str, Any]) -> None:
    """Refuse relatives with further parts."""
    kind = keys.get("speculators_model_type", "dflash")
    kind = "domino" if keys.get("projector_type") == "domino" else kind
    if kind not in ("dflash", "dflash2", "dspark"):
        raise UsageError(f"`{name}` is a draft of the kind `{kind}`, which is not supported", NONE_ELSE)
    for key, usual in (("attention_sink_bias", (None, False)), ("attention_value_scale", (None, 1, 1.0))):
        if keys.get(key) not in usual:
            raise UsageError(f"the draft `{name}` has `{key}: {keys[key]}`, which is not supported", NONE_ELSE)


def _layer_config(name: str, own: dict[str, Any]) -> Any:
    if own.get("model_type", "qwen3") != "qwen3":
        message = f"the draft `{name}` is built of `{own['model_type']}` layers, which are not supported"
        raise UsageError(message, NONE_ELSE)
    return read_layer_config(name, transformers.Qwen3Config, own)


def _layers(name: str, keys: Mapping[str, Any], is_speculators: bool) -> tuple[int, ...] | None:
    key = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
    given = keys.get(key)
    if given is None and not is_speculators:
        return None
    layers = tuple(layer - 1 if is_speculators else layer for layer in listed_layers(name, key, given))
    if min(layers) < 0:
        raise UsageError(f"the draft `{name}` reads its target's embeddings, which is not supported", NONE_ELSE)
    return layers


def _checked_block_size(name: str, size: Any) -> int:
    if type(size) is not int or not 2 <= size <= 512:
        raise UsageError(f"`block_size` of `{name}` must be from 2 to 512, not `{size}`", AGAIN)
    return int(size)


def _factor(name: str, keys: Mapping[str, Any], key: str) -> float | None:
    """A factor of the configuration; None where it has none, or 0."""
    factor = float(keys.get(key) or 0.0)
    if not isfinite(factor):
        raise UsageError(f"`{key}` of `{name}` must be a finite number, not `{keys[key]}`", AGAIN)
    return factor or None


def _mask_token(name: str, keys: Mapping[str, Any], source: DraftFolder, vocab_size: int) -> int:
    mask = keys.get("mask_token_id")
    if type(mask) is not int:
        raise UsageError(f"the configuration of the draft `{name}` has no `mask_token_id`", AGAIN)
    if not 0 <= mask < vocab_size and not _mask_file(source).is_file():
        raise UsageError(f"`mask_token_id` of `{name}` is `{mask}`, and it knows {vocab_size} tokens", AGAIN)
    return mask


def _block_layers(
    name: str, keys: Mapping[str, Any], own: Mapping[str, Any], num: int, source: DraftFolder
) -> tuple[BlockLayer, ...]:
    """How each layer attends: sliding layers are causal unless the configuration says otherwise, full ones are not.

    In speculators folders, DFlash2's sliding layers are not causal without a key, and DFlash's are.
    """
    kinds = own.get("layer_types") or ["full_attention"] * num
    if keys.get("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * num
    window = None
    if "sliding_attention" in kinds:
        window = source.whole_number(keys, "swa_window_size", 1) or source.whole_number(own, "sliding_window", 1)
        if window is None:
            raise UsageError(f"the draft `{name}` has sliding layers without a window", AGAIN)
    every = next((keys[key] for key in _CAUSAL if keys.get(key) is not None), None)
    is_open = source.kind.name == "dflash2" and "speculators_model_type" in keys
    sliding = not keys.get("sliding_window_non_causal", is_open)
    layers = []
    for kind in kinds[:num]:
        is_sliding = kind == "sliding_attention"
        layers.append(
            BlockLayer(window if is_sliding else None, is_sliding and sliding if every is None else bool(every))
        )
    return tuple(layers)


class BlockHead(PublishedHead):
    """A DFlash draft. A block is always whole, as in training."""

    draft: DFlashDraft

    def __init__(self, draft: DFlashDraft, target: LM) -> None:
        super().__init__(draft, target, draft.layer, "fc", draft.block_layers)
        mask = _mask_embedding(draft)
        self._mask = self.embed([draft.mask_token]) if mask is None else mask.to(target.device, target.dtype)
        self.most_tokens = draft.most_tokens
        self.is_one_pass = True

    def num_rows(self, depth: int) -> int:
        """A whole block, however few tokens are wanted."""
        return self.draft.block_size

    def mix(self, features: Tensor) -> Tensor:
        """One vector [n, hidden] of the target's states, normalized."""
        return self.norm(self._join(features.flatten(1)).to(features.dtype), "hidden_norm")

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """File the keys and values of further context in every layer; the vectors themselves come back."""
        self.layers.remember(feature, positions, feeds)
        return feature

    def rows(self, anchors: Sequence[int] | Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """States [sequences, B, hidden] of a block behind each context, behind the final norm.

        Args:
            anchors: each context's last token, which the first row reads.
            positions: of all rows [n] int64.
            feeds: the sequences; their new slots are the block's rows.
        """
        masks = self._mask.expand(self.draft.block_size - 1, -1)
        hidden = (
            torch.cat([torch.cat([embedding[None], masks]) for embedding in self.embed(anchors)])
            * self.draft.embedding_scale
        )
        states = self.layers.run(hidden, positions, feeds)
        return self.norm(states, "norm").view(len(anchors), self.draft.block_size, -1)

    def ahead(self, sequences: HeadSequences, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        """Logits of a block's rows."""
        feeds = [sequences.new_rows(handle, self.draft.block_size) for handle, _, _ in ends]
        rows = self.rows([token for _, token, _ in ends], positions_of(feeds, self._mask.device), feeds)
        rows = rows if self.draft.from_anchor else rows[:, 1:]
        states = [own[:depth] for own, (_, _, depth) in zip(rows, ends, strict=True)]
        return self.given(list(torch.split(self.logits(torch.cat(states)), [len(own) for own in states])), states)

    def recorded_ahead(
        self, depth: int, anchors: Tensor, ends: Tensor, feed: Callable[[int], RecordedFeed]
    ) -> RecordedAhead:
        """As `ahead`."""
        block = feed(self.draft.block_size)
        rows = self.rows(anchors, block.positions, [block])
        states = (rows if self.draft.from_anchor else rows[:, 1:])[:, :depth]
        return self.recorded(self.logits(states.flatten(0, 1)).view(len(anchors), depth, -1), states)

    def recorded(self, logits: Tensor, states: Tensor) -> RecordedAhead:
        """As `given`, of logits [B, depth, drafted vocabulary] and states [B, depth, hidden]."""
        return RecordedAhead(self.spread(logits.flatten(0, 1)).view(*logits.shape[:2], -1))

    def given(self, logits: list[Tensor], states: list[Tensor]) -> Ahead:
        """The result of a pass with logits [depth, drafted vocabulary] and states [depth, hidden] of each sequence.

        No token before a DFlash row's changes its logits.
        """
        return Ahead([self.spread(own) for own in logits])

    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, drafted vocabulary] float32 of rows' states [n, hidden]."""
        logits = self.scores(output)
        logits = logits * self.draft.logit_scale if self.draft.logit_scale != 1 else logits
        cap = self.draft.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _mask_file(source: DraftFolder) -> Path:
    """The file of the embedding that mask rows read, which most drafts do not have."""
    [file] = source.format.beside
    return source.path / file


def _mask_embedding(draft: DFlashDraft) -> Tensor | None:
    """Embedding that mask rows read, if a file beside the weights has it; nothing of the pickle is run.

    Raises:
        RunError: the file cannot be read.
        UsageError: it holds something else.
    """
    path = _mask_file(draft.source)
    if not draft.has_mask_embedding:
        return None
    try:
        embedding = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", "copy or download the draft again") from error
    if isinstance(embedding, dict):
        embedding = next((tensor for tensor in embedding.values() if isinstance(tensor, Tensor)), None)
    if (
        not isinstance(embedding, Tensor)
        or embedding.numel() != draft.layer.hidden_size
        or not embedding.isfinite().all()
    ):
        raise UsageError(f"`{path}` is no embedding of {draft.layer.hidden_size} numbers", "download the draft again")
    return embedding.reshape(1, -1)


def sequences(draft: DFlashDraft, target: LM, _num_tokens: int) -> HeadSequences:
    """The draft's sequences, its weights loaded."""
    return HeadSequences([BlockHead(draft, target)], target, draft.name, draft.num_taps)
