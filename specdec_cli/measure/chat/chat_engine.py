"""Answers a conversation with an engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.depth.draft_limit import check_reach
from specdec_cli.engine.prompts import ChatMessage, PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.events import Event, Finished, Noticed, Stepped
from specdec_cli.measure.chat.chat import ChatTurn, ContextFullError, Watch, check_k
from specdec_cli.quantities import counted

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.sampling.params import SamplingParams

_OWN, _NONE = "own", "none"
_ANSWER = 4  # of the context, a quarter is left to an answer before earlier turns are


class EngineSpeaker:
    """An engine that answers one conversation.

    Args:
        engine: idle; shares the KV cache of earlier turns if its prefix caching is on.
        params: how to sample.
        own_draft: the engine's own draft, as `--draft` names it.
        ends_at_context: answers may fill the context; `params.max_new_tokens` is not a limit.
        most_k: largest k that may be chosen.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, own_draft: str, ends_at_context: bool, most_k: int
    ) -> None:
        self.engine = engine
        self.target = engine.target.name
        self.own_draft = own_draft
        self._params, self._ends_at_context, self._most_k = params, ends_at_context, most_k
        self._k = engine.options.depths().most
        self._draft: str | None = None
        self._num_asked = 0

    @property
    def draft(self) -> str:
        """The draft of the next answer."""
        return self._draft or self.own_draft

    @property
    def k(self) -> int:
        """k of the next answer; 0 without a draft."""
        return 0 if self._name == _NONE else self._k

    @property
    def _name(self) -> str:
        return self._draft or self.engine.drafters.own_name

    @property
    def drafts(self) -> list[str]:
        """The drafts that can be chosen."""
        others = [name for name in self.engine.drafters.by_name if name != self.engine.drafters.own_name]
        return list(dict.fromkeys((self.own_draft, *others, _NONE)))

    def set_k(self, k: int) -> None:
        """Draft k tokens per step from the next answer on.

        Raises:
            UsageError: k is out of range, or cannot be chosen here.
        """
        check_k(k, self._most_k)
        if self._name != _NONE:
            check_reach(self.engine.drafters.by_name[self._name], k)
        self._k = k

    def set_draft(self, name: str) -> None:
        """Use another draft from the next answer on; `own` is the engine's own."""
        own_name = self.engine.drafters.own_name
        if name in (_OWN, self.own_draft, own_name):
            self._draft = None
        elif name in self.drafts:
            self._draft = name
        else:
            raise UsageError(f"there is no draft `{name}` in this conversation", f"one of {', '.join(self.drafts)}")

    def answer(self, messages: Sequence[ChatMessage], watch: Watch, stopped: Callable[[], bool]) -> ChatTurn:
        """Answer the last message.

        Raises:
            ContextFullError: the conversation leaves too little of the context to the answer.
            SpecdecError: the answer failed.
        """
        tokens = self.engine.encode([message.as_dict() for message in messages])
        prompt = messages[-1].content
        turn = ChatTurn(prompt, prompt_tokens=len(tokens), draft=self.draft, num_speculative_tokens=self.k)
        arm = Decoding("chat", self.k, draft=self._draft)
        is_first = not any(message.role == "assistant" for message in messages)
        request = Request(PromptRow(0, prompt), tokens, self._sampling(len(tokens), is_first))
        self._num_asked += 1

        def fold(arm: Decoding, event: Event) -> None:
            watch(turn, _fold(turn, arm, event))

        decode(self.engine, arm, [request], fold, stopped)
        output = arm.outputs()[0]
        turn.finish_reason, turn.timing = output.finish_reason, output.timing
        if output.finish_reason == "length" and len(tokens) + len(output.token_ids) >= self._capacity:
            turn.notices.append("the answer fills the context: the next message drops the oldest turns")
        elif output.finish_reason == "length":
            turn.notices.append(f"the answer was cut at {counted(len(output.token_ids), 'token')}, the limit of -n")
        return turn

    @property
    def _capacity(self) -> int:
        """Most tokens of a conversation, answer included."""
        target, options = self.engine.target, self.engine.options
        held = target.num_blocks * target.block_size
        nodes = 0 if options.tree is None else options.most_nodes  # siblings may need blocks past the context's end
        return target.max_context if held >= target.max_context + nodes else max(held - max(self.k, nodes), 0)

    def _sampling(self, num_tokens: int, is_first: bool) -> SamplingParams:
        room = self._capacity - num_tokens
        wanted = self._capacity // _ANSWER
        if not self._ends_at_context:
            wanted = min(wanted, self._params.max_new_tokens)
        if room < (1 if is_first else max(wanted, 1)):
            raise ContextFullError(
                f"the conversation has {num_tokens} tokens with this message, and the context holds {self._capacity}",
                "shorten the message" if is_first else "/clear starts a new conversation",
            )
        most = room if self._ends_at_context else min(room, self._params.max_new_tokens)
        fewest = min(self._params.min_tokens, most)
        return replace(self._params, max_new_tokens=most, min_tokens=fewest, index=self._num_asked)


def _fold(turn: ChatTurn, arm: Decoding, event: Event) -> str:
    """Update an answer by one event; gives its new text."""
    text = ""
    if isinstance(event, Noticed):
        turn.notices.append(event.message)
    elif isinstance(event, Finished):
        text = event.text
    elif isinstance(event, Stepped):
        text = "".join(emitted.text for emitted in event.emitted)
        cached = [emitted.num_cached_tokens for emitted in event.emitted if emitted.from_prefill]
        turn.cached_tokens = cached[0] if cached else turn.cached_tokens
        turn.completion_tokens = arm.meter.num_tokens
        turn.speculative = arm.counts().as_dict()
        turn.timing.decode_tokens_per_second = arm.meter.tokens_per_second
    turn.text += text
    return text
