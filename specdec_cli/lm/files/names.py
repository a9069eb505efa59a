"""Names of models, checked before anything is loaded: this module imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError, closest, did_you_mean
from specdec_cli.files import given_path

GENERATION_FILE = "generation_config.json"
DRAFT_TOKENS = "draft_token_ids"
"""Key of `config.json` with the tokens of its tokenizer that a draft model has, if these are not all."""
TEMPERATURES_FILE = "dspark_sts.json"
"""The temperatures of a DSpark draft's confidences, one for each token that it drafts."""
AUTO, NONE = "auto", "none"

BUILTIN = ("builtin:target", "builtin:draft")
SHAPE = "shape:"
SHAPES = Path(__file__).parent / "shapes"
GGUF, GGUF_MAGIC = ".gguf", b"GGUF"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*(:\w[\w.+-]*(/\w[\w.+-]*)*)?)?")
_HUB_ADDRESS = re.compile(
    r"(https?://)?(hf\.co|(www\.)?huggingface\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(:(?P<choice>[\w.+-]+)|/(blob|resolve|raw|tree)/(?P<revision>[^/?#]+)(/(?P<file>[^?#]+\.gguf))?[^?#]*)?/?([?#].*)?"
)
"""A model's or a file's page on the hub, as browsers, llama.cpp and Ollama name it."""
_OTHER_NAMES = {
    **dict.fromkeys(("prompt-lookup", "prompt-lookup-decoding", "pld", "lookup", "lookup-decoding"), "ngram"),
    **dict.fromkeys(("ngrams", "n-grams", "ngram-gpu", "ngram-simple", "ngram-mod", "ngram-cache"), "ngram"),
    **dict.fromkeys(("ngram-map-k", "ngram-map-k4v"), "ngram"),
    **dict.fromkeys(("suffix-decoding", "suffix-tree", "suffix-array"), "suffix"),
}
"""Names of other engines and papers for drafting methods."""
NO_BLOCKS = "its weights are not those of a GGUF file, nor whole numbers with scales"
MODEL_HINT = "give a folder with `config.json` and safetensors, a `.gguf` file, or a hub id such as `Qwen/Qwen3-0.6B`"


def shape_names() -> tuple[str, ...]:
    """The shapes that come with this package, without `shape:`."""
    return tuple(sorted(path.name for path in SHAPES.iterdir() if path.is_dir()))


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a hub id: `org/repo`, or `org/repo:FILE` for one of its GGUF files."""
    return _HUB_NAME.fullmatch(name) is not None


def folder_and_choice(name: str) -> tuple[Path, str] | None:
    """The folder and the choice of `FOLDER:CHOICE`, a GGUF model among several in a folder; None for other names."""
    folder, _, choice = name.rpartition(":")
    if not folder.strip() or not choice or _exists(given_path(name)):
        return None
    path = given_path(folder)
    return (path, choice) if _exists(path) and path.is_dir() else None


def is_local(name: str) -> bool:
    """Whether a name leads to files on this machine, whole or not, other than those of the hub's cache."""
    return _exists(given_path(name)) or folder_and_choice(name) is not None


def check_own_name(name: str, words: Sequence[str] = ()) -> None:
    """Refuse a built-in model or a shape that there is not.

    Raises:
        UsageError: there is none of that name.
    """
    if name.startswith("builtin:") and name not in BUILTIN:
        message = f"unknown built-in model `{name}`{_hint(meant_name(name, words))}"
        raise UsageError(message, f"the built-in pair is {' and '.join(BUILTIN)}")
    shape = name.removeprefix(SHAPE).partition("?")[0]
    if name.startswith(SHAPE) and shape not in shape_names():
        known = [SHAPE + shape_name for shape_name in shape_names()]
        raise UsageError(f"unknown shape `{name}`{did_you_mean(SHAPE + shape, known)}", f"one of {', '.join(known)}")


def check_generation_config(wanted: str) -> None:
    """Refuse a folder without a generation configuration.

    Raises:
        UsageError: there is none.
    """
    if wanted not in (AUTO, NONE) and not (given_path(wanted) / GENERATION_FILE).is_file():
        message = f"`--generation-config {wanted}` is not a folder with a `{GENERATION_FILE}`"
        raise UsageError(message, f"give {AUTO}, {NONE} or a folder that holds a `{GENERATION_FILE}`")


def check_name(name: str, words: Sequence[str] = ()) -> None:
    """Refuse a name that leads to no model, as far as this machine can tell.

    Raises:
        UsageError: an unknown built-in model or shape, or a folder or file that is not there.
    """
    check_own_name(name, words)
    path = given_path(name)
    if _is_file(path) and path.suffix != GGUF:
        raise _other_file_error(name, path)
    if name.startswith(("builtin:", SHAPE)) or (name.strip() and (path.is_symlink() or _exists(path))):
        return
    if folder_and_choice(name) is not None:
        return
    if address := _HUB_ADDRESS.fullmatch(name):
        chosen, revision = address["choice"] or address["file"], address["revision"] or "main"
        hub_id = address["repo"] + (f":{chosen}" if chosen else "")
        more = "" if revision == "main" else f" and the revision `{revision}`"
        raise UsageError(f"`{name}` is an address, and a model is named by its hub id", f"give `{hub_id}`{more}")
    if path.suffix == GGUF and ":" not in name:
        raise UsageError(f"the GGUF file `{name}` does not exist{_neighbour(name, path)}", "check the path")
    if not is_hub_name(name):
        meant = _neighbour(name, path) or _hint(meant_name(name, words))
        raise UsageError(f"model folder `{name}` does not exist{meant}", MODEL_HINT)


def _other_file_error(name: str, path: Path) -> UsageError:
    """The error for a file whose name does not end in `.gguf`."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        is_gguf = False
    if is_gguf:
        return UsageError(
            f"`{name}` is a GGUF file whose name does not end in `{GGUF}`", "rename it, or link to it under such a name"
        )
    hint = f"give its folder, `{path.parent}`" if path.suffix in (".safetensors", ".bin") else MODEL_HINT
    return UsageError(f"`{name}` is a file, not a model folder", hint)


def check_native(name: str, settings: Any, decoder: str) -> None:
    """Refuse `compute: native` beside settings that keep it from a model, before the model is looked at.

    Raises:
        UsageError: one does.
    """
    obstacles = {
        NO_BLOCKS: name.startswith(("builtin:", SHAPE)),
        f"its weights are to be quantized again, to {settings.quantize}": settings.quantize != "none",
        f"the decoder is `{decoder}`": decoder != AUTO,
        "our own decoder does not run in float16": settings.dtype == "float16",
        "our own decoder runs on a CPU": settings.device.startswith("cuda"),
    }
    obstacle = next((obstacle for obstacle, stands in obstacles.items() if stands), None)
    if obstacle is not None:
        raise native_error(name, obstacle)


def native_error(name: str, obstacle: str) -> UsageError:
    """The error for a model that was to be computed on as its GGUF file holds it."""
    message = f"`{name}` cannot be computed on as its file holds it: {obstacle}"
    return UsageError(message, "leave --compute out (target.compute)")


def check_word(name: str, words: Sequence[str], what: str) -> None:
    """Refuse a bare word that is neither here nor on this disk's hub cache, and close to a word of our own.

    Raises:
        UsageError: one of them was most likely meant.
    """
    if not re.fullmatch(r"[\w-]+", name) or _exists(given_path(name)) or is_downloaded(name):
        return
    meant = meant_name(name, words)
    if meant in words:
        hint = f"{what}: {', '.join(words)}; for a folder of that name write `./{name}`"
        raise UsageError(f"there is no model `{name}` here; did you mean `{meant}`?", hint)


def meant_name(name: str, words: Sequence[str] = ()) -> str | None:
    """The built-in model, the shape or the word of our own that a name most likely means; a method has no prefix."""
    prefix, colon, rest = name.partition(":")
    plain = re.sub("[-_]", "", prefix)
    if colon and closest(plain, ["builtin"]):
        method = meant_name(rest, words) if rest not in words else rest
        half = closest(rest, [builtin.removeprefix("builtin:") for builtin in BUILTIN])
        return method if method in words or half is None else f"builtin:{half}"
    known = name.lower().replace("_", "-")
    other = _OTHER_NAMES.get(known, re.sub(r"-?\d+$", "", known))
    return other if other in words else closest(name, [*words, *BUILTIN, *(SHAPE + shape for shape in shape_names())])


def _hint(meant: str | None) -> str:
    return "" if meant is None else f"; did you mean `{meant}`?"


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
        beside = sorted(entry.name for entry in path.parent.iterdir()) if path.name else []
    except (OSError, ValueError):
        return ""
    close = closest(path.name, beside)
    return "" if close is None else f"; did you mean `{name.rstrip('/').removesuffix(path.name)}{close}`?"
