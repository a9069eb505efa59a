"""llama.cpp: `llama-server` with `--spec-type`.

The options are those of tools/server/README.md and docs/speculative.md of November 2026; the `--draft-…` names of
earlier releases are errors there. Its target's sampler runs on every row, so the output is the target's at any
temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec_cli.drafters.elsewhere import ELSEWHERE, lookup_arguments
from specdec_cli.errors import UsageError
from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import HERE, Export, ExportJob, flags, quoted, script
from specdec_cli.export.settings import ExportSettings, is_gguf, is_hub_choice
from specdec_cli.quantities import counted

NAME, VERSION = "llama.cpp", "of November 2026"
PROGRAM = "llama-server"
CHECKED = ("b11549",)
"""Builds whose options were checked."""
OWN_OPTIONS = (
    *("--spec-type", "--spec-default", "--spec-draft-model", "--spec-draft-hf", "--spec-draft-n-max", "--model"),
    *("--hf-repo", "--hf-file", "--alias", "--cache-prompt", "--spec-synth-len", "--spec-synth-rates", "--metrics"),
)
"""Options that specdec alone decides, set or not: the two arms differ by them, or a figure rests on them."""
SHORT_OPTIONS = {
    "-m": "--model",
    "-md": "--spec-draft-model",
    "--model-draft": "--spec-draft-model",
    "-a": "--alias",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "-hff": "--hf-file",
    "-hfd": "--spec-draft-hf",
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-b": "--batch-size",
}
SPECULATES = "--spec-type"
"""The option of every command line that speculates."""
REFUSED_WITH_DRAFT, REFUSED_SAMPLING = (), ("stop_token_ids", "min_tokens", "skip_special_tokens")
SERVE_KEYS = frozenset({"served_model_name"})
VERIFIES_BY = "exact-match"
WHEEL = Path(__file__).parents[1] / "measure" / "elsewhere" / "xllamacpp_server.py"
_TYPES = {
    DRAFT_MODEL: "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dspark": "draft-dspark",
    "mtp": "draft-mtp",
}
_OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n_predict": "max_new_tokens",
}


def export(job: ExportJob) -> Export:
    """A script that converts what is no GGUF file yet, and one that starts the server."""
    settings = job.settings
    convert: list[str] = []
    target = _gguf(settings, "target", settings.target, convert)
    arguments: dict[str, Any] = target | _speculation(settings, convert) | _server(settings)
    following = settings.next_command()
    comment = job.comment(following)
    files = {"llamacpp.sh": script(comment, ["llama-server", *flags(arguments)], [HERE])}
    if convert:
        files["convert.sh"] = _converter(comment, convert)
    return Export(files, frozenset(files), following)


def server_words(settings: ExportSettings) -> list[str]:
    """The words behind the program that start its server on this machine, without its address.

    Raises:
        UsageError: a model is no GGUF file.
    """
    arguments = _gguf(settings, "target", settings.target, []) | _speculation(settings, [])
    server = {name: value for name, value in _server(settings).items() if name not in ("host", "port", *_SAMPLING)}
    server["parallel"] = settings.value("engine.max_num_seqs")
    return flags(arguments | server | {"kv_unified": True})


def _synthetic(settings: ExportSettings) -> dict[str, Any]:
    """Acceptance at random. Its length and rates count as specdec's do."""
    rates = settings.given("speculation.synthetic_acceptance_rates")
    length = settings.given("speculation.synthetic_acceptance_length")
    if rates is not None:
        return {"spec_synth_rates": ",".join(map(str, rates))}
    return {} if length is None else {"spec_synth_len": length}


def _speculation(settings: ExportSettings, convert: list[str]) -> dict[str, Any]:
    draft, k = settings.draft, settings.k
    if not k:
        return {}
    settings.one_k()
    synthetic = _synthetic(settings)
    if synthetic:
        settings.value("speculation.verify")  # `synthetic`, which these options stand for
    else:
        settings.exact_match()
    if draft.method == "ngram":
        settings.chains_only()
        if draft.option("min") not in (None, draft.option("max")):
            settings.warn(f"draft.min = {draft.option('min')} is left out: llama.cpp looks for n-grams of one length")
        return _lookup(settings, "ngram-simple", {"size_n": draft.option("max")}) | synthetic
    if draft.method in ELSEWHERE:
        settings.chains_only()
        options = {name: draft.option(name) for name in draft.options}
        return _lookup(settings, draft.method, options) | synthetic
    kind = _TYPES.get(draft.method)
    if kind is None:
        settings.no_counterpart()
        return {}
    arguments: dict[str, Any] = {"spec_type": kind}
    if draft.model is not None:
        arguments |= _gguf(settings, "draft", settings.draft_model, convert)
    arguments |= {"spec_draft_n_max": k, "spec_draft_n_min": 0}
    least = settings.chains_only(knows_confidence=True)
    return arguments | ({} if least is None else {"spec_draft_p_min": least}) | synthetic


def _lookup(settings: ExportSettings, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    size, k = options.get("size_n"), settings.k
    if method == "ngram-simple" and size is not None and size > k:
        settings.warn(
            f"llama.cpp looks for n-grams of {counted(k, 'token')}, not {size}: it drafts nothing shorter than its "
            "n-gram"
        )
    return {"spec_type": method} | lookup_arguments(method, options, k)


def speculation_of(words: Sequence[str]) -> dict[str, Any]:
    """The settings of speculation on a command line, by option."""
    return {word: value for word, value in pairwise(words) if word.startswith("--spec-")}


def _server(settings: ExportSettings) -> dict[str, Any]:
    host, port = settings.address
    arguments: dict[str, Any] = {"host": host, "port": port, "metrics": True}
    length, sequences = settings.given("engine.max_model_len"), settings.given("engine.max_num_seqs")
    caches = settings.given("engine.enable_prefix_caching")
    if caches is not None:
        arguments |= {"cache_prompt": caches} | ({} if caches else {"cache_ram": 0})
    if length is not None:
        arguments["ctx_size"] = length * (sequences or 1)  # shared by the slots
    simple = {"parallel": "engine.max_num_seqs", "batch_size": "engine.max_num_batched_tokens"}
    arguments |= {name: value for name, path in simple.items() if (value := settings.given(path)) is not None}
    names = settings.given("serve.served_model_name")
    if names:
        arguments["alias"] = ",".join(names) if isinstance(names, list | tuple) else names
    template = settings.given("target.chat_template")
    if template is not None:
        arguments["chat_template" if "{" in template else "chat_template_file"] = template
    for option, name in _SAMPLING.items():
        value = settings.value(f"sampling.{name}")
        if settings.origins.get(f"sampling.{name}", "default") != "default" and value is not None:
            arguments[option] = value
    settings.leave_to_requests(but=_SAMPLING.values())
    return arguments


_OPTIONS = {"target": ("model", "hf_repo"), "draft": ("spec_draft_model", "spec_draft_hf")}
"""Options for a file on this machine and for one of a hub repository."""


def _gguf(settings: ExportSettings, section: str, name: str, convert: list[str]) -> dict[str, Any]:
    """The option with a model's GGUF file; where it is none yet, the line that makes it is added."""
    settings.without(f"{section}.quantize", "quantize the GGUF file with llama-quantize")
    option, hub_option = _OPTIONS[section]
    if is_hub_choice(name):
        repo, _, choice = name.partition(":")
        is_file = choice.endswith(".gguf")
        if is_file and section == "draft":
            settings.warn(f"llama.cpp takes `{repo}:QUANTIZATION` as a draft, not a file such as `{choice}`")
        return {hub_option: repo, "hf_file": choice} if is_file and section == "target" else {hub_option: name}
    if is_gguf(name):
        from specdec_cli.lm.files.gguf_choice import local_gguf  # transformers behind it takes a second to import

        return {option: str(local_gguf(name) or name)}
    if settings.is_here:
        hint = "`specdec export llamacpp` writes a script that converts it"
        raise UsageError(f"llama.cpp runs GGUF files, and `{name}` is none", hint)
    outtype = _OUTTYPES.get(str(settings.value(f"{section}.dtype")), "auto")
    words = [name, "--outtype", outtype, "--outfile", f"$HERE/{section}.gguf"]
    if section == "draft" and settings.draft.method != DRAFT_MODEL:
        words += ["--target-model-dir", settings.target]
    convert.append(" ".join(['python "$LLAMACPP/convert_hf_to_gguf.py"', *map(quoted, words)]))
    return {option: f"$HERE/{section}.gguf"}


def _converter(comment: str, lines: list[str]) -> str:
    first = ["set -euo pipefail", HERE, "LLAMACPP=${LLAMACPP:?set LLAMACPP to a checkout of llama.cpp}"]
    note = "# A hub id must be downloaded first: convert_hf_to_gguf.py reads folders (or add --remote).\n"
    return f"#!/usr/bin/env bash\n{comment}{note}" + "".join(f"{line}\n" for line in [*first, *lines])
