"""`--speculative-config`: vLLM's JSON about speculation, as the recipe's keys that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError, did_you_mean
from specdec_cli.files import RepeatedKeyError, parse_json

FLAG = "--speculative-config"
_KEYS = {
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "disable_by_batch_size": "speculation.disable_by_batch_size",
    "synthetic_acceptance_length": "speculation.synthetic_acceptance_length",
    "synthetic_acceptance_rates": "speculation.synthetic_acceptance_rates",
    "draft_tensor_parallel_size": "draft.tensor_parallel_size",
    "revision": "draft.revision",
}
"""Keys with the same meaning here."""
_TABLE, _RULE, _DRAWS = "num_speculative_tokens_per_batch_size", "rejection_sample_method", "draft_sample_method"
_DRAFT = ("model", "method", "parallel_drafting", "use_heterogeneous_vocab")
_OWN_OPTIONS = {
    "ngram": {"prompt_lookup_max": "max", "prompt_lookup_min": "min"},
    "suffix": {"suffix_decoding_min_token_prob": "min_prob"},
}
"""Keys of one method, and its options here."""
_KNOWN = (*_KEYS, _TABLE, _RULE, _DRAWS, *_DRAFT, *(key for options in _OWN_OPTIONS.values() for key in options))
_WITH_MODEL = ("eagle", "eagle3", "dflash", "dspark", "medusa", "draft_model")
_METHODS = ("draft_model", "ngram", "suffix", "eagle", "eagle3", "mtp", "dflash", "dspark", "medusa")
_SAME = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
_RULES = {"block": "block", "synthetic": "synthetic", "strict": "exact-match", "probabilistic": "rejection"}
_SAMPLERS = {"greedy": "exact-match", "probabilistic": "rejection"}
_INSTEAD = {
    "quantization": "use `--draft-quantize int8`, or name a draft that is quantized already",
    "draft_lm_head_quantization": "use `--draft-quantize int8`, or name a draft that is quantized already",
    "max_model_len": "`--max-model-len` is the limit of target and draft",
    "tensor_parallel_size": "the draft's is `draft_tensor_parallel_size`",
    "speculative_token_tree": "use `--tree`",
    "enable_adaptive_verification": "use `--depth-policy adaptive`",
    "enforce_eager": "use `--decoder transformers`",
    "synthetic_acceptance_rate": "use `synthetic_acceptance_rates`, or `--synthetic-acceptance-rates A,B,...`",
    "acceptance_method": "use `--verify`",
    "spec_decoding_acceptance_method": "use `--verify`",
    "typical_acceptance_sampler_posterior_threshold": "use `--verify typical`",
    "typical_acceptance_sampler_posterior_alpha": "use `--verify typical`",
    "fly_window_size": "use `--verify typical` for a lossy rule",
    "fly_entropy_threshold": "use `--verify typical` for a lossy rule",
    "fly_entropy_top_k": "use `--verify typical` for a lossy rule",
    "suffix_decoding_max_cached_requests": "use `-d suffix:cache=TOKENS`",
    "suffix_decoding_max_spec_factor": "use `-d suffix:min_prob=P`",
    "suffix_decoding_max_tree_depth": "use `num_speculative_tokens`",
    "kv_cache_dtype": "the draft's cache has the dtype of `--draft-dtype`",
    "code_revision": "`revision` holds for a draft's code, too",
    **dict.fromkeys(
        (
            *("attention_backend", "moe_backend", "draft_load_config", "disable_padded_drafter_batch"),
            *("disable_eagle_block_drop", "disable_lookahead_block_hashes", "use_local_argmax_reduction"),
            *("index_share_for_mtp_iteration", "dspark_draft_topk", "xpress_topc"),
        ),
        "leave it out: it is a setting of vLLM's own kernels and caches",
    ),
}
"""Keys that are refused unless they are null or false, and what there is instead."""


def read_speculative_config(text: str) -> dict[str, tuple[Any, str]]:
    """The recipe's keys with their values, and each one's name in messages.

    Raises:
        UsageError: no JSON object, a key that is unknown or not supported, or no draft.
    """
    given = _parse(text)
    for key, value in given.items():
        if key in _INSTEAD and value not in (None, False):
            raise UsageError(f"`{FLAG}` sets `{key}`, which is not supported", _INSTEAD[key])
        if key not in (*_KNOWN, *_INSTEAD):
            message = f"`{FLAG}` has the unknown key `{key}`{did_you_mean(key, _KNOWN)}"
            raise UsageError(message, f"supported: {', '.join(_KNOWN)}")
    settings = {key: value for key, value in given.items() if value is not None and key in _KNOWN}
    keys: dict[str, tuple[Any, str]] = {"draft": (_draft(settings), FLAG)}
    keys |= {path: (settings[key], f"{FLAG} {key}") for key, path in _KEYS.items() if key in settings}
    return keys | _verify(settings) | _k_by_batch(settings)


def _parse(text: str) -> dict[str, Any]:
    hint = """for example `--speculative-config '{"model": "./draft", "num_speculative_tokens": 4}'`"""
    try:
        given = parse_json(text)
    except RepeatedKeyError as error:
        raise UsageError(f"`{FLAG}` has `{error}` twice", "give it once") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{FLAG}` is not JSON: {error}", hint) from None
    if not isinstance(given, dict):
        raise UsageError(f"`{FLAG}` must be a JSON object, not `{text[:60]}`", hint)
    return given


def _draft(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The draft as a recipe names it."""
    method, model = _method(settings), settings.get("model")
    for owner, options in _OWN_OPTIONS.items():
        for key in options:
            if key in settings and method != owner:
                raise UsageError(f"`{FLAG}` sets `{key}`, which is for the method `{owner}`", "leave it out")
    if method in _WITH_MODEL:
        if model is None:
            raise UsageError(f"`{FLAG}` names no draft", "give it a `model`, or the method `ngram`")
        return _with_model(method, settings)
    if model is not None and model not in ("ngram", "[ngram]"):
        raise UsageError(f"`{FLAG}` gives the method `{method}` a model", "leave one of them out")
    for key in ("revision", "draft_tensor_parallel_size", "parallel_drafting", "use_heterogeneous_vocab"):
        if settings.get(key, False) is not False:
            raise UsageError(f"`{FLAG}` sets `{key}`, which is for a draft model", "leave it out")
    own = {name: settings[key] for key, name in _OWN_OPTIONS.get(method, {}).items() if key in settings}
    if method == "ngram" and own:  # as in vLLM, a bound that is given alone is both
        own = {"max": own.get("max", own.get("min")), "min": own.get("min", own.get("max"))}
    return {"method": method, **own}


def _method(settings: Mapping[str, Any]) -> str:
    """The method by its usual name."""
    method = settings.get("method")
    if method is None:
        method = "ngram" if settings.get("model") in ("ngram", "[ngram]") else "draft_model"
    name = _SAME.get(method, method) if isinstance(method, str) else ""
    name = "mtp" if name.endswith("_mtp") else name
    if name not in _METHODS:
        message = f"`{FLAG}` asks for the method `{method}`, which is not supported{did_you_mean(method, _METHODS)}"
        raise UsageError(message, f"use {', '.join(_METHODS)}")
    return name


def _with_model(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A draft that is a model or a head; the files of a `draft_model` and of a DSpark draft tell what it is."""
    forms = {
        "parallel_drafting": {"draft_model": "pard", "eagle": "p-eagle", "eagle3": "p-eagle"},
        "use_heterogeneous_vocab": {"draft_model": "universal"},
    }
    own = None if method in ("draft_model", "dspark") else method
    for key, methods in forms.items():
        value = settings.get(key, False)
        if not isinstance(value, bool):
            raise UsageError(f"`{FLAG} {key}` must be true or false, not `{value}`")
        if value and method not in methods:
            raise UsageError(f"`{FLAG}` sets `{key}`, which is not for the method `{method}`", "leave it out")
        own = methods[method] if value else own
    return {"model": settings["model"]} | ({} if own is None else {"method": own})


def _verify(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The verification mode: vLLM's rule, and whether its draft samples."""
    rule, draws = settings.get(_RULE, "standard"), settings.get(_DRAWS)
    for key, value, known in ((_RULE, rule, ("standard", *_RULES)), (_DRAWS, draws, (None, *_SAMPLERS))):
        if value not in known:
            words = ", ".join(str(word) for word in known if word is not None)
            hint = f"use {words}; `--verify` has further modes"
            raise UsageError(f"`{FLAG}` sets `{key}` to `{value}`, which is not supported", hint)
    if rule != "standard":
        return {"speculation.verify": (_RULES[rule], f"{FLAG} {_RULE}")}
    return {} if draws is None else {"speculation.verify": (_SAMPLERS[draws], f"{FLAG} {_DRAWS}")}


def _k_by_batch(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The k of each number of sequences, from ranges (first, last, k); the k before a gap holds in it."""
    ranges = settings.get(_TABLE)
    if ranges is None:
        return {}
    right = (
        isinstance(ranges, list)
        and ranges
        and all(isinstance(row, list) and len(row) == 3 and all(type(n) is int for n in row) for row in ranges)
    )
    if not right:
        hint = "for example [[1, 4, 5], [5, 64, 2]]: first and last number of sequences, and k"
        raise UsageError(f"`{FLAG} {_TABLE}` must be a list of ranges, not `{ranges}`", hint)
    most = settings.get("num_speculative_tokens")
    limit = most if type(most) is int else max(k for *_, k in ranges)
    table = ",".join(f"{first}:{min(k, limit)}" for first, _, k in sorted(ranges))
    return {"speculation.k_by_batch": (table, f"{FLAG} {_TABLE}")}
