"""Names of models, checked before anything is loaded: this module imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from specdec_cli.errors import UsageError, closest, did_you_mean
from specdec_cli.files import given_path

GENERATION_FILE = "generation_config.json"
AUTO, NONE = "auto", "none"

BUILTIN = ("builtin:target", "builtin:draft")
SHAPE = "shape:"
SHAPES = Path(__file__).parent / "shapes"
GGUF = ".gguf"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*(:\w[\w.+-]*(/\w[\w.+-]*)*)?)?")
MODEL_HINT = "give a folder with `config.json` and safetensors, a `.gguf` file, or a hub id such as `Qwen/Qwen3-0.6B`"


def shape_names() -> tuple[str, ...]:
    """The shapes that come with this package, without `shape:`."""
    return tuple(sorted(path.name for path in SHAPES.iterdir() if path.is_dir()))


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a hub id: `org/repo`, or `org/repo:FILE` for one of its GGUF files."""
    return _HUB_NAME.fullmatch(name) is not None


def check_own_name(name: str) -> None:
    """Refuse a built-in model or a shape that there is not.

    Raises:
        UsageError: there is none of that name.
    """
    if name.startswith("builtin:") and name not in BUILTIN:
        said = f"unknown built-in model `{name}`{did_you_mean(name, BUILTIN)}"
        raise UsageError(said, f"the built-in pair is {' and '.join(BUILTIN)}")
    shape = name.removeprefix(SHAPE).partition("?")[0]
    if name.startswith(SHAPE) and shape not in shape_names():
        known = [SHAPE + one for one in shape_names()]
        raise UsageError(f"unknown shape `{name}`{did_you_mean(SHAPE + shape, known)}", f"one of {', '.join(known)}")


def check_generation_config(wanted: str) -> None:
    """Refuse a folder without a generation configuration.

    Raises:
        UsageError: there is none.
    """
    if wanted not in (AUTO, NONE) and not (given_path(wanted) / GENERATION_FILE).is_file():
        said = f"`--generation-config {wanted}` is not a folder with a `{GENERATION_FILE}`"
        raise UsageError(said, f"give {AUTO}, {NONE} or a folder that holds a `{GENERATION_FILE}`")


def check_name(name: str) -> None:
    """Refuse a name that leads to no model, as far as this machine can tell.

    Raises:
        UsageError: an unknown built-in model or shape, or a folder or file that is not there.
    """
    check_own_name(name)
    path = given_path(name)
    if _is_file(path) and path.suffix != GGUF:
        raise UsageError(f"`{name}` is a file, not a model folder", MODEL_HINT)
    if name.startswith(("builtin:", SHAPE)) or (name.strip() and (path.is_symlink() or _exists(path))):
        return
    if path.suffix == GGUF and ":" not in name:
        raise UsageError(f"the GGUF file `{name}` does not exist{_neighbour(name, path)}", "check the path")
    if not is_hub_name(name):
        raise UsageError(f"model folder `{name}` does not exist{_neighbour(name, path)}", MODEL_HINT)


def check_word(name: str, words: Sequence[str], what: str) -> None:
    """Refuse a bare word that is neither here nor on this disk's hub cache, and close to a word of our own.

    Args:
        name: of a model.
        words: of our own.
        what: they are, for the hint.

    Raises:
        UsageError: one of them was most likely meant.
    """
    if not re.fullmatch(r"[\w-]+", name) or _exists(given_path(name)) or is_downloaded(name):
        return
    meant = closest(name, words)
    if meant is not None:
        hint = f"{what}: {', '.join(words)}; for a folder of that name write `./{name}`"
        raise UsageError(f"there is no model `{name}` here; did you mean `{meant}`?", hint)


def is_downloaded(name: str) -> bool:
    """Whether the local hub cache has a folder for a hub id."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache, f"models--{name.partition(':')[0].replace('/', '--')}").is_dir()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_file(path: Path) -> bool:
    return _exists(path) and path.is_file()


def _neighbour(name: str, path: Path) -> str:
    """`; did you mean ...?` where something beside a missing path has nearly its name."""
    try:
        beside = sorted(one.name for one in path.parent.iterdir()) if path.name else []
    except (OSError, ValueError):
        return ""
    close = closest(path.name, beside)
    return "" if close is None else f"; did you mean `{name.rstrip('/').removesuffix(path.name)}{close}`?"
