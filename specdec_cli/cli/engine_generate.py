"""`specdec generate --engine NAME`: prompts decoded by another engine, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.generate_run import GenerateRun
from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.document import TotalsResult
from specdec_cli.engine.comparison import WITHOUT
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import Output
from specdec_cli.errors import RunError
from specdec_cli.measure.documents.generate import CommandResult, GenerateDocument, named_output
from specdec_cli.measure.documents.parts import lossless
from specdec_cli.measure.elsewhere.server_arm import ServerArm, check_single_turns
from specdec_cli.measure.endpoint.server_counts import ServerCounts
from specdec_cli.report.pieces import Piece
from specdec_cli.report.table import Column, run_table
from specdec_cli.report.texts import Texts, Writer
from specdec_cli.timing import Timing, joined_timing, timing_of

if TYPE_CHECKING:
    from specdec_cli.engine.prompts import PromptRow
    from specdec_cli.measure.endpoint.answer import Answer
    from specdec_cli.measure.endpoint.request_counts import AnswerCounts

_FINISHED = ("stop", "length")


@dataclass(slots=True)
class EngineGenerateRun(GenerateRun):
    """One run of the command in another engine, which is started as a subprocess."""

    engine: OtherEngine
    _arm: ServerArm = field(init=False)
    _outputs: list[Output] = field(init=False, default_factory=list)
    _rows: list[PromptRow] = field(init=False, default_factory=list)
    _usages: list[tuple[int, int]] = field(init=False, default_factory=list)  # tokens of each prompt and its answer
    _counts: ServerCounts = field(init=False, default_factory=ServerCounts)

    def __post_init__(self) -> None:
        """Refuse conversations of several turns."""
        GenerateRun.__post_init__(self)
        check_single_turns(self.prompts.rows, self.recipe.engine.name)

    def command(self) -> str:
        """The command line of its server."""
        return self.engine.shown()

    def open(self) -> tuple[str, ...]:
        """Warnings about the recipe's settings; the server is started in `decode`."""
        return self.engine.server().warnings

    def showing_failures(self) -> AbstractContextManager[None]:
        """Show the last lines of the log of an engine that fails."""
        return showing_log(self.screen)

    def decode(self, stopped: Callable[[], bool]) -> None:
        """Every prompt alone, so that the server's counters tell what each one accepted if its answer does not."""
        made, process = self.engine.server(), self.engine.process(self.screen, stopped=stopped)
        self.screen.say(f"starting {made.name}")
        self._arm = arm = ServerArm(
            made.name, process, self.recipe.sampling, made.drafts, self.chat, protocol=self.engine.protocol
        )
        rows = self.prompts.rows
        writer = Writer(self.screen.stdout, self.screen.stdout_colour, goes_on=self.shared.output is not None)
        texts = None if self.shared.json else Texts([row.index for row in rows], writer)
        with ExitStack() as started:
            started.callback(arm.stop)
            arm.start()
            for row in rows:
                if stopped():
                    return
                with _streamed(texts, writer, row.index) as watch:
                    answer, counted = arm.decode(row, watch)
                self._take(row, answer, counted)

    def summarize(self) -> None:
        """Show the figures, and what the engine says of itself."""
        arm = self._arm
        unknown = self.engine.unknown_version(arm.version)
        told = all(len(output.token_ids) == num for output, (_, num) in zip(self._outputs, self._usages, strict=True))
        unheard = [] if told else [f"{self.recipe.engine.name} left out token ids, so `token_ids` is empty there"]
        for message in (*([unknown] if unknown else []), *arm.notices, *unheard):
            self.note(message)
        if not self.screen.is_quiet and self._outputs:
            name = f"{arm.name} {arm.version or ''}".strip()
            column = Column(
                name if arm.drafts else WITHOUT,
                self.engine.k if arm.drafts else 0,
                Meter(num_tokens=sum(num for _, num in self._usages), counts=self._counts),
                self._timing().decode_tokens_per_second,
            )
            self.screen.console.print(run_table([column]))

    def _take(self, row: PromptRow, answer: Answer, counted: AnswerCounts) -> None:
        num = answer.num_tokens
        if num is None:
            raise RunError("the engine does not count the tokens of its answers", "use a newer release of it")
        # llama-server streams no ids of tokens that end inside a character.
        token_ids = answer.token_ids if len(answer.token_ids) == num else []
        counts = ServerCounts()
        for totals in (counts, self._counts):
            totals.add_run(counted.counts, max(num - 1, 0), counted.outcomes)
        first = answer.ttft_s
        timing = Timing() if first is None else timing_of(0.0, first, max(answer.arrivals[-1], first), num - 1)
        output = Output(row.index, row.prompt, [], answer.text, token_ids)
        output.finish_reason = "stop" if answer.finish_reason == "stop" else "length"
        if answer.finish_reason not in _FINISHED:
            raise RunError(f"the engine ended an answer with `{answer.finish_reason}`", "see its documentation")
        output.stop_reason, output.speculative, output.timing = answer.stop_reason, counts, timing
        self._outputs.append(output)
        self._rows.append(row)
        self._usages.append((answer.prompt_tokens or 0, num))

    def _timing(self) -> Timing:
        timings = [output.timing for output in self._outputs]
        num = sum(max(num - 1, 0) for _, num in self._usages)
        firsts = sorted(timing.ttft_s for timing in timings if timing.ttft_s is not None)
        return joined_timing(timings, firsts[len(firsts) // 2] if firsts else None, num)

    def body(self) -> dict[str, Any]:
        """The document's own fields."""
        outputs = []
        for row, output, usage in zip(self._rows, self._outputs, self._usages, strict=True):
            outputs.append(named_output(output, row))
            outputs[-1].prompt_tokens, outputs[-1].completion_tokens = usage
        return GenerateDocument(
            outputs=outputs,
            totals=TotalsResult(speculative=self._counts, timing=self._timing()),
            lossless=lossless(self.engine.promise),
            engine=CommandResult(
                name=self.recipe.engine.name,
                version=self._arm.version,
                command=shlex.join(self._arm.process.words),
                acceptance_from=self._arm.acceptance_from,
            ),
        ).as_json()


@contextmanager
def _streamed(texts: Texts | None, writer: Writer, place: int) -> Iterator[Callable[[Answer], None]]:
    """Shows an answer's text as it comes, and ends its line, also where the answer ends early."""
    shown = 0

    def watch(answer: Answer) -> None:
        nonlocal shown
        if texts is not None and len(answer.text) > shown:
            piece = Piece(answer.text[shown:])
            shown = len(answer.text)
            texts.feed(place, [piece])
            writer.flush()

    is_whole = False
    try:
        yield watch
        is_whole = True
    finally:
        if texts is not None and (is_whole or shown):
            texts.end(place)
            writer.flush()
