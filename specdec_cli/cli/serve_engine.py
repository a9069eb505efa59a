"""`specdec serve --engine NAME`: the engine's server as a subprocess, and ours in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_cli.cli.honoured import other_engine
from specdec_cli.cli.other_engine import OtherEngine, showing_log
from specdec_cli.cli.output import show_plan
from specdec_cli.cli.screen import open_screen
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.measure.documents.recipes import ServePlanDocument
from specdec_cli.recipe.schema import Serve

if TYPE_CHECKING:
    from specdec_cli.cli.shared import Shared
    from specdec_cli.recipe import Resolved
    from specdec_cli.serve.settings import Settings

_BY_THE_FRONT = frozenset(
    {
        "host",
        "port",
        "api_key_env",
        "max_waiting",
        "max_connections",
        "request_timeout_seconds",
        "drain_timeout_seconds",
        "cors_origins",
    }
    | {"allowed_hosts", "max_body_bytes", "max_json_depth", "log_format", "log_polls"}
)


def engine_behind(resolved: Resolved, shared: Shared) -> OtherEngine | None:
    """The engine that is to decode; None where specdec itself does.

    Raises:
        UsageError: a setting of the server that neither the front nor the engine has.
    """
    other = other_engine(resolved, shared)
    if other is None:
        return None
    made = other.server()
    for key in Serve.model_fields:
        if key not in _BY_THE_FRONT and key not in made.serve_keys and resolved.origins[f"serve.{key}"] != "default":
            hint = "leave it out, or give the engine's own option with --engine-args"
            raise UsageError(f"`serve.{key}` has no effect with --engine {resolved.recipe.engine.name}", hint)
    return other


def show_command(other: OtherEngine, shared: Shared) -> None:
    """Print the engine's command line; nothing is started."""
    body = {"models": [], "command": other.shown()}
    show_plan(other.resolved.recipe.as_dict(), body, shared, f"{other.shown()}\n", ServePlanDocument)


def serve_engine(other: OtherEngine, draft: str | None, settings: Settings, shared: Shared) -> ExitCode:
    """Listen, start the engine, serve; the port is taken before the engine starts.

    Args:
        other: the engine.
        draft: name of its draft, for the page; None without one.
        settings: of the server in front.
        shared: options about the terminal.

    Raises:
        SpecdecError: the engine did not start, or ended.
    """
    from specdec_cli.serve.http.logs import configure_logs
    from specdec_cli.serve.http.server import address, listen
    from specdec_cli.serve.proxy.app import Front
    from specdec_cli.serve.proxy.fields import PROXIED
    from specdec_cli.serve.proxy.server import FrontServer
    from specdec_cli.serve.proxy.upstream import Upstream

    recipe = other.resolved.recipe
    screen = open_screen(shared.quiet, streams_text=False)
    for warning in other.server().warnings:
        screen.say(f"warning: {warning}", "yellow")
    process = other.process(screen)
    screen.say_whole(f"starting {other.shown()}")

    def ended() -> SpecdecError | None:
        try:
            process.check()
        except SpecdecError as error:
            return error
        return None

    with showing_log(screen), listen(settings.serve.host, settings.serve.port) as listener, process as url:
        configure_logs(settings.serve.log_format, shared.quiet)
        described = {
            "draft": draft,
            "num_speculative_tokens": recipe.speculation.num_speculative_tokens if draft else 0,
            "tree": None,
            "per_request": False,
        }
        upstream = Upstream(url, other.server().name, ended)
        places = recipe.engine.max_num_seqs + settings.serve.max_waiting
        front = Front(upstream, settings, PROXIED[recipe.engine.name], described, places)
        screen.say(f"serving {other.model} at {address(listener)}, with {upstream.name} behind it at {url}")
        screen.say(f"page {address(listener)}/")
        return FrontServer(front, listener, ended).serve_forever()
