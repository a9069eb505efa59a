"""A model's files: where they are, whether they are whole, what they say; each fault is one clear sentence."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.files import given_path
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.contents import check_contents, check_pointer
from specdec_cli.proxy import exempt_this_machine, proxy_of

BUILTIN = ("builtin:target", "builtin:draft")
FAMILIES = "Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, Falcon, ..."
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def model_folder(name: str, revision: str | None, trust_remote_code: bool, has_weights: bool = True) -> Path:
    """The local folder behind a name; a hub id is fetched, or found in the local cache.

    Args:
        name: a local folder, a hub id, a built-in name or a shape.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: fetch Python files too.
        has_weights: fetch safetensors too.

    Raises:
        UsageError: an unknown built-in name or shape.
        RunError: there is no such folder, or it cannot be fetched.
    """
    if name.startswith(dummy.PREFIX):
        return dummy.shape_folder(name)
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise UsageError(f"unknown built-in model `{name}`", f"the built-in pair is {' and '.join(BUILTIN)}")
        folder = Path(__file__).parents[2] / "builtin" / name.removeprefix("builtin:")
        if not folder.is_dir():
            raise RunError(f"the weights of `{name}` are not installed", "install specdec-cli again")
        return folder
    path = given_path(name)
    if name.strip() and path.is_dir():
        check_contents(name, path, has_weights)
        return path
    hint = "give a folder with `config.json` and safetensors, or a hub id such as `Qwen/Qwen3-0.6B`"
    if path.is_file() and path.suffix == ".gguf":
        raise UsageError(f"`{name}` is a GGUF file (llama.cpp), which is not supported", hint)
    if path.is_file():
        raise RunError(f"`{name}` is a file, not a model folder", hint)
    if name.strip() and path.is_symlink():
        raise _broken_link(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise RunError(f"model folder `{name}` does not exist", hint)
    folder = _fetch(name, revision, trust_remote_code, has_weights)
    check_contents(name, folder, has_weights)
    return folder


def _fetch(name: str, revision: str | None, trust_remote_code: bool, has_weights: bool) -> Path:
    """Download a hub model's safetensors, if it has any, and small files, or find them in the local cache."""
    patterns = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    patterns += ["*.safetensors"] if has_weights else []
    exempt_this_machine(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["original/*", "onnx/*", "consolidated*"],
                etag_timeout=5,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except Exception as error:
        raise _fetch_error(name, revision, error) from error


def _fetch_error(name: str, revision: str | None, error: Exception) -> RunError:
    """The error for a failed download."""
    match error:
        case GatedRepoError():
            return RunError(f"model `{name}` is gated", "accept its licence on the hub and log in with `hf auth login`")
        case RevisionNotFoundError():
            return RunError(f"model `{name}` has no revision `{revision}`", "check `revision`")
        case RepositoryNotFoundError():
            hint = "check the spelling, or log in if it is private"
            return RunError(f"no folder and no hub model is named `{name}`", hint)
        case LocalEntryNotFoundError():
            what = "is neither a folder nor in the local hub cache"
        case _:
            what = f"could not be downloaded: {first_line(error)}"
    return RunError(f"model `{name}` {what}", f"{hub_proxy_words()}if no hub can be reached, give a local folder")


def hub_proxy_words() -> str:
    """The beginning of a hint if the hub is reached through a proxy."""
    proxy = None if constants.HF_HUB_OFFLINE else proxy_of(constants.ENDPOINT)
    return "" if proxy is None else f"the hub is reached through the {proxy}; "


def read_config(name: str, folder: Path, trust_remote_code: bool) -> Any:
    """The model's configuration, a transformers config.

    Raises:
        UsageError: transformers does not know the architecture, or it needs the model's own code.
        RunError: there is none, or it is broken.
    """
    changes = dummy.shape_changes(name)
    path = folder / "config.json"
    if path.is_symlink() and not path.exists():
        raise _broken_link(path)
    if not path.is_file():
        raise RunError(f"model folder `{name}` has no `config.json`", "give the folder that holds the model's files")
    content = read_object(path)
    if not isinstance(content.get("model_type"), str):
        raise RunError(f"`{path}` does not say a `model_type`", "give the folder of a transformers model")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True, **changes)
    except Exception as error:
        kind = content["model_type"]
        unknown = "does not recognize this architecture" in str(error)
        raise remote_code_error(name, error) or (
            UsageError(f"architecture `{kind}` of `{name}` is unknown to transformers", "upgrade transformers")
            if unknown
            else RunError(f"`{path}` is not a valid configuration: {first_line(error)}", "download the model again")
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in one of a model's files.

    Raises:
        RunError: the file cannot be read, or holds something else.
    """
    hint = "copy or download the model again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", hint) from error
    if not isinstance(content, dict):
        raise RunError(f"`{path}` cannot be read: it holds no JSON object", hint)
    return content


def weights_files(name: str, folder: Path) -> list[str]:
    """The safetensors files that the model needs, by name, in order.

    Raises:
        RunError: the folder does not say.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        return _indexed_files(index)
    raise _no_weights(name, folder)


def _indexed_files(index: Path) -> list[str]:
    """The files that an index of shards names.

    Raises:
        RunError: it is no index, or it names files that are not beside it.
    """
    hint = "copy or download the model again"
    content = read_object(index)
    for key in ("weight_map", "metadata"):  # transformers reads both
        if not isinstance(content.get(key), dict):
            raise RunError(f"`{index}` cannot be read: it has no `{key}`", hint)
    files = content["weight_map"].values()
    if not files or not all(isinstance(file, str) for file in files):
        raise RunError(f"`{index}` cannot be read: its `weight_map` names no files", hint)
    outside = next((file for file in files if Path(file).name != file), None)
    if outside is not None:
        raise RunError(f"`{index}` names `{outside}`, which is not a file beside it", hint)
    return sorted(set(files))


def _broken_link(path: Path) -> RunError:
    said = f"`{path}` is a link to `{path.readlink()}`, which does not exist"
    return RunError(said, "copy or download the model again; of a hub's cache, copy `blobs` too")


def _no_weights(name: str, folder: Path) -> RunError:
    """Description of the files that a folder has instead of the weights that transformers looks for."""
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    broken = next((shard for shard in shards if not (folder / shard).exists()), None)
    if broken is not None:
        return _broken_link(folder / broken)
    if any(list(folder.glob(pattern)) for pattern in PICKLES) and not shards:
        return RunError(
            f"`{name}` has only pickled weights, which can run code when they are loaded",
            "convert the model to safetensors",
        )
    if any(re.search(r"-\d+-of-\d+\.safetensors$", shard) for shard in shards):
        message = f"`{name}` has `{shards[0]}` and no `model.safetensors.index.json`, which says what is in which file"
        return RunError(message, "copy or download the model again")
    if shards:
        return RunError(
            f"`{name}` has no `model.safetensors`, only `{shards[0]}`", "rename it, or give the folder of a whole model"
        )
    return RunError(
        f"`{name}` has no weights: `model.safetensors` is missing", "give the folder that holds the model's weights"
    )


def check_weights(name: str, folder: Path) -> None:
    """See that every safetensors file that the model needs is there and whole.

    Raises:
        RunError: one is not.
    """
    hint = "copy or download the model again"
    for file in weights_files(name, folder):
        if (folder / file).is_symlink() and not (folder / file).exists():
            raise _broken_link(folder / file)
        if not (folder / file).is_file():
            raise RunError(f"`{name}` lacks the weights file `{file}`", hint)
        check_pointer(folder / file)
        try:
            with safe_open(folder / file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            said = first_line(error).removeprefix("Error while deserializing header: ")
            raise RunError(f"`{folder / file}` is not a whole safetensors file: {said}", hint) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars, warnings and reports off the terminal while something loads."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn whatever a load raises into one sentence."""
    try:
        yield
    except SpecdecError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
        raise remote_code_error(name, error) or RunError(
            f"model `{name}` does not load: {first_line(error)}",
            "load it with transformers alone to see the whole error",
        ) from error


def remote_code_error(name: str, error: Exception) -> UsageError | None:
    """The error for a model that needs its own Python code; None if loading failed for another reason."""
    if "trust_remote_code" not in str(error):
        return None
    return UsageError(f"model `{name}` comes with its own Python code", "read it, then pass --trust-remote-code")


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, without its full stop."""
    if isinstance(error, KeyError) and error.args:
        return f"unknown or missing `{error.args[0]}`"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:  # only a heading, as of transformers' checks of a configuration
        lines = [re.sub(r"^\s*\w+Error: ", "", lines[1])]
    return lines[0].strip().rstrip(".:")
