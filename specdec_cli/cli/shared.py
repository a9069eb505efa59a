"""Values of the options that commands share: a `Shared`, which resolves the recipe.

    @with_shared_options(aliases=True)
    def generate(prompt: ..., *, shared: Shared) -> ExitCode | None: ...

gives `generate` the shared options; the command sees one object and asks it for the resolved recipe.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from specdec_cli import drafters
from specdec_cli.cli.names import name_problems
from specdec_cli.cli.options import OPTIONS, SPECULATIVE_CONFIG, Option
from specdec_cli.cli.output import check_destination, is_interrupted
from specdec_cli.cli.screen import open_screen
from specdec_cli.drafters.elsewhere import ELSEWHERE, engine_of
from specdec_cli.errors import UsageError
from specdec_cli.files import given_path
from specdec_cli.recipe import DraftMethods, Recipe, Resolved, resolve, resolve_drafts
from specdec_cli.recipe.layers import unread_variables
from specdec_cli.recipe.problems import RecipeError
from specdec_cli.sampling.params import random_seed

Result = TypeVar("Result")
_OF_ANOTHER_ENGINE = ("engine.start_timeout_seconds", "engine.distributed_executor_backend")


def draft_methods() -> DraftMethods:
    """The drafting methods and their options: those of the drafters' folder, and those of other engines."""
    return DraftMethods((*drafters.methods(), *ELSEWHERE), _method_options, drafters.create, drafters.parse_first)


def _method_options(method: str) -> dict[str, Any]:
    import dataclasses

    defaults = {}
    for option in drafters.options(method):
        made = option.default_factory() if option.default_factory is not dataclasses.MISSING else option.default
        defaults[option.name] = ... if made is dataclasses.MISSING else made
    return defaults


@dataclass(slots=True)
class Shared:
    """The values of a command line's shared options.

    Args:
        recipe: a shipped recipe's name or a file, or None.
        sets: the `--set` texts.
        flags: recipe path to value and the option's name.
        json: one JSON document on stdout, nothing else there.
        output: file for the JSON document; checked already.
        force: overwrite it.
        quiet: only errors on stderr.
        trust_remote_code: run code that comes with a checkpoint.
        resume: continue an interrupted measurement.
        details: print the figures behind a verdict, too.
        takes_structured: whether the command's outputs can follow a grammar.
        loads_models: whether the command loads the recipe's models here, if no other engine does.
        takes_parallel: whether the command leaves it to another engine to run a model on several devices.
        takes_engine: whether the command can start another engine.
        engine_command: program that starts the other engine; None looks for it on PATH.
        engine_args: further arguments of the other engine.
        files: the further files of a result by their kind: plot, html, markdown, csv, junit.
        drawn_seed: what a negative seed becomes, the same in everything that this command line decodes.
        tells_variables: whether variables without a meaning are yet to be reported.
    """

    recipe: str | None = None
    sets: tuple[str, ...] = ()
    flags: dict[str, tuple[Any, str]] = field(default_factory=dict)
    json: bool = False
    output: Path | None = None
    force: bool = False
    quiet: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    details: bool = False
    takes_structured: bool = False
    takes_parallel: bool = False
    loads_models: bool = True
    takes_engine: bool = False
    engine_command: str | None = None
    engine_args: str | None = None
    files: dict[str, Path] = field(default_factory=dict)
    drawn_seed: int = field(default_factory=random_seed, compare=False)
    tells_variables: bool = field(default=True, compare=False)

    @property
    def wants_document(self) -> bool:
        """Whether a JSON document is asked for, on stdout or in a file."""
        return self.json or self.output is not None

    def resolve(self, *, draws_seed: bool = True) -> Resolved:
        """The checked recipe: flag > `--set` > environment > recipe > default.

        Args:
            draws_seed: put a random seed in place of a negative one.

        Raises:
            UsageError: everything that is wrong with it.
        """
        return self._checked(resolve(self.recipe, self.sets, os.environ, self.flags, draft_methods()), draws_seed)

    def resolve_drafts(self) -> list[Resolved]:
        """The checked recipe once for each of several drafts.

        Raises:
            UsageError: everything that is wrong with it.
        """
        return [
            self._checked(resolved)
            for resolved in resolve_drafts(self.recipe, self.sets, os.environ, self.flags, draft_methods())
        ]

    def _checked(self, resolved: Resolved, draws_seed: bool = True) -> Resolved:
        """Refuse structured output by name where it would be ignored; draw the seed that is wanted at random."""
        structured = resolved.recipe.structured.given
        if structured and not self.takes_structured:
            raise UsageError(
                f"`structured.{next(iter(structured))}` has no effect in this command",
                "leave it out of the recipe; `generate` has structured output, and so have requests to `serve`",
            )
        is_here = self.loads_models and resolved.recipe.engine.name == "specdec"
        if problems := name_problems(resolved, is_here=is_here):
            raise RecipeError(problems)
        self._check_engine(resolved.recipe)
        self._check_devices(resolved.recipe)
        self._report_variables(resolved)
        if draws_seed and resolved.recipe.sampling.seed < 0:
            sampling = resolved.recipe.sampling.model_copy(update={"seed": self.drawn_seed})
            return replace(resolved, recipe=resolved.recipe.model_copy(update={"sampling": sampling}))
        return resolved

    def _check_engine(self, recipe: Recipe) -> None:
        """Refuse another engine where the command starts none, and options about one where none is asked for."""
        name, only_in = recipe.engine.name, engine_of(recipe.draft.method)
        if only_in not in (None, name) and (self.loads_models or name != "specdec"):
            hint = f"add --engine {only_in}, or name another draft with --draft"
            raise UsageError(f"only llama.cpp has the draft `{recipe.draft.method}`", hint)
        if name != "specdec" and not self.takes_engine:
            hint = "`bench`, `sweep-k`, `compare-drafts`, `generate` and `serve` do; or set engine.name to specdec"
            raise UsageError(f"`engine.name` is `{name}`, and this command starts no other engine", hint)
        flags = [self.flags[path][1] for path in _OF_ANOTHER_ENGINE if path in self.flags]
        flags += ["--engine-command"] if self.engine_command is not None else []
        flags += ["--engine-args"] if self.engine_args is not None else []
        if name == "specdec" and flags and not self.takes_parallel:
            raise UsageError(f"`{flags[0]}` has no effect without another engine", "add --engine NAME")

    def _check_devices(self, recipe: Recipe) -> None:
        """Refuse models on several devices where specdec itself decodes."""
        if self.takes_parallel or recipe.engine.name != "specdec":
            return
        degrees = {
            "target.tensor_parallel_size": recipe.target.tensor_parallel_size,
            "target.pipeline_parallel_size": recipe.target.pipeline_parallel_size,
            "draft.tensor_parallel_size": recipe.draft.tensor_parallel_size,
        }
        for path, degree in degrees.items():
            if degree > 1:
                hint = "leave it out, or let vLLM do it: `--engine vllm`, `specdec export vllm`"
                raise UsageError(f"`{path}` is `{degree}`, and specdec runs a model on one device", hint)

    def _report_variables(self, resolved: Resolved) -> None:
        """Name the `SPECDEC_` variables that nothing reads, once."""
        if self.quiet or not self.tells_variables:
            return
        self.tells_variables = False
        for message in unread_variables(os.environ, read=(resolved.recipe.serve.api_key_env,)):
            open_screen(self.quiet, streams_text=False).say(f"note: {message}", "yellow")


def check_template(shared: Shared, is_chat: bool) -> None:
    """Refuse options about conversations where prompts are none.

    Raises:
        UsageError: there is one.
    """
    for path in ("target.chat_template", "target.default_chat_template_kwargs"):
        if path in shared.flags and not is_chat:
            raise UsageError(f"`{shared.flags[path][1]}` has no effect without a conversation", "add --chat")


def with_shared_options(
    *,
    common: str = "",
    aliases: bool = False,
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
    beside: Iterable[Option] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command the shared options; its parameter `shared` receives what they say.

    Args:
        common: names of the options that `--help` shows, without dashes and in order; empty shows all.
        aliases: also the names for people who come from vLLM-style servers.
        only: paths of the few options that have a meaning for this command; None takes all.
        without: paths of options that have no meaning for this command.
        beside: more of the recipe's options: `WORKLOAD_OPTIONS`, `GATE_OPTIONS`.
        defaults: what `--help` says of keys for which this command has a default other than the recipe's, by path.
    """
    paths = {option.path for option in OPTIONS}
    left_out = set(without) if only is None else paths - set(only)
    assert left_out <= paths, "only shared options can be left out"
    every = (*OPTIONS, SPECULATIVE_CONFIG)
    options = [o for o in every if o.path not in left_out and (aliases or not o.only_with_aliases)]
    options += beside

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "shared"]

        @functools.wraps(command)
        def called(**given: Any) -> Result:
            given = {name: expanded(value) for name, value in given.items()}
            values = {option.path: given.pop(option.parameter) for option in options}
            shared = _gather(options, values)
            named = [*shared.files.values(), *(value for value in given.values() if isinstance(value, Path))]
            if shared.force and shared.output is None and not named:
                raise UsageError("`--force` has no effect without --output", "name the file: --output FILE --force")
            if shared.resume:
                _prepare_to_resume(shared)
            check_destination(shared.output, shared.force)
            return command(**given, shared=shared)

        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*own, *(option.declared(aliases, defaults.get(option.path)) for option in options)]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.common_options = common.split()  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def expanded(value: Any) -> Any:
    """A path that an option names with its `~` expanded, which a shell leaves in `--output=~/result.json`."""
    return given_path(value) if isinstance(value, Path) else value


def _prepare_to_resume(shared: Shared) -> None:
    """Let a run that continues an interrupted one overwrite its files."""
    if shared.output is None:
        raise UsageError("`--resume` needs the --output FILE of the run to continue", "add --output FILE")
    shared.force = shared.force or is_interrupted(shared.output)


def _gather(options: Iterable[Option], values: Mapping[str, Any]) -> Shared:
    shared = Shared(
        takes_structured=any(option.path.startswith("structured.") for option in options),
        takes_engine=any(option.path == "engine.name" for option in options),
    )
    for option in options:
        value = values[option.path]
        if value is None or value == []:
            continue
        if option.expand is not None:
            _expand(shared.flags, option.flag, option.expand(value))
        elif option.path.startswith("files."):
            shared.files[option.path.removeprefix("files.")] = value
        elif "." in option.path or option.path == "draft":
            shared.flags[option.path] = (option.convert(value) if option.convert else value, option.flag)
        else:
            setattr(shared, option.path, tuple(value) if isinstance(value, list) else value)
    return shared


def _expand(flags: dict[str, tuple[Any, str]], name: str, given: Mapping[str, tuple[Any, str]]) -> None:
    """Add an option that sets several keys. A key that another option also sets is refused."""
    for path, value in given.items():
        if path in flags:
            raise UsageError(f"`{flags[path][1]}` and `{name}` set the same thing", "leave one of them out")
        flags[path] = value


def take_target(name: str, shared: Shared) -> None:
    """Let an argument name the target.

    Raises:
        UsageError: an option names one, too.
    """
    if "target.model" in shared.flags:
        other = shared.flags["target.model"][0]
        raise UsageError(f"two models are named: `{name}` and `--target {other}`", "name one of them")
    shared.flags["target.model"] = name, "MODEL"
