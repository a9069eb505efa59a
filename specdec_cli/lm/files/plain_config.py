"""Configurations of the families that have plain modules (`lm.llama.plain_modules`), without their models' import."""

from __future__ import annotations

from transformers import PreTrainedConfig


class PlainConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is untyped here
    """The configuration of a Llama: the values in its file, which names all that this package reads."""

    model_type = "llama"


class PlainQwen2Config(PlainConfig):
    """The configuration of a Qwen 2."""

    model_type = "qwen2"


class PlainQwen3Config(PlainConfig):
    """The configuration of a Qwen 3."""

    model_type = "qwen3"


CONFIGS = {config.model_type: config for config in (PlainConfig, PlainQwen2Config, PlainQwen3Config)}
"""The classes by their names in a configuration's `model_type`."""
