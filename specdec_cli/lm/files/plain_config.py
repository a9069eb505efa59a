"""Configurations of the families that have plain modules (`lm.llama.plain_modules`), without transformers' import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class PlainConfig:
    """The configuration of a Llama: the values in its file, which names all that this package reads."""

    model_type = "llama"
    vocab_size: int
    hidden_size: int
    num_attention_heads: int

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The configuration in a file's content."""
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        """Its values, as `config.json` has them."""
        return {"model_type": self.model_type, **vars(self)}

    def get_text_config(self) -> Self:
        """This configuration, which describes no more than a language model."""
        return self


class PlainQwen2Config(PlainConfig):
    """The configuration of a Qwen 2."""

    model_type = "qwen2"


class PlainQwen3Config(PlainConfig):
    """The configuration of a Qwen 3."""

    model_type = "qwen3"


CONFIGS = {config.model_type: config for config in (PlainConfig, PlainQwen2Config, PlainQwen3Config)}
"""The classes by their names in a configuration's `model_type`."""
