"""The engine: a generator of events. Plain decoding is a drafter that proposes nothing, one sequence a batch of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec_cli.drafters.contract import Drafter, DraftRow, Guesses
from specdec_cli.engine import requests
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.engine.requests import Prompt, spread
from specdec_cli.engine.scheduler import Limits, Scheduled, Scheduler
from specdec_cli.engine.sequence import Sequence
from specdec_cli.engine.verify import MODES, VerifyRow, resolve_mode, verify
from specdec_cli.errors import UsageError
from specdec_cli.events import Emitted, Event, Finished, Noticed, Stepped, TokenLogprob
from specdec_cli.lm.door import LM, Row
from specdec_cli.sampling.chain import ChainRow, Distribution, LogitsError, distribution
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe
    from specdec_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine speculates and batches.

    Args:
        num_speculative_tokens: k, most tokens drafted in one step; a request may ask for fewer or more.
        verify: auto, greedy, rejection, block, gumbel, exact-match or typical (lossy).
        p_min: stop drafting before a position whose largest q is below this.
        disable_by_batch_size: no drafting while more sequences than this run together.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens fed in one step.
        prefill_chunk: prompts are fed in pieces cut at multiples of this.
    """

    num_speculative_tokens: int = 4
    verify: str = "auto"
    p_min: float = 0.0
    disable_by_batch_size: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        ranges = {
            "num_speculative_tokens": self.num_speculative_tokens >= 0,
            "verify": self.verify in (*MODES, "auto"),
            "p_min": 0 <= self.p_min <= 1,
            "disable_by_batch_size": self.disable_by_batch_size is None or self.disable_by_batch_size >= 1,
            "max_num_seqs": self.max_num_seqs >= 1,
            "max_num_batched_tokens": self.max_num_batched_tokens >= 1,
            "prefill_chunk": self.prefill_chunk >= 1,
        }
        for name, fine in ranges.items():
            if not fine:
                raise UsageError(f"{name} is out of range: `{getattr(self, name)}`")


class Engine:
    """Decodes requests in batches, a draft guessing and the target verifying.

    Args:
        target: the LM whose output this is.
        drafter: proposes tokens; loaded already.
        tokenizer: text to tokens and back; without one prompts are token ids and outputs have no text.
        options: see EngineOptions.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        eos_token_ids: Items[int] = (),
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.options = options or EngineOptions()
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_tokens = min(tokenizer.num_tokens, target.vocab_size) if tokenizer else target.vocab_size
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._notices: list[Noticed] = []
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=self.options.max_num_seqs,
                max_num_batched_tokens=self.options.max_num_batched_tokens,
                prefill_chunk=self.options.prefill_chunk,
                disable_by_batch_size=self.options.disable_by_batch_size,
                max_context=target.max_context,
                draft_max_context=drafter.max_context,
                num_blocks=target.num_blocks,
                block_size=target.block_size,
            )
        )

    @classmethod
    def load(cls, target: str = "builtin:target", draft: str = "builtin:draft", **settings: Any) -> Engine:
        """An engine from two model names (or a draft such as `ngram`, `none`); see `build.load_engine`."""
        from specdec_cli.engine.build import load_engine

        return load_engine(target, draft, **settings)

    @classmethod
    def from_recipe(cls, recipe: str | Recipe, **settings: Any) -> Engine:
        """An engine from a recipe: a shipped one's name, a file, or one that is resolved already."""
        from specdec_cli.engine.build import engine_from_recipe
        from specdec_cli.recipe import resolve

        if isinstance(recipe, str):
            recipe = resolve(recipe).recipe
        return engine_from_recipe(recipe, **settings)

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._sequences)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids as they are, or chat messages by the template."""
        return requests.encode(prompt, self.tokenizer)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        num_speculative_tokens: int | None = None,
        verify: str | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt: text, token ids, or chat messages.
            params: its sampling parameters; greedy, 128 tokens by default.
            num_speculative_tokens: its own k; 0 decodes it without a draft.
            verify: its own verification mode.

        Returns:
            The sequence's id in the events.

        Raises:
            UsageError: an empty prompt, token ids out of range, a prompt that leaves no room in the context.
        """
        params = params or SamplingParams()
        tokens = self.encode(prompt)
        requests.check(tokens, params, self.num_tokens, self.target.max_context)
        k = self.options.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        if k < 0:
            raise UsageError(f"num_speculative_tokens is out of range: `{k}`", "0 decodes without a draft")
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)
        sequence = Sequence(
            id=self._next_id,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            stop_ids=stop_ids,
            verify=resolve_mode(verify or self.options.verify, params.temperature),
            k=k,
            max_tokens=min(len(tokens) + params.max_new_tokens, self.target.max_context),
            text=self.tokenizer.stream(params.stop) if self.tokenizer else None,
        )
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer", "use stop_token_ids")
        if self._scheduler.num_blocks_needed(sequence) > self.target.num_blocks:
            raise UsageError(
                f"the request needs {sequence.max_tokens} tokens of KV cache, and there are "
                f"`{self.target.num_blocks * self.target.block_size}`",
                "lower max_new_tokens or raise kv_cache_memory",
            )
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)
        return sequence.id

    def abort(self, sequence_id: int) -> list[Event]:
        """End a request now and give its blocks back; an unknown or finished id gives no event."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        sequence.finish_reason = "abort"
        if sequence.text is not None:
            sequence.tail = sequence.text.finish()
        return [self._finish(sequence)]

    def step(self) -> list[Event]:
        """One verification over all running sequences; its events in order, `Stepped` first."""
        begin = perf_counter()
        batch = self._scheduler.next()
        assert batch, "a step needs a sequence that can run; look at has_work first"
        guesses, draft_seconds = self._propose(batch)
        verify_begin = perf_counter()
        logits = self._score(batch, guesses)
        verify_seconds = perf_counter() - verify_begin
        decided = [(row, guess) for row, guess in zip(batch, guesses, strict=True) if row.is_decided]
        emitted = self._decide(decided, logits) if decided else ()
        finished = [self._finish(row.sequence) for row in batch if row.sequence.finish_reason is not None]
        stepped = Stepped(
            emitted=emitted,
            num_running=len(batch),
            num_waiting=len(self._scheduler.waiting),
            num_prefill_tokens=sum(row.num_prefill_tokens for row in batch),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            overhead_seconds=perf_counter() - begin - draft_seconds - verify_seconds,
            num_blocks_used=self.target.num_blocks - self.target.num_free_blocks,
            num_blocks=self.target.num_blocks,
        )
        notices, self._notices = self._notices, []
        return [stepped, *notices, *finished]

    def stream(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> Iterator[Event]:
        """Events of decoding prompts together; sequence ids count from the first one's in the prompts' order."""
        many = requests.as_many(prompts)
        sets = spread(params, len(many))
        ids: list[int] = []
        try:
            for prompt, one in zip(many, sets, strict=True):
                ids.append(self.add(prompt, one, num_speculative_tokens))
            while self.has_work:
                yield from self.step()
        finally:
            self._abandon(ids)

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> list[Output]:
        """Decode prompts together and return every result, in the prompts' order."""
        many = requests.as_many(prompts)
        outputs = Outputs()
        try:
            for prompt, one in zip(many, spread(params, len(many)), strict=True):
                outputs.add(self, prompt, one, num_speculative_tokens)
            while self.has_work:
                for event in self.step():
                    outputs.observe(event)
        finally:
            self._abandon(outputs.by_id)
        return outputs.finished()

    def _abandon(self, ids: Iterable[int]) -> None:
        """Abort what is left of requests whose caller went away; those that finished are none."""
        for sequence_id in ids:
            self.abort(sequence_id)

    def _propose(self, batch: list[Scheduled]) -> tuple[list[Guesses], float]:
        begin = perf_counter()
        asked = [row for row in batch if row.k > 0]
        with self._fence(asked):
            proposed = iter(self.drafter.propose([self._draft_row(row) for row in asked]) if asked else ())
        guesses = [next(proposed) if row.k > 0 else Guesses([]) for row in batch]
        for row in batch:
            self._notice_draft_limit(row.sequence)
        return guesses, perf_counter() - begin

    def _draft_row(self, row: Scheduled) -> DraftRow:
        sequence = row.sequence
        return DraftRow(
            handle=sequence.id,
            context=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            k=row.k,
            params=sequence.params,
            stop_ids=sequence.stop_ids,
            verify=sequence.verify,
            p_min=self.options.p_min,
        )

    def _score(self, batch: list[Scheduled], guesses: list[Guesses]) -> torch.Tensor:
        """One forward over all rows: prompts' chunks and k+1 verify rows together."""
        rows = []
        for row, guess in zip(batch, guesses, strict=True):
            tokens = row.sequence.tokens
            if row.is_decided:
                rows.append(Row(row.sequence.id, tokens + guess.tokens, len(guess.tokens) + 1))
            else:
                rows.append(Row(row.sequence.id, tokens[: row.num_fed], 0))
                row.sequence.num_computed = row.num_fed
        logits = self.target.score(rows)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return logits

    def _decide(self, decided: list[tuple[Scheduled, Guesses]], logits: torch.Tensor) -> tuple[Emitted, ...]:
        chain = [
            ChainRow(s.params, s.tokens, s.num_prompt_tokens, guess.tokens, s.stop_ids)
            for s, guess in ((row.sequence, guess) for row, guess in decided)
        ]
        with self._fence([row for row, _ in decided]):
            p = distribution(logits, chain, self.num_tokens)
        verdicts = verify(
            p, [VerifyRow(r.sequence.verify, r.sequence.params, len(r.sequence.tokens), g) for r, g in decided]
        )
        emitted, first = [], 0
        for (row, guess), verdict in zip(decided, verdicts, strict=True):
            kept = [*guess.tokens[: verdict.num_accepted], verdict.own]
            logprobs = _logprobs(p, first, kept, row.sequence.params.logprobs)
            emitted.append(row.sequence.extend(guess.tokens, verdict.num_accepted, verdict.own, logprobs))
            first += len(guess.tokens) + 1
        return tuple(emitted)

    def _finish(self, sequence: Sequence) -> Finished:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self.target.release(sequence.id)
        self.drafter.release(sequence.id)
        assert sequence.finish_reason is not None, "only an ended sequence is finished"
        return Finished(sequence.id, sequence.finish_reason, sequence.stop_reason, sequence.tail)

    @contextmanager
    def _fence(self, rows: list[Scheduled]) -> Iterator[None]:
        """End the one request whose logits are no distribution; the error goes on, the others stay as they were."""
        try:
            yield
        except LogitsError as error:
            self.abort(rows[error.row].sequence.id)
            raise

    def _notice_draft_limit(self, sequence: Sequence) -> None:
        if not sequence.warned_of_draft_limit and self._scheduler.is_past_draft(sequence):
            sequence.warned_of_draft_limit = True
            limit = self.drafter.max_context
            self._notices.append(
                Noticed(sequence.id, f"past the draft's context of {limit} tokens: decoding on without a draft")
            )


def _logprobs(p: Distribution, first: int, tokens: list[int], num: int | None) -> list[TokenLogprob]:
    if num is None:
        return []
    return [p.logprobs(first + i, token, num) for i, token in enumerate(tokens)]
