"""The target's own answers to the prompts, written to a file as they come so that a stopped run goes on.

A draft is trained on text that its target wrote (on-policy), since that is the text it will draft.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.disk import writing
from specdec_cli.train.samples import Sample

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine

_TOGETHER = 64  # prompts that are handed to the engine at once: what an interruption loses at most


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt that the target answers.

    Args:
        tokens: of the prompt, chat template included.
        index: its place in the data, which keys its noise.
        answer: tokens of the answer that the data has; None lets the target answer.
    """

    tokens: Sequence[int]
    index: int
    answer: Sequence[int] | None = None


def fingerprint(prompts: Sequence[TrainingPrompt], params: SamplingParams) -> str:
    """SHA-256 of the prompts' tokens and the sampling parameters, in hexadecimal."""
    content = json.dumps([[list(one.tokens) for one in prompts], repr(params)])
    return hashlib.sha256(content.encode()).hexdigest()


def samples_of(pairs: Iterable[tuple[TrainingPrompt, Sequence[int]]], max_context: int) -> list[Sample]:
    """Prompts with their answers, cut at the context; those with fewer than two tokens of answer are left out."""
    whole = [Sample([*one.tokens, *answer][:max_context], len(one.tokens)) for one, answer in pairs]
    return [one for one in whole if one.num_counted >= 2]


class Answers:
    """The answers of one run, kept in a JSONL file.

    Args:
        path: of the file; its first line says what the answers belong to.
        prompts: in order.
        params: how answers are sampled; each prompt's index keys its noise.

    Raises:
        UsageError: the file belongs to other prompts or parameters.
    """

    def __init__(self, path: Path, prompts: Sequence[TrainingPrompt], params: SamplingParams) -> None:
        self._path, self._prompts, self._params = path, prompts, params
        self._identity = fingerprint(prompts, params)
        self._found = self._read()

    @property
    def num_done(self) -> int:
        """Prompts that are answered."""
        return len(self._found)

    def generate(self, engine: Engine, progress: Callable[[int, int], None], stopped: Callable[[], bool]) -> None:
        """Answer what has no answer yet.

        Args:
            engine: idle; decodes without a draft.
            progress: told how many prompts are answered, and of how many.
            stopped: asked between batches; the answers so far are kept.

        Raises:
            RunError: the file cannot be written.
        """
        if not self._found:
            self._append([{"format": "specdec.answers/1", "fingerprint": self._identity}])
        while self.num_done < len(self._prompts) and not stopped():
            batch = self._prompts[self.num_done : self.num_done + _TOGETHER]
            params = [replace(self._params, index=one.index) for one in batch]
            outputs = engine.generate([list(one.tokens) for one in batch], params, 0)
            found = [list(output.token_ids) for output in outputs]
            self._append([{"index": one.index, "answer": its} for one, its in zip(batch, found, strict=True)])
            self._found += found
            progress(self.num_done, len(self._prompts))

    def samples(self, max_context: int) -> list[Sample]:
        """The samples of what is answered, as `samples_of` makes them."""
        return samples_of(zip(self._prompts, self._found, strict=False), max_context)

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _read(self) -> list[list[int]]:
        """The answers that are there; an unfinished last line is cut off."""
        if not self._path.exists():
            return []
        rows = list(_whole_rows(self._path))
        if not rows:
            self._path.unlink()
            return []
        if rows[0].get("fingerprint") != self._identity:
            said = f"the answers in `{self._path}` belong to other prompts or sampling options than these"
            raise UsageError(said, "give the data and options that the run began with, or name another --output")
        return [row["answer"] for row in rows[1:]]


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file up to the last whole line; the file is cut there."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with writing(path), path.open("r+b") as file:
            file.truncate(end)
    for line in content[:end].splitlines():
        yield json.loads(line)
