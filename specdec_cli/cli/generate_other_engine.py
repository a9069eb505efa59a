"""`specdec generate --engine vllm`: prompts decoded by another engine, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.cli.output import deliver, envelope
from specdec_cli.cli.screen import interruptible
from specdec_cli.engine.comparison import WITHOUT
from specdec_cli.engine.meter import Meter
from specdec_cli.engine.outputs import Output, Timing, joined_timing, timing_of
from specdec_cli.errors import ExitCode, RunError
from specdec_cli.measure.elsewhere.requests import check_single_turns
from specdec_cli.measure.elsewhere.server_arm import ServerArm
from specdec_cli.measure.endpoint.server_counts import ServerCounts
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.generate import SCHEMA, lossless
from specdec_cli.report.pieces import Piece
from specdec_cli.report.table import Column, run_table
from specdec_cli.report.texts import Texts, Writer

if TYPE_CHECKING:
    from specdec_cli.cli.options import Shared
    from specdec_cli.engine.prompts import PromptRow, PromptSet
    from specdec_cli.measure.endpoint.answer import Answer
    from specdec_cli.report.view import Screen

_FINISHED = ("stop", "length")


def show_other_generate(engine: OtherEngine, num_prompts: int, shared: Shared) -> None:
    """Show what would be started, without starting it."""
    resolved, command = engine.resolved, engine.shown()
    if shared.json or shared.output is not None:
        body: dict[str, Any] = {"origins": resolved.origins, "num_prompts": num_prompts, "command": command}
        document = envelope("specdec.recipe/1", resolved.recipe.as_dict(), body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        sys.stdout.write(f"# would decode {prompts} with {command}\n{to_yaml(resolved, origins=True)}")


@dataclass(slots=True)
class OtherGenerateRun:
    """One run of the command.

    Args:
        engine: decodes.
        prompts: what is decoded.
        chat: whether prompts are messages.
        shared: the command's shared options.
        screen: shows the progress.
    """

    engine: OtherEngine
    prompts: PromptSet
    chat: bool
    shared: Shared
    screen: Screen
    _outputs: list[Output] = field(init=False, default_factory=list)
    _rows: list[PromptRow] = field(init=False, default_factory=list)
    _prompt_tokens: list[int] = field(init=False, default_factory=list)
    _counts: ServerCounts = field(init=False, default_factory=ServerCounts)

    def go(self) -> ExitCode | None:
        """Start, decode, show, write."""
        recipe = self.engine.resolved.recipe
        check_single_turns(self.prompts.rows, recipe.engine.name)
        made = self.engine.server()
        for said in (*self.prompts.notices, *made.warnings):
            self.screen.say(f"note: {said}", "yellow")
        with interruptible() as stopped, showing_log(self.screen):
            process = self.engine.process(self.screen, stopped=stopped)
            self.screen.say(f"starting {made.name}")
            arm = ServerArm(made.name, process, recipe.sampling, made.drafts, self.chat)
            self._decode(arm, stopped)
            unknown = self.engine.unknown_version(arm.version)
            for said in (*([unknown] if unknown else []), *arm.notices):
                self.screen.say(f"note: {said}", "yellow")
            self._show(arm)
            if self.shared.json or self.shared.output is not None:
                document = envelope(SCHEMA, recipe.as_dict(), self._body(arm))
                deliver(document, to_stdout=self.shared.json, path=self.shared.output, force=self.shared.force)
            if stopped():
                self.screen.say("interrupted: these are the results so far", "yellow")
                return ExitCode.INTERRUPTED
        return None

    def _decode(self, arm: ServerArm, stopped: Callable[[], bool]) -> None:
        """Every prompt alone, so that the server's counters tell what each one accepted."""
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
                    answer, counters = arm.ask(row, watch)
                self._take(row, answer, counters)

    def _take(self, row: PromptRow, answer: Answer, counters: Mapping[str, float]) -> None:
        num = answer.num_tokens
        if num is None or len(answer.token_ids) != num:
            raise RunError("the engine does not tell the tokens of its answers", "use a newer release of it")
        counts = ServerCounts()
        for one in (counts, self._counts):
            one.add_run(counters, max(num - 1, 0))
        first = answer.ttft_s
        timing = Timing() if first is None else timing_of(0.0, first, max(answer.arrivals[-1], first), num - 1)
        output = Output(row.index, row.prompt, [], answer.text, answer.token_ids)
        output.finish_reason = "stop" if answer.finish_reason == "stop" else "length"
        if answer.finish_reason not in _FINISHED:
            raise RunError(f"the engine ended an answer with `{answer.finish_reason}`", "see its documentation")
        output.stop_reason, output.speculative, output.timing = answer.stop_reason, counts, timing
        self._outputs.append(output)
        self._rows.append(row)
        self._prompt_tokens.append(answer.prompt_tokens or 0)

    def _timing(self) -> Timing:
        timings = [one.timing for one in self._outputs]
        num = sum(max(len(one.token_ids) - 1, 0) for one in self._outputs)
        firsts = sorted(one.ttft_s for one in timings if one.ttft_s is not None)
        return joined_timing(timings, firsts[len(firsts) // 2] if firsts else None, num)

    def _show(self, arm: ServerArm) -> None:
        if self.screen.is_quiet or not self._outputs:
            return
        name = f"{arm.name} {arm.version or ''}".strip()
        column = Column(
            name if arm.drafts else WITHOUT,
            self.engine.k if arm.drafts else 0,
            Meter(num_tokens=sum(len(one.token_ids) for one in self._outputs), counts=self._counts),
            self._timing().decode_tokens_per_second,
        )
        self.screen.console.print(run_table([column]))

    def _body(self, arm: ServerArm) -> dict[str, Any]:
        outputs = []
        for row, output, num in zip(self._rows, self._outputs, self._prompt_tokens, strict=True):
            named = {"id": row.id, "category": row.category}
            known = {key: value for key, value in named.items() if value is not None}
            outputs.append(output.as_dict() | {"prompt_tokens": num} | known)
        return {
            "outputs": outputs,
            "totals": {"speculative": self._counts.as_dict(), "timing": self._timing().as_dict()},
            "lossless": lossless(self.engine.promise, None),
            "engine": {
                "name": self.engine.resolved.recipe.engine.name,
                "version": arm.version,
                "command": arm.process.launch.shown(),
            },
        }


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
