"""Files of models on the hub: which are fetched, and one sentence for every way in which that fails."""

from __future__ import annotations

import glob
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.files.draft_formats import pickled_files
from specdec_cli.lm.files.gguf_choice import choose_gguf
from specdec_cli.lm.files.model_folder import Wanted
from specdec_cli.lm.files.names import is_hub_name
from specdec_cli.lm.files.reading import first_line
from specdec_cli.proxy import exempt_this_machine, proxy_of

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
_PICKLED = "pytorch_model*.bin"
_WEIGHTS = ("*.safetensors", "adapter_model.bin")
_SECONDS = 5  # for the hub's answers


def is_cached(name: str) -> bool:
    """Whether the configuration of a hub model is in the local cache."""
    repo = name.partition(":")[0]
    return is_hub_name(name) and isinstance(try_to_load_from_cache(repo, "config.json"), str)


def fetch(name: str, revision: str | None, wanted: Wanted) -> Path:
    """Download a hub model's weights and small files, or find them in the local cache.

    Weights are its safetensors; without any, `pytorch_model.bin`; without those, one GGUF file.

    Args:
        name: a hub id; `org/repo:FILE.gguf` names a GGUF file of it, and `org/repo:Q4_K_M` the one with these letters.
        revision: branch, tag or commit.
        wanted: the files.

    Returns:
        The model's folder, or its GGUF file, the first of several parts.

    Raises:
        UsageError: it has several GGUF files, or none of that name.
        RunError: the hub has no such model, or cannot be reached, and nothing is in the cache.
    """
    repo, _, file = name.partition(":")
    fetches = wanted.has_weights and wanted.fetches_weights
    patterns = [*_SMALL, *(["*.py"] if wanted.trust_remote_code else [])]
    if fetches and not file:
        patterns += [*_WEIGHTS, *(["pytorch_model.bin", *pickled_files()] if wanted.is_head else [])]
    folder = _snapshot(repo, revision, patterns)
    is_whole = any(folder.glob("*.safetensors")) or any(folder.glob("adapter_config.json"))
    if not file and (not wanted.is_model or is_whole or (not fetches and (folder / "config.json").is_file())):
        return folder
    names = _file_names(repo, revision, folder)
    if not file and any(fnmatch(file_name, _PICKLED) for file_name in names):
        return _snapshot(repo, revision, [*patterns, _PICKLED]) if fetches else folder
    chosen = choose_gguf(repo, file, names, "has {} GGUF files")
    if chosen and fetches:
        folder = _snapshot(repo, revision, [*patterns, *map(glob.escape, chosen)])
    absent = next((part for part in chosen if not (folder / part).is_file()), None)
    if absent is not None:
        what = "is not here yet, and its configuration is in it" if not fetches else "could not be downloaded"
        hint = f"fetch it: `hf download {repo} {' '.join(chosen)}`"
        raise RunError(f"the GGUF file `{absent}` of `{repo}` {what}", hint)
    return folder / chosen[0] if chosen else folder


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of a model with the files that some patterns name."""
    exempt_this_machine(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["original/*", "onnx/*", "consolidated*"],
                etag_timeout=_SECONDS,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except Exception as error:
        raise _fetch_error(repo, revision, error) from error


def _file_names(repo: str, revision: str | None, folder: Path) -> list[str]:
    """Paths of a model's files on the hub; of those in the cache where the hub is not asked or does not answer."""
    if not constants.HF_HUB_OFFLINE:
        with suppress(Exception):
            # `list_repo_files` asks a hub that does not answer again and again, for half a minute.
            its = HfApi().model_info(repo, revision=revision, timeout=_SECONDS)
            return sorted(file.rfilename for file in its.siblings or ())
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _fetch_error(name: str, revision: str | None, error: Exception) -> SpecdecError:
    """The error for a failed download."""
    match error:
        case GatedRepoError():
            return RunError(f"model `{name}` is gated", "accept its licence on the hub and log in with `hf auth login`")
        case RevisionNotFoundError():
            return UsageError(f"model `{name}` has no revision `{revision}`", "check `revision`")
        case RepositoryNotFoundError():
            hint = "check the spelling, or log in if it is private"
            return UsageError(f"no folder and no hub model is named `{name}`", hint)
        case LocalEntryNotFoundError():
            what = "is neither a folder nor in the local hub cache"
        case _:
            what = f"could not be downloaded: {first_line(error)}"
    return RunError(f"model `{name}` {what}", f"{hub_proxy_words()}if no hub can be reached, give a local folder")


def hub_proxy_words() -> str:
    """The beginning of a hint if the hub is reached through a proxy."""
    proxy = None if constants.HF_HUB_OFFLINE else proxy_of(constants.ENDPOINT)
    return "" if proxy is None else f"the hub is reached through the {proxy}; "
