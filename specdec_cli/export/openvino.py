"""OpenVINO GenAI: a Python script around `LLMPipeline` with a draft model or prompt lookup.

The arguments are those of OpenVINO GenAI 2026.4. At temperature 0 it accepts what the target itself chooses; above,
its rule for draft models does not keep the target's distribution (src/cpp/src/sampling/sampler.cpp).
"""

from __future__ import annotations

import shlex
from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import HERE, Export, ExportJob
from specdec_cli.export.settings import ExportSettings

NAME, VERSION = "OpenVINO GenAI", "2026.4"
_DEVICES = {"auto": "CPU", "cpu": "CPU", "cuda": "GPU"}
_WEIGHTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "fp16"}
_SAMPLED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}
_SCRIPT = '''\
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys
from pathlib import Path

import openvino_genai

here = Path(__file__).parent
scheduler = openvino_genai.SchedulerConfig()
{scheduler}pipeline = openvino_genai.LLMPipeline(
    str(here / "target"),
    "{device}",
    scheduler_config=scheduler,
{draft})
config = openvino_genai.GenerationConfig()
{config}print(pipeline.generate(sys.argv[1], config))
'''


def export(job: ExportJob) -> Export:
    """A script that converts the models, and one that generates."""
    settings = job.settings
    convert = [_conversion(settings, "target", settings.target)]
    draft, config = _draft(settings, convert)
    config |= _sampling(settings)
    settings.not_a_server()
    filled = _SCRIPT.format(
        scheduler="".join(f"scheduler.{name} = {value!r}\n" for name, value in _scheduler(settings).items()),
        device=_DEVICES[str(settings.value("target.device")).partition(":")[0]],
        draft=draft,
        config="".join(f"config.{name} = {_literal(value)}\n" for name, value in config.items()),
    )
    comment = job.comment()
    lines = "".join(f"{line}\n" for line in ["set -euo pipefail", HERE, *convert])
    files = {"generate.py": comment + filled, "convert.sh": f"#!/usr/bin/env bash\n{comment}{lines}"}
    return Export(files, frozenset({"convert.sh"}))


def _conversion(settings: ExportSettings, section: str, name: str) -> str:
    quantize = str(settings.value(f"{section}.quantize"))  # in the words of optimum
    weights = _WEIGHTS[str(settings.value(f"{section}.dtype"))] if quantize == "none" else quantize
    settings.without(f"{section}.revision", "optimum-cli converts the newest; give it a folder of that revision")
    words = ["optimum-cli", "export", "openvino", "--model", name, "--task", "text-generation-with-past"]
    return f'{shlex.join([*words, "--weight-format", weights])} "$HERE/{section}"'


def _draft(settings: ExportSettings, convert: list[str]) -> tuple[str, dict[str, Any]]:
    """The pipeline's further argument, and the keys of the generation config that speculation sets."""
    draft, k = settings.draft, settings.k
    if not k:
        return "", {}
    settings.one_k()
    settings.lossless_rule()
    if draft.method == "ngram":
        settings.chains_only()
        if draft.option("min") not in (None, 1):
            settings.warn(
                f"draft.min = {draft.option('min')} is left out: OpenVINO GenAI tries n-grams down to one token"
            )
        return "    prompt_lookup=True,\n", {"num_assistant_tokens": k, "max_ngram_size": draft.option("max")}
    if draft.method not in (DRAFT_MODEL, "eagle3"):
        settings.no_counterpart()
        return "", {}
    if settings.is_sampled:
        settings.warn("OpenVINO GenAI's sampling with a draft does not keep the target's distribution")
    convert.append(_conversion(settings, "draft", settings.draft_model))
    device = _DEVICES[str(settings.value("draft.device")).partition(":")[0]]
    argument = f'    draft_model=openvino_genai.draft_model(str(here / "draft"), "{device}"),\n'
    own_trees = None if draft.method == DRAFT_MODEL else "branching_factor and tree_depth"
    least = settings.chains_only(knows_confidence=draft.method == DRAFT_MODEL, own_trees=own_trees)
    if least is not None:
        settings.warn(f"k = {k} is left out: OpenVINO GenAI stops at assistant_confidence_threshold alone")
        return argument, {"assistant_confidence_threshold": least}
    return argument, {"num_assistant_tokens": k}


def _scheduler(settings: ExportSettings) -> dict[str, Any]:
    simple = {
        "max_num_seqs": "engine.max_num_seqs",
        "max_num_batched_tokens": "engine.max_num_batched_tokens",
        "enable_prefix_caching": "engine.enable_prefix_caching",
    }
    return {name: value for name, path in simple.items() if (value := settings.given(path)) is not None}


def _sampling(settings: ExportSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {"max_new_tokens": settings.value("sampling.max_new_tokens")}
    arguments["do_sample"] = settings.is_sampled
    if settings.is_sampled:
        arguments["rng_seed"] = settings.value("sampling.seed")
    wanted = _ALWAYS | (_SAMPLED if settings.is_sampled else {})
    arguments |= {
        name: value for name, ours in wanted.items() if (value := settings.given(f"sampling.{ours}")) is not None
    }
    stop = settings.given("sampling.stop")
    return arguments | ({} if stop is None else {"stop_strings": tuple(stop)})


def _literal(value: Any) -> str:
    """A value in Python; several stop strings as a set, in the recipe's order."""
    return "{" + ", ".join(map(repr, value)) + "}" if isinstance(value, tuple) else repr(value)
