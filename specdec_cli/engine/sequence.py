"""One request while it runs: its tokens, its rules for ending, and what a step gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.engine.inbox import Inbox
from specdec_cli.events import Emitted, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from specdec_cli.drafted import Drafted
    from specdec_cli.sampling.grammar import Matcher
    from specdec_cli.sampling.params import SamplingParams
    from specdec_cli.text.stream import TextStream
    from specdec_cli.tree_shape import TreeShape
    from specdec_cli.verification import Rule


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that the engine decodes.

    Args:
        id: the engine's name for it, also its handle in the LM and the drafter.
        tokens: prompt and output so far; the LM has read all but the last of them once `num_computed` says so.
        num_prompt_tokens: how many of `tokens` are the prompt.
        params: its sampling parameters.
        stop_ids: tokens that end it.
        rule: verifies its drafts.
        k: most tokens to draft for it in one step.
        max_tokens: longest `tokens` may grow (the context limit, or prompt + max_new_tokens).
        text: turns tokens into text and finds stop strings; None without a tokenizer.
        matcher: its place in the grammar that the output must follow; None without one.
        draft: name of its drafter.
        draft_max_context: longest context that its drafter reads; None has no limit.
        own_k: that its request asks for; None takes the engine's.
        prediction: tokens that its output is expected to follow; None without any.
        tree: shape of its drafts; None for chains.
        cache_salt: shares cached prefixes with sequences of the same salt; None shares nothing.
        turn: sequences of the same turn share their places in the batch where another turn waits, and their rows of a
            step where another turn runs.
        inbox: takes the events of its caller.
        last_step: number of the last step in which it decoded.
        num_computed: how many of its tokens are in the cache.
        num_cached_tokens: how many of its prompt's were there when it began; None before.
    """

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int]
    rule: Rule
    k: int
    max_tokens: int
    text: TextStream | None
    matcher: Matcher | None = None
    draft: str = ""
    draft_max_context: int | None = None
    own_k: int | None = None
    prediction: list[int] | None = None
    tree: TreeShape | None = None
    cache_salt: str | None = None
    turn: str = ""
    inbox: Inbox = field(default_factory=Inbox, repr=False)
    last_step: int = 0
    num_computed: int = 0
    num_cached_tokens: int | None = None
    warned_of_draft_limit: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    tail: str = field(default="", repr=False)

    @property
    def num_output_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def most_nodes(self) -> int:
        """Most drafted tokens of a step."""
        return self.k if self.tree is None else self.tree.num_nodes(self.k)

    @property
    def is_prefilling(self) -> bool:
        """Whether its first token is still to come."""
        return len(self.tokens) == self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens to feed before a step can decide: the whole prompt for its first token, else all but the last one."""
        return len(self.tokens) - (not self.is_prefilling)

    @property
    def is_decoding(self) -> bool:
        """Whether its last token is all that the cache lacks, so that the next step decides and may draft."""
        return self.num_computed == len(self.tokens) - 1 and not self.is_prefilling

    @property
    def is_past_draft(self) -> bool:
        """Whether its context has outgrown its drafter's."""
        return self.draft_max_context is not None and len(self.tokens) > self.draft_max_context

    @property
    def room(self) -> int:
        """Tokens that it may still emit."""
        return self.max_tokens - len(self.tokens)

    def extend(self, drafted: Drafted, path: Items[int], own: int, logprobs: Items[TokenLogprob] = ()) -> Emitted:
        """Take a step's accepted tokens and the target's own one, cut where the request ends.

        Args:
            drafted: the drafted tokens of this step.
            path: the nodes that the target accepted, one after the other.
            own: the target's own next token after those.
            logprobs: one for each of the accepted tokens and the own one, if they are wanted.
        """
        from_prefill = self.is_prefilling
        tokens = [*(drafted.tokens[node] for node in path), own]
        tokens = self._cut_at_token(tokens)
        text, num_kept = self._feed_text(tokens)
        del tokens[num_kept:]
        self.tokens += tokens
        self.num_computed = len(self.tokens) - 1
        if self.finish_reason is not None and self.text is not None:
            self.tail = self.text.finish()
        return Emitted(
            sequence_id=self.id,
            tokens=tuple(tokens),
            text=text,
            num_drafted=drafted.max_depth,
            num_accepted=min(len(path), len(tokens)),
            num_nodes=len(drafted),
            ranks=() if drafted.is_chain else _ranks(drafted, path, len(tokens)),
            tree=None if drafted.is_chain else drafted,
            from_prefill=from_prefill,
            logprobs=tuple(logprobs[: len(tokens)]),
            num_cached_tokens=(self.num_cached_tokens or 0) if from_prefill else 0,
        )

    def _cut_at_token(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first that ends the request or completes its grammar, which stays among them."""
        fits_room = tokens[: self.room]
        if self.matcher is not None:
            del fits_room[self.matcher.accept(fits_room) :]
        for i, token in enumerate(fits_room):
            if token in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return fits_room[: i + 1]
        if self.matcher is not None and self.matcher.is_finished:
            self.finish_reason = "stop"
        elif len(fits_room) >= self.room:
            self.finish_reason = "length"
        return fits_room

    def _feed_text(self, tokens: list[int]) -> tuple[str, int]:
        """Text released by tokens, and how many of them are kept: a stop string cuts those after it."""
        if self.text is None:
            return "", len(tokens)
        num_unstoppable = max(0, self.params.min_tokens - 1 - self.num_output_tokens)
        released = self.text.feed(tokens, num_unstoppable)
        if released.stop is not None:
            self.finish_reason, self.stop_reason = "stop", released.stop
        return released.text, released.num_kept


def _ranks(drafted: Drafted, path: Items[int], num_kept: int) -> tuple[tuple[int, int], ...]:
    """The accepted child's rank and the number of children, at each place whose outcome is in the kept tokens."""
    ranks = []
    for node, accepted in list(zip((CONTEXT_END, *path), (*path, None), strict=True))[:num_kept]:
        children = drafted.children(node)
        if children:
            ranks.append((0 if accepted is None else children.index(accepted) + 1, len(children)))
    return tuple(ranks)
