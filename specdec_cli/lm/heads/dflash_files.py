"""Published folders of DFlash and DSpark drafts: what their configurations say, and the shapes of their tensors.

Sources: z-lab/dflash (`dflash/model.py`), the speculators library (`models/dflash`, `models/dspark`) and
deepseek-ai/DeepSpec (`modeling/dspark`). z-lab and DeepSpec name target layers by the state that leaves them
(`target_layer_ids`), speculators by the state that enters them (`aux_hidden_state_layer_ids`). Where a block's rows
predict the token at their own place, the first row gives none; DSpark's and those with `sample_from_anchor` predict the
token behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.contents import head_kind
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.draft_vocabulary import offset_ids
from specdec_cli.lm.heads.eagle_files import check_has_defaults
from specdec_cli.lm.heads.head_layer import head_size, layer_shapes, read_layer_config
from specdec_cli.lm.heads.head_tensors import drafted_size
from specdec_cli.lm.heads.layer_stack import BlockLayer
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

MASK_EMBEDDING = "mask_embedding.pt"
_HINT = "choose another draft, or `--draft ngram`"
_AGAIN = "copy or download the draft again"
_MARKOV = ("vanilla", "gated")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """The heads of DSpark behind a block's rows.

    Args:
        rank: of the Markov head; 0 without one.
        is_gated: a row's own state scales the token before it.
        has_confidence: whether there is a head that predicts acceptance.
        confidence_reads_token: whether that reads the token before it, too.
    """

    rank: int = 0
    is_gated: bool = False
    has_confidence: bool = False
    confidence_reads_token: bool = False


@dataclass(frozen=True, slots=True)
class DFlashConfig(PublishedDraft):
    """The configuration of a DFlash draft.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        method: `dflash`.
        file_format: who writes such folders: `z-lab`, `DeepSpec` or `speculators` with its version.
        layer: transformers configuration of its layers.
        block_layers: how each attends.
        layers: target layers whose outputs it reads, counted from 0; None where the configuration leaves them to the
            default.
        target_hidden_size: width of the hidden states that it reads.
        draft_vocab_size: tokens that it can draft.
        block_size: rows of a block, B.
        mask_token: that all rows but the first read.
        from_anchor: row i predicts the token behind its place, and a block gives B tokens; otherwise the token at its
            place, and a block gives B - 1.
        dspark: its further heads.
        embedding_scale: of what the rows read.
        logit_scale: of the output layer's results.
        softcap: of the logits; None without one.
    """

    file_format: str
    layer: Any
    block_layers: tuple[BlockLayer, ...]
    layers: tuple[int, ...] | None
    target_hidden_size: int
    draft_vocab_size: int
    block_size: int
    mask_token: int
    from_anchor: bool
    dspark: DSparkConfig = field(default_factory=DSparkConfig)
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that a block gives."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def named_layers(self) -> tuple[int, ...] | None:
        """Its layers."""
        return self.layers

    @property
    def num_taps(self) -> int:
        """Hidden states that it reads of each position."""
        return len(self.block_layers) if self.layers is None else len(self.layers)

    def __str__(self) -> str:
        """For people."""
        heads = [f"a Markov head of rank {self.dspark.rank}"] if self.dspark.rank else []
        heads += ["a confidence head"] if self.dspark.has_confidence else []
        kind = f"{'DSpark' if heads else 'DFlash'} draft, {self.file_format} format"
        reads = "reads layers by default"
        if self.layers is not None:
            reads = f"reads the outputs of layers {', '.join(map(str, self.layers))}"
        more = f", with {' and '.join(heads)}" if heads else ""
        vocabulary = f"{self.draft_vocab_size} of {self.layer.vocab_size} tokens"
        return f"{kind}: {reads}; drafts up to {self.most_tokens} tokens in one pass{more}; {vocabulary}"

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> DFlashConfig:
        """With its layers named: by the recipe, by itself, or by default."""
        if options.get("layers") is not None:
            return replace(self, layers=tuple(map(int, str(options["layers"]).split("-"))))
        if self.layers is not None:
            return self
        if self.num_taps > 1:
            check_has_defaults(self.name, num_layers())
        return replace(self, layers=default_layers(num_layers(), self.num_taps))

    def options(self) -> dict[str, Any]:
        """The layers."""
        return {} if self.layers is None else {"layers": "-".join(map(str, self.layers))}

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """By the width of hidden states and the size of the vocabulary."""
        hint = "choose a draft that was made for this target"
        if self.target_hidden_size != hidden_size:
            said = f"the draft `{self.name}` reads hidden states of width {self.target_hidden_size}"
            raise UsageError(f"{said}, and `{target}` has {hidden_size}", hint)
        if int(self.layer.vocab_size) != vocab_size:
            said = f"the draft `{self.name}` was made for {self.layer.vocab_size} tokens"
            raise UsageError(f"{said}, and `{target}` scores {vocab_size}", hint)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of every layer."""
        return 2 * len(self.block_layers) * int(self.layer.num_key_value_heads) * head_size(self.layer)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the layers, of what joins the target's states, and of further heads."""
        size, vocabulary, drafted = int(self.layer.hidden_size), int(self.layer.vocab_size), self.draft_vocab_size
        own = "" if size != self.target_hidden_size else "?"
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, self.num_taps * self.target_hidden_size),
            "hidden_norm.weight": (size,),
            "norm.weight": (size,),
            f"embed_tokens.weight{own}": (vocabulary, size),
        }
        is_reduced = drafted != vocabulary
        shapes["lm_head.weight" if is_reduced or own == "" else "lm_head.weight?"] = (drafted, size)
        shapes["d2t" if is_reduced else "d2t?"] = (drafted,)
        each = layer_shapes(self.layer, size) | {"input_layernorm.weight": (size,)}
        for i in range(len(self.block_layers)):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in each.items()}
        return shapes | self._dspark_shapes(size, vocabulary)

    def _dspark_shapes(self, size: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
        rank, shapes = self.dspark.rank, dict[str, tuple[int, ...]]()
        if rank:
            shapes["markov_head.markov_w1.weight"] = (vocabulary, rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, rank)
        if self.dspark.is_gated:
            shapes |= {"markov_head.gate_proj.weight": (rank, size + rank), "markov_head.gate_proj.bias": (rank,)}
        if self.dspark.has_confidence:
            width = size + (rank if self.dspark.confidence_reads_token else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias?": (1,)}
        return shapes

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """By `d2t`, where it drafts fewer tokens than the target has."""
        is_reduced = self.draft_vocab_size != self.layer.vocab_size
        return offset_ids(tensors["d2t"]) if is_reduced and "d2t" in tensors else None

    @staticmethod
    def common_name(name: str) -> str:
        """As in speculators folders."""
        name = name.removeprefix("model.")
        return {"draft_id_to_target_id": "d2t"}.get(name, name)


def default_layers(num_layers: int, num: int) -> tuple[int, ...]:
    """The layers whose outputs a draft with so many taps reads unless it says otherwise."""
    if num == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (num - 1)) for i in range(num))


def read_dflash_config(name: str, folder: Path, content: dict[str, Any]) -> DFlashConfig:
    """The configuration of a folder that holds a DFlash or DSpark draft.

    Args:
        name: of the draft, for messages.
        folder: where it is.
        content: of its `config.json`.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    nested = content.get("dflash_config")
    keys = {**content, **(nested if isinstance(nested, dict) else {})}
    is_speculators = "speculators_model_type" in content
    _check_variant(name, keys)
    own = content.get("transformer_layer_config") if is_speculators else content
    if not isinstance(own, dict):
        raise UsageError(f"the configuration of `{name}` has no `transformer_layer_config`", _AGAIN)
    layer = _layer_config(name, own)
    try:
        return DFlashConfig(
            name=name,
            folder=folder,
            method="dflash",
            file_format=_file_format(content),
            layer=layer,
            block_layers=_block_layers(name, keys, own, int(layer.num_hidden_layers)),
            layers=_layers(name, keys, is_speculators),
            target_hidden_size=int(keys.get("target_hidden_size") or layer.hidden_size),
            draft_vocab_size=drafted_size(DFlashConfig, name, folder, keys, int(layer.vocab_size)),
            block_size=_block_size(name, keys, 8 if is_speculators else 16),
            mask_token=_mask_token(name, keys, folder, int(layer.vocab_size)),
            from_anchor=bool(keys.get("sample_from_anchor", _is_dspark(keys))),
            dspark=_dspark(name, keys),
            embedding_scale=float(keys.get("input_embedding_scale") or 1.0),
            logit_scale=float(keys.get("output_multiplier") or 1.0),
            softcap=float(keys.get("final_logit_softcapping") or 0.0) or None,
        )
    except (TypeError, ValueError, OverflowError) as error:
        said = f"`{folder / 'config.json'}` is not a valid configuration: {first_line(error)}"
        raise RunError(said, _AGAIN) from error


def _is_dspark(keys: Mapping[str, Any]) -> bool:
    called = [keys.get("speculators_model_type"), *(keys.get("architectures") or [])]
    return any("dspark" in str(one).lower() for one in called)


def _file_format(content: Mapping[str, Any]) -> str:
    if "speculators_model_type" in content:
        return f"speculators {content.get('speculators_version', '')}".strip()
    return "DeepSpec" if _is_dspark(content) else "z-lab"


def _check_variant(name: str, keys: Mapping[str, Any]) -> None:
    """Refuse relatives with further parts."""
    kind = keys.get("speculators_model_type", "dflash")
    called = str(keys.get("architectures")).lower()
    found = kind if kind not in ("dflash", "dspark") else "dflash2" if "dflash2" in called else None
    found = found or ("domino" if keys.get("projector_type") == "domino" else None)
    if found is not None:
        raise UsageError(f"`{name}` is a draft of the kind `{found}`, which is not supported", _HINT)
    for key, usual in (("attention_sink_bias", (None, False)), ("attention_value_scale", (None, 1, 1.0))):
        if keys.get(key) not in usual:
            raise UsageError(f"the draft `{name}` has `{key}: {keys[key]}`, which is not supported", _HINT)


def _layer_config(name: str, own: dict[str, Any]) -> Any:
    if own.get("model_type", "qwen3") != "qwen3":
        said = f"the draft `{name}` is built of `{own['model_type']}` layers, which are not supported"
        raise UsageError(said, _HINT)
    return read_layer_config(name, transformers.Qwen3Config, own)


def _layers(name: str, keys: Mapping[str, Any], is_speculators: bool) -> tuple[int, ...] | None:
    key = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
    given = keys.get(key)
    if given is None and not is_speculators:
        return None
    if not isinstance(given, list) or not given or not all(type(one) is int for one in given):
        raise UsageError(f"`{key}` of `{name}` is no list of layers: `{given}`", _AGAIN)
    found = tuple(one - 1 if is_speculators else one for one in given)
    if min(found) < 0:
        raise UsageError(f"the draft `{name}` reads its target's embeddings, which is not supported", _HINT)
    return found


def _block_size(name: str, keys: Mapping[str, Any], default: int) -> int:
    size = keys.get("block_size", default)
    if type(size) is not int or not 2 <= size <= 512:
        raise UsageError(f"`block_size` of `{name}` must be from 2 to 512, not `{size}`", _AGAIN)
    return size


def _mask_token(name: str, keys: Mapping[str, Any], folder: Path, vocab_size: int) -> int:
    mask = keys.get("mask_token_id")
    if type(mask) is not int:
        raise UsageError(f"the configuration of the draft `{name}` has no `mask_token_id`", _AGAIN)
    if not 0 <= mask < vocab_size and not (folder / MASK_EMBEDDING).is_file():
        raise UsageError(f"`mask_token_id` of `{name}` is `{mask}`, and it knows {vocab_size} tokens", _AGAIN)
    return mask


def _block_layers(name: str, keys: Mapping[str, Any], own: Mapping[str, Any], num: int) -> tuple[BlockLayer, ...]:
    """How each layer attends: sliding layers are causal unless the configuration says otherwise, full ones are not."""
    kinds = own.get("layer_types") or ["full_attention"] * num
    if keys.get("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * num
    window = keys.get("swa_window_size") or own.get("sliding_window")
    if "sliding_attention" in kinds and type(window) is not int:
        raise UsageError(f"the draft `{name}` has sliding layers without a window", _AGAIN)
    every = keys.get("causal", keys.get("is_causal"))
    sliding = not keys.get("sliding_window_non_causal", False)
    found = []
    for kind in kinds[:num]:
        is_sliding = kind == "sliding_attention"
        found.append(
            BlockLayer(window if is_sliding else None, is_sliding and sliding if every is None else bool(every))
        )
    return tuple(found)


def _dspark(name: str, keys: Mapping[str, Any]) -> DSparkConfig:
    rank, kind = int(keys.get("markov_rank") or 0), str(keys.get("markov_head_type", "vanilla"))
    if rank and kind not in _MARKOV:
        said = f"the Markov head of `{name}` is of the type `{kind}`, which is not supported"
        raise UsageError(said, _HINT)
    has_confidence = bool(keys.get("enable_confidence_head", False))
    reads = has_confidence and rank > 0 and bool(keys.get("confidence_head_with_markov", False))
    return DSparkConfig(rank, rank > 0 and kind == "gated", has_confidence, reads)


FORMAT = DraftFormat(
    "DFlash draft",
    ("dflash",),
    lambda folder, content: head_kind(folder, content) in ("dflash", "dspark"),
    read_dflash_config,
)
