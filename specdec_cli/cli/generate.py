"""`specdec generate`: decode prompts with speculation; text to stdout, a live table to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.measurement_options import tell
from specdec_cli.cli.options import (
    ENGINE_OPTIONS,
    PROMPTS,
    STRUCTURED_OPTIONS,
    WORKLOAD_OPTIONS,
    Chat,
    Shared,
    check_template,
    with_shared_options,
)
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.output import deliver, envelope, machine_of
from specdec_cli.cli.prompts import given_prompts
from specdec_cli.cli.screen import interruptible, open_screen, progress
from specdec_cli.cli.structured import GrammarSource, wanted
from specdec_cli.engine.comparison import WITHOUT, Comparison
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.prompts import ChatMessage, PromptRow, PromptSet
from specdec_cli.errors import ExitCode, RunError, UsageError, in_words
from specdec_cli.measure.workload.turns import Dialogue, Round, dialogues, lost_turns, unasked_turns
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.generate import SCHEMA, Promise, generate_body
from specdec_cli.report.pieces import TokenPieces
from specdec_cli.report.view import RunView, Screen
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.recipe import Recipe, Resolved
    from specdec_cli.sampling.grammar import Grammar

_SHOWN = "Display"
_MOST_FAILURES = 5  # prompts whose errors are shown one by one
_K = "speculation.num_speculative_tokens"


@with_shared_options(
    aliases=True,
    without=("serve.served_model_name",),
    beside=(*WORKLOAD_OPTIONS, *STRUCTURED_OPTIONS, *ENGINE_OPTIONS),
    defaults={"workload.dataset": "the prompts above", "workload.num_prompts": "all"},
)
def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts. `-`, or no prompt in a pipe, reads one from stdin.", metavar="PROMPT"),
    ] = None,
    chat: Chat = False,
    system: Annotated[
        str | None, typer.Option(help="System message; implies --chat.", metavar="TEXT", rich_help_panel=PROMPTS)
    ] = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            help="Text that the output is expected to follow (--draft prediction).",
            metavar="TEXT",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also decode without the draft and show the speed-up.", rich_help_panel=_SHOWN),
    ] = False,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="Mark which tokens were accepted and which are the target's own. With --tree, draw the first tree.",
            rich_help_panel=_SHOWN,
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run without loading anything.", rich_help_panel=_SHOWN)
    ] = False,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Decode prompts with a draft. The output is the target's own, only faster."""
    if show_drafts and shared.json:
        raise UsageError("`--show-drafts` marks streamed text, and `--json` streams none", "leave one of them out")
    if "sampling.logprobs" in shared.flags and not shared.json and shared.output is None:
        raise UsageError("`--logprobs` is for the JSON document, and none is wanted", "add --json or --output FILE")
    check_template(shared, chat or system is not None)
    if prediction is not None:
        _predict(shared, prediction)
    resolved = shared.resolve()
    if resolved.recipe.draft.method == "prediction" and not resolved.recipe.draft.options.get("text"):
        raise UsageError("the draft `prediction` has no text to read", "give it with --prediction")
    if compare and not _drafts(resolved.recipe):
        raise UsageError(
            "`--compare` has nothing to compare: there is no draft", "name one with --draft, and k above 0"
        )
    prompts = given_prompts(prompt or [], resolved.recipe.workload, shared.flags, chat or system is not None)
    engine = OtherEngine.asked(resolved, shared)
    if engine is not None:
        given = {"--compare": compare, "--show-drafts": show_drafts}
        return _elsewhere(engine, _with_system(prompts, system), chat or system is not None, given, shared, dry_run)
    if dry_run:
        tell(prompts.notices, shared)
        _show_plan(resolved, prompts.rows, shared)
        return None
    wish = _GenerateOptions(
        chat or system is not None, system, compare, show_drafts, wanted(resolved.recipe.structured)
    )
    return _GenerateRun(resolved, prompts, wish, shared, open_screen(shared.quiet, streams_text=not shared.json)).go()


def _elsewhere(
    engine: OtherEngine, prompts: PromptSet, chat: bool, given: dict[str, bool], shared: Shared, dry_run: bool
) -> ExitCode | None:
    """Decode in another engine, which is started as a subprocess."""
    from specdec_cli.cli.generate_other_engine import OtherGenerateRun, show_other_generate
    from specdec_cli.cli.other_engine_run import refuse_elsewhere

    recipe = engine.resolved.recipe
    refuse_elsewhere({**given, "--logprobs": recipe.sampling.logprobs is not None}, recipe.engine.name)
    if dry_run:
        show_other_generate(engine, len(prompts.rows), shared)
        return None
    return OtherGenerateRun(engine, prompts, chat, shared, open_screen(shared.quiet, not shared.json)).go()


def _with_system(prompts: PromptSet, system: str | None) -> PromptSet:
    """The prompts with `--system` in the place of every row's own."""
    if system is None:
        return prompts
    message = ChatMessage("system", system)
    return PromptSet([row.with_system(message) for row in prompts.rows], prompts.notices)


def _predict(shared: Shared, text: str) -> None:
    """Make `--prediction` the draft's text; a recipe's draft of that method keeps its other options."""
    if not text.strip():
        raise UsageError("`--prediction` is empty", "give the text that the output is expected to follow")
    if "draft" not in shared.flags and shared.resolve().recipe.draft.method == "prediction":
        shared.flags["draft.text"] = (text, "--prediction")
        return
    draft, flag = shared.flags.get("draft", ({"method": "prediction"}, "--prediction"))
    if draft.get("method") != "prediction":
        raise UsageError("`--prediction` is read by the draft `prediction` alone", "leave --draft out")
    shared.flags["draft"] = (draft | {"text": text}, flag)


def _drafts(recipe: Recipe) -> bool:
    return recipe.draft.method != "none" and recipe.speculation.num_speculative_tokens > 0


def _show_plan(resolved: Resolved, rows: Sequence[PromptRow], shared: Shared) -> None:
    """Show what would run, and where each value comes from."""
    if shared.json or shared.output is not None:
        body: dict[str, Any] = {"origins": resolved.origins, "num_prompts": len(rows)}
        document = envelope("specdec.recipe/1", resolved.recipe.as_dict(), body)
        deliver(document, to_stdout=shared.json, path=shared.output, force=shared.force)
    if not shared.json:
        prompts = "1 prompt" if len(rows) == 1 else f"{len(rows)} prompts"
        sys.stdout.write(f"# would decode {prompts}\n{to_yaml(resolved, origins=True)}")


@dataclass(frozen=True, slots=True)
class _GenerateOptions:
    """The command's own options."""

    chat: bool
    system: str | None
    compare: bool
    show_drafts: bool
    structure: GrammarSource | None


@dataclass(slots=True)
class _GenerateRun:
    """One run of the command."""

    resolved: Resolved
    prompts: PromptSet
    wish: _GenerateOptions
    shared: Shared
    screen: Screen

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def draft_name(self) -> str:
        draft, model = self.recipe.draft, self.recipe.draft.model
        name = str(draft.method) if model is None else model.rstrip("/").rpartition("/")[2] or model
        return draft.behind_first(name)

    def _arm_name(self) -> str:
        if not _drafts(self.recipe):
            return WITHOUT
        synthetic = " (synthetic)" if self.recipe.speculation.is_synthetic else ""
        return f"with {self.draft_name}{synthetic}"

    def go(self) -> ExitCode | None:
        """Load, decode, show, write."""
        if self.resolved.built_in_pair:
            target, model = self.recipe.target.model, self.recipe.draft.model
            what = "pair" if model is not None and model.startswith("builtin:") else "target"
            draft = self.draft_name if model is None else self.recipe.draft.behind_first(model)
            self.screen.say(f"no target named: using the built-in {what} ({target}, draft {draft})")
        k = self.recipe.speculation.num_speculative_tokens
        if k > 0 and _K in self.shared.flags and not _drafts(self.recipe):
            self.screen.say(f"note: -k {k} has no effect: there is no draft, name one with --draft", "yellow")
        with progress(self.screen) as say:
            engine = self._load(say)
            round_ = Round(engine, self._talks(), self.wish.chat, self._params(), self._grammar(engine))
        from specdec_cli.engine.caveats import caveats
        from specdec_cli.engine.depth.draft_limit import own_cut_drafts

        for said in [*self.prompts.notices, *caveats(self.recipe, engine), *own_cut_drafts(engine)]:
            self.screen.say(f"note: {said}", "yellow")
        is_one = len(round_.places) == 1
        arm, plain = Decoding(self._arm_name(), keeps_errors=not is_one), Decoding(WITHOUT, 0, keeps_errors=not is_one)
        promise = Promise.of(self.recipe)
        comparison = Comparison(arm, plain, promise.keeps_tokens) if self.wish.compare else None
        with interruptible() as stopped:
            view, requests = self._decode(round_, arm, comparison, stopped)
            view.summary(promise, comparison)
            if stopped():
                self.screen.say("interrupted: these are the results so far", "yellow")
            if self.shared.json or self.shared.output is not None:
                body = generate_body(arm, requests, promise, comparison)
                outputs = [output.token_ids for output in arm.outputs()]
                document = envelope(SCHEMA, self.recipe.as_dict(), body, **machine_of(engine, outputs))
                deliver(document, to_stdout=self.shared.json, path=self.shared.output, force=self.shared.force)
            if stopped():
                return ExitCode.INTERRUPTED
        _raise_failures([arm] if comparison is None else [arm, plain], len(round_.places))
        return None

    def _load(self, say: Callable[[str], None]) -> Engine:
        say("starting torch and transformers")
        from specdec_cli.engine.engine import Engine

        return Engine.from_recipe(self.recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)

    def _params(self) -> SamplingParams:
        return SamplingParams(**self.recipe.sampling.model_dump())

    def _grammar(self, engine: Engine) -> Grammar | None:
        if self.wish.structure is None:
            return None
        assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
        grammar = self.wish.structure.compiled(engine.tokenizer)
        for warning in grammar.warnings:
            self.screen.say(f"note: {warning}", "yellow")
        return grammar

    def _talks(self) -> list[Dialogue]:
        """The rows' conversations, or their plain prompts; `--system` stands for every row's own."""
        return dialogues(_with_system(self.prompts, self.wish.system).rows)

    def _tree_text(self, engine: Engine) -> Callable[[int], str] | None:
        """Text of a token of a drafted tree; None where chains are drafted."""
        assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
        return None if self.recipe.speculation.tree is None else engine.tokenizer.piece

    def _decode(
        self, round_: Round, arm: Decoding, comparison: Comparison | None, stopped: Callable[[], bool]
    ) -> tuple[RunView, list[Request]]:
        """Decode every turn, the first of all rows together, then the second, and so on."""
        arms, ks = [arm], [self.recipe.speculation.num_speculative_tokens if _drafts(self.recipe) else 0]
        if comparison is not None:
            arms, ks = [*arms, comparison.plain], [*ks, 0]
        pieces = partial(_token_pieces, round_.engine, self.recipe.sampling.skip_special_tokens)
        view = RunView(
            self.screen,
            arms,
            ks,
            round_.places,
            streams_text=not self.shared.json,
            token_pieces=pieces if self.wish.show_drafts else None,
            tree_text=self._tree_text(round_.engine),
            goes_on=self.shared.output is not None,
            most_tokens=self.recipe.sampling.max_new_tokens,
        )
        decoded: list[Request] = []
        with view:
            while requests := round_.requests:
                decoded += requests
                if comparison is not None:
                    comparison.run(round_.engine, requests, view.watch, stopped)
                else:
                    decode(round_.engine, arm, requests, view.watch, stopped)
                if stopped():
                    break
                for place in round_.advance(arm):
                    view.skip(place)
        if round_.num_lost:
            self.screen.say(f"note: {lost_turns(round_.num_lost)}", "yellow")
        if round_.num_unasked:
            self.screen.say(f"note: {unasked_turns(round_.num_unasked)}", "yellow")
        return view, decoded


def _raise_failures(arms: Sequence[Decoding], num_prompts: int) -> None:
    """Report the prompts that failed, once everything else is written.

    Raises:
        RunError: there are such.
    """
    errors = {one.index: one.error for arm in arms for one in arm.outputs() if one.error is not None}
    if not errors:
        return
    first, *rest = [f"prompt {index + 1}: {in_words(error)[0]}" for index, error in sorted(errors.items())]
    shown = [f"{len(errors)} of {num_prompts} prompts failed; {first}", *rest[: _MOST_FAILURES - 1]]
    num_hidden = len(errors) - len(shown)
    raise RunError(
        "\n".join([*shown, f"and {num_hidden} more"] if num_hidden else shown),
        "run these again; the other outputs are complete",
    )


def _token_pieces(engine: Engine, skip_special_tokens: bool) -> TokenPieces:
    """Cuts an output's text into tokens."""
    assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
    return TokenPieces(engine.tokenizer.detokenizer(skip_special_tokens))
