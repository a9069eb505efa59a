"""Rows of a file, whatever its format: text lines, JSON, JSONL, CSV, TSV, Parquet, Arrow, packed or not.

The one reader of row files: `--prompt-file`, `--dataset`, presets with a file of one's own and the files of a hub's
folder all come through here. What a row's values mean is not known here.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.files import MAX_BYTES, RepeatedKeyError, decoded, parse_json, read_bytes, without_packing
from specdec_cli.measure.workload.chats import PROMPT_COLUMNS, is_broken_chat, is_chat, kind_of

_LINES_SUFFIXES = (".jsonl", ".ndjson")
_JSON_SUFFIXES = (".json", *_LINES_SUFFIXES)
_TABLE_SUFFIXES = (".csv", ".tsv")
ROW_SUFFIXES = (*_JSON_SUFFIXES, *_TABLE_SUFFIXES, ".parquet", ".arrow", ".txt")
_OTHER_SUFFIXES = (
    *(".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".py", ".ipynb", ".xlsx", ".xls", ".ods", ".docx", ".pdf"),
    *(".pkl", ".pickle", ".npy", ".npz", ".pt", ".safetensors", ".gguf", ".db", ".sqlite", ".avro", ".orc"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tiff", ".svg"),
    *(".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv"),
    *(".tar", ".tgz", ".zip", ".tfrecord", ".feather", ".h5", ".hdf5", ".lz4", ".br"),
)
_FORMATS = "a file of lines (.txt), JSONL, JSON, CSV, TSV, Parquet or Arrow, packed with gzip or Zstandard or not"
_PAGE_STARTS = (b"<!doctype", b"<html")
_DELIMITERS = ",;\t|"
_NUMBER_COLUMNS = ("id", "question_id", "prompt_id", "task_id", "max_new_tokens", "seed")
_MOST_DIGITS = 19
_MOST_ROWS = 1 << 22
_MOST_VALUES = 1 << 26  # lists, objects and texts in JSON, each of which takes at least 50 bytes
_TABLE_BATCH = 64  # rows of a table that are unpacked together: one repeated value may be long


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file has it.

    Args:
        where: names it in errors, by line or by number.
        values: by column.
    """

    where: str
    values: Mapping[str, Any]


def rows_of_file(path: Path, name: str, what: str) -> list[RawRow]:
    """Rows of a file.

    Args:
        path: the file.
        name: names it in the rows' places.
        what: names it in errors.

    Raises:
        UsageError: it cannot be read, or is of a format that no prompts are read from.
    """
    return rows_of_bytes(read_bytes(path, what), name, what, path)


def rows_of_bytes(data: bytes, name: str, what: str, path: Path | None = None) -> list[RawRow]:
    """Rows of a file's content.

    Args:
        data: the content, unpacked.
        name: names the file in the rows' places; its suffix tells the format where the content does not.
        what: names it in errors.
        path: the file itself, where there is one.

    Raises:
        UsageError: as `rows_of_file`.
    """
    try:
        return _rows_of_bytes(data, name, what, path)
    except RepeatedKeyError as error:
        text = decoded(data, what, path)
        raise UsageError(f"{_repetition(text, name)}: the key `{error}` is given twice", "keep one of them") from error


def _repetition(text: str, name: str) -> str:
    """Place of the first line with an object that has a key twice; the file where no line is one."""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            _parsed(line)
        except RepeatedKeyError:
            return f"{name}:{number}"
    return f"`{name}`"


def _rows_of_bytes(data: bytes, name: str, what: str, path: Path | None) -> list[RawRow]:
    suffix = PurePath(without_packing((path or PurePath(name)).name)).suffix.lower()
    if suffix in ROW_SUFFIXES and suffix != ".txt" and data[:200].lstrip().lower().startswith(_PAGE_STARTS):
        raise UsageError(f"{what} is a web page, not the file itself", "download the raw file")
    if data.startswith(b"PAR1") or suffix == ".parquet":
        return _numbered(_parquet(data, what), name)
    if data.startswith(b"ARROW1") or suffix == ".arrow":
        return _numbered(_arrow(data, what), name)
    if suffix in _OTHER_SUFFIXES:
        raise UsageError(f"{what} is a `{suffix}` file, from which no prompts are read", f"give {_FORMATS}")
    text = decoded(data, what, path)
    if "\n" not in text:
        text = text.replace("\r", "\n")  # as old Macs ended lines, and Excel's "CSV (Macintosh)" does
    start = text[:400].lstrip()
    if suffix in _TABLE_SUFFIXES:
        return _numbered(_csv(text, what, is_tsv=suffix == ".tsv"), name)
    if suffix in _JSON_SUFFIXES or start.startswith(("{", "[")):
        _check_values(data, what)
    if suffix in _JSON_SUFFIXES or start.startswith("{") or (start.startswith("[") and _is_of_rows(_parsed(text))):
        return _json(text, name, what, is_lines=suffix in _LINES_SUFFIXES)
    _check_rows(text.count("\n"), what)
    lines = enumerate(text.split("\n"), start=1)
    return [RawRow(f"{name}:{n}", {"prompt": line.removesuffix("\r")}) for n, line in lines if line.strip()]


def _check_values(data: bytes, what: str) -> None:
    """Refuse JSON of more values than fit into memory as objects, before it is parsed."""
    num = data.count(b"[") + data.count(b"{") + data.count(b'"') // 2
    if num > _MOST_VALUES:
        raise UsageError(f"{what} holds {num} values, and at most {_MOST_VALUES} are read", "keep fewer rows of it")


def _check_rows(num: int, what: str) -> None:
    if num > _MOST_ROWS:
        raise UsageError(f"{what} has more than {_MOST_ROWS} rows", "keep fewer of them")


def _numbered(rows: Iterator[Mapping[str, Any]], name: str) -> list[RawRow]:
    return [RawRow(f"row {number} of `{name}`", row) for number, row in enumerate(rows, start=1)]


def _is_of_rows(value: object) -> bool:
    return isinstance(value, list) and isinstance(_first(value), dict | list)


def _parsed(text: str) -> Any:
    """JSON's value; None for text that is none."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def _whole(text: str, name: str, is_lines: bool) -> Any:
    """A file as one JSON value; None where it holds a value a line."""
    start = text.lstrip()[:1]
    value = _parsed(text) if start in ("[", "{") else None
    if value is None and start == "[" and not is_lines and _parsed(text.lstrip().split("\n", 1)[0]) is None:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            hint = "write a list of rows, or one row per line"
            raise UsageError(f"{name}:{error.lineno}: not JSON: {error.msg}", hint) from error
        except (ValueError, RecursionError):
            return None
    return value


def _json(text: str, name: str, what: str, is_lines: bool) -> list[RawRow]:
    """Rows of JSON: a list, an object that holds one list, or a row a line, whatever the name says."""
    whole = _whole(text, name, is_lines)
    if is_chat(whole):
        return [RawRow(f"row 1 of `{name}`", {"messages": whole})]
    if isinstance(whole, list) and (not is_lines or _is_of_rows(whole)):
        _check_rows(len(whole), what)
        return _of_list(whole, name)
    if isinstance(whole, dict) and not is_lines:
        return _of_object(whole, name, what)
    if isinstance(whole, dict):
        first = text[: len(text) - len(text.lstrip())].count("\n") + 1
        return [RawRow(f"{name}:{first}", whole)]
    return _json_lines(text, name, what, is_lines)


def _of_object(row: Mapping[str, Any], name: str, what: str) -> list[RawRow]:
    """Rows of one object: itself, or the one list of objects in it."""
    if "turns" in row or any(_is_prompt(row.get(key)) for key in PROMPT_COLUMNS):
        return [RawRow(f"row 1 of `{name}`", row)]
    lists = [
        key
        for key, value in row.items()
        if isinstance(value, list) and isinstance(_first(value), dict) and not is_chat(value)
    ]
    if len(lists) == 1:
        return _of_list(row[lists[0]], name)
    if lists:
        raise UsageError(
            f"{what} holds several lists of rows: {', '.join(lists)}", "save the one to decode as a file of its own"
        )
    if row and all(isinstance(value, dict | list) for value in row.values()):
        raise UsageError(
            f"{what} holds columns, not rows: {', '.join(list(row)[:6])}",
            'write rows, with pandas: frame.to_json("rows.jsonl", orient="records", lines=True)',
        )
    return [RawRow(f"row 1 of `{name}`", row)]


def _of_list(rows: list[Any], name: str) -> list[RawRow]:
    places = ((f"row {number} of `{name}`", row) for number, row in enumerate(rows, start=1))
    return [RawRow(where, {"prompt": row} if isinstance(row, str) else _row(row, where)) for where, row in places]


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or is_chat(value) or is_broken_chat(value)


def _first(values: list[Any]) -> Any:
    """The first value that is not null."""
    return next((value for value in values if value is not None), None)


def _json_lines(text: str, name: str, what: str, is_lines: bool) -> list[RawRow]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            value = parse_json(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large a value"
            hint = "write one JSON object per line" if is_lines else "write one list of rows, or one row per line"
            raise UsageError(f"{where}: not a JSON object: {reason}", hint) from error
        rows.append(RawRow(where, _row(value, where)))
        _check_rows(len(rows), what)
    return rows


def _row(value: Any, where: str) -> Mapping[str, Any]:
    """A row's columns; a list of messages alone is a row of them."""
    if isinstance(value, dict):
        return value
    if is_chat(value) or (is_broken_chat(value) and any(value)):
        return {"messages": value}
    if value is None or value == []:
        return {}  # left out and counted, as rows without a prompt are
    raise UsageError(
        f"{where}: not a JSON object but {kind_of(value)}", 'write rows such as {"prompt": "Once upon a time"}'
    )


def _csv(text: str, what: str, is_tsv: bool) -> Iterator[Mapping[str, Any]]:
    """Rows of a table in text; its first line names the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    first = text.split("\n", 1)[0].strip()
    if first.lower().startswith("sep=") and len(first) == 5:
        delimiter, text = first[4], text.split("\n", 1)[1] if "\n" in text else ""
    else:
        delimiter = _delimiter(text, is_tsv)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    number = 0
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if columns is None:
                columns = _columns(cells, what)
                continue
            number += 1
            _check_rows(number, what)
            if any(cells[len(columns) :]):
                raise UsageError(
                    f"{what}: line {reader.line_num} has {len(cells)} cells, and the header names {len(columns)}",
                    f"put cells that hold `{delimiter}` in double quotes, or save the rows as JSONL".replace(
                        "\t", "tab"
                    ),
                )
            cells += [""] * (len(columns) - len(cells))
            yield {column: _cell(column, cell) for column, cell in zip(columns, cells, strict=False)}
    except csv.Error as error:
        raise UsageError(
            f"{what}: line {reader.line_num} is not in order: {error}",
            "double the quotes inside of quoted cells, or save the rows as JSONL",
        ) from error


def _delimiter(text: str, is_tsv: bool) -> str:
    """The separator of the first line that has one: a comma, semicolon, tab or bar."""
    line = next((line for line in text.replace("\r", "\n").split("\n") if line.strip()), "")
    if is_tsv and "\t" in line:
        return "\t"
    counts = {delimiter: len(next(csv.reader([line], delimiter=delimiter), [])) for delimiter in _DELIMITERS}
    return max(_DELIMITERS, key=lambda delimiter: counts[delimiter])


def _columns(cells: list[str], what: str) -> list[str]:
    columns = [cell.strip() for cell in cells]
    twice = next((column for column in columns if column and columns.count(column) > 1), None)
    if twice is not None:
        raise UsageError(f"{what} has two columns `{twice}`", "give each a name of its own in the first line")
    return columns


def _cell(column: str, text: str) -> Any:
    """A cell's text; a whole number where rows have those, and null where one is missing."""
    if column not in _NUMBER_COLUMNS:
        return text
    if not text.strip():
        return None
    digits = text.strip().removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS and str(int(digits)) == digits
    return int(text) if is_number else text


def _parquet(data: bytes, what: str) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
        groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > MAX_BYTES:
            raise _too_large(what)
        yield from _of_batches(file.iter_batches(_TABLE_BATCH), what)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(what, "Parquet", error) from error


def _arrow(data: bytes, what: str) -> Iterator[Mapping[str, Any]]:
    import pyarrow

    source = pyarrow.BufferReader(data)
    open_any = pyarrow.ipc.open_file if data.startswith(b"ARROW1") else pyarrow.ipc.open_stream
    try:
        with open_any(source) as file:
            yield from _of_batches(_arrow_batches(file), what)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(what, "Arrow", error) from error


def _arrow_batches(file: Any) -> Iterator[Any]:
    """Batches of an Arrow file or stream in parts of few rows, unpacked one after the other."""
    batches = file if not hasattr(file, "get_batch") else map(file.get_batch, range(file.num_record_batches))
    for batch in batches:
        yield from (batch.slice(start, _TABLE_BATCH) for start in range(0, batch.num_rows, _TABLE_BATCH))


def _of_batches(batches: Iterable[Any], what: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a table's batches, as long as they fit into memory."""
    num_rows = num_bytes = 0
    for batch in batches:
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        _check_rows(num_rows, what)
        if num_bytes > MAX_BYTES:
            raise _too_large(what)
        yield from batch.to_pylist()


def _too_large(what: str) -> UsageError:
    return UsageError(f"{what} unpacks to more than {MAX_BYTES >> 20} MiB", "keep fewer rows or columns of it")


def _damaged(what: str, kind: str, error: Exception) -> UsageError:
    message = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
    return UsageError(f"{what} is not a whole {kind} file: {message}", "download it again, or name the right file")
