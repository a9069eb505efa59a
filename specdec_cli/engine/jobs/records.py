"""A request on the engine's thread: the job, its deltas, its record, and their observers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from specdec_cli.events import Emitted, FinishReason, SpeculativeCounts, Stepped, TokenLogprob

if TYPE_CHECKING:
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to decode: a request to `AsyncEngine`, or a choice of an HTTP request.

    Args:
        request_id: of the HTTP request; its choices share it.
        token_ids: the prompt.
        params: sampling parameters; `index` is the choice.
        num_speculative_tokens: the request's own k; None takes the server's, 0 decodes without a draft.
        tree: shape of its drafted trees; None takes the server's, `none` drafts chains.
        draft: name of the drafter it wants; None takes the server's.
        prediction: tokens the output is expected to follow, for the drafter `prediction`.
        grammar: what the output must match, compiled; None for anything.
        cache_salt: prompts share KV blocks only with those of the same salt.
        turn: who asks, as in `Engine.add`: the API key, or else the request.
        prompt_logprobs: alternatives reported beside each prompt token, scored before decoding; None scores nothing.
        decodes: False ends the job after its prompt is scored, with finish reason length (`max_tokens: 0`).
        whole: the deltas are read only after the end.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    num_speculative_tokens: int | None = None
    tree: str | None = None
    draft: str | None = None
    prediction: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    turn: str = ""
    prompt_logprobs: int | None = None
    decodes: bool = True
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """The results of one or several steps for a job; its last delta has a finish reason or an error.

    Args:
        steps: the engine's events of each step, in order.
        rest: text that was held back and is released at the end.
        finish_reason: on the last delta.
        stop_reason: token id or string that ended it.
        error: why it ended, where an exception did that.
        prompt_logprobs: on the first delta, if asked for: one for each prompt token after the first.
    """

    steps: tuple[Emitted, ...] = ()
    rest: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """Released text; may be empty while a character or a stop string is incomplete."""
        steps = self.steps
        return (steps[0].text if len(steps) == 1 else "".join([step.text for step in steps])) + self.rest

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Emitted tokens. A step's accepted ones were drafted; one after them is the target's own."""
        steps = self.steps
        return steps[0].tokens if len(steps) == 1 else tuple([token for step in steps for token in step.tokens])

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of each token, if they were asked for."""
        return tuple(logprob for step in self.steps for logprob in step.logprobs)

    @property
    def num_drafted(self) -> int:
        """Tokens drafted one after another and verified."""
        return sum(step.num_drafted for step in self.steps)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(step.num_accepted for step in self.steps)

    @property
    def num_nodes(self) -> int:
        """Tokens drafted and verified, siblings in trees counted."""
        return sum(step.num_nodes for step in self.steps)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens whose KV was cached, with the first tokens; None later."""
        first = self.steps[0] if self.steps else None
        return first.num_cached_tokens if first is not None and first.from_prefill else None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True)
class JobRecord:
    """A job's life in numbers; times are seconds of `time.monotonic`.

    Args:
        request_id: of its HTTP request.
        num_prompt_tokens: of its prompt.
        arrived: when it was queued.
        scheduled: when the engine's thread took it.
        first_token: when its first token was there.
        last_token: when its newest token was there.
        finished: when it ended.
        num_output_tokens: emitted by now.
        finish_reason: stop, length, abort; None while it runs, and where an error ended it.
        num_cached_tokens: of its prompt, those whose KV was there already.
        speculative: its counts.
    """

    request_id: str
    num_prompt_tokens: int
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)


class Observer(Protocol):
    """Watches the engine's thread, on that thread: metrics and the terminal's table. Quick, never raises."""

    def queued(self, num_waiting: int) -> None:
        """A job waits; `num_waiting` with it."""
        ...

    def stepped(self, event: Stepped, num_queued: int) -> None:
        """The engine made a step; `num_queued` jobs wait in the bridge beside the engine's own."""
        ...

    def emitted(self, record: JobRecord, num_tokens: int, seconds_since_last: float | None) -> None:
        """A job got tokens; seconds since its previous ones, None for its first."""
        ...

    def ended(self, record: JobRecord) -> None:
        """A job finished, was aborted or failed."""
        ...
