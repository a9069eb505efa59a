"""Whether `compare-drafts` ranks drafts as measuring every k of every draft does (issue 3, "Must show" 4).

    python benchmarks/compare_against_exhaustive.py [--target DIR] [--draft SPEC ...] [--prompts FILE]

A good draft, a bad one, an expensive one, n-gram and none. Both runs are the command itself; two drafts count as
ranked where the interval of their ratio leaves 1 out, and a pair disagrees where both runs rank it and in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import Any

import record

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def compare(options: argparse.Namespace, *more: str) -> tuple[dict[str, Any], float]:
    """The document of one run of the command, and its seconds."""
    drafts = [word for draft in options.draft for word in ("-d", draft)]
    command = [
        *(sys.executable, "-m", "specdec_cli", "compare-drafts", "-t", options.target, *drafts),
        *("--dataset", str(options.prompts), "--num-prompts", str(options.num_prompts), "-n", str(options.tokens)),
        *("--k-max", str(options.k_max), "--quiet", "--json", *more),
    ]
    begin = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), perf_counter() - begin


def faster(document: dict[str, Any]) -> dict[frozenset[str], str | None]:
    """The certainly faster draft of each pair, or None."""
    found = {}
    for pair in document["pairwise"]:  # by speed, so that two documents need not name a pair alike
        low, high = pair["ci95"] or (0.0, 2.0)
        found[frozenset((pair["a"], pair["b"]))] = pair["a"] if low > 1 else pair["b"] if high < 1 else None
    return found


def order(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The drafts, fastest first."""
    rows = [
        {
            "draft": Path(row["draft"]).name,
            "best_k": row["best_k"],
            "speedup": row["speedup"]["median"],
            "ci95": row["speedup"]["ci95"],
            "acceptance_rate": row["acceptance_rate"],
            "cost_ratio": row["cost_ratio"],
        }
        for row in document["rows"]
    ]
    return sorted(rows, key=lambda row: -(row["speedup"] or 0.0))


def main() -> None:
    """Compare twice and keep both rankings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints = SHARED / "checkpoints"
    parser.add_argument("--target", default=str(checkpoints / "bitstories-3M"))
    parser.add_argument(
        "--draft",
        nargs="+",
        default=[
            *(str(checkpoints / name) for name in ("stories260K", "bitstories-1M", "bitstories-3M")),
            *("ngram", "none"),
        ],
    )
    parser.add_argument("--prompts", type=Path, default=SHARED / "prompts/tinystories_dev_300.jsonl")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k-max", type=int, default=6)
    options = parser.parse_args()
    before = record.machine()
    quick, quick_seconds = compare(options)
    full, full_seconds = compare(options, "--exhaustive")
    ours, theirs = faster(quick), faster(full)
    both = [pair for pair in ours if ours[pair] and theirs[pair]]
    against = [sorted(Path(name).name for name in pair) for pair in both if ours[pair] != theirs[pair]]
    settings = {
        "target": Path(options.target).name,
        "prompts": options.prompts.name,
        "num_prompts": options.num_prompts,
    }
    results = {
        **settings,
        "tokens": options.tokens,
        "k_max": options.k_max,
        "pairs": len(list(combinations(options.draft, 2))),
        "pairs_ranked_by_both": len(both),
        "pairs_that_disagree": against,
        "same_winner": quick["winner"] == full["winner"],
        "same_order": [row["draft"] for row in order(quick)] == [row["draft"] for row in order(full)],
        "seconds": {"compare": round(quick_seconds, 1), "exhaustive": round(full_seconds, 1)},
        "compare": order(quick),
        "exhaustive": order(full),
    }
    print(json.dumps(results, indent=1))
    print(record.save("compare_against_exhaustive", before, results, quick["environment"]["threads"]))


if __name__ == "__main__":
    main()
