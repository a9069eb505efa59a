"""How other engines verify above temperature 0, as rules that a trace can replay.

At temperature 0 every engine accepts the target's likeliest token. Above it, acceptance depends on how the draft
chooses its tokens and how the target judges them. An engine that accepts a drafted token where the target draws the
same one accepts `one-hot` of a draft that takes its likeliest token, and `exact-match` of one that samples. A draft
that looks up text guesses without chance, and all of these rules accept the same of it.

Sources are the engines' own files in the version of each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineRule:
    """One way of verification of an engine.

    Args:
        engine: its name, as `specdec export` has it.
        version: of the source that says so.
        rule: of `replay.RULES`; None for one that no trace can replay.
        needs: the setting that it takes; None for the engine's default.
        where: the build or device that it holds for; None for all.
        fault: why sampled text does not follow the target there, in a sentence; None where it does.
    """

    engine: str
    version: str
    rule: str | None
    needs: str | None = None
    where: str | None = None
    fault: str | None = None

    @property
    def words(self) -> str:
        """Engine, version, build and setting."""
        where = "" if self.where is None else f", {self.where}"
        return f"{self.engine} {self.version}{where}{'' if self.needs is None else f' with {self.needs}'}"


CPU_BUILD = "CPU build"
_VLLM_CPU = (
    "vLLM's CPU build up to 0.32.0 divides the logits of drafted positions by uninitialized memory instead of the "
    "temperature (vllm-project/vllm#55005), so sampled text with speculation is not the target's"
)
_OPENVINO = "OpenVINO GenAI compares with a token that the target drew and does not keep its distribution"

ENGINE_RULES = (
    EngineRule("vllm", "0.33.0", "one-hot"),
    EngineRule("vllm", "0.33.0", "rejection", "draft_sample_method probabilistic"),
    EngineRule("vllm", "0.33.0", "block", "rejection_sample_method block, on the V2 model runner"),
    EngineRule("vllm", "0.32.0", None, where=CPU_BUILD, fault=_VLLM_CPU),
    EngineRule("sglang", "0.5.23", "one-hot"),
    EngineRule("sglang", "0.5.23", "rejection", "--speculative-use-rejection-sampling"),
    EngineRule("sglang", "0.5.23", "block", "--speculative-use-block-verification, on a GPU"),
    EngineRule(
        "sglang",
        "0.5.23",
        "greedy",
        where=CPU_BUILD,
        fault="SGLang verifies greedily on a CPU, whatever the temperature",
    ),
    EngineRule("trtllm", "1.4", "one-hot"),
    EngineRule("trtllm", "1.4", "rejection", "use_rejection_sampling"),
    EngineRule("llamacpp", "November 2026", "one-hot"),
    EngineRule("transformers", "5.23", "rejection"),
    EngineRule("openvino", "2026.4", None, fault=_OPENVINO),
    EngineRule("mlx", "0.32.2", "exact-match"),
)
"""Every known way, each engine's default first. Ray Serve, Dynamo and Triton run vLLM or TensorRT-LLM."""


DRAFTS_PAST_END = frozenset({"vllm"})
"""Engines that draft k tokens in a request's last step too, and count those accepted behind its end.

Seen in vLLM 0.32.0: v1/core/sched/scheduler.py counts before the output is cut to `max_tokens`.
"""


def engines_with(rule: str) -> list[EngineRule]:
    """The engines that accept as a rule of replay does."""
    return [way for way in ENGINE_RULES if way.rule == rule]


def engine_rule(engine: str, *, is_cpu: bool = False, needs: str | None = None) -> EngineRule:
    """The rule of an engine as it is set up.

    Args:
        engine: its name.
        is_cpu: whether it is a build for CPUs.
        needs: part of the setting that it is given, such as `probabilistic`; None for its default.
    """
    ways = [way for way in ENGINE_RULES if way.engine == engine]
    assert ways, f"{engine} has a row"
    broken = [way for way in ways if is_cpu and way.where == CPU_BUILD]
    wanted = [way for way in ways if needs is not None and way.needs is not None and needs in way.needs]
    default = [way for way in ways if way.needs is None and way.where is None]
    return (broken or wanted or default)[0]


def rule_rows(rules: Iterable[str]) -> list[dict[str, Any]]:
    """Who verifies by each rule, with the document's keys; at temperature 0 all engines do by `greedy`."""
    return [
        {"rule": rule, "engines": ["every engine"] if rule == "greedy" else [way.words for way in engines_with(rule)]}
        for rule in dict.fromkeys(rules)
    ]


def sampled_faults(engine: str | None, version: str | None) -> list[str]:
    """Sentences about builds of an engine whose sampled text with speculation is not the target's.

    Args:
        engine: what serves the target, as `owned_by` of its models says; None where that is not known.
        version: its version; None where that is not known.
    """
    faulty = [way for way in ENGINE_RULES if way.engine == engine and way.fault is not None]
    return [
        f"{way.fault}: predictions above temperature 0 do not hold for that build"
        for way in faulty
        if version is None or _numbers(version) <= _numbers(way.version)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `0.32.0+cpu` is 0, 32, 0."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
