"""Drafts that only another engine has: rows with their options, so that a recipe names them as any other method.

llama.cpp looks up text in five ways (docs/speculative.md, November 2026). specdec passes them on by their names there
and runs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.errors import UsageError

_MOST = {"size_n": 1024, "min_hits": 1 << 20, "n_match": 1024, "n_min": 1024}


@dataclass
class ElsewhereDrafter(WithoutModel):
    """Base of the rows: has options and drafts nothing."""

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        for name, value in vars(self).items():
            least = 0 if name == "n_min" else 1
            if not least <= value <= _MOST[name]:
                method = next(method for method, made in ELSEWHERE.items() if made is type(self))
                raise UsageError(f"`{name}` of `{method}` must be from {least} to {_MOST[name]}, not `{value}`")

    def load(self, resources: Resources) -> None:
        """Refuse: commands name the engine before they load anything."""
        raise AssertionError("a draft of another engine is refused before it is loaded")

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Refuse, as `load`."""
        raise AssertionError("a draft of another engine is refused before it is loaded")

    def release(self, handle: int) -> None:
        """Forget nothing."""


@dataclass
class NgramSimple(ElsewhereDrafter):
    """Guess of the text that followed the last time the newest tokens were seen.

    Its rule is known (`common/ngram-map.cpp`, November 2026), so that a trace can tell what it would draft.

    Args:
        size_n: tokens that must agree, at most k: nothing shorter than what agrees is drafted.
    """

    size_n: int = 12

    def load(self, resources: Resources) -> None:
        """Load nothing."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Tokens that llama.cpp would draft."""
        return [Guesses(Drafted.chain(_after_match(row.context, min(self.size_n, row.k), row.k))) for row in rows]


def _after_match(context: Sequence[int], size: int, k: int) -> Sequence[int]:
    """Up to k tokens behind the last earlier place of the context's last `size` tokens; none where they are fewer."""
    known = len(context) - 1
    if known <= size + k + 1:
        return []
    newest = list(context[-size:])
    places = range(known - size - 1, 0, -1)  # the first token of a text is never the beginning of a match
    found = next((place for place in places if list(context[place : place + size]) == newest), 0)
    drafted = context[found + size : min(found + size + k, known)]
    return drafted if found and len(drafted) >= size else []


@dataclass
class NgramMap(ElsewhereDrafter):
    """Guess of the text that followed the newest tokens often enough.

    Args:
        size_n: tokens that must agree.
        min_hits: how often they must have occurred.
    """

    size_n: int = 12
    min_hits: int = 1


@dataclass
class NgramMap4(NgramMap):
    """The most frequent of up to four texts that followed the newest tokens."""


@dataclass
class NgramMod(ElsewhereDrafter):
    """A table from the hash of the newest tokens to the next one, which all requests share.

    Args:
        n_match: tokens that are hashed.
        n_min: shorter drafts are dropped, or those shorter than k where that is less.
    """

    n_match: int = 24
    n_min: int = 48


@dataclass
class NgramCache(ElsewhereDrafter):
    """Statistics of short n-grams; its files are options of the engine, `--lookup-cache-static` and `-dynamic`."""


ELSEWHERE: dict[str, type[ElsewhereDrafter]] = {
    "ngram-simple": NgramSimple,
    "ngram-map-k": NgramMap,
    "ngram-map-k4v": NgramMap4,
    "ngram-mod": NgramMod,
    "ngram-cache": NgramCache,
}
"""By method, which is llama.cpp's `--spec-type`."""
REMEMBER_REQUESTS = frozenset({"ngram-mod", "ngram-cache"})
"""Methods that draft from earlier requests as well."""
TRACED = "ngram-simple"
"""The one method of these whose drafts a trace can tell."""


def engine_of(method: str | None) -> str | None:
    """The engine that has a method which specdec itself has not; None for specdec's own."""
    return "llamacpp" if method in ELSEWHERE else None


def lookup_arguments(method: str, options: Mapping[str, Any], k: int) -> dict[str, Any]:
    """llama-server's arguments for a draft that looks up text and guesses at most k tokens."""
    prefix = f"spec_{method.replace('-', '_')}"
    given = {name: value for name, value in options.items() if value is not None}
    if method == "ngram-cache":
        return {"spec_draft_n_max": k}
    if method == "ngram-mod":
        return {f"{prefix}_{name}": value for name, value in given.items() if name != "n_min"} | {
            f"{prefix}_n_min": min(given.get("n_min", k), k),
            f"{prefix}_n_max": k,
        }
    if method == "ngram-simple":
        given["size_n"] = min(given["size_n"], k)
    return {f"{prefix}_{name}": value for name, value in given.items()} | {f"{prefix}_size_m": k}
