"""A model's thinking apart from its answer: `reasoning_content` beside `content`, whole or as it streams.

How an output begins is read from its prompt: a chat template may open the thought itself (`<think>` at the end), or
close an empty one where thinking is switched off. Where the prompt says nothing, the format does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.recipe.values import ReasoningParser
from specdec_cli.sampling.thinking import Begins, ThinkingMarkers

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_TAIL = 64  # tokens at the end of a prompt, more than a generation prompt has
_THINK = ThinkingMarkers("<think>", "</think>")
_MARKERS: Mapping[ReasoningParser, ThinkingMarkers] = {
    "granite": ThinkingMarkers("Here is my thought process:", "Here is my response:"),
    "mistral": ThinkingMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingMarkers("<seed:think>", "</seed:think>"),
}
_THINKS_ALWAYS: frozenset[ReasoningParser] = frozenset({"deepseek_r1", "minimax_m2", "olmo3", "step3"})
"""Formats whose output is a thought from its beginning, marker or not, as in vLLM."""


@dataclass(frozen=True, slots=True)
class ReasoningPlan:
    """How a request's thinking is read.

    Args:
        markers: around it.
        begins: how the output begins.
        is_shown: whether the answer has it (`include_reasoning`).
        has_special_marker: whether text without special tokens would lack a marker.
    """

    markers: ThinkingMarkers
    begins: Begins
    is_shown: bool = True
    has_special_marker: bool = False

    def reader(self) -> ThoughtReader:
        """A fresh reader for one choice."""
        return ThoughtReader(self)


def markers_of(parser: ReasoningParser) -> ThinkingMarkers:
    """The texts around a format's thinking."""
    return _MARKERS.get(parser, _THINK)


def plan_reasoning(
    parser: ReasoningParser, prompt: Sequence[int], continued: str, tokenizer: Tokenizer, is_shown: bool
) -> ReasoningPlan:
    """How the thinking of an output is read.

    Args:
        parser: name of the format.
        prompt: token ids of the conversation.
        continued: text of a last turn that the output goes on with; empty without one.
        tokenizer: of the model.
        is_shown: whether the answer has it.
    """
    markers = markers_of(parser)
    tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    otherwise: Begins = "thinking" if parser in _THINKS_ALWAYS else "undecided"
    begins = _last(continued, markers)
    if tail.endswith(markers.start):
        begins = "thinking"
    elif tail.endswith(markers.end):
        begins = "content"
    ids = (tokenizer.id_of(text) for text in (markers.start, markers.end))
    is_special = any(token in tokenizer.special_ids for token in ids)
    return ReasoningPlan(markers, begins or otherwise, is_shown, is_special)


def _last(text: str, markers: ThinkingMarkers) -> Begins | None:
    """State of a text that goes on: in a thought or past one; None if it has no marker."""
    start, end = text.rfind(markers.start), text.rfind(markers.end)
    if start == end:  # neither is there
        return None
    return "thinking" if start > end else "content"


class ThoughtReader:
    """Reads one choice's text; how it is cut into pieces changes nothing."""

    def __init__(self, plan: ReasoningPlan) -> None:
        self.phase: Begins = plan.begins
        self._markers = plan.markers
        self.has_begun_by_marker = False
        self._at_start = plan.begins != "content"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next text; what is certain to be thought, and what is certain to be the answer."""
        self._held += text
        if self._at_start and not self._begin():
            return "", ""
        thought = self._take_thought() if self.phase == "thinking" else ""
        if self.phase == "thinking":
            return thought, ""
        answer, self._held = self._held, ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """The text that was held back, once no more follows. Call it once."""
        left, self._held = self._held, ""
        return (left, "") if self.phase == "thinking" else ("", left)

    def _begin(self) -> bool:
        """Read a marker that begins the thought, if there is one; whether that is known."""
        start, begun = self._markers.start, self._held.lstrip()
        if start.startswith(begun) and begun != start:
            return False
        self._at_start = False
        if begun.startswith(start):
            self.phase, self._held = "thinking", begun[len(start) :]
            self.has_begun_by_marker = True
        elif self.phase == "undecided":
            self.phase = "content"
        return True

    def _take_thought(self) -> str:
        """The thought up to its end, or up to what may be the beginning of that."""
        held, end = self._held, self._markers.end
        place = held.find(end)
        if place >= 0:
            self.phase, self._held = "content", held[place + len(end) :]
            return held[:place]
        num = next((n for n in range(min(len(end) - 1, len(held)), 0, -1) if end.startswith(held[-n:])), 0)
        self._held = held[len(held) - num :]
        return held[: len(held) - num]


class ThoughtCounter:
    """Counts the tokens of one choice's thinking, without those of its markers."""

    def __init__(self, plan: ReasoningPlan, tokenizer: Tokenizer) -> None:
        self.num_tokens = 0
        self._reader = plan.reader()
        self._words = tokenizer.detokenizer(skip_special_tokens=False)
        self._num_pending = 0

    def count(self, token_ids: Sequence[int], is_last: bool) -> None:
        """Take the next tokens; after the last ones what was held back was none of a marker."""
        for token in token_ids:
            if self._reader.phase == "content":
                return
            self._num_pending += 1
            had_begun = self._reader.has_begun_by_marker
            thought, _ = self._reader.feed(self._words.push(token))
            self.num_tokens += self._num_pending if thought else 0
            if thought or self._reader.has_begun_by_marker > had_begun:
                self._num_pending = 0

        if is_last and (self._reader.feed(self._words.flush())[0] or self._reader.finish()[0]):
            self.num_tokens += self._num_pending
