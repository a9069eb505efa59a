"""The target's own answers to the prompts, written to a file as they come so that a stopped run goes on.

A draft is trained on text that its target wrote (on-policy), since that is the text it will draft.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    from specdec_cli.engine.outputs import Generated
    from specdec_cli.train.processes import Processes

_TOGETHER = 64  # prompts that a process hands to its engine at once: what an interruption loses at most


class _StoppedError(Exception):
    """The run was stopped while the target answered."""


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


def answers_origin(target_weights: str, params: SamplingParams) -> str:
    """SHA-256, in hexadecimal, of the target's weights and the sampling parameters: whose answers these are."""
    return hashlib.sha256(f"{target_weights} {params!r}".encode()).hexdigest()


def prompt_key(tokens: Sequence[int]) -> str:
    """32 hexadecimal digits that name a prompt in files of answers."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:32]


def earlier_answers(path: Path, origin: str) -> dict[str, list[list[int]]]:
    """The answers of another run by the key of their prompt, in order.

    Raises:
        UsageError: there is no such file, it names no prompts, or the answers are of another target or other sampling.
        RunError: it is damaged.
    """
    hint = "name the --output folder of a run with the same target and sampling options, or leave --answers-from out"
    if not path.is_file():
        raise UsageError(f"there are no answers in `{path}`", hint)
    lines = path.read_bytes().split(b"\n")[:-1]
    head = _row(lines[0]) if lines else {}
    if head.get("origin") != origin:
        raise UsageError(f"the answers in `{path}` are those of another target or other sampling options", hint)
    found: dict[str, list[list[int]]] = {}
    for number, line in enumerate(lines[1:], start=2):
        row = _row(line)
        if not isinstance(row.get("prompt"), str) or not _is_answer(row.get("answer")):
            raise RunError(f"line {number} of `{path}` is damaged", f"keep its first {number - 1} lines")
        found.setdefault(row["prompt"], []).append(row["answer"])
    return found


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
        origin: whose answers they are; see `answers_origin`.
        earlier: answers of another run by their prompt's key, which are used again.

    Raises:
        UsageError: the file belongs to other prompts or parameters.
        RunError: the file is damaged, or cannot be read.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[TrainingPrompt],
        params: SamplingParams,
        processes: Processes,
        origin: str,
        earlier: Mapping[str, Sequence[list[int]]] | None = None,
    ) -> None:
        self._path, self._prompts, self._params, self._processes = path, prompts, params, processes
        self._identity, self._origin = fingerprint(prompts, params), origin
        self._keys = [prompt_key(prompt.tokens) for prompt in prompts]
        self._known = self._matched(earlier or {})
        self._found = processes.from_main(self._read)

    @property
    def num_done(self) -> int:
        """Prompts that are answered."""
        return len(self._found)

    def generate(self, engine: Engine, progress: Callable[[int, int], None], stopped: Callable[[], bool]) -> None:
        """Answer what has no answer yet, each process its share of the next prompts.

        Raises:
            RunError: the file cannot be written.
        """
        processes = self._processes
        processes.from_main(self._begin)
        progress(self.num_done, len(self._prompts))
        while self.num_done < len(self._prompts) and not processes.any(stopped()):
            batch = self._prompts[self.num_done : self.num_done + _TOGETHER * processes.num]
            own = processes.share(batch)
            answered = processes.together(partial(self._answered, engine, own, progress, stopped))
            if processes.any(answered is None):
                return
            answers = processes.joined(answered or [])
            keys = self._keys[self.num_done :]
            rows = [
                {"index": prompt.index, "prompt": key, "answer": answer}
                for prompt, key, answer in zip(batch, keys, answers, strict=False)
            ]
            processes.from_main(partial(self._append, rows))
            self._found += answers
            progress(self.num_done, len(self._prompts))

    def _answered(
        self,
        engine: Engine,
        prompts: Sequence[TrainingPrompt],
        progress: Callable[[int, int], None],
        stopped: Callable[[], bool],
    ) -> list[list[int]] | None:
        """Tokens of the answers: those that are known, and the engine's; None where it was stopped."""

        def count(now: Generated) -> None:
            if stopped():
                raise _StoppedError
            finished = now.num_finished + len(prompts) - len(new)
            progress(self.num_done + finished * self._processes.num, len(self._prompts))

        new = [prompt for prompt in prompts if prompt.index not in self._known]
        params = [replace(self._params, index=prompt.index) for prompt in new]
        try:
            outputs = engine.generate([list(prompt.tokens) for prompt in new], params, 0, progress=count) if new else []
        except _StoppedError:
            return None
        made = iter(outputs)
        known = self._known
        return [known[prompt.index] if prompt.index in known else list(next(made).token_ids) for prompt in prompts]

    def _matched(self, earlier: Mapping[str, Sequence[list[int]]]) -> dict[int, list[int]]:
        """Earlier answers by the index of the prompt that takes each; of several to one prompt, in their order."""
        left = {key: list(reversed(answers)) for key, answers in earlier.items()}
        pairs = zip(self._prompts, self._keys, strict=True)
        return {prompt.index: left[key].pop() for prompt, key in pairs if left.get(key)}

    def samples(self, max_context: int) -> list[Sample]:
        """The usable samples of what is answered."""
        pairs = zip(self._prompts, self._found, strict=False)
        return usable((Sample([*prompt.tokens, *answer], len(prompt.tokens)) for prompt, answer in pairs), max_context)

    def _begin(self) -> None:
        """Write the first line, if there is none yet."""
        if not self._path.exists():
            self._append([{"format": "specdec.answers/1", "fingerprint": self._identity, "origin": self._origin}])

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
        if not _is_answer(answer) or row.get("index") != prompt.index:
            raise self._damaged(number)
        return list(row["answer"])

    def _damaged(self, number: int) -> RunError:
        message = f"line {number} of `{self._path}` is damaged"
        hint = f"restore it, or keep its first {number - 1} lines: with --resume, the target answers the rest again"
        return RunError(message, hint)


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, list) and all(type(token) is int for token in answer)


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
