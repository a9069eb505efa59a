"""Installed libraries beside the versions that this package was tested with, which its own metadata names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata

_BOUND = re.compile(r"(>=|<)\s*(\d+(?:\.\d+)*)")


def untested(requirements: Iterable[str], installed: Mapping[str, str]) -> tuple[str, str] | None:
    """The first library whose installed version was not tested, as a clause and as pip's requirement.

    Args:
        requirements: of this package, as its metadata has them: `transformers<5.25,>=5.17`.
        installed: versions of libraries, by their names.
    """
    for requirement in requirements:
        library = re.match(r"[\w.-]+", requirement)
        version = installed.get(library[0]) if library else None
        if library is None or version is None:
            continue
        bounds = dict(_BOUND.findall(requirement.partition(";")[0]))
        within = "".join(f"{sign}{bounds[sign]}" + "," for sign in (">=", "<") if sign in bounds).rstrip(",")
        if "<" in bounds and _numbers(version) >= _numbers(bounds["<"]):
            return f"{library[0]} {version} is newer than {_before(bounds['<'])}, the last one tested", library[
                0
            ] + within
        if ">=" in bounds and _numbers(version) < _numbers(bounds[">="]):
            return f"{library[0]} {version} is older than {bounds['>=']}, the first one tested", library[0] + within
    return None


@cache
def untested_here() -> tuple[str, str] | None:
    """`untested` of this environment; None where the package has no metadata, as in a copied source tree."""
    try:
        requirements = metadata.requires("specdec-cli") or []
    except metadata.PackageNotFoundError:
        return None
    return untested(requirements, _Installed())


class _Installed(dict[str, str]):
    """Versions of installed packages by their names, read when they are asked for."""

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return default


def blamed(message: str, hint: str | None) -> tuple[str, str | None]:
    """A failure's message and hint, which name a library that was not tested before anything else."""
    untested = untested_here()
    if untested is None:
        return message, hint
    why, requirement = untested
    return f"{why}: {message}", f"pip install '{requirement}'"


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what stands behind its numbers: 2.13.0+cpu is 2.13.0."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [0]
    while len(numbers) > 1 and numbers[-1] == 0:  # 5.0 and 5 are one version
        numbers.pop()
    return tuple(numbers)


def _before(bound: str) -> str:
    """The last version below a bound: 5.24 of 5.25, 15 of 16."""
    *rest, last = bound.split(".")
    return ".".join([*rest, str(int(last) - 1)])
