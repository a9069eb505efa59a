"""Data sets as prompts: files, saved folders and hub names through `datasets`, and presets for the usual benchmarks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any
from urllib.parse import parse_qsl

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.measure.prompts import PromptRow, decode_text, parse_prompts, read_prompt_file
from specdec_cli.proxy import exempt_this_machine, proxy_of

PROMPT_COLUMNS = ("prompt", "turns", "question", "instruction", "text")
_ID_COLUMNS = ("id", "question_id", "prompt_id", "task_id")
_SPLITS = ("test", "validation", "train")
_BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_BUILDERS |= {".arrow": "arrow"}
_TABLES = {".json", ".csv", ".tsv", ".parquet", ".arrow"}
_FILES = {*_BUILDERS, ".txt"}
_CHOICES = ("column", "config", "split", "task")
_FETCH_SECONDS = 20
_SAVED_TABLE, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from and how a row becomes a prompt.

    Args:
        name: hub id, URL, file or folder.
        config: the hub's name for a variant, or None.
        split: None takes test, validation or train, whichever is there first, or the only one.
        template: text with columns in braces; None takes the first of PROMPT_COLUMNS that is there.
        task_column: a column that says each row's task; None takes `category` where there is one.
        task: one task for all rows that have none of their own.
    """

    name: str
    config: str | None = None
    split: str | None = None
    template: str | None = None
    task_column: str | None = None
    task: str | None = None


PRESETS: dict[str, Source] = {
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", split="train"),
    "gsm8k": Source("openai/gsm8k", "main", "test", "Question: {question}\nAnswer:", task="gsm8k"),
    "humaneval": Source("openai/openai_humaneval", None, "test", "{prompt}", task="humaneval"),
    "mbpp": Source(
        "google-research-datasets/mbpp",
        "full",
        "test",
        "You are an expert Python programmer, and here is your task: {text} "
        "Your code should pass these tests:\n\n{test_list}\n\n",
        task="mbpp",
    ),
    "spec-bench": Source(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl", template="{turns}"
    ),
    "cnn_dailymail": Source(
        "abisee/cnn_dailymail",
        "3.0.0",
        "test",
        "Summarize this article.\n\n{article}\n\nSummary:",
        task="cnn_dailymail",
    ),
}


def read_dataset(name: str) -> list[PromptRow]:
    """Rows of a data set.

    Args:
        name: a prompt file; a table (.json, .csv, .tsv, .parquet, .arrow); a folder that `datasets` saved; a hub id
            `owner/name`; a preset, alone or as `PRESET:FILE`. Files, folders and hub ids take `?column=…&task=COLUMN`
            behind them, folders and hub ids `split=…`, what `datasets` has to build `config=…`.

    Raises:
        UsageError: no such thing, or rows without a prompt.
        RunError: it cannot be read, or the hub cannot be reached.
    """
    if name in PRESETS:
        return _fetched(name) if PRESETS[name].name.startswith("https://") else _rows(PRESETS[name], name)
    preset, colon, path = name.partition(":")
    if colon and preset in PRESETS:
        _check_exists(path, name)
        local = replace(PRESETS[preset], name=path, config=None, split=None)
        return _rows(local, name)
    if is_at_hand(name):
        return read_prompt_file(Path(name))
    path, _, choices = name.partition("?")
    if not _HUB_ID.fullmatch(path) or Path(path).suffix.lower() in _FILES:
        _check_exists(path, name)
    return _rows(_chosen(path, choices), name)


def is_at_hand(name: str) -> bool:
    """Whether a data set is a prompt file here, which is read at once and without `datasets`."""
    return Path(name).is_file() and Path(name).suffix.lower() not in _TABLES


def _fetched(name: str) -> list[PromptRow]:
    """Rows of a preset whose JSONL file lies at an address."""
    from urllib.request import urlopen

    address = PRESETS[name].name
    try:
        with urlopen(address, timeout=_FETCH_SECONDS) as answer:
            data: bytes = answer.read()
    except OSError as error:
        between = proxy_of(address)
        through = "" if between is None else f"; asked through the {between}"
        raise RunError(
            f"the data set `{name}` could not be fetched from {address}: {error}{through}",
            f"download it elsewhere and give --dataset {name}:FILE",
        ) from error
    return parse_prompts(decode_text(data, address), address, is_jsonl=True)


def _check_exists(path: str, name: str) -> None:
    if Path(path).exists():
        return
    if Path(path).suffix.lower() in _FILES:
        raise UsageError(f"there is no data set `{name}`: no such file", "check the path")
    raise UsageError(
        f"there is no data set `{name}`",
        f"give builtin:mini, builtin:stories, {', '.join(PRESETS)}, a file, a folder, or a hub id owner/name",
    )


def _chosen(path: str, choices: str) -> Source:
    given = dict(parse_qsl(choices, keep_blank_values=True))
    wrong = next((key for key in given if key not in _CHOICES or not given[key]), None)
    if wrong is not None or (choices and not given):
        raise UsageError(f"`?{choices}` is not understood", f"some of {', '.join(_CHOICES)}: FILE?column=question")
    part = next((key for key in ("config", "split") if key in given and _is_one(Path(path), key)), None)
    if part is not None:
        raise UsageError(f"`?{part}={given[part]}` chooses among several, and `{path}` is one", f"leave {part} out")
    column = given.get("column")
    template = None if column is None else f"{{{column}}}"
    return Source(path, given.get("config"), given.get("split"), template, task_column=given.get("task"))


def _is_one(path: Path, part: str) -> bool:
    """Whether there is nothing to choose: a file has one table, a saved folder one variant or one split."""
    if path.is_file() or (path / _SAVED_TABLE).is_file():
        return True
    return part == "config" and (path / _SAVED_SPLITS).is_file()


def _rows(source: Source, name: str) -> list[PromptRow]:
    with _clear_errors(name):
        table = _load(source)
        columns = list(table.column_names)
        template = source.template or _default_template(columns, name)
        _check_columns(template, source, columns, name)
        task_column = source.task_column or ("category" if "category" in columns else None)
        id_column = next((column for column in _ID_COLUMNS if column in columns), None)
        rows = []
        for index, row in enumerate(table):
            prompt = _filled(template, row)
            if not prompt.strip():
                raise UsageError(f"row {index + 1} of `{name}` has an empty prompt", "choose another column")
            task = row[task_column] if task_column else None
            given_id = row[id_column] if id_column else None
            rows.append(
                PromptRow(
                    index,
                    prompt,
                    id=given_id if isinstance(given_id, str | int) else None,
                    category=source.task if task is None else str(task),
                )
            )
    if not rows:
        raise UsageError(f"the data set `{name}` has no row", "choose another split: ?split=train")
    return rows


def _load(source: Source) -> Any:
    """The table of a source."""
    import datasets

    path = Path(source.name)
    if path.is_file():
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise UsageError(f"`{source.name}` is no table", f"give one of {', '.join(sorted(_BUILDERS))}")
        more = {"delimiter": "\t"} if path.suffix.lower() == ".tsv" else {}
        return datasets.load_dataset(builder, data_files=source.name, split="train", **more)
    if path.is_dir() and any((path / file).is_file() for file in (_SAVED_TABLE, _SAVED_SPLITS)):
        return _split_of(datasets.load_from_disk(source.name), source)
    return _split_of(datasets.load_dataset(source.name, source.config, split=source.split), source)


def _split_of(loaded: Any, source: Source) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    names = list(loaded)
    wanted = source.split or next((name for name in _SPLITS if name in names), names[0] if len(names) == 1 else None)
    if wanted not in names:
        what = f"has no split `{wanted}`" if wanted else "has several splits"
        raise UsageError(f"the data set `{source.name}` {what}", f"choose one of {', '.join(names)}: ?split={names[0]}")
    return loaded[wanted]


def _default_template(columns: Sequence[str], name: str) -> str:
    column = next((column for column in PROMPT_COLUMNS if column in columns), None)
    if column is None:
        raise UsageError(
            f"none of the columns of `{name}` is known to hold prompts: {', '.join(columns)}",
            f"name one: --dataset '{name}?column={columns[0] if columns else 'NAME'}'",
        )
    return f"{{{column}}}"


def _check_columns(template: str, source: Source, columns: Sequence[str], name: str) -> None:
    needed = [field for _, field, _, _ in Formatter().parse(template) if field]
    needed += [source.task_column] if source.task_column else []
    missing = next((column for column in needed if column not in columns), None)
    if missing is not None:
        raise UsageError(
            f"the data set `{name}` has no column `{missing}`", f"its columns are {', '.join(columns) or 'none'}"
        )


def _filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with a row's values; of turns the first, other lists line by line."""
    parts = []
    for text, column, _, _ in Formatter().parse(template):
        parts.append(text)
        if column:
            parts.append(_text(row[column], only_first=column in ("turns", "prompt")))
    return "".join(parts)


def _text(value: Any, only_first: bool) -> str:
    if isinstance(value, list):
        return str(value[0]) if only_first and value else "\n".join(map(str, value))
    return "" if value is None else str(value)


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Turn whatever `datasets` raises into one sentence, and keep its bars and warnings off the terminal."""
    import datasets
    from huggingface_hub import constants

    between = exempt_this_machine(constants.ENDPOINT)
    is_remote = not constants.HF_HUB_OFFLINE and not Path(name.partition("?")[0]).exists() and ":" not in name
    through = f"the hub is asked through the {between}; " if is_remote and between is not None else ""
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
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".:")
        raise RunError(
            f"the data set `{name}` could not be read: {said}",
            f"{through}without a hub give a file: --dataset FILE, or PRESET:FILE for a preset's rows",
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.utils.enable_progress_bars()
