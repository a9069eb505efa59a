"""The engine: a generator of events. Plain decoding is a drafter that proposes nothing, one sequence a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from specdec_cli.call_checks import checked_call
from specdec_cli.drafters.contract import Drafter
from specdec_cli.engine import requests
from specdec_cli.engine.drafting import Drafters
from specdec_cli.engine.drafting_plan import DraftingPlanner
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.inbox import Inbox, OneThread
from specdec_cli.engine.loading import LoadArguments, LoadProgress, LoadSettings, settle, takes_load_arguments
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.outputs import Generated, Output, Outputs
from specdec_cli.engine.requests import Prompt
from specdec_cli.engine.scheduler import Limits, Scheduler, StepRow
from specdec_cli.engine.sequence import Sequence
from specdec_cli.engine.stepper import Stepper
from specdec_cli.engine.synthetic import conditional
from specdec_cli.errors import UsageError
from specdec_cli.events import Emitted, Event, Failed, Finished, Noticed, Stepped
from specdec_cli.lm.door import LM, Tap
from specdec_cli.lm.files.generation import Generation
from specdec_cli.lm.machine.threads import free_cores
from specdec_cli.recipe.schema import Recipe
from specdec_cli.sampling.grammar import Grammar
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.text.tokenizer import Tokenizer

_MAKES = "`Engine.load` makes an engine from the names of its models"


class Engine:
    """Decodes requests in batches: a draft proposes tokens and the target verifies them.

    `Engine.load` and `Engine.from_recipe` make one; the constructor takes parts that are loaded already. One thread may
    use it at a time: while a call runs, calls from other threads raise a `UsageError`. AsyncEngine has a thread of its
    own.

    Args:
        target: the model that decides every token of the output.
        drafter: proposes tokens.
        others: further drafters, by the names that requests use for them.
        tokenizer: without one, prompts are token ids and outputs have no text.
        options: see EngineOptions.
        eos_token_ids: the model's own end tokens.
        generation: sampling defaults of the target's checkpoint, for callers to read; the engine ignores them.
        goes_ahead: launches a round on a GPU before the last one is read; False waits for each, for comparisons.
    """

    @checked_call("Engine", makes=_MAKES)
    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        eos_token_ids: Items[int] = (),
        others: Mapping[str, Drafter] | None = None,
        generation: Generation | None = None,
        goes_ahead: bool = True,
    ) -> None:
        for name, part, method in (("target", target, "score"), ("drafter", drafter, "propose")):
            if not hasattr(part, method):
                raise UsageError(f"{name} must be loaded, not `{part!r}`", _MAKES)
        self.target = target
        self.generation = generation or Generation()
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.options = options or EngineOptions()
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_tokens = min(tokenizer.num_tokens, target.vocab_size) if tokenizer else target.vocab_size
        self.drafters = Drafters(drafter, others or {}, self.num_tokens)
        self.policy = self.options.policy()
        self.planner = DraftingPlanner(self.options, self.drafters, target.scores_trees, bool(target.state_bytes))
        self.planner.shape(self.options.tree, self.drafters.own_name)
        if self.drafters.all_taps:
            target.tap(self.drafters.all_taps)
        self._failed: list[Failed] = []
        self._sequences: dict[int, Sequence] = {}
        self._inbox = Inbox()  # of the requests that `add` queued, whose events `step` returns
        self.one_thread = OneThread()
        self._next_id = 0
        self._step_ended_at: float | None = None
        rates = conditional(self.options.synthetic_acceptance_rates or ())
        self._stepper = Stepper(
            target,
            self.drafters.propose,
            self.num_tokens,
            rates,
            self.options.p_min,
            on_device=self.drafters.on_device if goes_ahead else None,
        )
        self._notices: list[Noticed] = []
        self._scheduler = Scheduler(Limits.of(target, self.options, goes_ahead=self._stepper.goes_ahead), self.policy)

    @classmethod
    @takes_load_arguments
    def load(
        cls,
        target: str = "builtin:target",
        draft: str | Mapping[str, Any] | None = "builtin:draft",
        *,
        options: EngineOptions | None = None,
        settings: LoadSettings | None = None,
        **changes: Unpack[LoadArguments],
    ) -> Self:
        """Load a target and a draft.

        The other arguments are the fields of EngineOptions, LoadSettings and ModelSettings, which describe them. Those
        of ModelSettings are the target's; with `draft_` before the name they are the draft's.

        Examples:
            engine = Engine.load()
            engine = Engine.load("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", num_speculative_tokens=3)
            engine = Engine.load("./my-model", "ngram", max_model_len=2048, dtype="bfloat16")
            engine = Engine.load("./my-model", None)  # plain decoding

        Args:
            target: model id on the hub, local folder or built-in name.
            draft: a model, a method such as `ngram`, a mapping with `method` or `model`; None decodes without a draft.
            options: engine options as one object; the arguments below override its fields.
            settings: load settings as one object; the arguments below override its fields.

        Raises:
            UsageError: an unknown argument, method or value, or a draft that does not fit the target.
            RunError: a model that does not load.
        """
        from specdec_cli.engine.build import check_draft_arguments, load_engines

        if not target.strip():
            raise UsageError("the target is empty", 'name a model or a folder, or "builtin:target"')
        options, settings = settle(changes, options, settings)
        check_draft_arguments(draft, changes)
        return load_engines(cls, target, [draft], options=options, settings=settings)[0]

    @classmethod
    @checked_call()
    def from_recipe(
        cls,
        recipe: str | Recipe,
        *,
        trust_remote_code: bool = False,
        others: tuple[str, ...] = (),
        progress: LoadProgress | None = None,
    ) -> Self:
        """Load the engine that a recipe describes.

        Examples:
            engine = Engine.from_recipe("builtin")
            engine = Engine.from_recipe("tuned.yaml", progress=print)

        Args:
            recipe: name of a shipped recipe, a file, or a resolved recipe.
            trust_remote_code: run code that comes with a checkpoint.
            others: draft methods without a model that requests may choose instead of the recipe's draft.
            progress: called with a short description of each loading phase.

        Raises:
            UsageError: an invalid recipe, or a draft that does not fit the target.
            RunError: a model that does not load.
        """
        from specdec_cli.engine.build import engines_from_recipes
        from specdec_cli.recipe import resolve

        if isinstance(recipe, str):
            if not recipe.strip():
                raise UsageError("the recipe is empty", 'name a shipped recipe such as "builtin", or a file')
            recipe = resolve(recipe).recipe
        return engines_from_recipes(
            cls, [recipe], trust_remote_code=trust_remote_code, others=others, progress=progress
        )[0]

    def __enter__(self) -> Self:
        """Return the engine, which aborts its open requests at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what is open."""
        self.close()

    def close(self) -> None:
        """Abort all open requests. There is nothing else to close: the models' memory is freed with the engine."""
        for sequence_id in [*self._sequences]:
            self.abort(sequence_id)

    def __repr__(self) -> str:
        """Models, k, verification mode and the number of open requests."""
        draft = self.drafter.lm
        parts = {
            "target": self.target.name,
            "draft": self.drafters.own_name if draft is None else draft.name,
            "num_speculative_tokens": self.options.num_speculative_tokens,
            "verify": self.options.verify,
            "device": str(self.target.device),
            "max_context": self.target.max_context,
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in parts.items())
        return f"Engine({shown}; open requests: {len(self._sequences)})"

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting, or `step` has events to return."""
        return bool(self._sequences or self._inbox.unread)

    @property
    def newest_running(self) -> int | None:
        """The sequence that was admitted last of those that run, and holds blocks; None where none does."""
        running = self._scheduler.running
        return running[-1].id if running else None

    @checked_call()
    def has_room(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens fits into the cache beside the running requests'."""
        if num_tokens < 0:
            raise UsageError(f"num_tokens is out of range: `{num_tokens}`", "it must be at least 0")
        return self._scheduler.has_room(num_tokens)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids as they are, or chat messages by the template."""
        return requests.encode(prompt, self.tokenizer)

    @checked_call()
    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        num_speculative_tokens: int | None = None,
        verify: str | None = None,
        *,
        tree: str | None = None,
        draft: str | None = None,
        prediction: Items[int] | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
        turn: str | None = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt: text, token ids, or chat messages.
            params: its sampling parameters; greedy, 128 tokens by default.
            num_speculative_tokens: its own k; 0 decodes it without a draft.
            verify: its own verification mode.
            tree: shape of its drafted trees, whose depth is its k where it names none; None takes the engine's where
                its drafter builds trees, `none` drafts chains.
            draft: name of its drafter; None takes the engine's own, `none` decodes without.
            prediction: tokens that the output is expected to follow, for the drafter `prediction`.
            grammar: what its text must match; the output ends where the grammar can only end, min_tokens or not.
            cache_salt: with prefix_caching, a prompt shares what is cached with those of the same salt alone.
            turn: who asks, such as a client or a request with several choices. While a turn with no running sequence
                waits, a turn with several gives up one place for it.

        Returns:
            The sequence's id in the events.

        Raises:
            UsageError: an empty prompt, token ids out of range, a prompt that leaves no room in the context, an
                unknown draft.
        """
        params = requests.params_of(params)
        tokens = self.encode(prompt)
        predicted = None if prediction is None else self.encode(list(prediction))
        requests.check(tokens, params, self.num_tokens, self.target.max_context, predicted or ())
        requests.check_tokenizer(self.tokenizer, params, grammar)
        plan = self.planner.plan(params.temperature, num_speculative_tokens, verify, tree, draft, prediction)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)
        text = self.tokenizer.stream(params.stop, stop_ids, params.skip_special_tokens) if self.tokenizer else None
        with self.one_thread:
            sequence = Sequence(
                id=self._next_id,
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                params=params,
                stop_ids=stop_ids,
                rule=plan.rule,
                k=plan.k,
                max_tokens=min(len(tokens) + params.max_new_tokens, self.target.max_context),
                text=text,
                draft=plan.draft,
                draft_max_context=self.drafters.max_context(plan.draft),
                own_k=plan.own_k,
                prediction=predicted,
                tree=plan.tree,
                cache_salt=cache_salt or "" if self.options.prefix_caching else None,
                turn=turn or "",
                inbox=self._inbox,
            )
            self._scheduler.check_fits(sequence)
            if grammar is not None:
                sequence.matcher = grammar.start(self.num_tokens, stop_ids, self.eos_token_ids)
            self._next_id += 1
            self._sequences[sequence.id] = sequence
            self._scheduler.add(sequence)
            self._inbox.open[sequence.id] = None
        return sequence.id

    def deliver(self, sequence_id: int, inbox: Inbox) -> None:
        """Let a request that was just added have its events in another inbox than `step`'s."""
        self._sequences[sequence_id].inbox = inbox
        del self._inbox.open[sequence_id]
        inbox.open[sequence_id] = None

    @checked_call()
    def abort(self, sequence_id: int) -> list[Event]:
        """End a request now and give its blocks back; an unknown or finished id gives no event."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        with self.one_thread:
            sequence.finish_reason = "abort"
            if sequence.text is not None:
                sequence.tail = sequence.text.finish()
            events: list[Event] = [self._finish(sequence)]
        if sequence.inbox is self._inbox:
            del self._inbox.open[sequence_id]
        elif sequence_id in sequence.inbox.open:
            sequence.inbox.unread.append(events)
        return events

    def step(self) -> list[Event]:
        """One verification over all running sequences; its events in order, `Stepped` first; none of an idle engine.

        The events are those of the requests that `add` queued. Those of `stream` and `generate` come from there, and a
        step that they made while such a request ran is returned here first. A request whose own part fails ends with
        `Failed`, and the others go on. Where the forward itself fails, the error is raised, no sequence has received a
        token, and the next step recomputes the cache.
        """
        return self.step_for(self._inbox)

    def step_for(self, inbox: Inbox) -> list[Event]:
        """A caller's events of the oldest step that it has not read, else of a new one; see `step`."""
        if self._sequences and not inbox.unread:
            inboxes = {id(sequence.inbox): sequence.inbox for sequence in self._sequences.values()}
            inboxes[id(inbox)] = inbox
            try:
                with self.one_thread, free_cores():
                    events = self._step()
            except Exception as error:
                for each in inboxes.values():  # the events of requests that ended in this step are lost
                    lost = [
                        Failed(sequence_id, error) for sequence_id in each.open if sequence_id not in self._sequences
                    ]
                    each.unread += [lost] if lost else []
                raise
            for each in inboxes.values():
                each.unread.append(events)
        return inbox.read()

    def _step(self) -> list[Event]:
        begin = perf_counter()
        since_last = 0.0 if self._step_ended_at is None else begin - self._step_ended_at
        self._step_ended_at = None
        preempted = self._scheduler.preempt()
        for sequence in preempted:
            self._stop(sequence)
        for sequence in self._scheduler.admit():
            sequence.num_computed = self._start(sequence)
        rows = self._scheduler.rows()
        assert rows, "of the sequences of an engine, one can always run"
        for row in rows:
            row.taps = self._taps(row.sequence)
            self._notice_draft_limit(row.sequence)
        try:
            goes_on = self._stepper.goes_ahead and self._scheduler.goes_on(rows)
            draft_seconds, verify_seconds = self._stepper.run(rows, goes_on=goes_on)
        except BaseException:
            lost = [row.sequence for row in rows] + self._stepper.forget()
            for sequence in dict.fromkeys(lost):  # an interrupted forward may have written any part of the cache
                self._recompute(sequence)
            raise
        emitted = tuple(self._take(rows))
        finished = [self._finish(row.sequence) for row in rows if row.sequence.finish_reason is not None]
        end = perf_counter()
        seconds = end - begin
        stepped = Stepped(
            emitted=emitted,
            num_running=len(rows),
            num_waiting=len(self._scheduler.waiting),
            num_prefill_tokens=sum(row.num_prefill_tokens for row in rows),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            overhead_seconds=max(seconds - draft_seconds - verify_seconds, 0.0),
            num_blocks_used=self.target.num_blocks - self.target.num_free_blocks,
            num_blocks=self.target.num_blocks,
            num_preemptions=len(preempted),
        )
        outcomes = {
            each.sequence_id: (each.num_drafted, each.num_accepted)
            for each in emitted
            if each.sequence_id in self._sequences
        }
        # A step costs the caller's work before it, too. Where that took longer than the step, it was something else.
        self.policy.observe(seconds + since_last if since_last < seconds else seconds, outcomes, draft_seconds)
        self._step_ended_at = end if self._sequences else None
        return [stepped, *self._take_news(), *finished]

    def _take_news(self) -> list[Event]:
        """Notices and failures that no step has returned yet."""
        news: list[Event] = [*self._notices, *self._stepper.notices, *self.drafters.notices, *self._failed]
        self._notices.clear()
        self._stepper.notices.clear()
        self.drafters.notices.clear()
        self._failed.clear()
        return news

    @checked_call()
    def stream(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> Iterator[Event]:
        """Decode prompts together and yield their events as they happen.

        Several streams and other calls may take turns on one engine: their requests are decoded together, and each
        yields the events of its own.

        Examples:
            for event in engine.stream("Once upon a time", SamplingParams(max_new_tokens=64)):
                if isinstance(event, Stepped):
                    print("".join(emitted.text for emitted in event.emitted), end="", flush=True)
                elif isinstance(event, Finished):
                    print(event.text, event.finish_reason)

        Args:
            prompts: one prompt or several: text, token ids, or chat messages.
            params: for all prompts, or one for each.
            num_speculative_tokens: k of these requests; None uses the engine's.

        Yields:
            A `Stepped` after every step, with an `Emitted` for each sequence that received tokens; `Noticed` for
            messages to the user; a `Finished` at the end of each sequence. Sequence ids count from the first prompt's
            in the prompts' order.

        Raises:
            UsageError: a prompt or parameter that the engine does not accept.
        """
        many = requests.as_many(prompts)
        with Driver(self) as driver:
            for prompt, its_params in zip(many, requests.spread(params, len(many)), strict=True):
                driver.add(prompt, its_params, num_speculative_tokens)
            for events in driver.steps():
                yield from events

    @checked_call()
    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        num_speculative_tokens: int | None = None,
        *,
        progress: Callable[[Generated], None] | None = None,
    ) -> list[Output]:
        """Decode prompts together and return their results in the prompts' order.

        Examples:
            outputs = engine.generate(["Once upon a time", "The dog"], SamplingParams(max_new_tokens=64))
            engine.generate(prompts, progress=lambda now: print(now.num_finished, "of", now.num_prompts))

        Args:
            prompts: one prompt or several: text, token ids, or chat messages.
            params: for all prompts, or one for each.
            num_speculative_tokens: k of these requests; None uses the engine's.
            progress: called after every step; an exception in it aborts the requests and is raised.

        Raises:
            UsageError: a prompt or parameter that the engine does not accept.
        """
        many, outputs = requests.as_many(prompts), Outputs()
        with self.one_thread, Driver(self) as driver:
            for prompt, its_params in zip(many, requests.spread(params, len(many)), strict=True):
                tokens = self.encode(prompt)
                text = requests.text_of(prompt, tokens, self.tokenizer)
                outputs.add(driver, tokens, text, its_params, num_speculative_tokens)
            for events in driver.steps():
                for event in events:
                    outputs.observe(event)
                if progress is not None:
                    progress(Generated.of(outputs))
        return outputs.finished()

    def trace(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: until 0.2.0 this method traced prompts, as the function `specdec_cli.trace` does now.

        Raises:
            UsageError: always; it names the function.
        """
        raise UsageError("`Engine.trace` is a function now", "call `specdec_cli.trace(engine, prompts)`")

    def _take(self, rows: Items[StepRow]) -> Iterator[Emitted]:
        """Give each sequence its accepted tokens and the target's own one, or end it with its error."""
        for row in rows:
            if row.error is not None:
                self._fail(row.sequence, row.error)
            elif row.verdict is not None:
                try:
                    yield row.take()
                except Exception as error:
                    self._fail(row.sequence, error)

    def _recompute(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back, and start it again from its cached prefix."""
        self.target.release(sequence.id)
        most = self._stepper.features.known(sequence.id) if self._taps(sequence) else len(sequence.tokens)
        sequence.num_computed = self._adopt(sequence, most)

    def _finish(self, sequence: Sequence) -> Finished:
        self._remove(sequence)
        assert sequence.finish_reason is not None, "only an ended sequence is finished"
        reason, matcher = sequence.finish_reason, sequence.matcher
        is_incomplete = reason == "length" and matcher is not None and not matcher.may_end
        return Finished(sequence.id, reason, sequence.stop_reason, sequence.tail, is_incomplete)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self._stop(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End the one request whose own part of a step failed; the others go on."""
        sequence.finish_reason = None
        self._remove(sequence)
        self._failed.append(Failed(sequence.id, error))

    def _start(self, sequence: Sequence) -> int:
        """Adopt a sequence's cached prefix, up to where its draft can go on; returns its length."""
        most, begin, salt = len(sequence.tokens), 0, sequence.cache_salt
        if self._taps(sequence) and salt is not None:
            most = begin = self.drafters.adopt(sequence.draft, sequence.id, sequence.tokens, salt)
        self._stepper.features.begin(sequence.id, begin)
        return self._adopt(sequence, most)

    def _taps(self, sequence: Sequence) -> Items[Tap]:
        """The target's hidden states that a sequence's draft reads."""
        has_ended = self._scheduler.limits.k_by_context.has_ended(len(sequence.tokens))
        if sequence.k == 0 or sequence.is_past_draft or has_ended:
            return ()
        return self.drafters.taps(sequence.draft, sequence.id)

    def _adopt(self, sequence: Sequence, most: int) -> int:
        """Adopt at most so many cached tokens of a sequence's beginning; returns their number."""
        if sequence.cache_salt is None:
            return 0
        num_cached = self.target.adopt(sequence.id, sequence.tokens[: most + 1], sequence.cache_salt)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
        return num_cached

    def _stop(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back, the target's and the drafts'; if it goes on, the drafts read it again."""
        self.target.release(sequence.id)
        self.drafters.release(sequence.id)
        self._stepper.drop(sequence.id)
        self.policy.forget(sequence.id)

    def _notice_draft_limit(self, sequence: Sequence) -> None:
        if sequence.k > 0 and sequence.is_past_draft and not sequence.warned_of_draft_limit:
            sequence.warned_of_draft_limit = True
            limit = sequence.draft_max_context
            self._notices.append(
                Noticed(sequence.id, f"past the draft's context of {limit} tokens: continuing without a draft")
            )
