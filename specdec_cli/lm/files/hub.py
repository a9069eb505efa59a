"""Files of models on the hub: which are fetched, and one sentence for every way in which that fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import first_line
from specdec_cli.proxy import exempt_this_machine, proxy_of

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
_OF_HEADS = ("pytorch_model.bin", "mask_embedding.pt")
_WEIGHTS = ("*.safetensors", "adapter_model.bin")


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


def fetch(name: str, revision: str | None, wanted: Wanted) -> Path:
    """Download a hub model's safetensors, if it has any, and small files, or find them in the local cache.

    Raises:
        RunError: the hub has no such model, or cannot be reached, and nothing is in the cache.
    """
    patterns = [*_SMALL, *(["*.py"] if wanted.trust_remote_code else [])]
    if wanted.has_weights and wanted.fetches_weights:
        patterns += [*_WEIGHTS, *(_OF_HEADS if wanted.is_head else [])]
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
