"""`specdec serve --engine NAME`: another engine's server on this terminal, started as the recipe says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec_cli.cli.honoured import other_engine
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.output import show_plan
from specdec_cli.cli.screen import open_screen
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.documents.recipes import ServePlanDocument
from specdec_cli.recipe.schema import Serve

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.recipe import Resolved

_HONOURED = frozenset({"host", "port", "api_key_env"})


def engine_to_serve(resolved: Resolved, shared: Shared) -> OtherEngine | None:
    """The engine that is to decode; None where specdec itself does.

    Raises:
        UsageError: a setting of the server that the engine does not have.
    """
    other = other_engine(resolved, shared)
    if other is None:
        return None
    made, path = other.server(), "serve.per_request_spec_decode_metrics"
    for key in Serve.model_fields:
        if key not in _HONOURED and key not in made.serve_keys and resolved.origins[f"serve.{key}"] != "default":
            hint = "leave it out, or give the engine's own option with --engine-args"
            raise UsageError(f"`serve.{key}` has no effect with --engine {resolved.recipe.engine.name}", hint)
    option = made.acceptance
    if not made.drafts or option is None or option in other.arguments or resolved.origins[path] != "default":
        return other  # the engine's own argument, or the recipe's setting among the engine's
    value = resolved.recipe.serve.per_request_spec_decode_metrics
    return replace(other, arguments=(*other.arguments, option, value))


def show_command(other: OtherEngine, shared: Shared) -> None:
    """Print the engine's command line; nothing is started."""
    body = {"models": [], "command": other.shown()}
    show_plan(other.resolved.recipe.as_dict(), body, shared, f"{other.shown()}\n", ServePlanDocument)


def serve_engine(other: OtherEngine, keys: tuple[str, ...], shared: Shared) -> None:
    """Become the engine's server.

    Args:
        other: the engine.
        keys: API keys, which it takes from its own environment variable.
        shared: options about the terminal.

    Raises:
        RunError: its program is not there or cannot be run.
        UsageError: it takes one key, and there are several.
    """
    made, serve = other.server(), other.resolved.recipe.serve
    if len(keys) > 1:
        raise UsageError(f"{made.name} takes one API key, not {len(keys)}", "give one key")
    screen = open_screen(shared.quiet, streams_text=False)
    for warning in made.warnings:
        screen.say(f"warning: {warning}", "yellow")
    words = (*other.program_words(), "--host", serve.host, "--port", str(serve.port))
    screen.say_whole(f"starting {other.shown()} --host {serve.host} --port {serve.port}")
    environment = os.environ | ({made.key_variable: keys[0]} if keys else {})
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        raise RunError(f"`{words[0]}` cannot be run: {message}", "check --engine-command") from None
