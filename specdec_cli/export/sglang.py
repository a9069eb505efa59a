"""SGLang: `python -m sglang.launch_server` with `--speculative-algorithm`.

The settings are those of SGLang 0.5.23 (arg_groups/fields/spec.py): k drafted tokens are `num-steps` k with
`eagle-topk` 1, and k + 1 `num-draft-tokens`, since it counts the token that the target adds. It verifies by rejection
for EAGLE heads and MTP layers alone, and refuses that flag with other drafts.
"""

from __future__ import annotations

import json
from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import HERE, Export, ExportJob, flags, script
from specdec_cli.export.settings import ExportSettings

NAME, VERSION = "SGLang", "0.5.23"
_HEADS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
_STEPS = {DRAFT_MODEL: "STANDALONE"} | _HEADS
_BLOCKS = {"dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"}
_TREES = dict.fromkeys(_STEPS, "--speculative-eagle-topk") | {"ngram": "--speculative-ngram-max-bfs-breadth"}
"""What makes a tree of the drafts of a method, where SGLang has trees: a number of the likeliest children."""
_ADAPTING = ("eagle", "eagle3")
_ADAPTIVE, _TIMES = "adaptive.json", "steps.json"


def export(job: ExportJob) -> Export:
    """A script that starts the server, and beside it a schedule of k by batch size, and a DSpark draft's step times."""
    settings = job.settings
    speculative, table = speculation(settings)
    times = _step_times(job) if speculative else {}
    beside = {name: json.dumps(its, indent=2) + "\n" for name, its in ((_ADAPTIVE, table), (_TIMES, times)) if its}
    arguments = server_arguments(settings) | speculative
    arguments |= {"speculative_dspark_sps_table_path": f"$HERE/{_TIMES}"} if times else {}
    words = ["python", "-m", "sglang.launch_server", *flags(arguments)]
    following = settings.next_command()
    files = {"sglang.sh": script(job.comment(following), words, [HERE] if beside else [])} | beside
    return Export(files, frozenset({"sglang.sh"}), following)


def _step_times(job: ExportJob) -> dict[str, Any]:
    """Steps per second by the tokens of a verification, for the scheduler of ragged verification."""
    times = job.dspark_step_times()
    if not times:
        return {}
    job.settings.warn("SGLang reads the step times only with SGLANG_RAGGED_VERIFY_MODE=compact in its environment")
    return {
        "sample_batch_tokens": list(times),
        "sample_steps_per_sec": [round(1 / seconds, 6) for seconds in times.values()],
        "max_batch_tokens": max(times),
    }


def server_arguments(settings: ExportSettings) -> dict[str, Any]:
    """Arguments that have nothing to do with speculation."""
    host, port = settings.address
    arguments: dict[str, Any] = {"model_path": settings.target, "host": host, "port": port}
    simple = {
        "revision": "target.revision",
        "dtype": "target.dtype",
        "load_format": "target.load_format",
        "tp_size": "target.tensor_parallel_size",
        "chat_template": "target.chat_template",
        "context_length": "engine.max_model_len",
        "max_running_requests": "engine.max_num_seqs",
        "max_prefill_tokens": "engine.max_num_batched_tokens",
        "page_size": "engine.kv_block_size",
        "tool_call_parser": "serve.tool_call_parser",
        "reasoning_parser": "serve.reasoning_parser",
        "random_seed": "sampling.seed",
    }
    arguments |= {name: value for name, path in simple.items() if (value := settings.given(path)) is not None}
    names = settings.given("serve.served_model_name")
    if names:
        arguments["served_model_name"] = names[0] if isinstance(names, list | tuple) else names
    share = settings.recipe.engine.memory_share() if settings.given("engine.kv_cache_memory") is not None else None
    if share is not None:
        arguments["mem_fraction_static"] = round(share, 6)
    elif settings.given("engine.kv_cache_memory") is not None:
        settings.without("engine.kv_cache_memory", "SGLang takes a share of the memory, such as 90%")
    if settings.given("engine.enable_prefix_caching") is False:
        arguments["disable_radix_cache"] = True
    if settings.given("target.generation_config") == "none":
        arguments["sampling_defaults"] = "openai"
    settings.without("target.quantize", "SGLang reads checkpoints that are quantized already; name one as the target")
    settings.leave_to_requests(but=("seed",))
    return arguments


def speculation(settings: ExportSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for speculation, and the adaptive table; both empty without a draft."""
    draft, k = settings.draft, settings.k
    if not k:
        return {}, {}
    algorithm = _STEPS.get(draft.method) or _BLOCKS.get(draft.method) or {"ngram": "NGRAM"}.get(draft.method)
    if algorithm is None:
        settings.no_counterpart()
        return {}, {}
    arguments: dict[str, Any] = {"speculative_algorithm": algorithm}
    if draft.model is not None and draft.method != "mtp":
        arguments["speculative_draft_model_path"] = settings.draft_model
        revision = settings.given("draft.revision")
        arguments |= {} if revision is None else {"speculative_draft_model_revision": revision}
        settings.without("draft.quantize", "SGLang reads drafts that are quantized already")
    temperatures = settings.confidence_temperatures
    arguments |= {} if temperatures is None else {"speculative_dspark_confidence_sts_path": temperatures}
    if draft.method in _STEPS:
        arguments |= {"speculative_num_steps": k, "speculative_eagle_topk": 1}
    if draft.method == "ngram":
        arguments["speculative_ngram_max_bfs_breadth"] = 1  # a chain; by default it drafts a tree
        if draft.option("max") or draft.option("min"):
            settings.warn("SGLang's NGRAM looks up in a trie of all served text, and its depth is not the n-gram's")
    arguments["speculative_num_draft_tokens"] = k + 1
    settings.chains_only(
        own_trees=_TREES.get(draft.method), own_policy="--speculative-adaptive" if draft.method in _ADAPTING else None
    )
    table = _adaptive(settings)
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": f"$HERE/{_ADAPTIVE}"} if table else {}
    return arguments | _rule(settings) | adaptive, table


def _rule(settings: ExportSettings) -> dict[str, Any]:
    verify, method = settings.value("speculation.verify"), settings.draft.method
    if not settings.lossless_rule() or not settings.is_sampled:
        return {}
    settings.warn("SGLang verifies greedily on a CPU, whatever the temperature")
    if verify == "block" and method in (*_HEADS, *_BLOCKS):
        return {"speculative_use_block_verification": True}
    if verify in ("auto", "rejection") and method in _HEADS:
        return {"speculative_use_rejection_sampling": True}
    if method not in _BLOCKS:  # these sample, and are verified by rejection without a flag
        settings.exact_match()
    return {}


def _adaptive(settings: ExportSettings) -> dict[str, Any]:
    """The schedule of k by batch size, which only EAGLE heads have."""
    pairs = settings.k_by_batch
    if not pairs:
        return {}
    if settings.draft.method not in _ADAPTING:
        settings.warn("k by batch size is left out: SGLang has such a table for EAGLE heads alone")
        return {}
    return {str(size): {"candidate_steps": [k]} for size, k in pairs}
