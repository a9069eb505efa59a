"""The engine: a generator of events. Plain decoding is a drafter that proposes nothing, one sequence a batch of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec_cli.drafters.contract import Drafter, DraftRow, Guesses
from specdec_cli.engine import requests
from specdec_cli.engine.depth import POLICIES, Adaptive, DepthPolicy, Fixed, KByBatch
from specdec_cli.engine.drafting import NONE, Drafters
from specdec_cli.engine.fit import fit
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.engine.requests import Prompt, spread
from specdec_cli.engine.scheduler import Limits, Scheduled, Scheduler
from specdec_cli.engine.sequence import Sequence
from specdec_cli.engine.synthetic import conditional
from specdec_cli.engine.verify import MODES, SYNTHETIC, Verdict, VerifyRow, resolve_mode, verify
from specdec_cli.errors import UsageError
from specdec_cli.events import Emitted, Event, Failed, Finished, Noticed, Stepped, TokenLogprob
from specdec_cli.lm.door import LM, Row
from specdec_cli.sampling.chain import ChainRow, Distribution, distribution
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.text.tokenizer import Tokenizer

Part = tuple[Scheduled, Guesses]
"""A row of a step, and what was drafted for it."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine speculates and batches.

    Args:
        num_speculative_tokens: k, most tokens drafted in one step; a request may ask for fewer or more.
        verify: auto, greedy, rejection, block, gumbel, exact-match, typical (lossy) or synthetic (lossy).
        synthetic_acceptance_rates: for each drafted token of a step the rate at which it and all before it are to
            stand (verify synthetic); what is drafted beyond them is refused.
        depth_policy: fixed and confidence draft k tokens (but see p_min), adaptive as many as pay by its clock.
        p_min: stop drafting before a position whose largest q is below this.
        k_by_batch: (number of sequences, k) ascending: from so many that run together on, this k in place of
            num_speculative_tokens, and no request more.
        disable_by_batch_size: no drafting while more sequences than this run together; one more entry of the table.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens fed in one step.
        prefill_chunk: prompts are fed in pieces cut at multiples of this.
    """

    num_speculative_tokens: int = 4
    verify: str = "auto"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    depth_policy: str = "fixed"
    p_min: float = 0.0
    k_by_batch: tuple[tuple[int, int], ...] = ()
    disable_by_batch_size: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        ranges = {
            "num_speculative_tokens": self.num_speculative_tokens >= 0,
            "verify": self.verify in (*MODES, SYNTHETIC, "auto"),
            "synthetic_acceptance_rates": (self.synthetic_acceptance_rates is None) == (self.verify != SYNTHETIC),
            "depth_policy": self.depth_policy in POLICIES,
            "k_by_batch": _is_table(self.k_by_batch),
            "p_min": 0 <= self.p_min <= 1,
            "disable_by_batch_size": self.disable_by_batch_size is None or self.disable_by_batch_size >= 1,
            "max_num_seqs": self.max_num_seqs >= 1,
            "max_num_batched_tokens": self.max_num_batched_tokens >= 1,
            "prefill_chunk": self.prefill_chunk >= 1,
        }
        for name, fine in ranges.items():
            if not fine:
                raise UsageError(f"{name} is out of range: `{getattr(self, name)}`")

    def depths(self) -> KByBatch:
        """k by how many sequences run together."""
        return KByBatch.of(self.num_speculative_tokens, self.k_by_batch, self.disable_by_batch_size)

    def policy(self) -> DepthPolicy:
        """A new depth policy."""
        return Adaptive() if self.depth_policy == "adaptive" else Fixed()


class Engine:
    """Decodes requests in batches, a draft guessing and the target verifying.

    Args:
        target: the LM whose output this is.
        drafter: proposes tokens; loaded already.
        others: drafters by the names that requests may give; loaded already.
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
        others: Mapping[str, Drafter] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.options = options or EngineOptions()
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_tokens = min(tokenizer.num_tokens, target.vocab_size) if tokenizer else target.vocab_size
        self.drafters = Drafters(drafter, others or {}, self.num_tokens)
        self.policy = self.options.policy()
        self._depths = self.options.depths()
        self._failed: list[Failed] = []
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._synthetic = conditional(self.options.synthetic_acceptance_rates or ())
        self._notices: list[Noticed] = []
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=self.options.max_num_seqs,
                max_num_batched_tokens=self.options.max_num_batched_tokens,
                prefill_chunk=self.options.prefill_chunk,
                k_by_batch=self._depths,
                max_context=target.max_context,
                num_blocks=target.num_blocks,
                block_size=target.block_size,
            ),
            self.policy,
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

    def has_room(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens fits into the cache beside the running requests'."""
        return self._scheduler.has_room(num_tokens)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids as they are, or chat messages by the template."""
        return requests.encode(prompt, self.tokenizer)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        num_speculative_tokens: int | None = None,
        verify: str | None = None,
        *,
        draft: str | None = None,
        prediction: Items[int] | None = None,
        grammar: Grammar | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt: text, token ids, or chat messages.
            params: its sampling parameters; greedy, 128 tokens by default.
            num_speculative_tokens: its own k; 0 decodes it without a draft.
            verify: its own verification mode.
            draft: name of its drafter; None takes the engine's own, `none` decodes without.
            prediction: tokens that the output is expected to follow, for the drafter `prediction`.
            grammar: what its text must match; the output ends where the grammar can only end, min_tokens or not.

        Returns:
            The sequence's id in the events.

        Raises:
            UsageError: an empty prompt, token ids out of range, a prompt that leaves no room in the context, an
                unknown draft.
        """
        params = params or SamplingParams()
        tokens = self.encode(prompt)
        predicted = None if prediction is None else self.encode(list(prediction))
        requests.check(tokens, params, self.num_tokens, self.target.max_context, predicted or ())
        wish = num_speculative_tokens
        if wish is not None and wish < 0:
            raise UsageError(f"num_speculative_tokens is out of range: `{wish}`", "0 decodes without a draft")
        name = self.drafters.name(draft, prediction)
        k = 0 if name == NONE else self._depths.most if wish is None else wish
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
            text=self.tokenizer.stream(params.stop, skip_special_tokens=params.skip_special_tokens)
            if self.tokenizer
            else None,
            draft=name,
            draft_max_context=self.drafters.max_context(name),
            wish=wish,
            prediction=predicted,
        )
        if sequence.verify == SYNTHETIC and not self._synthetic:
            raise UsageError("verification mode `synthetic` needs rates", "give the engine synthetic_acceptance_rates")
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer", "use stop_token_ids")
        if self._scheduler.num_blocks_needed(sequence) > self.target.num_blocks:
            raise UsageError(
                f"the request needs {sequence.max_tokens} tokens of KV cache, and there are "
                f"`{self.target.num_blocks * self.target.block_size}`",
                "lower max_new_tokens or raise kv_cache_memory",
            )
        if grammar is not None:
            if self.tokenizer is not None and grammar.tokenizer is not self.tokenizer:
                raise UsageError("the grammar was compiled for another tokenizer", "compile it for the engine's own")
            sequence.matcher = grammar.start(self.num_tokens, stop_ids, self.eos_token_ids)
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
        """One verification over all running sequences; its events in order, `Stepped` first.

        A request whose own part fails ends with `Failed`, and the others go on. Where the forward itself fails, the
        error is raised, nobody has got a token, and the next step computes again what was in the cache.
        """
        begin = perf_counter()
        batch = self._scheduler.next()
        assert batch, "a step needs a sequence that can run; look at has_work first"
        guesses, draft_seconds = self._propose(batch)
        parts = self._fit(batch, guesses)
        verify_begin = perf_counter()
        logits = self._score(parts)
        verify_seconds = perf_counter() - verify_begin
        emitted = self._decide([part for part in parts if part[0].is_decided], logits)
        finished = [self._finish(row.sequence) for row, _ in parts if row.sequence.finish_reason is not None]
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
        going_on = {one.sequence_id: one.num_accepted for one in emitted if one.sequence_id in self._sequences}
        self.policy.observe(draft_seconds + verify_seconds + stepped.overhead_seconds, going_on)
        return [stepped, *self._take_news(), *finished]

    def _take_news(self) -> list[Event]:
        """Notices and failures that were not told yet."""
        news: list[Event] = [*self._notices, *self.drafters.notices, *self._failed]
        self._notices.clear()
        self.drafters.notices.clear()
        self._failed.clear()
        return news

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
                for event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
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
        asked = [(row.sequence.draft, self._draft_row(row)) for row in batch if row.k > 0]
        proposed = iter(self.drafters.propose(asked))
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
            prediction=sequence.prediction,
        )

    def _fit(self, batch: list[Scheduled], guesses: list[Guesses]) -> list[Part]:
        """Rows with their guesses, cut where a grammar refuses them; its masks go with the rows."""
        parts = []
        for i, (row, guess) in enumerate(zip(batch, guesses, strict=True)):
            with self._fence(row.sequence):
                matcher, fitting = row.sequence.matcher, guess
                if matcher is not None and row.is_decided:
                    fitting, row.allowed = fit(guess, matcher, i)
                parts.append((row, fitting))
        return parts

    def _score(self, parts: list[Part]) -> torch.Tensor:
        """One forward over all rows: prompts' chunks and k+1 verify rows together."""
        rows = []
        for row, guess in parts:
            tokens = row.sequence.tokens
            if row.is_decided:
                rows.append(Row(row.sequence.id, tokens + guess.tokens, len(guess.tokens) + 1))
            else:
                rows.append(Row(row.sequence.id, tokens[: row.num_fed], 0))
        try:
            logits = self.target.score(rows)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
        except BaseException:
            for row, _ in parts:  # what a forward that broke off has written is not known
                self.target.release(row.sequence.id)
                row.sequence.num_computed = 0
            raise
        for row, _ in parts:
            row.sequence.num_computed = min(row.num_fed, len(row.sequence.tokens) - 1)
        return logits

    def _decide(self, decided: list[Part], logits: torch.Tensor) -> tuple[Emitted, ...]:
        """Judge all rows together; where that fails each alone, so that only those end whose own part it is."""
        if not decided:
            return ()
        try:
            judged = self._judge(decided, logits)
        except Exception:
            judged = []
            each = torch.split(logits, [len(guess.tokens) + 1 for _, guess in decided])
            for part, its_logits in zip(decided, each, strict=True):
                with self._fence(part[0].sequence):
                    judged += self._judge([part], its_logits)
        emitted = []
        for (row, guess), p, first, verdict in judged:
            with self._fence(row.sequence):
                kept = [*guess.tokens[: verdict.num_accepted], verdict.own]
                logprobs = _logprobs(p, first, kept, row.sequence.params.logprobs)
                emitted.append(row.sequence.extend(guess.tokens, verdict.num_accepted, verdict.own, logprobs))
        return tuple(emitted)

    def _judge(self, decided: list[Part], logits: torch.Tensor) -> list[tuple[Part, Distribution, int, Verdict]]:
        """Each row's verdict, with p and the place in it where the row begins."""
        chain = [
            ChainRow(s.params, s.tokens, s.num_prompt_tokens, guess.tokens, s.stop_ids, row.allowed)
            for s, row, guess in ((row.sequence, row, guess) for row, guess in decided)
        ]
        p = distribution(logits, chain, self.num_tokens)
        verdicts = verify(
            p,
            [
                VerifyRow(r.sequence.verify, r.sequence.params, len(r.sequence.tokens), g, self._synthetic)
                for r, g in decided
            ],
        )
        judged, first = [], 0
        for part, verdict in zip(decided, verdicts, strict=True):
            judged.append((part, p, first, verdict))
            first += len(part[1].tokens) + 1
        return judged

    def _finish(self, sequence: Sequence) -> Finished:
        self._remove(sequence)
        assert sequence.finish_reason is not None, "only an ended sequence is finished"
        return Finished(sequence.id, sequence.finish_reason, sequence.stop_reason, sequence.tail)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self.target.release(sequence.id)
        self.drafters.release(sequence.id)
        self.policy.forget(sequence.id)

    @contextmanager
    def _fence(self, sequence: Sequence) -> Iterator[None]:
        """End the one request whose own part of a step fails; the others stay as they were."""
        try:
            yield
        except Exception as error:
            sequence.finish_reason = None
            self._remove(sequence)
            self._failed.append(Failed(sequence.id, error))

    def _notice_draft_limit(self, sequence: Sequence) -> None:
        if not sequence.warned_of_draft_limit and self._scheduler.is_past_draft(sequence):
            sequence.warned_of_draft_limit = True
            limit = sequence.draft_max_context
            self._notices.append(
                Noticed(sequence.id, f"past the draft's context of {limit} tokens: decoding on without a draft")
            )


def _is_table(table: Items[tuple[int, int]]) -> bool:
    """Whether numbers of sequences ascend from 1 or more, each with a k."""
    sizes = [size for size, _ in table]
    return sizes == sorted(set(sizes)) and all(size >= 1 and k >= 0 for size, k in table)


def _logprobs(p: Distribution, first: int, tokens: list[int], num: int | None) -> list[TokenLogprob]:
    if num is None:
        return []
    return [p.logprobs(first + i, token, num) for i, token in enumerate(tokens)]
