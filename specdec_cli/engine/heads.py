"""Draft heads behind a draft's name: a folder that holds one becomes its drafting method, with its layers named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec_cli.engine.loading import ModelSettings
from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.head_files import HeadConfig, default_layers, is_head, read_head_config
from specdec_cli.lm.load import num_layers

_METHODS = ("eagle", "eagle3")


def head_config(
    fields: Mapping[str, Any], draft: ModelSettings, target: str, settings: ModelSettings, has_weights: bool = True
) -> HeadConfig | None:
    """The configuration of the head that a draft is, its layers named; None for every other draft.

    Args:
        fields: `model`, or `method` and its options.
        draft: how the draft is loaded.
        target: the target's name.
        settings: how the target is loaded.
        has_weights: fetch the head's weights too.

    Raises:
        UsageError: the head cannot be used, or not with these settings.
        RunError: its folder cannot be read.
    """
    method, name = fields.get("method"), fields.get("model")
    if not isinstance(name, str) or not (method in _METHODS or (method is None and is_head(name, draft.revision))):
        return None
    config = read_head_config(name, draft.revision, has_weights)
    if method not in (None, config.method):
        raise UsageError(f"`{name}` is for the drafting method `{config.method}`, not `{method}`", f"write `-d {name}`")
    changed = [key for key in ("dtype", "device", "load_format", "quantize") if _differs(key, draft)]
    if changed:
        said = f"the draft head `{name}` runs as its target does, so `draft.{changed[0]}` has no meaning for it"
        raise UsageError(said, "leave it out")
    if fields.get("layers") is not None:
        return replace(config, layers=tuple(map(int, str(fields["layers"]).split("-"))))
    if config.layers is None and config.method == "eagle3":
        return replace(config, layers=default_layers(num_layers(target, settings.revision)))
    return config


def _differs(key: str, draft: ModelSettings) -> bool:
    return bool(getattr(draft, key) != getattr(ModelSettings(), key))


def head_fields(config: HeadConfig) -> dict[str, Any]:
    """A head as drafters take it."""
    fields: dict[str, Any] = {"method": config.method, "model": config.name}
    if config.method == "eagle3" and config.layers is not None:
        fields["layers"] = "-".join(map(str, config.layers))
    return fields
