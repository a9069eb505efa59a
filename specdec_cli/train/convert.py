"""Published drafts in another format: the same tensors under other names, and the same settings under other keys.

EAGLE-3 heads go between their authors' format and that of the speculators library, DFlash drafts between z-lab's and
that. A draft is read as the engine reads it, so whatever runs here can be converted; what the other format cannot say
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.checkpoint import find_checkpoint
from specdec_cli.lm.heads.dflash import DFlashDraft
from specdec_cli.lm.heads.eagle import EagleDraft
from specdec_cli.lm.heads.head_tensors import stored_tensors
from specdec_cli.lm.heads.published import PublishedDraft, read_published
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.train.disk import writing
from specdec_cli.train.published import check_empty, layer_content, official_eagle3, write_draft

FORMATS = ("official", "z-lab", "speculators")
_VERSION = "0.9.0"
_USUAL_TOKENS = 3


@dataclass(frozen=True, slots=True)
class DraftConversion:
    """A draft that is to be written in another format.

    Args:
        config: of the draft, its layers named.
        tensors: by common names, as they are stored.
        target: its name; None where neither the caller nor the draft names it.
        num_tokens: tokens to draft in a step, where the format says a number; None takes the usual one.
    """

    config: PublishedDraft
    tensors: dict[str, Tensor]
    target: str | None
    num_tokens: int | None

    @property
    def name(self) -> str:
        """Name of the draft."""
        return self.config.name

    def maps(self) -> dict[str, Tensor]:
        """`t2d` [V] bool, which of the target's tokens a reduced vocabulary has."""
        ids, vocab_size = self.config.drafted_ids(self.tensors), self.config.vocab_size
        if ids is None or vocab_size is None:
            return {}
        return {"t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)}

    def speculators(self, kind: str, num_tokens: int) -> dict[str, Any]:
        """Keys that all folders of the speculators library have.

        Raises:
            UsageError: the target is not known.
        """
        if self.target is None:
            message = f"the speculators format names the target of a draft, and `{self.name}` does not"
            raise UsageError(message, "name it: --target MODEL")
        method = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1}
        return {
            "speculators_model_type": kind,
            "speculators_version": _VERSION,
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "default_proposal_method": "greedy",
                "verifier": _verifier(self.target),
            },
        }


def convert_draft(
    name: str, to: str, output: Path, target: str | None = None, num_tokens: int | None = None, force: bool = False
) -> PublishedDraft:
    """Write a published draft in another format.

    Args:
        name: hub id or folder of the draft.
        to: one of `FORMATS`.
        output: a new or empty folder.
        target: hub id or folder of the target; None takes what the draft says.
        num_tokens: tokens to draft in a step, for the formats that say so.
        force: overwrite a draft that is alone in the folder.

    Returns:
        The draft as its new folder has it.

    Raises:
        UsageError: there is no such format, it is not one of this kind of draft, or it cannot say what the draft is.
        RunError: the draft cannot be read, or the folder cannot be written.
    """
    draft = check_conversion(name, to, output, force=force)
    target = target or _named_target(draft.source.content)
    config = draft.given({}, lambda: _num_layers(name, target))
    tensors = stored_tensors(config)
    config.check_shapes({key: tuple(value.shape) for key, value in tensors.items()})
    content, written = _WRITERS[draft.method, to](DraftConversion(config, tensors, target, num_tokens))
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    write_draft(output, content, written)
    return read_published(str(output))


def check_conversion(
    name: str, to: str, output: Path | None, has_weights: bool = True, force: bool = False
) -> PublishedDraft:
    """The draft that is to be converted, once its format and the new folder are found to be possible.

    Raises:
        UsageError: there is no such format, it is not one of this kind of draft, or the folder has other files.
        RunError: the draft cannot be read.
    """
    if to not in FORMATS:
        raise UsageError(f"there is no format `{to}`", f"one of: {', '.join(FORMATS)}")
    draft = read_published(name, has_weights=has_weights)
    if (draft.method, to) not in _WRITERS:
        own = [form for method, form in _WRITERS if method == draft.method]
        what = " and ".join(own) or "one format alone"
        raise UsageError(f"`{name}` is a draft of the method `{draft.method}`, which has {what}", "choose another one")
    if output is not None:
        check_empty(output, force, draft.folder)
    return draft


def _num_layers(name: str, target: str | None) -> int:
    if target is None:
        message = f"which of the target's layers `{name}` reads depends on the target, which it does not name"
        raise UsageError(message, "name it: --target MODEL")
    return ModelPlan(target, fetches_weights=False).num_layers


def _named_target(content: Mapping[str, Any]) -> str | None:
    """The target that a draft's configuration names."""
    nested = content.get("speculators_config")
    verifier = nested.get("verifier") if isinstance(nested, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return named or content.get("base_model_name_or_path")


def _verifier(target: str) -> dict[str, Any]:
    """The target as the speculators format names it; a built-in one by its folder, which other engines can read."""
    checkpoint = find_checkpoint(target, None, trust_remote_code=False, has_weights=False)
    content = checkpoint.content
    name = str(checkpoint.folder) if target.startswith("builtin:") else target
    return {"name_or_path": name, "architectures": list(content.get("architectures") or [])}


_Written = tuple[dict[str, Any], dict[str, Tensor]]


def _eagle3_keys(config: EagleDraft) -> dict[str, Any]:
    """Keys that both formats of an EAGLE-3 head have; readers differ in what they take a missing one for."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layer_taps],  # the layers that states enter
    }


def _official_eagle3(job: DraftConversion) -> _Written:
    config = job.config
    assert isinstance(config, EagleDraft), "the method has this configuration"
    if config.num_layers > 1:
        message = f"`{job.name}` has {config.num_layers} decoder layers, and the official format has names for one"
        raise UsageError(message, "leave it as it is")
    content = official_eagle3(config.layer, config.layer_taps, job.target, _eagle3_keys(config))
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in job.tensors.items()}
    return content, tensors | job.maps()


def _speculators_eagle3(job: DraftConversion) -> _Written:
    config = job.config
    assert isinstance(config, EagleDraft), "the method has this configuration"
    content = job.speculators("eagle3", job.num_tokens or _USUAL_TOKENS) | _eagle3_keys(config)
    content |= {"architectures": ["Eagle3DraftModel"], "tie_word_embeddings": False}
    content["transformer_layer_config"] = layer_content(config.layer, config.num_layers)
    return content, job.tensors | job.maps()


def _z_lab_dflash(job: DraftConversion) -> _Written:
    config = _block_config(job)
    if config.is_reduced:
        message = f"`{job.name}` drafts {config.draft_vocab_size} of {config.vocab_size} tokens"
        raise UsageError(f"{message}, and z-lab's format drafts all", "leave it as it is")
    content = _block_content(config)
    content |= {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
    content["dflash_config"] = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.layer_taps),
        "sample_from_anchor": config.from_anchor,
        **_causal(config),
    }
    if job.target is not None:
        content |= {"base_model_name_or_path": job.target, "num_target_layers": _num_layers(job.name, job.target)}
    return content, job.tensors


def _speculators_dflash(job: DraftConversion) -> _Written:
    config = _block_config(job)
    sliding = [block_layer.is_causal for block_layer in config.block_layers if block_layer.window is not None]
    if (
        any(block_layer.is_causal for block_layer in config.block_layers if block_layer.window is None)
        or len(set(sliding)) > 1
    ):
        message = f"`{job.name}` has full layers that are causal, or sliding ones of both kinds"
        raise UsageError(f"{message}, which the speculators format cannot say", "leave it as it is")
    content = job.speculators("dflash", config.most_tokens) | {
        "architectures": ["DFlashDraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layer_taps],  # the layers that states enter
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not any(sliding),  # vLLM takes its opposite for all layers
        "tie_word_embeddings": False,
    }
    content["transformer_layer_config"] = _block_content(config)
    return content, job.tensors | job.maps()


def _block_config(job: DraftConversion) -> DFlashDraft:
    """The configuration of a DFlash draft that both formats can say.

    Raises:
        UsageError: it has parts that one of them has no keys for.
    """
    config = job.config
    assert isinstance(config, DFlashDraft), "the method has this configuration"
    parts = {
        f"parts of {config.source.kind.title}": config.source.kind.name != "dflash",
        "a mask embedding of its own": config.has_mask_embedding,
        "scaled embeddings or logits": (config.embedding_scale, config.logit_scale, config.softcap) != (1, 1, None),
    }
    unsayable = next((part for part, is_there in parts.items() if is_there), None)
    if unsayable is not None:
        raise UsageError(f"`{job.name}` has {unsayable}, which only one of the formats can say", "leave it as it is")
    return config


def _block_content(config: DFlashDraft) -> dict[str, Any]:
    """The configuration of a draft's layers, sliding ones with their window."""
    windows = [block_layer.window for block_layer in config.block_layers]
    content = layer_content(config.layer, len(windows))
    content["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    window = next((window for window in windows if window is not None), None)
    return content if window is None else content | {"sliding_window": window, "use_sliding_window": True}


def _causal(config: DFlashDraft) -> dict[str, bool]:
    """The key `causal` of z-lab's format, where its layers are not what they are without it."""
    is_usual = all(block_layer.is_causal == (block_layer.window is not None) for block_layer in config.block_layers)
    if is_usual:
        return {}
    kinds = {block_layer.is_causal for block_layer in config.block_layers}
    if len(kinds) > 1:
        message = f"`{config.name}` has causal layers beside others, as z-lab's format cannot say"
        raise UsageError(message, "leave it as it is")
    return {"causal": kinds.pop()}


_WRITERS: dict[tuple[str, str], Callable[[DraftConversion], _Written]] = {
    ("eagle3", "official"): _official_eagle3,
    ("eagle3", "speculators"): _speculators_eagle3,
    ("dflash", "z-lab"): _z_lab_dflash,
    ("dflash", "speculators"): _speculators_dflash,
}
"""Of each drafting method and format, what writes it."""
