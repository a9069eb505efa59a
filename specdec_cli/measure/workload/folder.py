"""Data sets of several files: a hub's folder on this disk, what `datasets` saved, and a hub's own.

The `datasets` library finds which files are which config and split, or loads them from a hub; rows of files are read by
`tables`, as those of any other file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.measure.workload.tables import ROW_SUFFIXES, RawRow, rows_of_file
from specdec_cli.proxy import exempt_this_machine

_SPLITS = ("test", "validation", "train")
_SAVED_TABLE, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_DEFAULT = "default"
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_CONFIGS = re.compile(r"(?:BuilderConfig '([^']*)' not found\.|Config name is missing)[^\[]*\[([^\]]*)\]")
_NAMES_FILES = re.compile(r"^\s*-?\s*(configs|data_files|data_dir)\s*:", re.MULTILINE)

Rows = tuple[list[RawRow], list[str]]


def rows_of_folder(
    path: Path, name: str, config: str | None, split: str | None, usual: tuple[str | None, str | None]
) -> Rows:
    """Rows of a folder, and notices about the choice.

    Args:
        path: the folder.
        name: as given by the user.
        config: the variant, where there are several.
        split: the split, as given by the user.
        usual: a preset's config and split, taken where they are there and nothing else is asked for.

    Raises:
        UsageError: there are several and none is chosen, or the one chosen is not there.
        RunError: `datasets` cannot read the folder.
    """
    with _clear_errors(name, is_here=True):
        if any((path / file).is_file() for file in (_SAVED_TABLE, _SAVED_SPLITS)):
            return _saved(path, name, config, split, usual[1])
        where, files_by_split = _files(path, name, config, usual[0])
    wanted, notices = _split(files_by_split, name, split, usual[1], config)
    files = [Path(os.path.relpath(file)) if not os.path.isabs(name) else Path(file) for file in files_by_split[wanted]]
    _check_one_set(where, name, files)
    rows = [row for file in files for row in rows_of_file(file, str(file), f"the data set `{file}`")]
    return rows, notices


def rows_of_hub(name: str, config: str | None, split: str | None, given: str) -> list[RawRow]:
    """Rows of a hub's data set.

    Args:
        name: hub id.
        config: the variant, or None for the only one.
        split: the split, or None for test, validation or train.
        given: its name as given by the user.

    Raises:
        UsageError: it has several configs or splits, and none is chosen.
        RunError: it cannot be reached or read.
    """
    with _clear_errors(given, is_here=False):
        import datasets

        loaded = datasets.load_dataset(name, config, split=split)
        if isinstance(loaded, dict):
            loaded = loaded[_split(loaded, given, split, None, config)[0]]
        return _rows_of_table(loaded, given)


def _rows_of_table(table: Any, name: str) -> list[RawRow]:
    """Rows of a loaded table, images and sounds as the bytes they are."""
    batches = table.with_format("arrow").iter(1000)
    rows = (row for batch in batches for row in batch.to_pylist())
    return [RawRow(f"row {number} of `{name}`", row) for number, row in enumerate(rows, start=1)]


def _saved(path: Path, name: str, config: str | None, split: str | None, usual: str | None) -> Rows:
    """Rows of what `save_to_disk` wrote."""
    import datasets

    is_one = (path / _SAVED_TABLE).is_file()
    part, value = ("config", config) if config is not None else ("split", split if is_one else None)
    if value is not None:
        raise UsageError(f"`?{part}={value}` chooses among several, and `{name}` is one", f"leave {part} out")
    loaded = datasets.load_from_disk(str(path))
    if is_one:
        return _rows_of_table(loaded, name), []
    wanted, notices = _split(loaded, name, split, usual, None)
    return _rows_of_table(loaded[wanted], name), notices


def _files(path: Path, name: str, config: str | None, usual: str | None) -> tuple[Path, Mapping[str, Sequence[str]]]:
    """The folder that a config's files lie in, and its files by split."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(str(path))
    except FileNotFoundError as error:
        hint = f"name a folder of such files: {', '.join(ROW_SUFFIXES)}"
        raise UsageError(f"the folder `{name}` holds no files of rows", hint) from error
    wanted = config or (usual if usual in names or (usual is not None and (path / usual).is_dir()) else None)
    if wanted is not None and wanted not in names and (path / wanted).is_dir():
        return _files(path / wanted, f"{name.rstrip('/')}/{wanted}", None, None)
    if wanted is None and len(names) == 1:
        wanted = names[0]
    if wanted not in names:
        raise _several(name, "config", names, wanted)
    with TemporaryDirectory(prefix="specdec-") as cache:  # the home may be read-only, and nothing has to be kept
        builder = datasets.load_dataset_builder(str(path), None if wanted == _DEFAULT else wanted, cache_dir=cache)
    return path, {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}


def _split(
    splits: Mapping[str, object], name: str, given: str | None, usual: str | None, config: str | None
) -> tuple[str, list[str]]:
    """The split to read, and a notice if it was chosen from several by default."""
    names = list(splits)
    preferred = [split for split in (usual, *_SPLITS) if split in names] or names[: len(names) == 1]
    wanted = given or next(iter(preferred), None)
    if wanted not in names:
        raise _several(name, "split", names, wanted, config)
    assert wanted is not None, "a split that is there has a name"
    if given is None and wanted != usual and len(names) > 1:
        return wanted, [f"split `{wanted}` of `{name}` is read, which has {', '.join(names)}"]
    return wanted, []


def _several(name: str, part: str, names: Sequence[str], wanted: str | None, config: str | None = None) -> UsageError:
    what = f"has no {part} `{wanted}`" if wanted else f"has several {part}s"
    chosen = f"config={config}&" if config else ""
    hint = (
        f"choose one of {', '.join(names)}: --dataset {quote(f'{name}?{chosen}{part}={names[0]}')}" if names else None
    )
    return UsageError(f"the data set `{name}` {what}", hint)


def _check_one_set(path: Path, name: str, files: Sequence[Path]) -> None:
    """Refuse files of one split that lie in several folders: sets whose README, which tells them apart, is missing."""
    folders = sorted({file.parent for file in files})
    readme = path / "README.md"
    is_told = readme.is_file() and _NAMES_FILES.search(readme.read_text(encoding="utf-8", errors="replace"))
    if len(folders) > 1 and not is_told:
        names = ", ".join(f"`{folder.name}`" for folder in folders[:6])
        raise UsageError(
            f"the data set `{name}` has files in several folders, {names}, and no README.md that says what they are",
            f"name one: --dataset {quote(str(folders[0]))}",
        )


@contextmanager
def _clear_errors(name: str, is_here: bool) -> Iterator[None]:
    """Turn whatever `datasets` raises into one sentence, and keep its bars and warnings off the terminal."""
    import datasets
    from huggingface_hub import constants

    between = None if is_here or constants.HF_HUB_OFFLINE else exempt_this_machine(constants.ENDPOINT)
    through = f"the hub is reached through the {between}; " if between is not None else ""
    hint = f"{through}without a hub give a file: --dataset FILE, or PRESET:FILE for a preset's rows"
    loggers = [logging.getLogger(room) for room in ("datasets", "huggingface_hub", "fsspec")]
    levels = [logger.level for logger in loggers]
    had_bars = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        if configs := _CONFIGS.search(str(error)):
            raise _several(name, "config", re.findall(r"'([^']*)'", configs[2]), configs[1]) from error
        if not is_here and isinstance(error, OSError) and error.errno in _UNWRITABLE:
            hint = "name a folder that can be written: HF_HOME=DIR"
        message = (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".:")
        raise RunError(
            f"the data set `{name}` could not be read: {message}",
            "name one file of the folder" if is_here else hint,
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.utils.enable_progress_bars()
