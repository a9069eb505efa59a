"""vLLM: `vllm serve` with `--speculative-config`.

The settings are those of vLLM 0.33.0 (config/speculative.py, engine/arg_utils.py). Its rule is rejection sampling where
the draft samples too (`draft_sample_method: probabilistic`); otherwise a drafted token has the probability 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL, configuration, folder_of
from specdec_cli.export.exported import Export, ExportJob, flags, script
from specdec_cli.export.settings import ExportSettings

NAME, VERSION = "vLLM", "0.33.0"
PROGRAM = "vllm"
CHECKED = ("0.32", "0.33")
"""Releases whose settings were checked."""
OWN_OPTIONS = (
    *("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
    *("--enable-prefix-caching", "--model", "--served-model-name", "--config"),
)
"""Options that specdec alone decides, set or not: the two arms differ by them, or a figure rests on them."""
SHORT_OPTIONS = {"-sc": "--speculative-config", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}
SPECULATES = "--speculative-config"
"""The option of every command line that speculates."""
REFUSED_WITH_DRAFT, REFUSED_SAMPLING = ("min_p", "logit_bias"), ()
SERVE_KEYS = frozenset({"served_model_name", "tool_call_parser", "reasoning_parser", "per_request_spec_decode_metrics"})
VERIFIES_BY = WHEEL = None
_NO_END = 2**20  # sequences, the end of the last range of a table
_HEADS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
}
_V2_ALONE = ("dflash2", "dspark")
_OVERRIDDEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def export(job: ExportJob) -> Export:
    """A script that starts the server."""
    settings = job.settings
    arguments = _with_acceptance(settings, engine_arguments(settings) | server_arguments(settings))
    words = [PROGRAM, "serve", settings.target, *flags(arguments)]
    following = settings.next_command()
    return Export({"vllm.sh": script(job.comment(following), words)}, frozenset({"vllm.sh"}), following)


def server_words(settings: ExportSettings) -> list[str]:
    """The words behind the program that start its server, without its address."""
    arguments = _with_acceptance(settings, engine_arguments(settings) | served(settings))
    return ["serve", settings.target, *flags(arguments)]


def _with_acceptance(settings: ExportSettings, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with each request's acceptance: here as in our own server, in an export where the recipe sets it.

    vLLM refuses it without a draft, and releases before 0.32 do not have it: `none` leaves it out.
    """
    path = "serve.per_request_spec_decode_metrics"
    level = settings.value(path) if settings.is_here else settings.given(path)
    if "speculative_config" not in arguments:
        settings.without(path, "there is no draft")
        return arguments
    return arguments if level in (None, "none") else arguments | {"per_request_spec_decode_metrics": level}


def speculation_of(words: Sequence[str]) -> dict[str, Any]:
    """The settings of speculation on a command line."""
    config: dict[str, Any] = json.loads(words[words.index(SPECULATES) + 1])
    return config


def engine_arguments(settings: ExportSettings) -> dict[str, Any]:
    """The engine's own arguments, by their names in Python (`LLM`, Ray Serve's `engine_kwargs`)."""
    simple = {
        "revision": "target.revision",
        "dtype": "target.dtype",
        "load_format": "target.load_format",
        "tensor_parallel_size": "target.tensor_parallel_size",
        "pipeline_parallel_size": "target.pipeline_parallel_size",
        "distributed_executor_backend": "engine.distributed_executor_backend",
        "max_model_len": "engine.max_model_len",
        "max_num_seqs": "engine.max_num_seqs",
        "max_num_batched_tokens": "engine.max_num_batched_tokens",
        "block_size": "engine.kv_block_size",
        "enable_prefix_caching": "engine.enable_prefix_caching",
    }
    values = {name: settings.given(path) for name, path in simple.items()}
    arguments = {name: value for name, value in values.items() if value is not None}
    arguments |= _memory(settings) | _generation(settings)
    settings.without("target.quantize", "vLLM reads checkpoints that are quantized already; name one as the target")
    settings.without("target.device", "the build of vLLM decides")
    speculative = speculative_config(settings)
    return arguments | ({} if speculative is None else {"speculative_config": speculative})


def server_arguments(settings: ExportSettings) -> dict[str, Any]:
    """Arguments of the HTTP server."""
    host, port = settings.address
    return {"host": host, "port": port} | served(settings)


def served(settings: ExportSettings) -> dict[str, Any]:
    """Arguments of the HTTP server but its address."""
    arguments: dict[str, Any] = {}
    simple = {
        "served_model_name": "serve.served_model_name",
        "chat_template": "target.chat_template",
        "default_chat_template_kwargs": "target.default_chat_template_kwargs",
        "reasoning_parser": "serve.reasoning_parser",
        "tool_call_parser": "serve.tool_call_parser",
    }
    for name, path in simple.items():
        value = settings.given(path)
        if value is not None:
            arguments |= {"enable_auto_tool_choice": True} if name == "tool_call_parser" else {}
            arguments[name] = value
    settings.without("serve.api_key_env", "vLLM reads its key from VLLM_API_KEY")
    return arguments


def speculative_config(settings: ExportSettings) -> dict[str, Any] | None:
    """`speculative_config`; None where vLLM is to decode without a draft."""
    draft, k = settings.draft, settings.k
    if not k:
        return None
    config = _method(settings)
    if config is None:
        settings.no_counterpart()
        return None
    config["num_speculative_tokens"] = k
    if draft.model is not None and draft.method != "mtp":
        config["model"] = settings.draft_model
        revision = settings.given("draft.revision")
        config |= {} if revision is None else {"revision": revision}
        config |= _parallel(settings)
    _check_modules(settings)
    _check_block(settings)
    trims = _trims(settings)
    settings.chains_only(knows_adaptive=trims)
    settings.without("draft.quantize", "vLLM reads drafts that are quantized already")
    settings.without("draft.device", "vLLM runs the draft where the target runs")
    settings.without("draft.dtype", "vLLM runs the draft in the target's dtype")
    adaptive = {"enable_adaptive_verification": True} if trims else {}
    return config | adaptive | _rule(settings) | _schedule(settings)


def _trims(settings: ExportSettings) -> bool:
    """Whether vLLM is to verify only as much of each draft as pays: its counterpart of the adaptive policy."""
    is_adaptive = settings.value("speculation.depth_policy") == "adaptive"
    is_split = settings.value("target.pipeline_parallel_size") > 1
    if is_adaptive and settings.draft.method in _V2_ALONE and is_split:
        settings.warn("vLLM refuses enable_adaptive_verification with pipeline_parallel_size")
    return is_adaptive and settings.draft.method in _V2_ALONE and not is_split


def _check_modules(settings: ExportSettings) -> None:
    """Warn of a k that vLLM refuses: with several MTP modules it takes a k up to their number, or a multiple of it."""
    num, k = settings.num_mtp_modules, settings.k
    if settings.draft.method == "mtp" and num and k > num and k % num:
        settings.warn(f"vLLM refuses k = {k} with {num} MTP modules: set k to {num}, or to a multiple of it")


def _check_block(settings: ExportSettings) -> None:
    """Warn of blocks that vLLM runs in one of its runners, or reads in another way."""
    draft = settings.draft
    if draft.method in _V2_ALONE:
        settings.warn(f"vLLM runs {draft.what} in its V2 model runner alone, which has no CPU form")
    folder = None if draft.model is None else folder_of(draft.model)
    content = {} if folder is None else configuration(folder)
    if draft.method == "dspark" and "speculators_model_type" in content and content.get("sample_from_anchor") is None:
        settings.warn("vLLM takes `sample_from_anchor` for false where a draft's config.json lacks it: add it as true")


def _method(settings: ExportSettings) -> dict[str, Any] | None:
    draft = settings.draft
    if draft.method in _HEADS:
        return {"method": _HEADS[draft.method]} | ({"parallel_drafting": True} if draft.method == "p-eagle" else {})
    if draft.method in (DRAFT_MODEL, "pard"):
        return {"method": DRAFT_MODEL} | ({"parallel_drafting": True} if draft.method == "pard" else {})
    if draft.method == "ngram":
        lengths = {"prompt_lookup_max": draft.option("max"), "prompt_lookup_min": draft.option("min")}
        return {"method": "ngram"} | {name: value for name, value in lengths.items() if value is not None}
    if draft.method == "universal":
        return {"method": DRAFT_MODEL, "use_heterogeneous_vocab": True}
    if draft.method == "suffix":
        return {"method": "suffix", "suffix_decoding_min_token_prob": draft.option("min_prob")}
    return {"method": "mtp"} if draft.method == "mtp" else None


def _parallel(settings: ExportSettings) -> dict[str, Any]:
    """A draft model runs on as many devices as the target; a head may run on one."""
    size = settings.given("draft.tensor_parallel_size")
    target = settings.value("target.tensor_parallel_size")
    if settings.draft.method in (DRAFT_MODEL, "pard", "universal"):
        if size is not None and size != target:
            message = f"vLLM runs a draft model on as many devices as the target, {target}"
            settings.warn(f"draft.tensor_parallel_size = {size} is left out: {message}")
        return {"draft_tensor_parallel_size": target} if target > 1 else {}
    return {} if size is None else {"draft_tensor_parallel_size": size}


def _rule(settings: ExportSettings) -> dict[str, Any]:
    rates = settings.given("speculation.synthetic_acceptance_rates")
    length = settings.given("speculation.synthetic_acceptance_length")
    if rates is not None or length is not None:
        rule: dict[str, Any] = {"rejection_sample_method": "synthetic"}
        made = {"synthetic_acceptance_rates": list(rates)} if rates is not None else {}
        return rule | (made or {"synthetic_acceptance_length": length})
    settings.lossless_rule()
    if not settings.is_sampled or settings.draft.method in ("ngram", "suffix"):
        return {}
    if settings.draft.method == "universal":
        settings.warn("vLLM takes the likeliest token of a draft with another tokenizer, whatever the temperature")
        return {}
    own = settings.rule
    if own is not None and own.is_lossless and not own.needs_q:
        return {"draft_sample_method": "greedy"}
    rule = {"draft_sample_method": "probabilistic"}
    if own is not None and own.judges_jointly:
        settings.warn("block verification needs vLLM's V2 model runner, which has no CPU form")
        rule["rejection_sample_method"] = "block"
    return rule


def _schedule(settings: ExportSettings) -> dict[str, Any]:
    pairs = settings.k_by_batch
    if not pairs:
        return {}
    ends = [*(size - 1 for size, _ in pairs[1:]), _NO_END]
    ranges = [[size, end, k] for (size, k), end in zip(pairs, ends, strict=True)]
    return {"num_speculative_tokens_per_batch_size": ranges}


def _memory(settings: ExportSettings) -> dict[str, Any]:
    if settings.given("engine.kv_cache_memory") is None:
        return {}
    share = settings.recipe.engine.memory_share()
    if share is not None:
        return {"gpu_memory_utilization": round(share, 6)}
    return {"kv_cache_memory_bytes": settings.recipe.engine.kv_cache_bytes()}


def _generation(settings: ExportSettings) -> dict[str, Any]:
    """Where sampling defaults come from, and those that the recipe sets."""
    source = settings.given("target.generation_config")
    arguments: dict[str, Any] = {} if source is None else {"generation_config": "vllm" if source == "none" else source}
    set_here = {name: settings.value(f"sampling.{name}") for name in _OVERRIDDEN if _is_set(settings, name)}
    if "min_p" in set_here and settings.k:
        settings.warn("sampling.min_p is left out: vLLM refuses it together with speculation")
        del set_here["min_p"]
        settings.refused.add("min_p")
    if settings.given("sampling.logit_bias") and settings.k:
        settings.warn("sampling.logit_bias is left out: vLLM refuses requests with it together with speculation")
        settings.refused.add("logit_bias")
    settings.leave_to_requests(but={*_OVERRIDDEN, *settings.refused})
    return arguments | ({"override_generation_config": set_here} if set_here else {})


def _is_set(settings: ExportSettings, name: str) -> bool:
    """Whether the recipe sets it, to the default too: a server's own default temperature is 1 and not 0."""
    settings.value(f"sampling.{name}")
    return settings.origins.get(f"sampling.{name}", "default") != "default"
