"""A tokenizer of the tokenizers library in the place of transformers' around it, which takes longer to import.

Both split a text by the same backend. What only transformers does with it, such as to render a chat, its own object
does, which is made when it is first asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))  # transformers' order
_TEMPLATE = "chat_template.jinja"


class BackendTokenizer:
    """A tokenizer as `text.tokenizer.Tokenizer` asks one of transformers.

    Args:
        backend: of the tokenizers library. No one else changes it.
        settings: what `tokenizer_config.json` says: special tokens by their roles, a chat template.
        name: where it came from, for messages.
        num_tokens: the largest id + 1; None counts them.
    """

    is_fast, is_stand_in = True, False

    def __init__(
        self, backend: Tokenizer, settings: Mapping[str, Any], name: str, num_tokens: int | None = None
    ) -> None:
        self.backend_tokenizer, self.name_or_path, self.num_tokens = backend, name, num_tokens
        self.chat_template = settings.get("chat_template")
        self._settings = dict(settings)

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> BackendTokenizer:
        """The tokenizer in a folder with `tokenizer.json` and the settings beside it."""
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = folder / _TEMPLATE
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), settings, name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens by their roles."""
        return {role: self._settings[role] for role in _ROLES if role in self._settings}

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._id_of("eos_token")

    def _id_of(self, role: str) -> int | None:
        token_id: int | None = self.backend_tokenizer.token_to_id(self._settings.get(role, ""))
        return token_id

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids."""
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """A conversation by the chat template that this tokenizer has now."""
        return self.of_transformers.apply_chat_template(*args, **{"chat_template": self.chat_template} | kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Token ids and masks of texts."""
        return self.of_transformers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which copying and pickling look for
            raise AttributeError(name)
        return getattr(self.of_transformers, name)

    @cached_property
    def of_transformers(self) -> Any:
        """transformers' tokenizer around the same backend."""
        from transformers import PreTrainedTokenizerFast

        from specdec_cli.lm.template_limits import limit_templates

        limit_templates()
        settings = self._settings | {"chat_template": self.chat_template, "name_or_path": self.name_or_path}
        return PreTrainedTokenizerFast(tokenizer_object=_SharedBackend(self.backend_tokenizer), **settings)


@dataclass(slots=True)
class _SharedBackend:
    """A backend for a library that would make a copy of it, by way of its JSON."""

    backend: Tokenizer

    def __deepcopy__(self, _: dict[int, Any]) -> Tokenizer:
        return self.backend
