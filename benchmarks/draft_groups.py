"""Targets and the drafts that are compared on each: of the built-in target, and of the shared checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import untrained_drafts

from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.recipe.values import Quantize

CHECKPOINTS = Path(__file__).parents[2] / "shared" / "data" / "checkpoints"
PLAIN = "none"
HEAD_K = 4


@dataclass(frozen=True)
class Arm:
    """A draft.

    Args:
        spec: as `--draft` takes it.
        k: of its chains.
        only_prose: it is compared on prose alone: it is there for what it costs.
        quantize: of a draft model.
    """

    spec: str
    k: int
    only_prose: bool = False
    quantize: Quantize = "none"


@dataclass(frozen=True)
class Group:
    """A target and its drafts.

    Args:
        target: its name or folder.
        arms: by name.
        note: said in the results.
    """

    target: str
    arms: Mapping[str, Arm]
    note: str = ""


def builtin(trained: Path | None, folder: Path) -> Group:
    """The built-in target: drafts without training, heads with and without it, a model with another tokenizer.

    Args:
        trained: a folder whose subfolders are drafts that were trained for the target; None without.
        folder: where untrained drafts are saved.
    """
    arms = {
        "builtin:draft": Arm("builtin:draft", 5, quantize="int8"),
        "ngram": Arm("ngram", 8),
        "suffix": Arm("suffix", 16),
        "ngram+builtin:draft": Arm("ngram+builtin:draft", 5, quantize="int8"),
        "suffix+builtin:draft": Arm("suffix+builtin:draft", 8, quantize="int8"),
        "self-int8": Arm("self-int8", 4),
        "self-exit:2": Arm("self-exit:2", 4),
    }
    published = [] if trained is None else sorted(one.parent for one in trained.glob("*/config.json"))
    arms |= {f"trained {one.name}": Arm(str(one), HEAD_K) for one in published}
    if CHECKPOINTS.is_dir():
        arms["stories260K, another tokenizer"] = Arm(str(CHECKPOINTS / "stories260K"), 4)
    target = untrained_drafts.save_target(folder / "target")
    untrained = untrained_drafts.save_drafts(folder / "drafts")
    arms |= {name: Arm(spec, HEAD_K, only_prose=True) for name, spec in untrained.items()}
    said = "the target is the built-in one with an untrained MTP module; untrained drafts show costs alone"
    return Group(str(target), arms, said)


def shared() -> Group | None:
    """The shared checkpoints; None where they are not beside this checkout."""
    if not CHECKPOINTS.is_dir():
        return None
    arms = {
        "stories260K": Arm(str(CHECKPOINTS / "stories260K"), 5),
        "bitstories-1M": Arm(str(CHECKPOINTS / "bitstories-1M"), 3),
        "ngram": Arm("ngram", 8),
        "suffix": Arm("suffix", 16),
        "suffix+stories260K": Arm(f"suffix+{CHECKPOINTS / 'stories260K'}", 8),
        "self-exit:2": Arm("self-exit:2", 4),
    }
    return Group(str(CHECKPOINTS / "bitstories-3M"), arms)


def groups(trained: Path | None) -> dict[str, Callable[[], Group | None]]:
    """Makers of all groups by name."""
    folder = Path(tempfile.mkdtemp(prefix="untrained-drafts-"))
    return {"built-in": lambda: builtin(trained, folder), "shared": shared}


def loaded(group: Group, names: list[str], **wishes: Any) -> dict[str, Engine]:
    """An engine for plain decoding and one for each draft, around one target."""
    arms = [group.arms[name] for name in names]
    most = max(arm.k for arm in arms)
    found = load_engines(
        Engine, group.target, [None, *(arm.spec for arm in arms)], settings=LoadSettings(draft=ModelSettings()),
        options=EngineOptions(max_num_seqs=1, num_speculative_tokens=most, **wishes),
        draft_models=[ModelSettings(), *(ModelSettings(quantize=arm.quantize) for arm in arms)],
    )  # fmt: skip
    return dict(zip([PLAIN, *names], found, strict=True))


def at(group: Group, engines: Mapping[str, Engine], **wishes: Any) -> dict[str, Engine]:
    """The same drafts, each at its own k, with other options."""
    found: dict[str, Engine] = {}
    for name, one in engines.items():
        k = 0 if name == PLAIN else group.arms[name].k
        options = EngineOptions(max_num_seqs=1, num_speculative_tokens=k, **wishes)
        found[name] = Engine(one.target, one.drafter, one.tokenizer, options, one.eos_token_ids)
    return found
