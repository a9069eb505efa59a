"""Conversations in which the user speaks several times: every turn is decoded, with the model's answers before it.

An answer that the row brings stays as it is; a user message that nothing answers is a turn, and what the model says to
it becomes part of the next turn's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.prompts import ChatMessage, PromptRow
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.sampling.grammar import Grammar


class Dialogue:
    """A row's conversation, turn by turn.

    Args:
        row: with its whole conversation, or a plain prompt, which is one turn.
        index: of its first turn among all turns.
    """

    def __init__(self, row: PromptRow, index: int) -> None:
        self.row, self.index = row, index
        self.num_begun = 0
        self._messages = list(row.messages)
        self._ends = turn_ends(row)

    @property
    def num_turns(self) -> int:
        """Turns of the whole conversation."""
        return len(self._ends)

    @property
    def has_more(self) -> bool:
        """Whether there is a turn after those begun."""
        return self.num_begun < self.num_turns

    def next(self) -> PromptRow:
        """The next turn: its context as messages, its own text as the prompt."""
        place = self.num_begun
        self.num_begun += 1
        index = self.index + place
        if self.num_turns == 1:
            return replace(self.row, index=index)
        messages = tuple(self._messages[: self._ends[place] + place])
        return replace(self.row, index=index, prompt=messages[-1].content, messages=messages, turn=place + 1)

    def answer(self, text: str) -> None:
        """Take the model's answer to the turn that was begun last."""
        place = self.num_begun - 1
        self._messages.insert(self._ends[place] + place, ChatMessage("assistant", text))


def turn_ends(row: PromptRow) -> list[int]:
    """How many of a row's messages come before each answer that is the model's to give."""
    roles = [message.role for message in row.messages]
    ends = [
        place
        for place, role in enumerate(roles, start=1)
        if role == "user" and (place == len(roles) or roles[place] != "assistant")
    ]
    return ends or [0]


def dialogues(rows: Sequence[PromptRow]) -> list[Dialogue]:
    """Every row's conversation; indexes count turns where a row has several, else they are the rows' own."""
    if all(len(turn_ends(row)) == 1 for row in rows):
        return [Dialogue(row, row.index) for row in rows]
    conversations, index = [], 0
    for row in rows:
        conversations.append(Dialogue(row, index))
        index += conversations[-1].num_turns
    return conversations


def request_of(row: PromptRow, tokens: list[int], params: SamplingParams, grammar: Grammar | None = None) -> Request:
    """A row's request; its own length and seed go before the run's, and its own seed has noise index 0."""
    seed, index = (params.seed, row.index) if row.seed is None else (row.seed, 0)
    length = params.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
    return Request(row, tokens, replace(params, seed=seed, index=index, max_new_tokens=length), grammar)


def fits(request: Request, max_context: int) -> bool:
    """Whether a prompt and its output have room in the context."""
    return len(request.token_ids) + request.params.max_new_tokens <= max_context


def lost_turns(num: int) -> str:
    """The sentence about turns that could not be decoded."""
    turns = "1 later turn was" if num == 1 else f"{num} later turns were"
    return f"{turns} left out: the conversation before fills the context"


def unasked_turns(num: int) -> str:
    """The sentence about turns after one that failed."""
    turns = "1 later turn was" if num == 1 else f"{num} later turns were"
    return f"{turns} left out: the turn before failed"


class Round:
    """The turns of all conversations that are decoded together: first all first ones, then the second, and so on.

    Args:
        engine: decodes them.
        talks: the conversations, of which no turn has begun.
        chat: whether prompts are messages.
        params: the run's.
        grammar: what every output must match, or None.

    Attributes:
        requests: of this round; none after the last.
        num_lost: turns that did not fit into the context after the conversation before.
        num_unasked: turns after one that failed.
    """

    def __init__(
        self,
        engine: Engine,
        talks: Sequence[Dialogue],
        chat: bool,
        params: SamplingParams,
        grammar: Grammar | None = None,
    ) -> None:
        self.engine, self.num_lost, self.num_unasked = engine, 0, 0
        self._chat, self._params, self._grammar = chat, params, grammar
        self.places = [talk.index + turn for talk in talks for turn in range(talk.num_turns)]
        self._now = [(talk, self._request(talk.next())) for talk in talks]

    @property
    def requests(self) -> list[Request]:
        """The conversations in their current turn."""
        return [request for _, request in self._now]

    def advance(self, arm: Decoding) -> list[int]:
        """Go on to the next turns, after what the arm answered to these; gives the places of turns left out."""
        outputs = {output.index: output for output in arm.outputs()}
        later: list[tuple[Dialogue, Request]] = []
        lost: list[int] = []
        unasked: list[int] = []
        for talk, request in self._now:
            if not talk.has_more:
                continue
            answered = outputs[request.row.index]
            if answered.error is not None:
                unasked += range(request.row.index + 1, talk.index + talk.num_turns)
                continue
            talk.answer(answered.text)
            following = self._request(talk.next())
            if fits(following, self.engine.target.max_context):
                later.append((talk, following))
            else:
                lost += range(following.row.index, talk.index + talk.num_turns)
        self._now = later
        self.num_lost += len(lost)
        self.num_unasked += len(unasked)
        return lost + unasked

    def decode_answers(self, arm: Decoding) -> None:
        """Decode the requests that another turn follows and that have room for their answers."""
        self._now = [(talk, request) for talk, request in self._now if talk.has_more and self._has_room(talk, request)]
        decode(self.engine, arm, self.requests)

    def _has_room(self, talk: Dialogue, request: Request) -> bool:
        if fits(request, self.engine.target.max_context):
            return True
        self.num_lost += talk.num_turns - talk.num_begun
        return False

    def _request(self, row: PromptRow) -> Request:
        tokens = self.engine.encode(row.chat() if self._chat else row.prompt)
        return request_of(row, tokens, self._params, self._grammar)


def every_turn(
    engine: Engine, rows: Sequence[PromptRow], chat: bool, params: SamplingParams
) -> tuple[list[Request], int]:
    """Every turn of every row with the target's own answers before it, in the order of the rows.

    Args:
        engine: idle; decodes without a draft what is followed by another turn.
        rows: the prompts.
        chat: whether prompts are messages.
        params: the run's.

    Returns:
        The turns, and how many were left out because the conversation before fills the context.
    """
    now = Round(engine, dialogues(rows), chat, params)
    requests: list[Request] = []
    while now.requests:
        requests += now.requests
        arm = Decoding("turns", 0)
        now.decode_answers(arm)
        now.advance(arm)
    return sorted(requests, key=lambda request: request.row.index), now.num_lost
