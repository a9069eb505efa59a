"""TensorRT-LLM: `trtllm-serve` with a YAML file whose key `speculative_config` names a decoding type.

The settings are those of TensorRT-LLM 1.4 (LLM API, PyTorch backend). It accepts a drafted token where the target draws
the same one; rejection sampling is an option of its own.
"""

from __future__ import annotations

import json
from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import HERE, Export, ExportJob, flags, script, to_yaml
from specdec_cli.export.settings import ExportSettings

NAME, VERSION = "TensorRT-LLM", "1.4"
_TYPES = {
    DRAFT_MODEL: "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "ngram": "NGram",
    "suffix": "SA",
    "pard": "PARD",
    "dflash": "DFlash",
    "dspark": "DSpark",
}
_MOST_SEQUENCES = 2048  # TensorRT-LLM's default max_batch_size
_CONFIG, _TIMES = "trtllm.yaml", "steps.json"


def export(job: ExportJob) -> Export:
    """The YAML file, a script that starts the server with it, and a DSpark draft's step times."""
    settings = job.settings
    host, port = settings.address
    document, times = llm_arguments(settings), {}
    if "speculative_config" in document and (times := job.dspark_step_times()):
        settings.warn("TensorRT-LLM has the confidence settings from 1.4.0rc4 on")
        own = {"enable_confidence_scheduling": True, "confidence_cost_table_path": _TIMES}
        temperatures = settings.confidence_temperatures
        own |= {} if temperatures is None else {"confidence_calibration_path": temperatures}
        document["speculative_config"] |= own
    words = ["trtllm-serve", settings.target, *flags({"config": f"$HERE/{_CONFIG}", "host": host, "port": port})]
    settings.leave_to_requests()
    following = settings.next_command()
    comment = job.comment(following)
    before = [HERE, *['cd "$HERE"'] * bool(times)]  # its configuration names a file beside it
    files = {"trtllm.sh": script(comment, words, before), _CONFIG: comment + to_yaml(document)}
    if times:
        milliseconds = [round(1e3 * seconds, 6) for seconds in times.values()]
        files[_TIMES] = json.dumps({"token_counts": list(times), "step_time_ms": milliseconds}, indent=2) + "\n"
    return Export(files, frozenset({"trtllm.sh"}), following)


def llm_arguments(settings: ExportSettings) -> dict[str, Any]:
    """Arguments of the LLM API, as its YAML files have them; the model is named elsewhere."""
    simple = {
        "revision": "target.revision",
        "dtype": "target.dtype",
        "load_format": "target.load_format",
        "tensor_parallel_size": "target.tensor_parallel_size",
        "max_batch_size": "engine.max_num_seqs",
        "max_num_tokens": "engine.max_num_batched_tokens",
        "max_seq_len": "engine.max_model_len",
    }
    arguments: dict[str, Any] = {"backend": "pytorch"}
    arguments |= {name: value for name, path in simple.items() if (value := settings.given(path)) is not None}
    cache = _cache(settings)
    arguments |= {"kv_cache_config": cache} if cache else {}
    settings.without("target.quantize", "TensorRT-LLM reads checkpoints that are quantized already")
    speculative = speculative_config(settings)
    return arguments | ({} if speculative is None else {"speculative_config": speculative})


def speculative_config(settings: ExportSettings) -> dict[str, Any] | None:
    """`speculative_config`; None where the engine is to decode without a draft."""
    draft, k = settings.draft, settings.k
    if not k:
        return None
    kind = _TYPES.get(draft.method)
    if kind is None:
        settings.no_counterpart()
        return None
    config: dict[str, Any] = {"decoding_type": kind, "max_draft_len": k}
    if draft.model is not None and draft.method != "mtp":
        config["speculative_model"] = settings.draft_model
        settings.without("draft.quantize", "TensorRT-LLM reads drafts that are quantized already")
    if draft.method == "ngram":
        config["max_matching_ngram_size"] = draft.option("max")
    if draft.method == "suffix":
        settings.warn("the draft `suffix` becomes TensorRT-LLM's suffix automaton, which has none of its options")
    settings.chains_only(own_trees="use_dynamic_tree" if draft.method == "eagle3" else None)
    return config | _rule(settings) | _schedule(settings, k)


def _rule(settings: ExportSettings) -> dict[str, Any]:
    verify = settings.value("speculation.verify")
    if settings.is_sampled and verify in ("auto", "rejection") and settings.draft.model is not None:
        settings.warn("use_rejection_sampling is a prototype in TensorRT-LLM; without it fewer drafted tokens count")
        return {"use_rejection_sampling": True}
    settings.exact_match()
    return {}


def _schedule(settings: ExportSettings, k: int) -> dict[str, Any]:
    """k by batch size, as 1.4 reads it: each upper bound has its k, and beyond the last bound there is no draft."""
    most = settings.given("engine.max_num_seqs") or _MOST_SEQUENCES
    pairs = [pair for pair in settings.k_by_batch if pair[0] <= most]  # no batch is larger
    if not pairs:
        return {}
    ends = [*(size - 1 for size, _ in pairs[1:]), most]
    schedule = {end: its for (_, its), end in zip(pairs, ends, strict=True) if its or end != most}
    settings.warn(
        "draft_len_schedule has upper bounds as keys, as TensorRT-LLM 1.4 reads them; in 2025 they were lower bounds"
    )
    first = pairs[0][1]
    if first != k:
        settings.warn(f"max_draft_len is {first}, the first k of the table, as TensorRT-LLM demands, not {k}")
    return {"max_draft_len": first, "draft_len_schedule": schedule}


def _cache(settings: ExportSettings) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, path in (("tokens_per_block", "kv_block_size"), ("enable_block_reuse", "enable_prefix_caching")):
        value = settings.given(f"engine.{path}")
        config |= {} if value is None else {name: value}
    if settings.given("engine.kv_cache_memory") is not None:
        share = settings.recipe.engine.memory_share()
        if share is not None:
            config["free_gpu_memory_fraction"] = round(share, 6)
        else:
            config["max_gpu_total_bytes"] = settings.recipe.engine.kv_cache_bytes()
    return config
