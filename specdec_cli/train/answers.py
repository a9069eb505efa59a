"""The target's own answers to the prompts, written to a file as they come so that a stopped run goes on.

A draft is trained on text that its target wrote (on-policy), since that is the text it will draft.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import RunError, UsageError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.disk import writing
from specdec_cli.train.samples import Sample

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.train.processes import Processes

_TOGETHER = 64  # prompts that a process hands to its engine at once: what an interruption loses at most


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt that the target answers.

    Args:
        tokens: of the prompt, chat template included.
        index: its place in the data, which keys its noise.
        given: samples with the answers that the data has; None lets the target answer.
    """

    tokens: Sequence[int]
    index: int
    given: Sequence[Sample] | None = None


def fingerprint(prompts: Sequence[TrainingPrompt], params: SamplingParams) -> str:
    """SHA-256 of the prompts' tokens and the sampling parameters, in hexadecimal."""
    content = json.dumps([[list(prompt.tokens) for prompt in prompts], repr(params)])
    return hashlib.sha256(content.encode()).hexdigest()


def usable(samples: Iterable[Sample], max_context: int) -> list[Sample]:
    """Samples cut at the context; those with fewer than two tokens of answers are left out."""
    return [cut for sample in samples if (cut := sample.cut(max_context)).num_counted >= 2]


class Answers:
    """The answers of one run, kept in a JSONL file.

    Args:
        path: of the file; its first line says what the answers belong to.
        prompts: in order.
        params: how answers are sampled; each prompt's index keys its noise.
        processes: that share the prompts; the main one keeps the file.

    Raises:
        UsageError: the file belongs to other prompts or parameters.
        RunError: the file is damaged, or cannot be read.
    """

    def __init__(
        self, path: Path, prompts: Sequence[TrainingPrompt], params: SamplingParams, processes: Processes
    ) -> None:
        self._path, self._prompts, self._params, self._processes = path, prompts, params, processes
        self._identity = fingerprint(prompts, params)
        self._found = processes.from_main(self._read)

    @property
    def num_done(self) -> int:
        """Prompts that are answered."""
        return len(self._found)

    def generate(self, engine: Engine, progress: Callable[[int, int], None], stopped: Callable[[], bool]) -> None:
        """Answer what has no answer yet, each process its share of the next prompts.

        Args:
            engine: idle, this process's; decodes without a draft.
            progress: told how many prompts are answered, and of how many.
            stopped: asked between batches; the answers so far are kept.

        Raises:
            RunError: the file cannot be written.
        """
        processes = self._processes
        processes.from_main(self._begin)
        while self.num_done < len(self._prompts) and not processes.any(stopped()):
            batch = self._prompts[self.num_done : self.num_done + _TOGETHER * processes.num]
            answers = processes.joined(processes.together(partial(self._answered, engine, processes.share(batch))))
            rows = [{"index": prompt.index, "answer": answer} for prompt, answer in zip(batch, answers, strict=True)]
            processes.from_main(partial(self._append, rows))
            self._found += answers
            progress(self.num_done, len(self._prompts))

    def _answered(self, engine: Engine, prompts: Sequence[TrainingPrompt]) -> list[list[int]]:
        """Tokens of the engine's answers."""
        params = [replace(self._params, index=prompt.index) for prompt in prompts]
        outputs = engine.generate([list(prompt.tokens) for prompt in prompts], params, 0)
        return [list(output.token_ids) for output in outputs]

    def samples(self, max_context: int) -> list[Sample]:
        """The usable samples of what is answered."""
        pairs = zip(self._prompts, self._found, strict=False)
        return usable((Sample([*prompt.tokens, *answer], len(prompt.tokens)) for prompt, answer in pairs), max_context)

    def _begin(self) -> None:
        """Write the first line, if there is none yet."""
        if not self._path.exists():
            self._append([{"format": "specdec.answers/1", "fingerprint": self._identity}])

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _read(self) -> list[list[int]]:
        """The answers that are there; an unfinished last line is cut off."""
        if not self._path.exists():
            return []
        lines = _whole_lines(self._path)
        if not lines:
            self._path.unlink()
            return []
        self._check_head(lines[0])
        if len(lines) - 1 > len(self._prompts):
            raise self._damaged(len(self._prompts) + 2)
        numbered = enumerate(zip(self._prompts, lines[1:], strict=False), start=2)
        return [self._answer(prompt, line, number) for number, (prompt, line) in numbered]

    def _check_head(self, line: bytes) -> None:
        """Refuse answers to other prompts."""
        head = _row(line)
        if "fingerprint" not in head:
            hint = "restore the file, or delete it: with --resume, the target answers all prompts again"
            raise RunError(f"line 1 of `{self._path}` is damaged", hint)
        if head["fingerprint"] != self._identity:
            message = f"the answers in `{self._path}` belong to other prompts or sampling options than these"
            raise UsageError(message, "give the data and options that the run began with, or name another --output")

    def _answer(self, prompt: TrainingPrompt, line: bytes, number: int) -> list[int]:
        """The answer to a prompt in its line of the file."""
        row = _row(line)
        answer = row.get("answer")
        is_answer = isinstance(answer, list) and all(type(token) is int for token in answer)
        if not is_answer or row.get("index") != prompt.index:
            raise self._damaged(number)
        return list(row["answer"])

    def _damaged(self, number: int) -> RunError:
        message = f"line {number} of `{self._path}` is damaged"
        hint = f"restore it, or keep its first {number - 1} lines: with --resume, the target answers the rest again"
        return RunError(message, hint)


def _row(line: bytes) -> dict[str, Any]:
    """The object of a line; empty where there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file up to the last whole one; the file is cut there."""
    with writing(path):
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            with path.open("r+b") as file:
                file.truncate(end)
    return content[:end].split(b"\n")[:-1]
