"""A GGUF model in several files, as llama.cpp's converter and `llama-gguf-split` write them.

Each file holds some of the tensors and says which part it is (`split.no`, from 0), of how many (`split.count`), and how
many tensors all parts have (`split.tensors.count`); the first one holds the metadata. Their names end in
`-00001-of-00003.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.contents import check_pointer
from specdec_cli.lm.files.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from specdec_cli.lm.files.reading import broken_link

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST = 99999  # parts, by the digits of their names
_HINT = "download or split the model again, and keep its parts in one folder"


def part_names(name: str, count: int | None = None) -> list[str]:
    """The names of all parts of a model.

    Args:
        name: of one part, or of a model in one file, which is its only part.
        count: of parts; None takes the name's.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"]) if count is None else count
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def gguf_parts(name: str, path: Path) -> tuple[Path, ...]:
    """The files of a model, in order.

    Raises:
        UsageError: the path is another part's.
        RunError: a part is missing, or the first one has a name that does not lead to the others.
    """
    header = read_gguf_header(name, path)
    number, count = _place(name, header)
    if count == 1:
        return (path,)
    names = part_names(path.name, count)
    if len(names) == 1:
        message = f"`{name}` is one of {count} files of a model, and its name does not lead to the others"
        raise RunError(message, f"name it as llama.cpp does: `NAME-{number + 1:05d}-of-{count:05d}.gguf`")
    paths = [path.with_name(part) for part in names]
    if number:
        raise UsageError(f"`{name}` is part {number + 1} of {count} of a model", f"give the first part: `{paths[0]}`")
    for place, part in enumerate(paths, 1):
        if part.is_symlink() and not part.exists():
            raise broken_link(part)
        if not part.is_file():
            raise RunError(f"part {place} of {count} of `{name}` is missing: `{part}`", _HINT)
        check_pointer(part)
    return tuple(paths)


def read_model_header(name: str, paths: Sequence[Path]) -> GgufHeader:
    """The header of a model: the first file's, with the tensors of all files.

    Raises:
        RunError: a file is broken, or the files are not the parts of one model.
    """
    first = read_gguf_header(name, paths[0])
    if len(paths) == 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    factors = first.rope_factors
    for place, path in enumerate(paths):
        header = first if place == 0 else read_gguf_header(str(path), path)
        number, count = _place(str(path), header)
        if (number, count) != (place, len(paths)):
            said = f"part {number + 1} of {count}" if count > 1 else "a whole model"
            raise RunError(f"`{path}` says that it is {said}, and its name part {place + 1} of {len(paths)}", _HINT)
        twice = next((key for key in header.tensors if key in tensors), None)
        if twice is not None:
            raise RunError(f"`{path}` has `{twice}`, which an earlier part has: they are of two models", _HINT)
        tensors |= header.tensors
        factors = factors or header.rope_factors
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise RunError(f"the parts of `{name}` have {len(tensors)} tensors, and the first one says {wanted}", _HINT)
    return replace(first, tensors=tensors, rope_factors=factors)


def _place(name: str, header: GgufHeader) -> tuple[int, int]:
    """Which part a file is, counted from 0, and of how many.

    Raises:
        RunError: it says what no part does.
    """
    given = {key: header.metadata.get(f"split.{key}", usual) for key, usual in (("count", 1), ("no", 0))}
    for key, value in given.items():
        if type(value) is not int or not 0 <= value <= _MOST:
            raise RunError(f"`{name}` says `split.{key}: {value}`, which no part of a model has", _HINT)
    return given["no"], max(1, given["count"])
