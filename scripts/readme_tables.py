#!/usr/bin/env python
"""The README's tables, written from benchmarks/results/*.json; no number in them is typed by hand.

    python scripts/readme_tables.py           # rewrite what stands between the markers
    python scripts/readme_tables.py --check   # exit 1 if that would change something

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; it is empty while its result is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
ENOUGH_STARTS = 6  # the range of fewer covers less than 95 %
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def measured_on(document: dict[str, Any]) -> str:
    """The machine, its load before and after, commit and date of a result."""
    machine, threads = document["machine"], _threads(document)
    load = f"load {machine['load_average_1m']:.1f} before and {document['load_average_after_1m']:.1f} after"
    return f"{machine['cpu']}, {threads}, {load}, commit {machine['commit']}, {machine['measured'][:10]}"


def _threads(document: dict[str, Any]) -> str:
    return f"{document['machine']['threads']} of {document['machine']['cores']} cores"


def builtin(document: dict[str, Any]) -> str:
    """The built-in pair by k: what is accepted and what it gains over the same engine without a draft."""
    results = document["results"]
    wrong = max(row["prompts_with_other_tokens"] for row in results["rows"])
    said = f"{results['prompts']} story prompts, one at a time, greedy, {results['max_new_tokens']} tokens each"
    said += f"{_weights(results)}; "
    said += (
        "the tokens are the same with and without the draft. " if not wrong else f"{wrong} prompts gave other tokens. "
    )
    head = ["k", "acceptance rate", "acceptance length", "tokens/s without draft", "speed-up [95 % interval]"]
    return f"{said}{measured_on(document)}.\n\n" + markdown(head, [_builtin_row(row) for row in results["rows"]])


def _weights(results: dict[str, Any]) -> str:
    """How our draft's weights were kept, where not as they are."""
    kept = results.get("draft_quantize", "none")
    return "" if kept == "none" else f", the draft's weights in our runs {kept}"


def _builtin_row(row: dict[str, Any]) -> list[str]:
    speedup = row["speedup_decode"]
    return [
        str(row["k"]),
        f"{row['acceptance_rate']:.3f}",
        f"{row['acceptance_length']:.2f}",
        f"{row['plain_tokens_per_second']:.1f}",
        _interval(speedup["median"], speedup["ci95"]),
    ]


def peers(document: dict[str, Any]) -> str:
    """Ours beside transformers at the k that gave most tokens per second."""
    results = document["results"]
    best = next(row for row in results["rows"] if row["k"] == results["best_k"])
    dtype = "its own precision" if results["dtype"] == "auto" else results["dtype"]
    said = f"`{results['target']}` with `{results['draft']}` in {dtype}, k = {best['k']}, greedy, all in turn"
    said += " (OpenVINO before and after)" * bool(best.get("openvino"))
    said += f"{_weights(results)}: {results['num_prompts']} prompts, {results['tokens']} tokens each. "
    said += f"{measured_on(document)}.\n\n"
    others = {"transformers": "transformers", "transformers-assisted": "transformers, assisted by the same draft"}
    rows = [_peer_row(label, best["against"][name]) for name, label in others.items()]
    rows += [*_server_rows(results["servers"], best), *_openvino_rows(best)]
    plain = {"tokens_per_second": best["plain_tokens_per_second"], "draft_over_it": best["speedup"]}
    rows.append(_peer_row("specdec, no draft", plain | {"equal": best["lossless"]}))
    rows.append(["specdec, with the draft", f"{best['draft_tokens_per_second']:.0f}", "", ""])
    return said + markdown(["", "tokens/s", "the last row over it [95 % interval]", "same tokens"], rows)


def _peer_row(label: str, facts: dict[str, Any]) -> list[str]:
    """One system: its speed, ours with the draft over it, and whether its tokens were ours."""
    over, equal = facts["draft_over_it"], facts["equal"]
    same = "yes" if not equal["mismatches"] else f"not in {equal['mismatches']} texts"
    return [label, f"{facts['tokens_per_second']:.0f}", _interval(over["median"], over["ci95"]), same]


def _server_rows(servers: Sequence[dict[str, Any]], best: dict[str, Any]) -> list[list[str]]:
    """Other engines' servers beside the best k; their texts were not compared."""
    found = {
        server["name"]: 1 / server["timing"]["tpot_s"]["median"]
        for server in servers
        if server["k_before"] == best["k"]
    }
    return [_other_row(name, speed, best, "–") for name, speed in sorted(found.items(), key=lambda item: item[1])]


def _openvino_rows(best: dict[str, Any]) -> list[list[str]]:
    """OpenVINO GenAI's runs before and after ours, their mean; whether its draft leaves its own text as it is."""
    runs = best.get("openvino", [])
    if not runs:
        return []
    name = f"OpenVINO GenAI {'.'.join(runs[0]['version'].split('.')[:2])}"
    plain, draft = (fmean(run[f"{arm}_tokens_per_second"] for run in runs) for arm in ("plain", "draft"))
    num, equal = runs[0]["num_texts"], min(run["texts_equal_to_its_plain"] for run in runs)
    same = "yes" if equal == num else f"its own in {equal} of {num} texts"
    return [
        _other_row(f"{name}, no draft", plain, best, "–"),
        _other_row(f"{name}, with the draft", draft, best, same),
    ]


def _other_row(label: str, speed: float, best: dict[str, Any], same: str) -> list[str]:
    """One that took its turn in another process: a ratio without an interval."""
    return [label, f"{speed:.0f}", f"{best['draft_tokens_per_second'] / speed:.2f}", same]


def adaptive(document: dict[str, Any]) -> str:
    """The adaptive depth and a fixed k over plain decoding, by draft and by how many sequences run together.

    The runs are many: their loads and commits are told, and what the same measurement says of plain decoding twice.
    """
    rows = document["results"]
    sizes = sorted({row["batch"] for row in rows})
    kinds = list(dict.fromkeys((row["draft"], row["cold"] and row["tokens"]) for row in rows))
    head = [
        f"times as fast as no draft: adaptive (fixed k = {rows[0]['fixed_k']})",
        *(f"{size} together" for size in sizes),
    ]
    lines = []
    for draft, first in kinds:  # tokens of a process' first texts, or False
        of_size = {row["batch"]: row for row in rows if (row["draft"], row["cold"] and row["tokens"]) == (draft, first)}
        label = f"{draft}, first {first} tokens" if first else draft
        lines.append([label, *(_adaptive_cell(of_size.get(size)) for size in sizes)])
    runs = [row["measured_on"] for row in rows]
    loads = [run["load_average_1m"] for run in runs]
    same = [row["plain_again"]["total"] for row in rows]
    said = f"{_each(runs, 'cpu')}, {_threads(document)}, load {min(loads):.1f} to {max(loads):.1f} before each run, "
    said += f"commit {_each(runs, 'commit')}, {document['machine']['measured'][:10]}. "
    said += f"Plain decoding beside plain decoding, in the same runs: {min(same):.2f} to {max(same):.2f}."
    return f"{said}\n\n" + markdown(head, lines)


def _each(runs: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({run[key] for run in runs}))


def _adaptive_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{_interval(row['adaptive']['total'], row['adaptive']['ci95'])} ({row['fixed']['total']:.2f})"


def streams(document: dict[str, Any]) -> str:
    """The server's speed with drafts over that without, by how many streams there are."""
    points = document["results"]["points"]
    arms = [name.removesuffix(" / none") for name in points[0]["ci95"]]
    head = [
        "times as fast as no draft",
        *(f"{point['streams']} stream{'s' * (point['streams'] > 1)}" for point in points),
    ]
    lines = [
        [arm, *(_interval(point[f"{arm} / none"], point["ci95"][f"{arm} / none"]) for point in points)] for arm in arms
    ]
    lines.append(["tokens/s without a draft", *(f"{point['none']:.0f}" for point in points)])
    num_starts = min(len(each) for point in points for each in point["of_starts"].values())
    said = f"Every server was started {num_starts} times; in brackets "
    said += "the 95 % interval over starts" if num_starts >= ENOUGH_STARTS else "the range of the starts' medians"
    return f"{said}. {measured_on(document)}.\n\n" + markdown(head, lines)


def _interval(value: float, ends: Sequence[float]) -> str:
    return f"{value:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "builtin": ("builtin_pair.json", builtin),
    "adaptive": ("adaptive.json", adaptive),
    "streams": ("serve_load.json", streams),
    "peers-builtin": ("peers_builtin.json", peers),
    "peers-embedded": ("peers_embedded.json", peers),
}


def table(name: str, results: Path = RESULTS) -> str:
    """A table's text, empty while its result is not there.

    Raises:
        SystemExit: the README names a table that nothing here makes.
    """
    if name not in TABLES:
        sys.exit(f"the README names table `{name}`; known are {', '.join(TABLES)}")
    file, make = TABLES[name]
    path = results / file
    return make(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ""


def filled(text: str, results: Path = RESULTS) -> str:
    """A README's text with every table as its result says."""
    return MARKED.sub(lambda found: found[1] + table(found[2], results) + found[4], text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the README; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    check = parser.parse_args(arguments).check
    text = README.read_text(encoding="utf-8")
    wanted = filled(text)
    if wanted == text:
        return 0
    if check:
        print("README.md is out of date: run python scripts/readme_tables.py", file=sys.stderr)
        return 1
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
