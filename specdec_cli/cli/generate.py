"""`specdec generate`: decode prompts with speculation; text to stdout, a live table to stderr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.generate_run import GenerateRun
from specdec_cli.cli.honoured import ENGINE, other_engine, refuse_without_effect
from specdec_cli.cli.options import ENGINE_OPTIONS, PAIR, PROMPTS, STRUCTURED_OPTIONS, WORKLOAD_OPTIONS, Chat
from specdec_cli.cli.output import machine_of
from specdec_cli.cli.prompts import given_prompts
from specdec_cli.cli.screen import progress, start_torch
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.cli.structured import GrammarSource, wanted
from specdec_cli.engine.comparison import WITHOUT, Comparison
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.promise import Promise
from specdec_cli.engine.prompts import ChatMessage, PromptSet
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.workload.turns import Dialogue, Round, dialogues, lost_turns, unasked_turns
from specdec_cli.report.pieces import TokenPieces
from specdec_cli.report.view import RunView
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.recipe import Recipe
    from specdec_cli.sampling.grammar import Grammar

_SHOWN = "Display"
_K = "speculation.num_speculative_tokens"


@with_shared_options(
    common=f"{PAIR} engine max-new-tokens temperature seed prompt-file chat compare json output",
    aliases=True,
    without=("serve.served_model_name",),
    beside=(*WORKLOAD_OPTIONS, *STRUCTURED_OPTIONS, *ENGINE_OPTIONS),
    defaults={"workload.dataset": "the prompts above", "workload.num_prompts": "all"},
)
def generate(
    context: typer.Context,
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
    """Decode prompts with a draft. The output is the target's own, only faster.

    Examples:
        # Decode with and without the draft and show the speed-up.
        specdec generate "Once upon a time" --compare
        # Use your own target and draft.
        specdec generate "Hello" -t MODEL -d DRAFT -k 4 --chat
        # Decode a file of prompts into a JSON document.
        specdec generate --prompt-file prompts.jsonl --output result.json
    """
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
    is_chat, prompts = chat or system is not None, _with_system(prompts, system)
    engine = other_engine(resolved, shared)
    if engine is not None:
        from specdec_cli.cli.engine_generate import EngineGenerateRun

        refuse_without_effect(context, ENGINE, f"--engine {resolved.recipe.engine.name}", resolved)
        return EngineGenerateRun(resolved, prompts, is_chat, shared, engine).start(dry_run)
    structure = None if dry_run else wanted(resolved.recipe.structured)
    return OwnGenerateRun(resolved, prompts, is_chat, shared, compare, show_drafts, structure).start(dry_run)


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


@dataclass(slots=True)
class OwnGenerateRun(GenerateRun):
    """One run of the command with our own engine.

    Args:
        compares: whether it also decodes without the draft.
        shows_drafts: whether drafted tokens are marked in the text.
        structure: grammar that the outputs follow, or None.
    """

    compares: bool
    shows_drafts: bool
    structure: GrammarSource | None
    _round: Round = field(init=False)
    _arm: Decoding = field(init=False)
    _comparison: Comparison | None = field(init=False, default=None)
    _view: RunView = field(init=False)
    _decoded: list[Request] = field(init=False, default_factory=list)

    @property
    def draft_name(self) -> str:
        """The draft in words."""
        draft, model = self.recipe.draft, self.recipe.draft.model
        name = str(draft.method) if model is None else model.rstrip("/").rpartition("/")[2] or model
        return draft.behind_first(name)

    def _arm_name(self) -> str:
        if not _drafts(self.recipe):
            return WITHOUT
        synthetic = " (synthetic)" if self.recipe.speculation.is_synthetic else ""
        return f"with {self.draft_name}{synthetic}"

    def open(self) -> list[str]:
        """Load the models; gives limits of what they do."""
        if self.resolved.built_in_pair:
            target, model = self.recipe.target.model, self.recipe.draft.model
            what = "pair" if model is not None and model.startswith("builtin:") else "target"
            draft = self.draft_name if model is None else self.recipe.draft.behind_first(model)
            self.screen.say(f"no target named: using the built-in {what} ({target}, draft {draft})")
        k = self.recipe.speculation.num_speculative_tokens
        if k > 0 and _K in self.shared.flags and not _drafts(self.recipe):
            self.note(f"-k {k} has no effect: there is no draft, name one with --draft")
        with progress(self.screen) as say:
            engine = self._load(say)
            self._round = Round(engine, self._talks(), self.chat, self._params(), self._grammar(engine))
        from specdec_cli.engine.caveats import caveats
        from specdec_cli.engine.depth.draft_limit import own_cut_drafts

        is_alone = len(self._round.places) == 1
        self._arm = Decoding(self._arm_name(), keeps_errors=not is_alone)
        if self.compares:
            plain = Decoding(WITHOUT, 0, keeps_errors=not is_alone)
            self._comparison = Comparison(self._arm, plain, Promise.of(self.recipe).keeps_tokens)
        return [*caveats(self.recipe, engine), *own_cut_drafts(engine)]

    def summarize(self) -> None:
        """Show what the draft did."""
        self._view.summary(Promise.of(self.recipe), self._comparison)

    def body(self) -> dict[str, Any]:
        """The document's own fields."""
        from specdec_cli.measure.documents.generate import generate_body

        return generate_body(self._arm, self._decoded, Promise.of(self.recipe), self._comparison)

    def machine(self) -> dict[str, Any]:
        """Device, dtype and decoder of the models."""
        return machine_of(self._round.engine, [output.token_ids for output in self._arm.outputs()])

    @property
    def num_prompts(self) -> int:
        """Prompts that are decoded, each turn of a conversation one."""
        return len(self._round.places)

    def failures(self) -> dict[int, Exception]:
        """Errors by prompt."""
        arms = [self._arm] if self._comparison is None else [self._arm, self._comparison.plain]
        return {output.index: output.error for arm in arms for output in arm.outputs() if output.error is not None}

    def _load(self, say: Callable[[str], None]) -> Engine:
        start_torch(say)
        from specdec_cli.engine.engine import Engine

        return Engine.from_recipe(self.recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)

    def _params(self) -> SamplingParams:
        return SamplingParams(**self.recipe.sampling.model_dump())

    def _grammar(self, engine: Engine) -> Grammar | None:
        if self.structure is None:
            return None
        assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
        grammar = self.structure.compiled(engine.tokenizer)
        for warning in grammar.warnings:
            self.screen.say(f"note: {warning}", "yellow")
        return grammar

    def _talks(self) -> list[Dialogue]:
        """The rows' conversations, or their plain prompts."""
        return dialogues(self.prompts.rows)

    def _tree_text(self, engine: Engine) -> Callable[[int], str] | None:
        """Text of a token of a drafted tree; None where chains are drafted."""
        assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
        return None if self.recipe.speculation.tree is None else engine.tokenizer.piece

    def decode(self, stopped: Callable[[], bool]) -> None:
        """Decode every turn, the first of all rows together, then the second, and so on."""
        round_, arm, comparison = self._round, self._arm, self._comparison
        arms, ks = [arm], [self.recipe.speculation.num_speculative_tokens if _drafts(self.recipe) else 0]
        if comparison is not None:
            arms, ks = [*arms, comparison.plain], [*ks, 0]
        pieces = partial(_token_pieces, round_.engine, self.recipe.sampling.skip_special_tokens)
        self._view = view = RunView(
            self.screen,
            arms,
            ks,
            round_.places,
            streams_text=not self.shared.json,
            token_pieces=pieces if self.shows_drafts else None,
            tree_text=self._tree_text(round_.engine),
            goes_on=self.shared.output is not None,
            most_tokens=self.recipe.sampling.max_new_tokens,
        )
        with view:
            while requests := round_.requests:
                self._decoded += requests
                if comparison is not None:
                    comparison.run(round_.engine, requests, view.watch, stopped)
                else:
                    decode(round_.engine, arm, requests, view.watch, stopped)
                if stopped():
                    break
                for place in round_.advance(arm):
                    view.skip(place)
        if round_.num_lost:
            self.note(lost_turns(round_.num_lost))
        if round_.num_unasked:
            self.note(unasked_turns(round_.num_unasked))


def _token_pieces(engine: Engine, skip_special_tokens: bool) -> TokenPieces:
    """Cuts an output's text into tokens."""
    assert engine.tokenizer is not None, "engines of recipes have a tokenizer"
    return TokenPieces(engine.tokenizer.detokenizer(skip_special_tokens))
