"""NVIDIA's `speculation_profile.json`: how much of a draft is accepted, for simulators and beside a checkpoint.

The schema is version 1.0 of Model-Optimizer's examples/specdec_bench (September 2026). It holds both conventions: the
rate of each position given that all before it were accepted (Dynamo's simulator), and of each with all before it
(vLLM's synthetic acceptance).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.export.draft_kind import draft_kind
from specdec_cli.export.exported import Export, ExportJob
from specdec_cli.export.measured import DAMAGED

NAME, VERSION = "Model-Optimizer's speculation profile", "1.0"
_HINT = "name the result of `specdec bench`: --measured FILE"
_MOST_TOKENS = 64
_CHAINS = ("draft_model", "eagle", "eagle3")


def export(job: ExportJob) -> Export:
    """The profile of a measurement; k, draft and target are the measured ones.

    Raises:
        UsageError: there is no measurement of a draft.
    """
    if job.document is None:
        raise UsageError("a profile is made of a measurement", _HINT)
    try:
        profile = _of_measurement(job.document)
    except DAMAGED:
        raise UsageError("this result lacks what a profile needs", _HINT) from None
    if profile is None:
        raise UsageError("this result holds no acceptance by position", f"{_HINT}, with a draft")
    return Export({"speculation_profile.json": json.dumps(profile, indent=2) + "\n"})


def _of_measurement(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The profile; None of a measurement without acceptance by position."""
    is_bench = document["schema"].startswith("specdec.bench/")
    stats = (document["draft"] or {}).get("speculative") if is_bench else None
    if not stats or not stats["num_drafts"] or not stats["acceptance_histogram"]:
        return None
    measured = document["recipe"]
    name, method = (measured["draft"].get(key) for key in ("model", "method"))
    if name is None and method is None:
        raise LookupError("the draft")
    draft = draft_kind(name, method, measured["draft"])
    return _profile(measured["speculation"]["num_speculative_tokens"], stats["acceptance_histogram"]) | {
        "method": draft.method,
        "draft_checkpoint": {"name": draft.model},
        "target_model": {"name": measured["target"]["model"]},
        "verification_method": "block" if document["lossless"]["verify"] == "block" else "longest_prefix",
        "accept_length_model": "chain_analytic" if draft.method in _CHAINS else "measured_per_k",
        "measurement_conditions": _conditions(document),
    }


def _profile(k: int, histogram: list[int]) -> dict[str, Any]:
    """The figures of how many steps accepted 0, 1, 2, ... drafted tokens.

    Args:
        k: most tokens drafted in a step.
        histogram: steps by how many drafted tokens they accepted.
    """
    k = max(k, len(histogram) - 1)  # a table of k by batch size may have a larger one
    if k > _MOST_TOKENS:
        raise ValueError("no step drafts as many tokens")
    steps = sum(histogram)
    marginal = [sum(histogram[n:]) / steps for n in range(1, k + 1)]
    conditional = [rate / before if before else 0.0 for rate, before in zip(marginal, [1.0, *marginal], strict=False)]
    mean = 1 + sum(n * count for n, count in enumerate(histogram)) / steps
    implied = 1 + sum(marginal)
    return {
        "schema_version": "1.0",
        "measured": True,
        "num_speculative_tokens": k,
        "block_size": None,
        "max_supported_k": k,
        "conditional_accept_rates": [round(rate, 6) for rate in conditional],
        "marginal_accept_rates": [round(rate, 6) for rate in marginal],
        "mean_accept_length": round(mean, 6),
        "accept_length_by_k": {str(k): round(mean, 6)},
        "acceptance_length_histogram": {str(n + 1): count for n, count in enumerate(histogram)},
        "per_category": None,
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": 0.02,
                "passed": abs(implied - mean) <= 0.02,
            },
            "marginal_monotonicity": {"passed": True, "violations": []},
        },
    }


def _conditions(document: Any) -> dict[str, Any]:
    environment, workload = document["environment"], document["workload"]
    return {
        "tool": f"specdec {document['specdec_version']}",
        "created": document["created"],
        "dataset": workload["dataset"],
        "num_samples": workload["num_prompts"],
        "temperature": document["recipe"]["sampling"]["temperature"],
        "max_new_tokens": document["recipe"]["sampling"]["max_new_tokens"],
        "batch_size": document["plan"]["batch_size"],
        "dtype": environment["dtype"],
        "device": environment["gpu"] or environment["cpu"],
    }
