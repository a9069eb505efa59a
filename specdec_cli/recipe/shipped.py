"""Recipes that come with specdec, and reading a recipe's file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.errors import UsageError, did_you_mean
from specdec_cli.files import given_path
from specdec_cli.recipe.document import MAX_BYTES


@dataclass(frozen=True, slots=True)
class Shipped:
    """One shipped recipe: its name, the first line of its head comment, its file."""

    name: str
    title: str
    path: Path


def folder() -> Path:
    """Folder of the shipped recipes: in an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def list_recipes() -> list[Shipped]:
    """Every shipped recipe, by name."""
    paths = sorted(folder().glob("*.yaml"), key=lambda path: path.stem)
    return [Shipped(path.stem, head_comment(path)[0], path) for path in paths]


def head_comment(path: Path) -> list[str]:
    """The lines of a recipe's head comment, without their `#`; at least one."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return lines or [""]


def find(name: str | os.PathLike[str]) -> Path:
    """The file of a shipped recipe's name, or the file itself.

    Raises:
        UsageError: neither a shipped recipe nor a file.
    """
    text = os.fspath(name)
    path = given_path(text)
    looks_like_name = path.name == text and path.suffix not in (".yaml", ".yml")
    names = [recipe.name for recipe in list_recipes()] if looks_like_name else []
    if text in names:
        return folder() / f"{text}.yaml"
    if os.path.lexists(path):
        return path
    if looks_like_name:
        hint = "`specdec recipe list` shows the shipped ones; name your own file by its path"
        raise UsageError(f"there is no recipe `{text}`{did_you_mean(text, names)}", hint)
    raise UsageError(f"there is no file `{text}`", "`specdec recipe list` shows the shipped recipes")


def read_bytes(path: Path) -> bytes:
    """A file's bytes, cut just above the size that is refused.

    Raises:
        UsageError: a folder, or a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise UsageError(f"the recipe `{path}` is a folder", "name a YAML file in it") from None
    except OSError as error:
        raise UsageError(
            f"the recipe `{path}` cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
