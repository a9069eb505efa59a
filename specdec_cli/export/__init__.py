"""Recipes for other engines: one file per engine, each naming the version that it was checked against.

The folder is the registry. An engine's file has `NAME` and `VERSION`, for people, and `export`, which turns a recipe
into files that are ready to run. The file of an engine that `--engine` starts has `server_words` as well, and the
constants from which `server_command` makes a `ServerCommand`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specdec_cli.export.exported import Export, ExportJob
from specdec_cli.export.measured import sentences
from specdec_cli.export.settings import ExportSettings
from specdec_cli.recipe import Resolved

__all__ = ["ENGINES", "Export", "ServerCommand", "export", "server_command"]

ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "triton": "triton",
    "llamacpp": "llamacpp",
    "openvino": "openvino",
    "ray-serve": "ray_serve",
    "dynamo": "dynamo",
    "transformers": "transformers",
    "mlx": "mlx",
    "profile": "profile",
}
"""The file of each engine, by the engine's name on the command line."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How an engine's server is started on this machine.

    Args:
        name: the engine's, for people.
        program: it is called.
        words: its arguments, without its address.
        checked: releases whose settings were checked, such as `0.33`.
        drafts: whether the engine will speculate.
        speculation: its settings of speculation, by its own names; empty where it will not.
        warnings: sentences about what it does not do as the recipe says.
        own_options: those that `--engine-args` must not hold, whether they are among the words or not.
        short_options: short names of options, to the long ones.
        refused_with_draft: sampling settings that the engine refuses together with speculation.
        refused_sampling: sampling settings that it does not have at all.
        serve_keys: keys of `serve` that its command line has.
        verifies_by: its rule above temperature 0; None where the recipe chooses one.
        wheel: a program of ours for a Python that has the engine's wheel; None where only its own program starts it.
    """

    name: str
    program: str
    words: tuple[str, ...]
    checked: tuple[str, ...]
    drafts: bool
    speculation: Mapping[str, Any]
    warnings: tuple[str, ...]
    own_options: tuple[str, ...]
    short_options: Mapping[str, str]
    refused_with_draft: tuple[str, ...]
    refused_sampling: tuple[str, ...]
    serve_keys: frozenset[str]
    verifies_by: str | None
    wheel: Path | None


def server_command(name: str, resolved: Resolved) -> ServerCommand:
    """The command line that starts an engine's server for a recipe on this machine, as `export` would write it.

    Args:
        name: one of `ENGINES` that has a server of its own.
        resolved: the recipe.

    Raises:
        UsageError: the recipe names what no other engine can load.
    """
    module = import_module(f"{__name__}.{ENGINES[name]}")
    settings = ExportSettings(resolved.recipe, resolved.origins, module.NAME, is_here=True)
    words = tuple(module.server_words(settings))
    settings.warn_of_the_rest()
    return ServerCommand(
        name=module.NAME,
        program=module.PROGRAM,
        words=words,
        checked=module.CHECKED,
        drafts=module.SPECULATES in words,
        speculation=module.speculation_of(words) if module.SPECULATES in words else {},
        warnings=tuple(settings.warnings),
        own_options=module.OWN_OPTIONS,
        short_options=module.SHORT_OPTIONS,
        refused_with_draft=module.REFUSED_WITH_DRAFT,
        refused_sampling=module.REFUSED_SAMPLING,
        serve_keys=module.SERVE_KEYS,
        verifies_by=module.VERIFIES_BY,
        wheel=module.WHEEL,
    )


def export(
    name: str,
    resolved: Resolved,
    specdec: str,
    document: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> tuple[Export, list[str]]:
    """The files of a recipe for an engine, and warnings about what it does not do as the recipe says.

    Args:
        name: one of `ENGINES`.
        resolved: the recipe.
        specdec: the version that writes.
        document: a result of `bench`, `sweep-k` or `compare-drafts`, for the files' heads.
        notes: sentences about the recipe's k that stand among the warnings.

    Raises:
        UsageError: the recipe names what no other engine can load, or a profile lacks its measurement.
    """
    module = import_module(f"{__name__}.{ENGINES[name]}")
    settings = ExportSettings(resolved.recipe, resolved.origins, module.NAME)
    for note in notes:
        settings.warn(note)
    measured = sentences(document) if document is not None else ()
    engine = f"{module.NAME} {module.VERSION}"
    made: Export = module.export(ExportJob(settings, specdec, engine, measured, resolved.source, document))
    return made, settings.warnings
