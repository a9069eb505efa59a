"""`specdec serve`: an OpenAI-compatible HTTP server over the engine of `generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli.completion import targets
from specdec_cli.cli.options import ENGINE_OPTIONS, PAIR, SERVE_OPTIONS, SERVER
from specdec_cli.cli.output import show_plan
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.serve_engine import engine_behind, serve_engine, show_command
from specdec_cli.cli.shared import Shared, take_target, with_shared_options
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.measure.documents.recipes import ServePlanDocument
from specdec_cli.recipe.present import to_yaml
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.recipe import Resolved
    from specdec_cli.recipe.schema import Recipe
    from specdec_cli.report.view import Screen
    from specdec_cli.serve.models import Model, Models
    from specdec_cli.serve.request.parameters import Defaults
    from specdec_cli.serve.settings import Settings

Names = tuple[str, ...]
"""The names of one model; the first stands in answers."""
_PACKAGES = ("fastapi", "uvicorn")
_OTHERS = ("ngram", "prediction")
"""Drafters that a request may name beside the server's own."""
_OF_A_MODEL = ("serve.tool_call_parser", "serve.reasoning_parser")
"""The keys of a recipe's section `serve` that are one model's own."""
_DEFAULTS = {
    "sampling.max_new_tokens": "to the context's end",
    "sampling.temperature": "1",
    "sampling.seed": "drawn for each request",
    "engine.enable_prefix_caching": "on",
}
"""Defaults of requests that differ from the recipe's."""
_REPOSITORY_HELP = "Serve several models from a YAML file of `name: recipe` lines. Each is loaded on its first request."


@with_shared_options(
    common=f"{PAIR} engine host port api-key served-model-name max-num-seqs max-model-len dry-run",
    aliases=True,
    without=("sampling.logprobs",),
    beside=(*SERVE_OPTIONS, *ENGINE_OPTIONS),
    defaults=_DEFAULTS,
)
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="The model to serve, as in --target.", metavar="MODEL", autocompletion=targets),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="API key that clients must send (repeatable).", metavar="KEY", rich_help_panel=SERVER),
    ] = None,
    insecure_no_auth: Annotated[
        bool,
        typer.Option(
            "--insecure-no-auth", help="Accept requests from other machines without a key.", rich_help_panel=SERVER
        ),
    ] = False,
    model_repository: Annotated[
        Path | None, typer.Option(help=_REPOSITORY_HELP, metavar="FILE", rich_help_panel=SERVER)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what would be served, or the other engine's command, without loading anything.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Serve a model over an OpenAI-compatible HTTP API with continuous batching and speculation.

    Examples:
        # Serve the built-in pair on port 8000.
        specdec serve
        # Serve a model with an n-gram draft.
        specdec serve MODEL --draft ngram --port 9000
        # Serve a recipe to other machines, with a key.
        specdec serve -r tuned.yaml --host 0.0.0.0 --api-key KEY
    """
    if not dry_run and shared.wants_document:
        raise UsageError("`serve` writes no document: `--json` and `--output` are for --dry-run", "leave them out")
    _take_model(model or [], shared)
    resolved = shared.resolve(draws_seed=False)
    named = {_model_names(resolved): resolved} if model_repository is None else _read(model_repository, shared)
    _check_packages()
    from specdec_cli.serve.settings import Settings, read_keys

    section = resolved.recipe.serve
    _check_key_variable(resolved)
    settings = Settings(section, read_keys(api_key or (), os.environ.get(section.api_key_env, "")))
    settings.check_exposure(insecure_no_auth)
    other = engine_behind(resolved, shared)
    if other is not None and model_repository is not None:
        raise UsageError("`--model-repository` has no effect with --engine", "serve one model, or leave --engine out")
    if other is not None and dry_run:
        show_command(other, shared)
        return None
    if other is not None:
        return serve_engine(other, _draft_words(resolved.recipe), settings, shared)
    if dry_run:
        _show_plan(named, shared)
        return None
    return _run(named, settings, shared, is_repository=model_repository is not None)


def _take_model(names: Sequence[str], shared: Shared) -> None:
    """Let the argument name the target."""
    if len(names) > 1:
        hint = "several names of one model: repeat --served-model-name; several models: --model-repository FILE"
        raise UsageError(f"`serve` takes one model, not {', '.join(f'`{name}`' for name in names)}", hint)
    if names:
        take_target(names[0], shared)


def _check_key_variable(resolved: Resolved) -> None:
    """Refuse a named variable for API keys that is not set: the server would run without keys."""
    name = resolved.recipe.serve.api_key_env
    if resolved.origins["serve.api_key_env"] != "default" and not os.environ.get(name, "").strip():
        message = f"`serve.api_key_env` names the environment variable `{name}`, which is not set"
        raise UsageError(message, f"set {name} to the keys, with commas between them, or leave api_key_env out")


def _show_plan(named: Mapping[Names, Resolved], shared: Shared) -> None:
    """Show what would be served, and where each value comes from."""
    models = [
        {"name": names[0], "names": list(names), "recipe": resolved.recipe.as_dict(), "origins": resolved.origins}
        for names, resolved in named.items()
    ]
    recipe = next(iter(named.values())).recipe.as_dict() if len(named) == 1 else None
    shown = (
        f"# would serve {', '.join(names)}\n{to_yaml(resolved, origins=True)}" for names, resolved in named.items()
    )
    show_plan(recipe, {"models": models}, shared, "".join(shown), ServePlanDocument)


def _run(named: Mapping[Names, Resolved], settings: Settings, shared: Shared, *, is_repository: bool) -> ExitCode:
    """Listen, load, serve; the port is taken before the first model is looked at."""
    from specdec_cli.serve.http.logs import configure_logs
    from specdec_cli.serve.http.ready import curl_line, ready_lines
    from specdec_cli.serve.http.server import Server, leave_loaded_alone, listen, when_ready

    listener = listen(settings.serve.host, settings.serve.port)
    configure_logs(settings.serve.log_format, shared.quiet)
    models = _models(named, settings, shared)
    server = Server(models, settings, listener)
    if not is_repository:
        models.all[0].begin_loading()
    screen = open_screen(shared.quiet, streams_text=False)
    leave_loaded_alone(models)
    key_variable = settings.serve.api_key_env if settings.api_keys else None

    def tell() -> None:
        for line in ready_lines(models, server.url):
            screen.say(line)
        screen.say_whole(f"try it: {curl_line(models, server.url, key_variable)}")

    when_ready(models, tell)
    with _view(models, screen, settings):
        code = server.serve_forever()
    if models.is_loading:
        # Its thread cannot be stopped, and torch's code aborts the process when the interpreter ends around it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _view(models: Models, screen: Screen, settings: Settings) -> AbstractContextManager[Any]:
    """The live table on a terminal; a line in the log now and then elsewhere."""
    import logging

    from specdec_cli.report.serve import ServeView

    if screen.is_live and settings.serve.log_format == "text":
        return ServeView(models.snapshot, screen.console)
    return ServeView(models.snapshot, log=None if screen.is_quiet else logging.getLogger("specdec_cli.serve").info)


def _models(named: Mapping[Names, Resolved], settings: Settings, shared: Shared) -> Models:
    from specdec_cli.serve.models import Models

    models = [_model(names, resolved, shared) for names, resolved in named.items()]
    return Models(models, settings.serve.hang_timeout_seconds)


def _model(names: Names, resolved: Resolved, shared: Shared) -> Model:
    from specdec_cli.serve.models import Model

    recipe = resolved.recipe
    return Model(
        names[0],
        _loader(resolved, shared),
        recipe.serve,
        aliases=names[1:],
        root=recipe.target.model,
        draft=_draft_words(recipe),
        num_speculative_tokens=recipe.speculation.num_speculative_tokens,
        tree=recipe.speculation.tree,
        sampling=default_sampling(resolved),
    )


def _draft_words(recipe: Recipe) -> str | None:
    """The draft as the ready line and the page name it; None without one."""
    from specdec_cli.measure.predict.traced import draft_name

    if recipe.draft.method == "none":
        return None
    is_quantized = recipe.draft.model is not None and recipe.draft.quantize != "none"
    return draft_name(recipe) + (f" ({recipe.draft.quantize})" if is_quantized else "")


def _loader(resolved: Resolved, shared: Shared) -> Callable[[], Any]:
    def load() -> Any:
        import logging

        from specdec_cli.engine.caveats import caveats
        from specdec_cli.engine.depth.draft_limit import own_cut_drafts
        from specdec_cli.engine.engine import Engine
        from specdec_cli.verification import AUTO, RULES

        log = logging.getLogger("specdec_cli.serve")
        trusted = shared.trust_remote_code
        recipe = _sharing_prefixes(resolved.recipe)
        engine = Engine.from_recipe(recipe, trust_remote_code=trusted, others=_OTHERS, progress=log.info)
        for caveat in [*caveats(recipe, engine), *own_cut_drafts(engine)]:
            log.warning(caveat)
        mode = recipe.speculation.verify
        if mode != AUTO and not RULES[mode].is_lossless and not recipe.speculation.is_synthetic:
            log.warning(f"verification mode `{mode}` is lossy: samples do not follow the target's distribution")
        return engine

    return load


def _sharing_prefixes(recipe: Recipe) -> Recipe:
    """The recipe, with prefix caching on unless it is set."""
    if recipe.engine.enable_prefix_caching is not None:
        return recipe
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"enable_prefix_caching": True})})


def default_sampling(resolved: Resolved) -> Defaults:
    """Values of fields that a request leaves out: those set for this server, else OpenAI's defaults."""
    from specdec_cli.serve.request.parameters import Defaults

    values = resolved.recipe.sampling.model_dump()
    named = {key: value for key, value in values.items() if resolved.origins[f"sampling.{key}"] != "default"}
    if named.get("seed", 0) < 0:
        del named["seed"]  # each request draws its own
    is_greedy = resolved.recipe.speculation.verify == "greedy"
    params = SamplingParams(**({"temperature": 0.0 if is_greedy else 1.0} | named))
    return Defaults(params, frozenset(named), is_greedy)


def _model_names(resolved: Resolved) -> tuple[str, ...]:
    """The names that the model answers to, the one in answers first."""
    return tuple(dict.fromkeys(resolved.recipe.serve.served_model_name)) or (resolved.recipe.target.model,)


def _read(path: Path, shared: Shared) -> dict[Names, Resolved]:
    """The models of a repository: what the command line says holds for each, but for what tells them apart."""
    for key in ("target.model", "draft", "serve.served_model_name"):
        if key in shared.flags:
            flag = shared.flags[key][1]
            raise UsageError(f"`{flag}` names one model, and --model-repository names its own", f"leave out {flag}")
    if shared.recipe is not None:
        raise UsageError("`--recipe` names one model, and --model-repository names its own", "leave out --recipe")
    from specdec_cli.recipe.repository import read_repository

    repository: dict[Names, Resolved] = {
        (name,): replace(shared, recipe=recipe).resolve(draws_seed=False)
        for name, recipe in read_repository(path).items()
    }
    for (name, *_), resolved in repository.items():
        _check_own_settings(name, resolved)
    return repository


def _check_own_settings(name: str, resolved: Resolved) -> None:
    """Refuse a repository's recipe that sets address or limits, which belong to the server."""
    origins = resolved.origins.items()
    for key, origin in origins:
        if key.startswith("serve.") and key not in _OF_A_MODEL and origin.startswith("recipe "):
            hint = "set it on the command line for all models"
            raise UsageError(f"the recipe of `{name}` sets `{key}`, which is the server's ({origin})", hint)


def _check_packages() -> None:
    missing = next((package for package in _PACKAGES if find_spec(package) is None), None)
    if missing is not None:
        raise UsageError(
            f"`specdec serve` needs the package `{missing}`, which is not installed",
            "`pip install 'specdec-cli[serve]'`",
        )
