"""`specdec chat`: a conversation in the terminal, with the acceptance statistics of each answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from specdec_cli import drafters
from specdec_cli.cli.chat_commands import ChatCommands
from specdec_cli.cli.chat_input import ReadLine, open_input, read_typed
from specdec_cli.cli.endpoint_options import (
    ApiKey,
    EndpointModel,
    EndpointTimeout,
    key_of,
    url_option,
)
from specdec_cli.cli.honoured import HERE, SERVER, refuse_without_effect
from specdec_cli.cli.options import PAIR
from specdec_cli.cli.output import deliver, envelope, machine_of
from specdec_cli.cli.screen import interruptible, open_screen, progress, start_torch
from specdec_cli.cli.shared import Shared, with_shared_options
from specdec_cli.cli.terminal import colourful
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.measure.chat.chat import ChatDocument, ChatHistory, Speaker
from specdec_cli.report.chat import ReplyView, settings_words, turn_line
from specdec_cli.report.texts import Writer
from specdec_cli.report.view import Screen

if TYPE_CHECKING:
    from specdec_cli.measure.chat.chat_endpoint import EndpointSpeaker
    from specdec_cli.measure.chat.chat_engine import EngineSpeaker
    from specdec_cli.recipe import Recipe, Resolved

_LENGTH = "sampling.max_new_tokens"
_LEFT_OUT = (
    "sampling.logprobs",
    "speculation.disable_by_batch_size",
    "speculation.k_by_batch",
    "engine.max_num_seqs",
    "serve.served_model_name",
)


_DEFAULTS = {_LENGTH: "to the context's end", "engine.enable_prefix_caching": "on"}
"""Defaults in `--help` that differ from the recipe's."""


@with_shared_options(
    common=f"{PAIR} system endpoint max-new-tokens temperature max-model-len json output",
    aliases=True,
    without=_LEFT_OUT,
    defaults=_DEFAULTS,
)
def chat(
    context: typer.Context,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    endpoint: Annotated[
        str | None, url_option("Chat with this OpenAI-compatible server instead of loading a model.")
    ] = None,
    endpoint_model: EndpointModel = None,
    endpoint_timeout: EndpointTimeout = None,
    api_key: ApiKey = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Chat with a model in the terminal and see what the draft contributes to each answer.

    In the conversation, /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends.

    Examples:
        # Chat with the built-in pair.
        specdec chat
        # Chat with your own model.
        specdec chat -t MODEL -d DRAFT -k 4 --system "Answer in one sentence."
        # Chat with a running server.
        specdec chat --endpoint http://127.0.0.1:8000
    """
    if system is not None and not system.strip():
        raise UsageError("`--system` is empty", "give the system message, or leave the option out")
    refuse_without_effect(context, HERE if endpoint is None else SERVER, "" if endpoint is None else "--endpoint")
    resolved = shared.resolve()
    read_line, is_interactive = open_input()
    talk = _Chat(resolved, shared, read_line, is_interactive, open_screen(shared.quiet, streams_text=not shared.json))
    talk.history.system = system
    if endpoint is None:
        return talk.go(talk.engine(), None)
    with talk.server(endpoint, endpoint_model, endpoint_timeout, api_key) as speaker:
        return talk.go(speaker, endpoint)


@dataclass(slots=True)
class _Chat:
    """One run of the command."""

    resolved: Resolved
    shared: Shared
    read_line: ReadLine
    is_interactive: bool
    screen: Screen
    history: ChatHistory = field(default_factory=ChatHistory)
    machine: dict[str, str | None] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def engine(self) -> EngineSpeaker:
        """Load the engine; prefix caching is on, so that a turn reads only what is new."""
        recipe = self.recipe
        if recipe.draft.method == "prediction":
            raise UsageError("`chat` has no text for the draft `prediction`", "choose another draft: -d ngram")
        if recipe.engine.enable_prefix_caching is None:
            changed = recipe.engine.model_copy(update={"enable_prefix_caching": True})
            recipe = recipe.model_copy(update={"engine": changed})
        own_draft = drafters.to_spec(recipe.draft_fields())
        if self.resolved.built_in_pair:
            self.screen.say(f"no target named: using the built-in {recipe.target.model}, draft {own_draft}")
        with progress(self.screen) as say:
            start_torch(say)
            from specdec_cli.engine.caveats import caveats
            from specdec_cli.engine.depth.draft_limit import own_cut_drafts
            from specdec_cli.engine.engine import Engine

            engine = Engine.from_recipe(
                recipe, trust_remote_code=self.shared.trust_remote_code, others=("ngram",), progress=say
            )
        for message in [*caveats(recipe, engine), *own_cut_drafts(engine)]:
            self.screen.say(f"note: {message}", "yellow")
        engine.encode([{"role": "user", "content": "Hello"}])  # refuses a tokenizer without a chat template
        self.machine = machine_of(engine)
        from specdec_cli.measure.chat.chat_engine import EngineSpeaker
        from specdec_cli.sampling.params import SamplingParams

        params = SamplingParams(**recipe.sampling.model_dump())
        return EngineSpeaker(engine, params, own_draft, not self._has_length, recipe.serve.max_speculative_tokens)

    def server(self, url: str, model: str | None, timeout_s: float | None, key: str | None) -> EndpointSpeaker:
        """The server's side of the conversation; nothing is sent yet."""
        from specdec_cli.measure.chat.chat_endpoint import EndpointSpeaker
        from specdec_cli.measure.endpoint.address import check_key, parse_address
        from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan

        named = None if self.resolved.built_in_pair else self.recipe.target.model
        timeout: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
        plan = EndpointPlan(parse_address(url), check_key(key_of(key)), model or named, chat=True, **timeout)
        recipe = self.recipe
        return EndpointSpeaker(plan, recipe.sampling, recipe.serve.max_speculative_tokens, self._has_length)

    @property
    def _has_length(self) -> bool:
        """Whether the length of answers is limited; otherwise they may fill the context."""
        return self.resolved.origins.get(_LENGTH) != "default"

    def go(self, speaker: Speaker, endpoint: str | None) -> ExitCode | None:
        """Read, answer, show, until the input ends; then write the document."""

        def document() -> dict[str, Any]:
            recipe = self.recipe.as_dict()
            kept = recipe if endpoint is None else {"sampling": recipe["sampling"]}
            body = ChatDocument(
                target=speaker.target, endpoint=endpoint, system=self.history.system, turns=self.history.turns
            )
            return envelope(ChatDocument, kept, body.as_json(), **self.machine)

        commands = ChatCommands(self.history, speaker, self.screen, document)
        if self.is_interactive:
            words = settings_words(speaker.draft, speaker.k)
            self.screen.say(f"{speaker.target} · {words} · /help lists the commands, Ctrl-D ends")
        try:
            return self._converse(speaker, commands)
        finally:
            if self.shared.wants_document:
                deliver(document(), self.shared)

    def _converse(self, speaker: Speaker, commands: ChatCommands) -> ExitCode | None:
        while True:
            try:
                typed = read_typed(self.read_line)
                if typed is None:
                    break
                if typed.is_command:
                    if not commands.run(typed.text):
                        return None
                elif typed.text and self._ask(typed.text, speaker):
                    return ExitCode.INTERRUPTED
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                sys.stderr.write("\n")
                self.screen.say("Ctrl-D or /quit ends the conversation")
            except SpecdecError as error:
                if not self.is_interactive:
                    raise
                self._complain(error)
        if self.is_interactive:
            sys.stderr.write("\n")
        return None

    def _ask(self, prompt: str, speaker: Speaker) -> bool:
        """Show the answer to a message. True if Ctrl-C ended the run, which only an interactive chat survives."""
        settings = settings_words(speaker.draft, speaker.k)
        with interruptible(repeatedly=True, ends=not self.is_interactive) as stopped:
            with ReplyView(self.screen, self._writer(), self.screen.is_live, settings) as view:
                turn = self.history.ask(prompt, speaker, view.show, stopped)
            self.screen.say(turn_line(turn))
            for notice in turn.notices:
                self.screen.say(f"note: {notice}", "yellow")
            if not turn.text:
                self.screen.say("the answer has no text: the message is not kept", "yellow")
        return stopped() and not self.is_interactive

    def _writer(self) -> Writer | None:
        """Writer of answers: to stdout, or to stderr with --json, whose document goes to stdout."""
        if not self.shared.json:
            return Writer(sys.stdout, colourful(sys.stdout))
        return None if self.shared.quiet else Writer(sys.stderr, colourful(sys.stderr))

    def _complain(self, error: SpecdecError) -> None:
        """Show an error and go on."""
        self.screen.console.print(Text(f"error: {error.message}", style="red"), soft_wrap=True)
        if error.hint:
            self.screen.console.print(Text(f"hint: {error.hint}", style="cyan"), soft_wrap=True)
