"""Names that other engines, or other sections, have for a recipe's keys: what an unknown key most likely means."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_cli.errors import closest
from specdec_cli.recipe.keys import section_class
from specdec_cli.recipe.schema import Recipe

_K = "speculation.num_speculative_tokens"
_OTHERS = {
    _K: "k n_k gamma lookahead spec_k draft_k num_draft_tokens draft_tokens num_draft draft_max n_draft "
    "num_assistant_tokens speculative_num_draft_tokens speculative_num_steps speculative_tokens num_spec_tokens "
    "draft_length max_draft_len spec_draft_n_max",
    "speculation.depth_policy": "policy num_assistant_tokens_schedule",
    "speculation.p_min": "draft_p_min assistant_confidence_threshold confidence_threshold",
    "draft.model": "draft draft_model speculative_model assistant_model model_draft speculative_draft_model_path "
    "drafter spec_draft_model",
    "draft.method": "speculative_method speculative_algorithm draft_method spec_method",
    "target.model": "model target_model model_path model_name model_id model_name_or_path base_model path name hf_repo",
    "target.device": "n_gpu_layers gpu_layers",
    "target.dtype": "torch_dtype precision data_type",
    "target.quantize": "quantization quant load_in_8bit load_in_4bit",
    "target.tensor_parallel_size": "tp tp_size tensor_parallel",
    "target.pipeline_parallel_size": "pp pp_size pipeline_parallel",
    "sampling.max_new_tokens": "max_tokens max_completion_tokens max_output_tokens n_predict num_predict max_length "
    "num_tokens new_tokens n",
    "sampling.temperature": "temp",
    "sampling.repetition_penalty": "repeat_penalty repetition",
    "sampling.stop": "stop_strings stop_sequences stop_words",
    "sampling.stop_token_ids": "eos_token_id stop_tokens",
    "sampling.min_tokens": "min_new_tokens min_length",
    "sampling.seed": "random_seed",
    "engine.max_num_seqs": "batch_size max_batch_size max_batch n_parallel parallel num_seqs max_running_requests",
    "engine.max_model_len": "context_length max_context max_seq_len max_sequence_length ctx_size n_ctx ctx "
    "max_position_embeddings",
    "engine.kv_block_size": "block_size page_size",
    "engine.kv_cache_memory": "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes kv_cache_size",
    "engine.max_num_batched_tokens": "chunked_prefill_size prefill_chunk_size",
    "engine.enable_prefix_caching": "prefix_caching cache_prompt",
    "workload.dataset": "data data_set prompts benchmark",
    "workload.num_prompts": "num_samples limit samples n_prompts",
    "gates.fail_if": "fail gate",
    "train.learning_rate": "lr",
    "train.epochs": "num_epochs num_train_epochs",
    "train.max_steps": "steps num_steps",
    "serve.served_model_name": "model_alias alias",
}
_REMOVED = {
    "engine.compile": "it was removed in 0.3.0, because it was slower than `engine.decoder: auto`",
    "engine.mmap": "loading copies a GGUF file's blocks into another layout, so the file does not stay mapped",
    "engine.mlock": "`systemd-run --user --scope -p MemorySwapMax=0 COMMAND` keeps a command in memory",
}
"""Keys of earlier versions and of llama.cpp, and why there are none."""
_MEANT = {other: path for path, others in _OTHERS.items() for other in others.split()}


def why_removed(name: str) -> str:
    """`; it was removed ...` for a key's path, a variable or an option that there no longer is, else nothing."""
    word = name.lower().removeprefix("--no-").replace("-", "_").strip("_")
    gone = [reason for path, reason in _REMOVED.items() if word in (path, path.replace(".", "_"), path.split(".")[1])]
    return f"; {gone[0]}" if gone else ""


def key_of_other_engines(option: str) -> str | None:
    """The key that an option of other engines sets, or None."""
    return _MEANT.get(option.lower().lstrip("-").replace("-", "_"))


def meant_key(section: str | None, key: object, known: Sequence[str]) -> str:
    """`; did you mean ...?` for an unknown key, why it is gone if an earlier version had it, else nothing.

    Args:
        section: in which it stands; None is the recipe itself.
        key: that is unknown.
        known: keys that stand there.
    """
    word = str(key).replace("-", "_").lower()
    if gone := why_removed(f"{section}.{word}"):
        return gone
    path = _MEANT.get(word)
    if path is None or (section is not None and path.partition(".")[0] != section):
        close = closest(str(key), known)
        path = close if close is not None else path or _elsewhere(word, section)
    inner = path.removeprefix(f"{section}.") if path is not None and section is not None else path
    return "" if inner is None else f"; did you mean `{inner}`?"


def _elsewhere(word: str, section: str | None) -> str | None:
    """The one key of another section that has this name."""
    owners = [name for name in Recipe.model_fields if name not in (section, "draft")]
    paths = [f"{name}.{word}" for name in owners if (owner := section_class(name)) and word in owner.model_fields]
    return paths[0] if len(paths) == 1 else None
