"""A model's folder, and what its file names, headers and configuration tell without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.files import given_path
from specdec_cli.lm.files.contents import check_contents, check_pointer, is_adapter
from specdec_cli.lm.files.gguf_choice import local_gguf
from specdec_cli.lm.files.gguf_split import gguf_parts, read_model_header
from specdec_cli.lm.files.reading import broken_link, parse_object, unreadable


@dataclass(frozen=True)
class ModelFolder:
    """A model's files on this machine, whose `config.json` is read once."""

    name: str
    folder: Path

    @property
    def config_path(self) -> Path:
        """The path of its configuration as the user has it, for messages."""
        return self.folder / "config.json"

    @cached_property
    def config_bytes(self) -> bytes:
        """The bytes of its configuration.

        Raises:
            RunError: there is none.
        """
        path = self.config_path
        if path.is_symlink() and not path.exists():
            raise broken_link(path)
        if not path.is_file():
            raise RunError(
                f"model folder `{self.name}` has no `config.json`", "give the folder that holds the model's files"
            )
        try:
            return path.read_bytes()
        except OSError as error:
            raise unreadable(path, error) from error

    @cached_property
    def content(self) -> dict[str, Any]:
        """The JSON object in its configuration.

        Raises:
            RunError: there is none, or it is broken.
        """
        return parse_object(self.config_path, self.config_bytes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The files of a model that are wanted.

    Args:
        trust_remote_code: its Python files.
        has_weights: its weights, now or later.
        is_head: it holds a draft head, whose weights may be pickled.
        fetches_weights: of a hub id, the weights are fetched now.
    """

    trust_remote_code: bool
    has_weights: bool
    is_head: bool
    fetches_weights: bool

    @property
    def is_model(self) -> bool:
        """Whether it has to be a language model with weights."""
        return self.has_weights and not self.is_head


def check_local_files(name: str, is_model: bool = True) -> None:
    """Refuse a model's local files as loading does, as far as names, headers and its configuration tell.

    Args:
        name: of the model; one on the hub, or a built-in one, has nothing to check.
        is_model: whether a folder must hold a causal LM, and not a draft head.

    Raises:
        UsageError: they hold something else than a model of ours, or several.
        RunError: one is missing or broken.
    """
    gguf, folder = local_gguf(name), given_path(name)
    if gguf is not None:
        check_pointer(gguf)
        read_model_header(name, gguf_parts(name, gguf.absolute()))
    elif is_model and folder.is_dir() and not is_adapter(folder):
        model = ModelFolder(name, folder)
        check_contents(model)
        assert isinstance(model.content, dict), "its configuration is an object"
