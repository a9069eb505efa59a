"""Which GGUF model of a folder or a repository is meant: `NAME:Q4_K_M`, `NAME:FILE.gguf`, or the only one there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from specdec_cli.errors import UsageError
from specdec_cli.files import given_path
from specdec_cli.lm.files.contents import has_weights, is_adapter
from specdec_cli.lm.files.gguf_split import part_names
from specdec_cli.lm.files.names import GGUF, folder_and_choice

_BESIDE = re.compile(r"(^mtp-)|mmproj|imatrix", re.IGNORECASE)  # llama.cpp's names for what lies beside models
_FOLDER = "is a folder of GGUF files with {} models"
_MOST_NAMES = 12  # in a message


def choose_gguf(name: str, wanted: str, files: Sequence[str], what: str) -> list[str]:
    """The files of the model that is meant, the first part first; none where there is no model and none is asked for.

    Args:
        name: of the folder or repository.
        wanted: a file's path or name, or words that only one model's name has; empty for the only model.
        files: everything in it.
        what: it is, for the message about several models.

    Raises:
        UsageError: there are several, none of that name, or it is a later part's.
    """
    ggufs = [file for file in files if file.endswith(GGUF)]
    first = [file for file in ggufs if _first_of(file) == file or _first_of(file) not in ggufs]
    exact = [file for file in ggufs if wanted in (file, Path(file).name)]
    if exact and exact[0] not in first:
        its = f"give the first part: `{name}:{_first_of(exact[0])}`"
        raise UsageError(f"`{exact[0]}` of `{name}` is a later part of a model", its)
    models = [file for file in first if not _BESIDE.search(Path(file).name)]
    words = re.compile(rf"(^|[^A-Za-z0-9]){re.escape(wanted)}([^A-Za-z0-9_]|$)", re.IGNORECASE)
    matches = exact or [model for model in models if not wanted or words.search(model)]
    if len(matches) == 1:
        folder = matches[0].removesuffix(Path(matches[0]).name)
        return [folder + part for part in part_names(Path(matches[0]).name)]
    if not matches and not wanted:
        return []
    nearly = [model for model in models if wanted.lower() in model.lower()]
    hint = f"name one of them, such as `{name}:{(matches or nearly or models or ['FILE.gguf'])[0]}`"
    if matches:
        some = f" with `{wanted}` in their names" if wanted else ""
        raise UsageError(f"`{name}` {what.format(len(matches))}{some}: {_listed(matches)}", hint)
    raise UsageError(f"`{name}` has no GGUF file `{wanted}`", hint if models else "leave out what follows the colon")


def local_gguf(name: str) -> Path | None:
    """The GGUF file, or its first part, that a name leads to on this machine; None for other models.

    Args:
        name: of a file, of a folder that holds GGUF files and no other weights, or `FOLDER:CHOICE`.

    Raises:
        UsageError: a folder has several models, or not the chosen model.
    """
    path = given_path(name)
    if path.suffix == GGUF and path.is_file():
        return path
    folder, wanted = folder_and_choice(name) or (path, "")
    if not folder.is_dir() or (not wanted and (has_weights(folder) or is_adapter(folder))):
        return None
    files = sorted(str(file.relative_to(folder)) for pattern in ("*", "*/*") for file in folder.glob(pattern + GGUF))
    chosen = choose_gguf(name.removesuffix(f":{wanted}") if wanted else name, wanted, files, _FOLDER)
    return folder / chosen[0] if chosen else None


def _first_of(file: str) -> str:
    """The first part of a model's file."""
    return file.removesuffix(Path(file).name) + part_names(Path(file).name)[0]


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MOST_NAMES} more" if len(files) > _MOST_NAMES else ""
    return ", ".join(f"`{file}`" for file in files[:_MOST_NAMES]) + more
