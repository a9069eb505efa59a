"""Planted faults: in our own decoder's source, which is then compiled with them, in verification, and in drafts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specdec_cli.engine.residual import Residuals
from specdec_cli.lm.heads.head_module import HeadModule, NewNodes
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.llama import native

FAULTS = {
    "a query sees the token behind it": (
        "const long own = rows[row].position + 1",
        "const long own = rows[row].position + 2",
    ),
    "a row of a block sees nothing ahead": ("std::min(own + ahead, long(ends[row]))", "own"),
    "a row of a block sees beyond its window": ("std::min(own + ahead, long(ends[row]))", "long(ends[row])"),
    "later layers read the inputs": ("s.inputs && (is_first || s.only_files)", "s.inputs"),
    "later layers file normed states": ("s.inputs && (is_first || s.only_files)", "s.inputs && is_first"),
    "a row is another one in company": (
        "write<ADDS>(m, Kind::values",
        "write<ADDS>(m, (n > 1 ? 1.0001f : 1.0f) * Kind::values",
    ),
    "a window begins with its company": (
        "const long begin = begin_of((first + q) / groups)",
        "const long begin = std::max(from, begin_of(0))",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: str | tuple[str, str], level: str = "-O1") -> None:
    """Have every decoder that is made from now on run with a fault: one of FAULTS, or what is replaced and by what."""
    right, wrong = FAULTS[fault] if isinstance(fault, str) else fault
    sources = {name: native.source(name) for name in (native.STEP, native.LAYOUTS)}  # which share headers
    assert max(source.count(right) for source in sources.values()) == 1
    compile_otherwise(monkeypatch, {name: source.replace(right, wrong) for name, source in sources.items()}, level)


def compile_otherwise(monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, str], level: str = "-O1") -> None:
    """Have our own decoder compiled of other sources from now on, each library when it is first needed.

    Less optimized, it is compiled sooner: at `-O0` in a third of the time, for what then computes little.
    """
    source = native.source
    monkeypatch.setattr(native, "source", lambda name: sources.get(name) or source(name))
    monkeypatch.setattr(native, "_built", functools.cache(native._built.__wrapped__))
    monkeypatch.setattr(native, "_FLAGS", [level if flag[:2] == "-O" else flag for flag in native._FLAGS])


def own_weights_of_p(residuals: Any, last: Any) -> Any:
    """The distribution of the own token without its residual: p itself."""
    return residuals._p[[residuals._places[node] for node in last]]


def forget_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the own token after a refused one drawn from p."""
    monkeypatch.setattr(Residuals, "own_weights", own_weights_of_p)


def keep_residuals_of_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a refused child leave p as it was, for the children after it."""
    refuse = Residuals._refuse_drawn

    def forgets(residuals: Any, nodes: Any) -> None:
        before = residuals.p.copy()
        refuse(residuals, nodes)
        residuals.p[:], residuals.total[:] = before, 1.0
        residuals._left.clear()

    monkeypatch.setattr(Residuals, "_refuse_drawn", forgets)


def refused_keys_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache already is not written again: keys and values of drafted tokens stay where others are."""
    feed = HeadSequences.feed

    def keeping(self: HeadSequences, *given: Any) -> None:
        caches = [both for module in self.modules for both in (module.cache.keys, module.cache.values)]
        before = [one.clone() for one in caches]
        feed(self, *given)
        for one, old in zip(caches, before, strict=True):
            one[old != 0] = old[old != 0]

    monkeypatch.setattr(HeadSequences, "feed", keeping)


def drafted_nodes_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft head's output behind drafted tokens is given again where they are drafted behind a longer text."""
    run, kept = HeadModule.run, dict[tuple[int, tuple[int, ...]], tuple[Any, Any]]()

    def keeping(self: HeadModule, news: Sequence[NewNodes], features: Any) -> None:
        run(self, news, features)
        for held, path in [(new.sequence, path) for new in news for path in new.paths]:
            _, held.outputs[path] = kept.setdefault((id(held), path), (held, held.outputs[path]))

    monkeypatch.setattr(HeadModule, "run", keeping)
