"""Published folders of EAGLE heads: what their configurations say, and their tensors under one set of names.

Sources: SafeAILab/EAGLE (`cnets.py`, `cnets1.py`), the speculators library (`models/eagle3`), SpecForge's and NVIDIA
ModelOpt's exports. The same layers have two numbers: the top-level key `eagle_aux_hidden_state_layer_ids` names the
layer that a state enters, the one within `eagle_config` the layer that it leaves. Taps are those that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.contents import head_kind, tensor_names
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.draft_vocabulary import offset_ids
from specdec_cli.lm.heads.head_layer import head_size, layer_shapes, read_layer_config
from specdec_cli.lm.heads.head_tensors import drafted_size
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

_FEWEST_LAYERS = 4
"""Of a target, so that the state entering its layer L-3 is one of a layer's outputs."""
_CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
_HINT = "choose a draft that was made for this target, or `--draft ngram`"
_MASKS = ("mask_token_id", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class HeadConfig(PublishedDraft):
    """The configuration of an EAGLE head.

    Args:
        name: of the head, for messages.
        folder: where it is.
        method: which forward it has: `eagle`, `eagle3` or `p-eagle`.
        file_format: who writes such folders: `official` or `speculators` with its version.
        layer: transformers configuration of its decoder layers.
        num_layers: how many these are.
        vocab_size: the target's vocabulary that it was made for.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: width of the hidden states that it reads.
        layers: target layers whose outputs it reads, counted from 0; None where the configuration leaves them to the
            default of three.
        norm_before_residual: the normalized feature is what attention's output is added to.
        norm_before_fc: the joined states are normalized before they are projected.
        fc_norm: each layer's states are normalized before they are joined.
        norm_output: the next draft step reads the normalized output.
        mask_token: stands for tokens that are not drafted yet (P-EAGLE); None for other heads.
    """

    file_format: str
    layer: Any
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token: int | None

    @property
    def named_layers(self) -> tuple[int, ...] | None:
        """Its layers."""
        return self.layers

    @property
    def num_taps(self) -> int:
        """Hidden states that it reads of each position."""
        return len(self.layers) if self.layers is not None else 3

    @property
    def kv_numbers(self) -> int:
        """Of its layers."""
        return 2 * self.num_layers * int(self.layer.num_key_value_heads) * head_size(self.layer)

    def __str__(self) -> str:
        """For people: what it is, what it reads, and what it can draft."""
        kind = {"eagle": "EAGLE head", "eagle3": "EAGLE-3 head", "p-eagle": "P-EAGLE head"}[self.method]
        kind = kind if self.file_format == "official" else f"{kind}, {self.file_format} format"
        reads = "the final hidden states"
        if self.method != "eagle" and self.layers is not None:
            reads = f"the outputs of layers {', '.join(map(str, self.layers))}"
        return f"{kind}: reads {reads}; drafts {self.draft_vocab_size} of {self.vocab_size} tokens"

    def given(self, options: Mapping[str, Any], num_layers: Callable[[], int]) -> HeadConfig:
        """With its layers named: by the recipe, by itself, or by default."""
        if options.get("layers") is not None:
            return replace(self, layers=tuple(map(int, str(options["layers"]).split("-"))))
        if self.layers is None and self.method != "eagle":
            check_has_defaults(self.name, num_layers())
            return replace(self, layers=default_layers(num_layers()))
        return self

    def options(self) -> dict[str, Any]:
        """The layers of EAGLE-3 and P-EAGLE."""
        if self.method == "eagle" or self.layers is None:
            return {}
        return {"layers": "-".join(map(str, self.layers))}

    def check_fits(self, target: str, hidden_size: int, vocab_size: int) -> None:
        """By the width of hidden states and the size of the vocabulary."""
        hint = "choose a draft that was made for this target"
        if self.target_hidden_size != hidden_size:
            said = f"the draft head `{self.name}` reads hidden states of width {self.target_hidden_size}"
            raise UsageError(f"{said}, and `{target}` has {hidden_size}", hint)
        if self.vocab_size != vocab_size:
            said = f"the draft head `{self.name}` was made for {self.vocab_size} tokens"
            raise UsageError(f"{said}, and `{target}` scores {vocab_size}", hint)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of EAGLE's tensors, or EAGLE-3's and P-EAGLE's."""
        return _eagle_shapes(self) if self.method == "eagle" else _eagle3_shapes(self)

    def drafted_ids(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """By `d2t`, where it drafts fewer tokens than the target has."""
        is_reduced = self.draft_vocab_size != self.vocab_size
        return offset_ids(tensors["d2t"]) if is_reduced and "d2t" in tensors else None

    @staticmethod
    def common_name(name: str) -> str:
        """As in speculators folders."""
        return _common_name(name)


def read_head_config(name: str, folder: Path, content: dict[str, Any]) -> HeadConfig:
    """The configuration of a folder that holds an EAGLE head.

    Args:
        name: of the head, for messages.
        folder: where it is.
        content: of its `config.json`.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """
    file_format = _file_format(name, content)
    own = content["transformer_layer_config"] if file_format != "official" else content.get("model", content)
    layer = _layer_config(name, own)
    names = {_common_name(one) for one in tensor_names(folder)}
    is_third = file_format != "official" or "layers.0.hidden_norm.weight" in names
    nested: Any = content.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    is_masked = content.get("speculators_model_type") == "peagle" or "mask_hidden" in names
    mask = _mask_token(name, content, layer.vocab_size) if is_masked else None
    try:
        if int(nested.get("parallel_draft_step") or 1) > 1:
            said = f"`{name}` drafts several tokens at once (`parallel_draft_step`), which is not supported"
            raise UsageError(said, _HINT)
        return HeadConfig(
            name=name,
            folder=folder,
            method="eagle" if not is_third else "eagle3" if mask is None else "p-eagle",
            file_format=file_format,
            layer=layer,
            num_layers=_num_layers(names, own) if is_third else 1,
            vocab_size=int(layer.vocab_size),
            draft_vocab_size=drafted_size(HeadConfig, name, folder, content, int(layer.vocab_size)),
            target_hidden_size=int(content.get("target_hidden_size") or layer.hidden_size),
            layers=_layers(name, content, nested),
            norm_before_residual=bool(content.get("norm_before_residual", False)),
            norm_before_fc=bool(content.get("norm_before_fc", "input_norm.weight" in names)),
            fc_norm=bool(content.get("fc_norm", "fc_norm.0.weight" in names)),
            norm_output=bool(content.get("norm_output", False)),
            mask_token=mask,
        )
    except (TypeError, ValueError, OverflowError) as error:
        said = f"`{folder / 'config.json'}` is not a valid configuration: {first_line(error)}"
        raise RunError(said, "copy or download the draft again") from error


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


def _num_layers(names: set[str], own: Mapping[str, Any]) -> int:
    """Decoder layers, by the tensors' names; by the configuration where these are not here."""
    found = {name.split(".")[1] for name in names if name.startswith("layers.")}
    return len(found) or int(own.get("num_hidden_layers") or 1)


def _mask_token(name: str, content: Mapping[str, Any], vocab_size: int) -> int:
    """The token of P-EAGLE's masks, by the keys that vLLM goes by."""
    given = next((content[key] for key in _MASKS if content.get(key) is not None), None)
    if type(given) is not int or not 0 <= given < vocab_size:
        said = (
            f"the configuration of `{name}` has no mask token (`{_MASKS[0]}`)"
            if given is None
            else (f"the mask token of `{name}` is `{given}`, which is none of its {vocab_size} tokens")
        )
        raise UsageError(said, "copy or download the draft again")
    return given


def _layer_config(name: str, content: Any) -> Any:
    kind = content.get("model_type", "llama") if isinstance(content, dict) else None
    kind = "llama" if kind == "eagle" else kind
    if str(kind) not in _CONFIGS:
        raise UsageError(f"the draft head `{name}` is built of `{kind}` layers, which are not supported", _HINT)
    return read_layer_config(name, getattr(transformers, _CONFIGS[str(kind)]), {**content, "num_hidden_layers": 1})


def _layers(name: str, content: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose outputs the head reads, by the list that most engines go by where there are two."""
    key = "eagle_aux_hidden_state_layer_ids"
    entered, left = content.get(key), nested.get(key)
    given = entered if entered is not None else left
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(type(one) is int for one in given):
        raise UsageError(f"`{key}` of `{name}` is no list of layers: `{given}`", "copy or download the draft again")
    return tuple(one - 1 if entered is not None else one for one in given)


def check_has_defaults(name: str, num_layers: int) -> None:
    """Refuse a target with too few layers for a draft that does not say which ones it reads.

    Raises:
        UsageError: the layers that such drafts usually read do not exist.
    """
    if num_layers < _FEWEST_LAYERS:
        said = (
            f"`{name}` does not say which layers it reads, and the usual ones need a target of {_FEWEST_LAYERS} layers"
        )
        hint = "name them in the recipe, for example `draft.layers: 0-1-2`, or choose another target"
        raise UsageError(f"{said}: this one has {num_layers}", hint)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs a head reads unless it says otherwise: the states entering layers 2, L//2 and L-3."""
    return (1, num_layers // 2 - 1, num_layers - 4)


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
    if config.mask_token is not None:
        shapes["mask_hidden"] = (1, 1, joined)
    further = layer_shapes(config.layer, size) | {"input_layernorm.weight": (size,)}
    for i in range(1, config.num_layers):
        shapes |= _within_layer(further, i)
    return shapes | _within_layer(layer)


def _within_layer(shapes: dict[str, tuple[int, ...]], index: int = 0) -> dict[str, tuple[int, ...]]:
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def _common_name(name: str) -> str:
    """A tensor's name as all formats have it here."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    old = {
        "hidden_norm.weight": "layers.0.hidden_norm.weight",
        "draft_id_to_target_id": "d2t",
        "aux_norm_low.weight": "fc_norm.0.weight",
        "aux_norm_mid.weight": "fc_norm.1.weight",
        "aux_norm_high.weight": "fc_norm.2.weight",
    }
    return old.get(name, name)


FORMAT = DraftFormat(
    "EAGLE head",
    ("eagle", "eagle3", "p-eagle"),
    lambda folder, content: head_kind(folder, content) == "eagle",
    read_head_config,
)
