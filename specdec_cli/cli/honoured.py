"""Where a command's work is done (here, in another engine, on a server), and which options each place honours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.options import every_option
from specdec_cli.errors import UsageError
from specdec_cli.recipe.keys import default_of

if TYPE_CHECKING:
    import typer

    from specdec_cli.cli.other_engine import OtherEngine
    from specdec_cli.cli.shared import Shared
    from specdec_cli.recipe import Resolved

_OUTPUT = ("recipe", "sets", "json", "output", "force", "quiet", "details")
_ENGINE = ("trust_remote_code", "engine_command", "engine_args")
_PROMPTS = ("sampling.", "workload.", "prompt_file", "chat", "dry_run")
_ENDPOINT = (
    *("endpoint", "concurrency", "endpoint_model", "endpoint_timeout", "request_rate", "extra_body"),
    *("max_tokens_field", "api_key", "slo", "plain_endpoint"),
)
_AUDITED = ("endpoint", "plain_endpoint", "endpoint_model", "endpoint_timeout", "api_key")
_GATES = ("gates.fail_if", "gates.baseline")
_SERVERS = ("draft_endpoint", "endpoint_timeout", "api_key", "at_a_time")
_ASKED = "only prompts and sampling are sent to a server"


@dataclass(frozen=True, slots=True)
class HonouredOptions:
    """The options that mean something at a place: parameters, keys of the recipe, and sections with their dot.

    Args:
        only: on the command line these alone; empty honours all but those refused.
        refused: these not, keys of the recipe wherever they are set.
        why: the reason, for people; empty where the place says enough.
        hint: what to do about a key of the recipe.
    """

    only: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    why: str = ""
    hint: str = "leave it out"

    def honours(self, *names: str) -> bool:
        """Whether an option means something, by any of its names."""
        if not self.only:
            return not any(name in self.refused for name in names)
        sections = tuple(name for name in self.only if name.endswith("."))
        return any(name in self.only or name.startswith(sections) for name in names)


HERE, ENGINE, SERVER, RECORDED, REQUESTS = "here", "engine", "server", "recorded", "requests"
_WHEN_STARTED = "leave it out; set it when you start the server"

PLACES: dict[tuple[str, str], HonouredOptions] = {
    ("audit", HERE): HonouredOptions(refused=_AUDITED, hint="name the server: --endpoint URL"),
    ("audit", SERVER): HonouredOptions(
        (*_OUTPUT, *_PROMPTS, *_AUDITED, "tools", "target.model"), (), _ASKED, _WHEN_STARTED
    ),
    ("audit", REQUESTS): HonouredOptions(
        refused=(*_AUDITED, "mode", "k_values", "batch_sizes", "time_limit", "table", "full", "chat", "prompt_file"),
        why="the file's requests are asked one by one",
    ),
    ("bench", HERE): HonouredOptions(refused=_ENDPOINT, hint="name the server: --endpoint URL"),
    ("bench", ENGINE): HonouredOptions(refused=("against", "resume")),
    ("bench", SERVER): HonouredOptions(
        (*_OUTPUT, *_PROMPTS, *_ENDPOINT, "target.model", "gates.", "repeats", "by", "files."),
        (),
        _ASKED,
        _WHEN_STARTED,
    ),
    ("chat", HERE): HonouredOptions(refused=_ENDPOINT, hint="name the server: --endpoint URL"),
    ("chat", SERVER): HonouredOptions(
        (*_OUTPUT, *_ENDPOINT, "sampling.", "target.model", "system"), (), _ASKED, _WHEN_STARTED
    ),
    ("compare-drafts", ENGINE): HonouredOptions(refused=("k_max", "exhaustive", "trace", "resume")),
    ("generate", ENGINE): HonouredOptions(refused=("compare", "show_drafts", "sampling.logprobs")),
    ("sweep-k", HERE): HonouredOptions(refused=_SERVERS, hint="name the server: --target-endpoint URL"),
    ("sweep-k", ENGINE): HonouredOptions(
        (
            *(*_OUTPUT, *_PROMPTS, *_ENGINE, "target.", "draft", "speculation.", "engine."),
            *("k_max", "batch_sizes", "write_recipe", "repeats", "gates.", "files."),
        ),
        (),
        "it sweeps chains on another engine",
    ),
    ("sweep-k", SERVER): HonouredOptions(
        (
            *(*_OUTPUT, *_PROMPTS, *_SERVERS, "target.model", "draft"),
            *("target_endpoint", "trace_from", "k_max"),
        ),
        _GATES,
        _ASKED,
        _WHEN_STARTED,
    ),
    ("sweep-k", RECORDED): HonouredOptions(
        (*_OUTPUT, "workload.num_prompts", "dry_run", "target.model", "draft", "trace_from", "k_max"),
        _GATES,
        "it reads answers that were given",
        "leave it out; --num-prompts says how many rows to read",
    ),
}
"""By command and place; a command without an entry honours all its options there."""

_NAMES_A_SERVER = {"audit": "--endpoint", "bench": "--endpoint", "chat": "--endpoint", "sweep-k": "--target-endpoint"}
"""The option that names a server, by command."""


def refuse_without_effect(
    context: typer.Context, place: str, named: str = "", resolved: Resolved | None = None
) -> None:
    """Refuse options of the command line that mean nothing where the work is done.

    Args:
        context: the command line.
        place: HERE, ENGINE, SERVER or RECORDED.
        named: the option that sends the work there; empty for HERE.
        resolved: the recipe, whose keys are refused, too, wherever they are set.

    Raises:
        UsageError: there is such an option.
    """
    command = str(context.command.name)
    honoured = PLACES.get((command, place))
    if honoured is None:
        return
    path_of = {option.parameter: option.path for option in every_option()}
    effect = f"has no effect with {named}" if named else f"has no effect without {_NAMES_A_SERVER[command]}"
    for parameter in _given(context):
        path = path_of.get(parameter.name, "")
        if not honoured.honours(parameter.name, path):
            why, hint = honoured.why, honoured.hint if path or not named else "leave it out"
            if path.startswith("files."):
                why, hint = "the result is written as JSON alone", "leave it out; --output FILE writes the result"
            raise UsageError(f"`{_flag(parameter)}` {effect}{why and f': {why}'}", hint)
    for option in every_option():
        is_refused = "." in option.path and option.path in honoured.refused
        if resolved is not None and is_refused and _is_set(resolved, option.path):
            raise UsageError(f"`{option.flag}` {effect}", honoured.hint)


def other_engine(resolved: Resolved, shared: Shared) -> OtherEngine | None:
    """The engine that a recipe names; None where specdec itself decodes.

    Raises:
        UsageError: its further arguments cannot be read.
    """
    if resolved.recipe.engine.name == "specdec":
        return None
    from specdec_cli.cli.other_engine import OtherEngine

    return OtherEngine.of(resolved, shared)


def _is_set(resolved: Resolved, path: str) -> bool:
    """Whether a key of the recipe has another value than its default."""
    section, key = path.split(".")
    return bool(getattr(getattr(resolved.recipe, section), key) != default_of(path))


def _given(context: typer.Context) -> Iterator[Any]:
    """The command's parameters that the command line gives."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield parameter


def _flag(parameter: Any) -> str:
    return next((word for word in parameter.opts if word.startswith("--")), str(parameter.name))
