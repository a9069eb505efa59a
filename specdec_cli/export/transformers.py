"""Hugging Face transformers: a Python script around `generate` with an assistant.

The arguments are those of transformers 5.23. It verifies by rejection where a draft model samples, else it accepts a
drafted token where the target draws the same one; one sequence at a time.
"""

from __future__ import annotations

from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import Export, ExportJob
from specdec_cli.export.settings import ExportSettings, is_gguf

NAME, VERSION = "transformers", "5.23"
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_SCRIPT = '''\
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target})
target = AutoModelForCausalLM.from_pretrained({target}, {loading})
{assistant}torch.manual_seed({seed})
prompt = tokenizer(sys.argv[1], return_tensors="pt").to(target.device)
output = target.generate(
    **prompt,
{arguments})
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens={skips}))
'''
_ASSISTANT = """\
assistant = AutoModelForCausalLM.from_pretrained({draft}, {loading})
assistant.generation_config.num_assistant_tokens = {k}
assistant.generation_config.num_assistant_tokens_schedule = "constant"
assistant.generation_config.assistant_confidence_threshold = {threshold}
"""


def export(job: ExportJob) -> Export:
    """The script."""
    settings = job.settings
    assistant, arguments = _assistant(settings)
    arguments |= _sampling(settings)
    settings.not_a_server()
    filled = _SCRIPT.format(
        target=repr(settings.target),
        loading=_loading(settings, "target"),
        assistant=assistant,
        seed=settings.value("sampling.seed"),
        arguments="".join(f"    {name}={value},\n" for name, value in arguments.items()),
        skips=settings.value("sampling.skip_special_tokens"),
    )
    return Export({"generate.py": job.comment() + filled})


def _assistant(settings: ExportSettings) -> tuple[str, dict[str, str]]:
    """Lines that load the draft, and arguments of `generate`."""
    draft, k = settings.draft, settings.k
    if not k:
        return "", {}
    settings.one_k()
    if draft.method in ("ngram", "mtp", "self-exit"):
        settings.chains_only()
        return "", _without_model(settings, k)
    if draft.method not in (DRAFT_MODEL, "universal"):
        settings.no_counterpart()
        return "", {}
    settings.lossless_rule()
    threshold = settings.chains_only(knows_confidence=True) or 0.0
    text = _ASSISTANT.format(
        draft=repr(settings.draft_model), loading=_loading(settings, "draft"), k=k, threshold=threshold
    )
    if draft.method != "universal":
        return text, {"assistant_model": "assistant"}
    other = f"assistant_tokenizer = AutoTokenizer.from_pretrained({settings.draft_model!r})\n"
    tokenizers = {"tokenizer": "tokenizer", "assistant_tokenizer": "assistant_tokenizer"}
    return text + other, {"assistant_model": "assistant"} | tokenizers


def _without_model(settings: ExportSettings, k: int) -> dict[str, str]:
    """Arguments of `generate` for a draft that is no model of its own."""
    draft = settings.draft
    if draft.method == "self-exit":
        settings.warn(f"k = {k} is left out: transformers has a schedule of its own for early exits")
        return {"assistant_early_exit": str(draft.option("layers"))}
    settings.exact_match()
    if draft.method == "mtp":
        settings.warn(f"k = {k} is left out: transformers drafts as many tokens as there are MTP layers")
        return {"use_mtp": "True"}
    if draft.option("min") not in (None, 1):
        settings.warn(f"draft.min = {draft.option('min')} is left out: transformers tries n-grams down to one token")
    return {"prompt_lookup_num_tokens": str(k), "max_matching_ngram_size": str(draft.option("max"))}


def _loading(settings: ExportSettings, section: str) -> str:
    """Arguments of `from_pretrained`."""
    dtype = str(settings.value(f"{section}.dtype"))
    arguments = {"dtype": '"auto"' if dtype == "auto" else f"torch.{dtype}"}
    revision = settings.given(f"{section}.revision")
    arguments |= {} if revision is None else {"revision": repr(revision)}
    device = settings.value(f"{section}.device")
    arguments |= {} if device == "auto" else {"device_map": repr(device)}
    settings.without(f"{section}.quantize", "give `from_pretrained` a quantization_config")
    name = settings.recipe.target.model if section == "target" else settings.draft.model
    if name is not None and is_gguf(name):
        settings.warn(f"transformers reads a GGUF file by its folder and gguf_file=…; change the lines for {name}")
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def _sampling(settings: ExportSettings) -> dict[str, str]:
    arguments: dict[str, Any] = {"max_new_tokens": settings.value("sampling.max_new_tokens")}
    arguments["do_sample"] = settings.is_sampled
    for name in _SAMPLED:
        value = settings.value(f"sampling.{name}")
        if settings.is_sampled:
            arguments[name] = 0 if name == "top_k" and value is None else value
    penalty, stop = settings.given("sampling.repetition_penalty"), settings.given("sampling.stop")
    arguments |= {} if penalty is None else {"repetition_penalty": penalty}
    arguments |= {} if stop is None else {"stop_strings": list(stop), "tokenizer": None}
    least = settings.given("sampling.min_tokens")
    arguments |= {} if least is None else {"min_new_tokens": least}
    shown = {name: repr(value) for name, value in arguments.items()}
    return shown | ({"tokenizer": "tokenizer"} if "tokenizer" in arguments else {})
