"""From a row's columns to its prompt: which one is read, what is refused, and notices about the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from specdec_cli.engine.prompts import ChatMessage, EmptyPromptError, PromptRow, PromptSet, check_text
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.chats import (
    CHAT_COLUMNS,
    PROMPT_COLUMNS,
    broken_chat,
    first_user_text,
    is_broken_chat,
    is_chat,
    is_longer,
    kind_of,
    text_of,
    unwritten,
    whole_chat,
)
from specdec_cli.measure.workload.tables import RawRow
from specdec_cli.quantities import counted
from specdec_cli.sampling.params import settled_seed

_ID_COLUMNS = ("id", "question_id", "prompt_id", "task_id")
_CHATS_FIRST = ("turns", *CHAT_COLUMNS, *(column for column in PROMPT_COLUMNS if column not in CHAT_COLUMNS))
_TURN_COLUMNS = ("turns", "prompt")
_OWN_COLUMNS = (*_ID_COLUMNS, "category", "max_new_tokens", "seed")
_ANSWER_COLUMNS = (
    *("answer", "answers", "output", "outputs", "response", "responses", "completion", "completions", "chosen"),
    *("rejected", "label", "labels", "target", "targets", "reference", "references", "solution", "solutions"),
    *("canonical_solution", "gold", "explanation", "test", "tests", "test_list", "entry_point"),
)
_CATALOGUE_COLUMNS = (
    *("source", "sources", "model", "dataset", "language", "lang", "license", "url", "score", "scores", "rating"),
    *("index", "idx", "metadata", "meta", "tags", "type", "split", "num_turns", "timestamp", "created_at"),
    *("sub_category", "src_id", "difficulty", "multiturn", "subject", "level", "unique_id"),
)
_NOT_PROMPTS = frozenset((*_ANSWER_COLUMNS, *_CATALOGUE_COLUMNS))
"""Columns that are not expected to be part of the prompt."""
_SKIP = "or leave out `empty=refuse`"
_NO_MESSAGES = ("[]", "null", "None")
_MOST_PLACES = 8
"""A conversation without messages as a table writes it."""


_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Text of SPEED-Bench's public files in place of prompts that must be fetched from their own sources."""
_WORD = re.compile(r"[a-zA-Z]{2,}")
_MIN_WORDS, _MOST_WORDS, _RANDOM_SHARE = 300, 1000, 0.85
"""Of so many words of real prompts, at most 0.69 were different ones; of random tokens' 0.93 and more."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows become prompts.

    Args:
        chat: whether whole conversations are wanted; None where a command decodes plain prompts alone.
        column: holds the prompts; None takes the first of PROMPT_COLUMNS that is there.
        template: a preset's text with columns in braces, instead of a column.
        task_column: says each row's task; None takes `category`.
        task: of all rows that have none of their own.
        refuse_empty: whether a row that holds nothing to ask is refused, not left out.
    """

    chat: bool | None = False
    column: str | None = None
    template: str | None = None
    task_column: str | None = None
    task: str | None = None
    refuse_empty: bool = False


def prompts_of(raw: Sequence[RawRow], name: str, reading: Reading) -> PromptSet:
    """The prompts of a file's rows.

    Raises:
        UsageError: no row, or one that is wrong (by its place).
    """
    if not raw:
        raise UsageError(f"`{name}` has no prompt", "write one prompt per line, or JSONL rows with `prompt`")
    return _Reader(raw, name, reading).run()


class _Reader:
    """Makes prompts of rows, and counts what the notices report."""

    def __init__(self, raw: Sequence[RawRow], name: str, reading: Reading) -> None:
        self.raw, self.name, self.reading = raw, name, reading
        self.columns = list(dict.fromkeys(column for row in raw for column in row.values))
        self.filled = {column for row in raw for column, value in row.values.items() if value is not None}
        self.used: set[str] = set()
        self.skipped: list[tuple[str, EmptyPromptError]] = []
        self.num_more_turns = 0
        self.num_joined = 0

    def run(self) -> PromptSet:
        reading = self.reading
        if reading.template is not None:
            self._check_columns([field for _, field, _, _ in Formatter().parse(reading.template) if field])
        self._check_columns([column for column in (reading.column, reading.task_column) if column is not None])
        rows: list[PromptRow] = []
        for row in self.raw:
            try:
                rows.append(self._row(row, len(rows)))
            except EmptyPromptError as error:
                if self.reading.refuse_empty:
                    raise
                self.skipped.append((row.where, error))
        self._check_placeholders(rows)
        if not rows:
            _, first = self.skipped[0]
            message = f"`{self.name}` has no prompt: every row is empty; {first.message}"
            raise UsageError(message, "fill them, or name another column: 'FILE?column=NAME'")
        notices = list(self._notices())
        return PromptSet(rows, [*notices, _RANDOM_TOKENS] if _look_random(rows) else notices)

    def _row(self, row: RawRow, index: int) -> PromptRow:
        values, where = row.values, row.where
        messages: tuple[ChatMessage, ...] = ()
        if self.reading.template is not None:
            prompt = _filled(self.reading.template, values, where)
        else:
            column = self._column(row)
            prompt, messages = self._read(column, values, where)
        if not self.reading.chat:
            messages = ()
        system = values.get("system")
        if self.reading.chat and isinstance(system, str) and system.strip():
            self.used.add("system")
            messages = messages or (ChatMessage("user", prompt),)
            if all(message.role != "system" for message in messages):
                messages = (ChatMessage("system", system), *messages)
        return PromptRow(
            index,
            prompt,
            id=_id_of(values, where),
            category=self._category(values, where),
            max_new_tokens=_length_of(values, where),
            seed=_seed_of(values, where),
            messages=messages,
            values=values,
        )

    def _check_placeholders(self, rows: Sequence[PromptRow]) -> None:
        """Refuse SPEED-Bench's public files, most of whose prompts have to be fetched from their own sources."""
        held = [row for row in rows if _PLACEHOLDER in json.dumps(dict(row.values), default=str, ensure_ascii=False)]
        if not held:
            return
        tasks = sorted({row.category for row in held if row.category})
        among = f" ({', '.join(tasks)})" if tasks else ""
        hold = f"of `{self.name}` {'holds' if len(held) == 1 else 'hold'}"
        message = f"{len(held)} of {counted(len(rows), 'row')} {hold} SPEED-Bench's placeholder, no prompt{among}"
        hint = "prepare the data with examples/specdec_bench of NVIDIA's Model-Optimizer, and give the file it writes"
        raise UsageError(message, hint)

    def _column(self, row: RawRow) -> str:
        """The column that holds a row's prompt."""
        if self.reading.column is not None:
            return self.reading.column
        names = [name for name in (_CHATS_FIRST if self.reading.chat else PROMPT_COLUMNS) if name in row.values]
        column = next((name for name in names if name in self.filled), names[0] if names else None)
        if column is None:
            raise self._no_prompt(row)
        return column

    def _no_prompt(self, row: RawRow) -> UsageError:
        if all(value is None or column in _OWN_COLUMNS for column, value in row.values.items()):
            return EmptyPromptError(f"{row.where}: the row has no `prompt`", f"give each row a `prompt`, {_SKIP}")
        columns = ", ".join(f"`{column}`" for column in list(row.values)[:8])
        hint = "name the column `prompt` (in a CSV file's first line), or say which one it is: 'FILE?column=NAME'"
        return UsageError(f"{row.where}: the row has no `prompt`, but {columns}", hint)

    def _read(self, column: str, values: Mapping[str, Any], where: str) -> tuple[str, tuple[ChatMessage, ...]]:
        """A prompt, and its conversation where it is one."""
        self.used.add(column)
        value = unwritten(values.get(column), where)
        if is_chat(value):
            prompt = first_user_text(value, where)
            if self.reading.chat:
                return prompt, whole_chat(value, where)
            self.num_more_turns += is_longer(value)
            return prompt, ()
        if is_broken_chat(value):
            raise broken_chat(value, where)
        if isinstance(value, list) and (column == "turns" or (column in _TURN_COLUMNS and _are_strings(value))):
            return self._turns(column, value, where)
        text = self._joined(column, value, values) if isinstance(value, str) else text_of(value, where)
        if not text.strip() or (column in CHAT_COLUMNS and text.strip() in _NO_MESSAGES):
            raise EmptyPromptError(f"{where}: the prompt is empty", f"give at least one word, {_SKIP}")
        check_text(text, f"{where}: the prompt")
        return text, ()

    def _turns(self, column: str, turns: list[Any], where: str) -> tuple[str, tuple[ChatMessage, ...]]:
        if not turns:
            raise EmptyPromptError(
                f"{where}: `{column}` must be a list of strings with at least one", f"fill it, {_SKIP}"
            )
        wanted = turns if self.reading.chat else turns[:1]
        texts = [text_of(turn, where, "the prompt" if column == "prompt" else "a turn") for turn in wanted]
        for place, text in enumerate(texts, start=1):
            check_text(text, f"{where}: turn {place}")
        self.num_more_turns += len(turns) > 1 and not self.reading.chat
        return texts[0], tuple(ChatMessage("user", text) for text in texts)

    def _joined(self, column: str, text: str, values: Mapping[str, Any]) -> str:
        """Alpaca's instruction and its input, as both were written to be read together."""
        more = values.get("input")
        if column != "instruction" or self.reading.column is not None or not isinstance(more, str) or not more.strip():
            return text
        self.used.add("input")
        self.num_joined += 1
        return f"{text}\n\n{more}"

    def _category(self, values: Mapping[str, Any], where: str) -> str | None:
        column = self.reading.task_column or "category"
        value = values.get(column)
        if value is None or value == "":
            return self.reading.task
        if not isinstance(value, str | int | float):
            raise UsageError(
                f"{where}: `{column}` must be a string or a number, not {kind_of(value)}",
                "name another column of tasks: 'FILE?task=COLUMN'",
            )
        return str(value)

    def _check_columns(self, needed: Sequence[str]) -> None:
        missing = next((column for column in needed if column not in self.columns), None)
        if missing is not None:
            raise UsageError(
                f"the data set `{self.name}` has no column `{missing}`",
                f"its columns are {', '.join(self.columns) or 'none'}",
            )

    def _notices(self) -> Iterable[str]:
        """Sentences about the rows that were left out."""
        if self.skipped:
            num = counted(len(self.skipped), "row")
            places = [where for where, _ in self.skipped]
            more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
            yield f"{num} without a prompt left out: {', '.join(places[:_MOST_PLACES])}{more}"
        if self.num_joined:
            yield f"prompts of `{self.name}` are `instruction` and, after an empty line, `input`"
        if self.reading.column is None and self.reading.template is None:
            unread = [column for column in self.columns if self._is_missed(column)]
            if unread:
                names = _listed(unread)
                read = _listed([column for column in self.columns if column in self.used])
                chats = [column for column in unread if column in ("turns", *CHAT_COLUMNS)]
                more = f"; --chat reads {_listed(chats)}" if chats and self.reading.chat is False else ""
                are = "is" if len(unread) == 1 else "are"
                yield f"{names} of `{self.name}` {are} not read: prompts are {read}{more}"
        if self.num_more_turns:
            rows = "1 row holds" if self.num_more_turns == 1 else f"{self.num_more_turns} rows hold"
            more = "" if self.reading.chat is None else "; --chat reads all of it"
            yield f"{rows} a conversation, of which the first user message is the prompt{more}"

    def _is_missed(self, column: str) -> bool:
        """Whether a column beside the prompt may have been meant as part of it."""
        if self.used & {"turns", *CHAT_COLUMNS} and column == "prompt":
            return False  # what such rows repeat of their conversation
        if column == "seed":
            return any(_is_words(row.values.get(column)) for row in self.raw)
        if column in self.used or column in _OWN_COLUMNS or column.lower() in _NOT_PROMPTS:
            return False
        return column != self.reading.task_column and any(
            row.values.get(column) not in (None, "", [], {}) for row in self.raw
        )


_RANDOM_TOKENS = (
    "the prompts look like random tokens: acceptance and speed on such prompts say little about real text "
    "(NVIDIA found throughput overstated by about a fifth for SPEED-Bench)"
)


def _look_random(rows: Sequence[PromptRow]) -> bool:
    """Whether almost every word of the first prompts is another one, as no text's are."""
    words: list[str] = []
    for row in rows:
        words += _WORD.findall(row.prompt[: 16 * _MOST_WORDS].lower())
        if len(words) >= _MOST_WORDS:
            break
    words = words[:_MOST_WORDS]
    return len(words) >= _MIN_WORDS and len(set(words)) > _RANDOM_SHARE * len(words)


def _are_strings(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, str) for item in value)


def _filled(template: str, values: Mapping[str, Any], where: str) -> str:
    """A preset's template with a row's values; lists of strings line by line."""
    parts = []
    for text, column, _, _ in Formatter().parse(template):
        parts.append(text)
        if column:
            value = values.get(column)
            value = "\n".join(value) if isinstance(value, list) and _are_strings(value) else value
            words = text_of(value, where, f"`{column}`")
            if not words.strip():
                raise EmptyPromptError(f"{where}: `{column}` is empty", f"fill it, {_SKIP}")
            parts.append(words)
    prompt = "".join(parts)
    check_text(prompt, f"{where}: the prompt")
    return prompt


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names[:6]] + (["more"] if len(names) > 6 else [])
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _id_of(values: Mapping[str, Any], where: str) -> str | int | None:
    """A row's own name."""
    name = next((name for name in _ID_COLUMNS if values.get(name) is not None), None)
    if name is None:
        return None
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: `{name}` must be a string or an integer, not `{_shown(value)}`")
    return str(value) if isinstance(value, float) else value


def _length_of(values: Mapping[str, Any], where: str) -> int | None:
    """A row's own most new tokens."""
    return _whole_number(values, "max_new_tokens", where, "an integer of at least 1", lambda n: n > 0)


def _whole_number(
    values: Mapping[str, Any], name: str, where: str, wanted: str, is_fine: Callable[[int], bool]
) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not is_fine(value):
        raise UsageError(f"{where}: `{name}` must be {wanted}, not `{_shown(value)}`")
    return value


def _seed_of(values: Mapping[str, Any], where: str) -> int | None:
    """A row's seed, drawn for a negative one; a column of that name with words in it is none."""
    if _is_words(values.get("seed")):
        return None
    seed = _whole_number(values, "seed", where, "an integer below 2^63", lambda n: abs(n) < 2**63)
    return None if seed is None else settled_seed(seed)


def _is_words(value: Any) -> bool:
    """Whether a column `seed` holds what a text grew from, not a number."""
    return isinstance(value, str) and not re.fullmatch(r"\s*[-+]?[\d.]*\s*", value)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
