"""Data sets by name: files, a hub's folders, hub ids through `datasets`, and presets for the usual benchmarks."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

from specdec_cli.engine.prompts import PromptSet
from specdec_cli.errors import RunError, UsageError, did_you_mean
from specdec_cli.files import given_path, read_limited, unpacked, without_packing
from specdec_cli.measure.workload.reading import Reading, prompts_of
from specdec_cli.measure.workload.tables import ROW_SUFFIXES, RawRow, rows_of_bytes, rows_of_file
from specdec_cli.proxy import proxy_of

_CHOICES = ("column", "config", "split", "task", "empty")
_FETCH_SECONDS = 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a data set's rows, and how a row becomes a prompt.

    Args:
        name: hub id, URL, file or folder.
        config: the hub's name for a variant, or None.
        split: None takes test, validation or train, whichever is there first, or the only one.
        template: text with columns in braces; None takes a column that is known to hold prompts.
        task: one task for all rows that have none of their own.
    """

    name: str
    config: str | None = None
    split: str | None = None
    template: str | None = None
    task: str | None = None


BUILT_IN = ("builtin:mini", "builtin:stories")
PRESETS: dict[str, Source] = {
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", split="train"),
    "gsm8k": Source("openai/gsm8k", "main", "test", "Question: {question}\nAnswer:", task="gsm8k"),
    "math-500": Source("HuggingFaceH4/MATH-500", None, "test", "{problem}", task="math-500"),
    "humaneval": Source("openai/openai_humaneval", None, "test", "{prompt}", task="humaneval"),
    "mbpp": Source(
        "google-research-datasets/mbpp",
        "full",
        "test",
        "You are an expert Python programmer, and here is your task: {text} "
        "Your code should pass these tests:\n\n{test_list}\n\n",
        task="mbpp",
    ),
    "speed-bench": Source("nvidia/SPEED-Bench", "qualitative", "test"),
    "spec-bench": Source("https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"),
    "cnn_dailymail": Source(
        "abisee/cnn_dailymail",
        "3.0.0",
        "test",
        "Summarize this article.\n\n{article}\n\nSummary:",
        task="cnn_dailymail",
    ),
}


def check_dataset_name(name: str) -> None:
    """Refuse a word that is no data set of this package, and no file's name either."""
    word = name.partition("?")[0]
    if word.startswith("builtin:") and word not in BUILT_IN:
        message = f"there is no built-in data set `{word}`{did_you_mean(word, BUILT_IN)}"
        raise UsageError(message, f"there are {' and '.join(BUILT_IN)}")
    if re.fullmatch(r"[\w-]+", word) and word not in PRESETS and not os.path.exists(given_path(word)):
        raise _no_data_set(name)


def _no_data_set(name: str) -> UsageError:
    known = [*BUILT_IN, *PRESETS]
    meant = did_you_mean(name, known) or did_you_mean(f"builtin:{name}", BUILT_IN)
    message = f"there is no data set `{name}`{meant}"
    return UsageError(message, f"give {', '.join(known)}, a file, a folder, or a hub id owner/name")


def read_dataset(name: str, chat: bool | None = False) -> PromptSet:
    """Rows of a data set.

    Args:
        name: a file of rows, packed or not; a folder of such files, as a hub or `datasets` lays them out; a hub id
            `owner/name`; a preset, alone or as `PRESET:PATH`. `?column=…&task=COLUMN&empty=refuse` may stand behind a
            path or hub id, `config=…` and `split=…` where there are several.
        chat: whether whole conversations are wanted.

    Raises:
        UsageError: no such thing, or rows without a prompt.
        RunError: it cannot be read, or the hub cannot be reached.
    """
    preset, colon, path = name.partition(":")
    if colon and preset in PRESETS:
        return _read(path, name, chat, PRESETS[preset])
    if name in PRESETS:
        source = PRESETS[name]
        return prompts_of(
            _fetched(name) if source.name.startswith("https://") else _from_hub(source, name),
            name,
            _reading(source, {}, chat),
        )
    return _read(name, name, chat, None)


def read_prompt_file(name: str, chat: bool | None = False) -> PromptSet:
    """Rows of a prompt file, `?column=…` behind it if need be: what `read_dataset` makes of the same file.

    Raises:
        UsageError: it cannot be read, or a row is wrong.
    """
    place = _place(name)
    if place.is_folder:
        raise UsageError(f"prompt file `{place.text}` cannot be read: Is a directory", "name a file in it")
    rows = rows_of_file(place.path, place.text, f"prompt file `{place.text}`")
    return prompts_of(rows, place.text, _reading(None, place.choices, chat))


def check_prompt_file(name: str) -> None:
    """Refuse a prompt file that is not there; `-` is standard input."""
    if name == "-":
        return
    place = _place(name)
    try:
        is_folder = stat.S_ISDIR(os.stat(place.path).st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"prompt file `{place.text}` cannot be read: {reason}"
        raise UsageError(message, "check the path and its permissions") from None
    if is_folder:
        raise UsageError(f"prompt file `{place.text}` cannot be read: Is a directory", "name a file in it")


def is_at_hand(name: str) -> bool:
    """Whether a data set is built in or a file here, which is read at once and without `datasets`."""
    if name.startswith("builtin:"):
        return True
    preset, colon, path = name.partition(":")
    place = _place(path if colon and preset in PRESETS else name)
    return place.is_there and not place.is_folder


@dataclass(frozen=True, slots=True)
class _Place:
    """A path, or a hub id, as it was given, and what was chosen behind its `?`."""

    text: str
    path: Path
    choices: Mapping[str, str]

    @property
    def is_there(self) -> bool:
        return os.path.exists(self.path)

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.path)


def _read(given: str, name: str, chat: bool | None, preset: Source | None) -> PromptSet:
    """Rows of a path or hub id with its choices, as a preset reads them where there is one."""
    place = _place(given)
    if not place.is_there:
        _check_hub_id(place.text, name, preset)
    column, config, split = (place.choices.get(key) for key in ("column", "config", "split"))
    if preset is not None and column is not None:
        raise UsageError(f"`?column={column}` has no effect on a preset", "name the file without the preset")
    notices: list[str] = []
    if place.is_folder:
        from specdec_cli.measure.workload.folder import rows_of_folder

        usual = (preset.config, preset.split) if preset is not None else (None, None)
        rows, notices = rows_of_folder(place.path, place.text, config, split, usual)
    elif place.is_there:
        rows = rows_of_file(place.path, place.text, f"the data set `{place.text}`")
    else:
        rows = _from_hub(Source(place.text, config, split), name)
    prompts = prompts_of(rows, place.text if preset is None else name, _reading(preset, place.choices, chat))
    return replace(prompts, notices=[*notices, *prompts.notices])


def _reading(preset: Source | None, choices: Mapping[str, str], chat: bool | None) -> Reading:
    return Reading(
        chat,
        choices.get("column"),
        preset.template if preset else None,
        choices.get("task"),
        preset.task if preset else None,
        choices.get("empty") == "refuse",
    )


def _place(name: str) -> _Place:
    """The path or hub id that a name means, and its choices."""
    whole = given_path(name)
    if os.path.exists(whole) or "?" not in name:
        return _Place(name, whole, {})
    text, _, choices = name.partition("?")
    given = dict(parse_qsl(choices, keep_blank_values=True))
    wrong = next((key for key in given if key not in _CHOICES or not given[key]), None)
    if wrong is not None or not given:
        raise UsageError(f"`?{choices}` is not understood", f"some of {', '.join(_CHOICES)}: FILE?column=question")
    if given.get("empty", "skip") not in ("skip", "refuse"):
        hint = "rows without a prompt are left out; ?empty=refuse refuses them"
        raise UsageError(f"`?empty={given['empty']}` is not understood", hint)
    place = _Place(text, given_path(text), given)
    part = next((key for key in ("config", "split") if key in given), None)
    if part is not None and place.is_there and not place.is_folder:
        raise UsageError(f"`?{part}={given[part]}` chooses among several, and `{text}` is one", f"leave {part} out")
    return place


def _check_hub_id(path: str, name: str, preset: Source | None) -> None:
    """Refuse a name that can be no hub's: a mistyped file or folder."""
    suffix = Path(without_packing(path)).suffix.lower()
    if path == "-":
        raise UsageError(
            "`-` is not a data set: a measurement reads its prompts from a file", "name one, or /dev/stdin"
        )
    if "://" in path:
        raise UsageError(
            f"the data set `{name}` is an address, and files are read from this disk", f"`curl -LO {shlex.quote(path)}`"
        )
    if suffix in ROW_SUFFIXES or Path(path).suffix != Path(without_packing(path)).suffix:
        raise UsageError(f"there is no data set `{name}`: no such file", "check the path")
    if preset is not None:
        raise UsageError(f"there is no data set `{name}`: no such file or folder", "check the path")
    if not _HUB_ID.fullmatch(path):
        raise _no_data_set(name)


def _fetched(name: str) -> list[RawRow]:
    """Rows of a preset whose JSONL file lies at an address."""
    from urllib.request import urlopen

    address = PRESETS[name].name
    try:
        with urlopen(address, timeout=_FETCH_SECONDS) as answer:
            data = read_limited(answer.read, address)
    except OSError as error:
        between = proxy_of(address)
        through = "" if between is None else f"; asked through the {between}"
        raise RunError(
            f"the data set `{name}` could not be downloaded from {address}: {error}{through}",
            f"download it elsewhere and give --dataset {name}:FILE",
        ) from error
    return rows_of_bytes(unpacked(data, address), address, address)


def _from_hub(source: Source, name: str) -> list[RawRow]:
    from specdec_cli.measure.workload.folder import rows_of_hub

    return rows_of_hub(source.name, source.config, source.split, name)
