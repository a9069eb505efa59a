"""The table of published formats of drafts: which one a folder holds, and what it says."""

from __future__ import annotations

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.checkpoint import model_folder
from specdec_cli.lm.files.reading import check_counts, check_flags, read_object
from specdec_cli.lm.heads import dflash_files, eagle_files, medusa_files, pard2_files, pard_files
from specdec_cli.lm.heads.published import DraftFormat, PublishedDraft

FORMATS: tuple[DraftFormat, ...] = (
    eagle_files.FORMAT,
    dflash_files.FORMAT,
    medusa_files.FORMAT,
    pard_files.FORMAT,
    pard2_files.FORMAT,
)
"""Each module that reads one has a `FORMAT`; a folder holds the first that recognizes it."""


def is_published(name: str, revision: str | None = None) -> bool:
    """Whether a name leads to a folder of one of the formats; False where it leads nowhere, which loading tells."""
    try:
        folder = model_folder(name, revision, trust_remote_code=False, has_weights=False)
    except (RunError, UsageError):
        return False
    try:
        content = read_object(folder / "config.json")
    except RunError:  # which reading it tells, if its tensors are a draft's
        content = {}
    return any(one.recognizes(folder, content) for one in FORMATS)


def read_published(
    name: str, revision: str | None = None, has_weights: bool = True, method: str | None = None
) -> PublishedDraft:
    """Read a published draft's folder.

    Args:
        name: hub id or folder.
        revision: branch, tag or commit of a hub id.
        has_weights: fetch its weights too.
        method: a drafting method that is to run it; None takes the folder's own.

    Raises:
        UsageError: it holds something else, or a variant that is not supported.
        RunError: there is no such folder, or its configuration cannot be read.
    """
    folder = model_folder(name, revision, trust_remote_code=False, has_weights=has_weights, is_head=True)
    if not (folder / "config.json").is_file():
        raise RunError(f"the draft `{name}` has no `config.json`", "give the folder that holds the draft's files")
    content = read_object(folder / "config.json")
    check_counts(folder / "config.json", content)
    check_flags(folder / "config.json", content)
    for one in FORMATS:
        if one.recognizes(folder, content):
            found = one.read(name, folder, content)
            if method not in (None, found.method):
                said = f"`{name}` is for the drafting method `{found.method}`, not `{method}`"
                raise UsageError(said, f"write `-d {name}`")
            return found
    what = next((one.what for one in FORMATS if method in one.methods), "draft of a known format")
    raise UsageError(f"`{name}` holds no {what}", "give the folder of one, or name a model as the draft")
