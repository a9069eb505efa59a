#!/usr/bin/env python
"""Write the tables of README.md and of pages in docs/ from benchmarks/results/*.json. No number is typed by hand.

    python scripts/readme_tables.py           # rewrite the text between the markers
    python scripts/readme_tables.py --check   # exit 1 if a page is out of date

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. It stays empty while a result file of it is missing.
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
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{page}.md" for page in ("performance", "vllm", "llamacpp", "real-models")),
)
RESULTS = ROOT / "benchmarks" / "results"
ENOUGH_STARTS = 6  # the range of fewer covers less than 95 %
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: first column left-aligned, numbers right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def measured_on(document: dict[str, Any]) -> str:
    """Machine, load before and after, commit and date of a result."""
    machine, threads = document["machine"], _threads(document)
    load = f"load {machine['load_average_1m']:.1f} before and {document['load_average_after_1m']:.1f} after"
    return f"{machine['cpu']}, {threads}, {load}, commit {machine['commit']}, {machine['measured'][:10]}"


def _threads(document: dict[str, Any]) -> str:
    return f"{document['machine']['threads']} of {document['machine']['cores']} cores"


def builtin(document: dict[str, Any]) -> str:
    """Acceptance and speed-up of the built-in pair by k, against the same engine without a draft."""
    results = document["results"]
    wrong = max(row["prompts_with_other_tokens"] for row in results["rows"])
    said = f"{results['prompts']} story prompts, one at a time, greedy, {results['max_new_tokens']} tokens each"
    said += f"{_weights(results)}. "
    said += f"{wrong} prompts gave other tokens with the draft. " if wrong else "The draft changes no token. "
    head = ["k", "acceptance rate", "acceptance length", "tokens/s without draft", "speed-up [95 % interval]"]
    return f"{said}{measured_on(document)}.\n\n" + markdown(head, [_builtin_row(row) for row in results["rows"]])


def _weights(results: dict[str, Any]) -> str:
    """Precision of our draft's weights, if it is not the checkpoint's."""
    kept = results.get("draft_quantize", "none")
    return "" if kept == "none" else f", {kept} draft weights in our runs"


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
    """Our speed beside other engines, at the k with the most tokens per second."""
    results = document["results"]
    best = next(row for row in results["rows"] if row["k"] == results["best_k"])
    dtype = "its own precision" if results["dtype"] == "auto" else results["dtype"]
    said = f"`{results['target']}` with `{results['draft']}` in {dtype}, k = {best['k']}, greedy, in turn"
    said += " (OpenVINO before and after the others)" * bool(best.get("openvino"))
    said += f"{_weights(results)}: {results['num_prompts']} prompts, {results['tokens']} tokens each. "
    said += f"{measured_on(document)}.\n\n"
    others = {"transformers": "transformers", "transformers-assisted": "transformers, assisted by the same draft"}
    rows = [_peer_row(label, best["against"][name]) for name, label in others.items()]
    rows += [*_server_rows(results["servers"], best), *_openvino_rows(best)]
    plain = {"tokens_per_second": best["plain_tokens_per_second"], "draft_over_it": best["speedup"]}
    rows.append(_peer_row("specdec, no draft", plain | {"equal": best["lossless"]}))
    rows.append(["specdec, with the draft", f"{best['draft_tokens_per_second']:.0f}", "", ""])
    return said + markdown(["", "tokens/s", "speed-up of the last row [95 % interval]", "same tokens as specdec"], rows)


def _peer_row(label: str, facts: dict[str, Any]) -> list[str]:
    """One engine: its speed, our speed-up over it, and whether its tokens equal ours."""
    over, equal = facts["draft_over_it"], facts["equal"]
    same = "yes" if not equal["mismatches"] else f"no, {equal['mismatches']} texts differ"
    return [label, f"{facts['tokens_per_second']:.0f}", _interval(over["median"], over["ci95"]), same]


def _server_rows(servers: Sequence[dict[str, Any]], best: dict[str, Any]) -> list[list[str]]:
    """Servers of other engines, measured beside the best k. Their texts were not compared."""
    found = {
        server["name"]: 1 / server["timing"]["tpot_s"]["median"]
        for server in servers
        if server["k_before"] == best["k"]
    }
    return [_other_row(name, speed, best, "–") for name, speed in sorted(found.items(), key=lambda item: item[1])]


def _openvino_rows(best: dict[str, Any]) -> list[list[str]]:
    """Mean of OpenVINO GenAI's runs before and after ours, and whether its draft changes its own text."""
    runs = best.get("openvino", [])
    if not runs:
        return []
    name = f"OpenVINO GenAI {'.'.join(runs[0]['version'].split('.')[:2])}"
    plain, draft = (fmean(run[f"{arm}_tokens_per_second"] for run in runs) for arm in ("plain", "draft"))
    num, equal = runs[0]["num_texts"], min(run["texts_equal_to_its_plain"] for run in runs)
    same = "yes" if equal == num else f"equals its own plain text in {equal} of {num}"
    return [
        _other_row(f"{name}, no draft", plain, best, "–"),
        _other_row(f"{name}, with the draft", draft, best, same),
    ]


def _other_row(label: str, speed: float, best: dict[str, Any], same: str) -> list[str]:
    """An engine measured in a process of its own: a ratio without an interval."""
    return [label, f"{speed:.0f}", f"{best['draft_tokens_per_second'] / speed:.2f}", same]


def adaptive(document: dict[str, Any]) -> str:
    """Speed-up of adaptive depth and of a fixed k, by draft and by the number of sequences that run together.

    The table covers many runs. Its caption names all loads and commits, and the noise: plain decoding against itself.
    """
    rows = document["results"]
    sizes = sorted({row["batch"] for row in rows})
    kinds = list(dict.fromkeys((row["draft"], row["cold"] and row["tokens"]) for row in rows))
    head = [
        f"speed-up: adaptive [95 % interval] (fixed k = {rows[0]['fixed_k']})",
        *(_count(size, "sequence") for size in sizes),
    ]
    lines = []
    for draft, first in kinds:  # tokens of a new process' first texts, or False
        of_size = {row["batch"]: row for row in rows if (row["draft"], row["cold"] and row["tokens"]) == (draft, first)}
        label = f"{draft}, first {first} tokens" if first else draft
        lines.append([label, *(_adaptive_cell(of_size.get(size)) for size in sizes)])
    runs = [row.get("measured_on", document["machine"]) for row in rows]
    loads = [run["load_average_1m"] for run in runs]
    same = [row["plain_again"]["total"] for row in rows]
    load = " to ".join(sorted({f"{load:.1f}" for load in (min(loads), max(loads))}))
    said = f"{_each(runs, 'cpu')}, {_threads(document)}, load {load} before each run, "
    said += f"commit {_each(runs, 'commit')}, {document['machine']['measured'][:10]}. "
    said += f"Plain decoding against plain decoding in the same runs: {min(same):.2f} to {max(same):.2f}."
    return f"{said}\n\n" + markdown(head, lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _each(runs: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({run[key] for run in runs}))


def _adaptive_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{_interval(row['adaptive']['total'], row['adaptive']['ci95'])} ({row['fixed']['total']:.2f})"


def streams(document: dict[str, Any]) -> str:
    """Speed-up of the server by policy and number of streams."""
    points = document["results"]["points"]
    arms = [name.removesuffix(" / none") for name in points[0]["ci95"]]
    head = ["speed-up", *(_count(point["streams"], "stream") for point in points)]
    lines = [
        [arm, *(_interval(point[f"{arm} / none"], point["ci95"][f"{arm} / none"]) for point in points)] for arm in arms
    ]
    lines.append(["tokens/s without a draft", *(f"{point['none']:.0f}" for point in points)])
    num_starts = min(len(each) for point in points for each in point["of_starts"].values())
    return f"{_starts(num_starts)} {measured_on(document)}.\n\n" + markdown(head, lines)


def _starts(number: int) -> str:
    """How often servers were started, and what the brackets hold."""
    held = "the 95 % interval over starts" if number >= ENOUGH_STARTS else "the range of the starts' medians"
    return f"Every server was started {number} times. The brackets hold {held}."


def trees(document: dict[str, Any]) -> str:
    """Chains and trees beside plain decoding, greedy and at temperature 1."""
    results = document["results"]
    modes = ("greedy", "temperature 1")
    rows = []
    for name, both in results["greedy"].items():
        row = [name, str(both["nodes"])]
        for facts in (results[mode][name] for mode in modes):
            speed_up = facts["speed-up"]
            row += [f"{facts['acceptance length']:.2f}"]
            row += [_interval(speed_up["median"], speed_up["ci95"]) if both["nodes"] else ""]
        rows.append(row)
    head = ["drafted", "nodes", *(f"{figure}, {mode}" for mode in modes for figure in ("length", "speed-up"))]
    precision = "its own precision" if results["quantize"] == "none" else results["quantize"]
    pair = f"`{results['target']}` with `{results['draft']}` in {precision}"
    said = f"{pair}: {results['prompts']} prompts, {results['tokens']} tokens each. {measured_on(document)}"
    return f"{said}.\n\n" + markdown(head, rows)


_KINDS = ("prose", "edits", "asked again")


def drafts(document: dict[str, Any]) -> str:
    """Speed-ups of the built-in target's drafts by kind of text and temperature."""
    parts = {name: part for name, part in document["results"]["parts"].items() if name.startswith("built-in, ")}
    tables = []
    for words in ("greedy", "temperature 1"):
        rows = []
        for arm, facts in parts[f"built-in, {words}, prose"]["arms"].items():
            if arm.startswith("untrained"):  # shows what a head costs, not what it gains
                continue
            length = facts["acceptance length"]
            cells = [_draft_cell(parts[f"built-in, {words}, {kind}"]["arms"].get(arm)) for kind in _KINDS]
            rows.append([arm, "" if length is None else f"{length:.2f}", *cells])
        head = [f"{words}: speed-up [95 % interval]", "acceptance length", *_KINDS]
        tables.append(markdown(head, rows))
    return _of_parts(document["results"], parts) + "\n".join(tables)


def _of_parts(results: dict[str, Any], parts: dict[str, Any]) -> str:
    machines = [part["machine"] for part in parts.values()]
    said = f"{results['prompts']} prompts of up to {results['tokens']} tokens. {machines[0]['cpu']}, load "
    loads = [machine["load_average_1m"] for machine in machines]
    said += f"{min(loads):.1f} to {max(loads):.1f} before each part, commit {_each(machines, 'commit')}, "
    return said + f"{_each([{'measured': machine['measured'][:10]} for machine in machines], 'measured')}.\n\n"


def _draft_cell(facts: dict[str, Any] | None) -> str:
    return "" if facts is None else _interval(facts["speed-up"]["median"], facts["speed-up"]["ci95"])


def engine_sweep(document: dict[str, Any]) -> str:
    """Speed-ups of another engine at every k: predicted from three of its starts, and measured."""
    results, greedy = document["results"], document["results"]["greedy"]
    sampled = {row["k"]: row for row in results["sampled"]["rows"]}
    said = f"vLLM {results['version']} (CPU build), {greedy['trace']['requests']} story prompts, one at a time. "
    head = ["k", "speed-up predicted", "measured [95 % interval]", "acceptance length predicted", "counted"]
    head += ["at temperature 1 predicted", "counted", "load"]
    rows = []
    for row in greedy["rows"]:
        speedup, length, other = row["speedup"], row["acceptance_length"], sampled[row["k"]]
        fitted = " (fitted)" if row["fitted"] else ""
        cells = [f"{row['k']}{fitted}", f"{speedup['predicted']:.2f}", _interval(speedup["measured"], speedup["ci95"])]
        cells += [f"{length['predicted']:.3f}", f"{length['counted']:.3f}"]
        rows.append([*cells, f"{other['predicted']:.2f}", f"{other['counted']:.2f}", f"{row['load']:.1f}"])
    return f"{said}{measured_on(document)}.\n\n" + markdown(head, rows)


def gpu_heads(document: dict[str, Any]) -> str:
    """Heads and a draft model on a GPU, at one acceptance."""
    found = next(step["document"]["results"] for step in document["steps"] if step["step"] == "heads")
    target, draft = (found[one].removeprefix("shape:") for one in ("target", "draft"))
    said = (
        f"{document['device']}, torch {document['torch']}, {found['dtype']}, target of `{target}`'s shape, model of "
        f"`{draft}`'s, {found['context']} tokens of context, each drafted token accepted with probability "
        f"{found['acceptance']}, commit {document['commit']}, {document['measured'][:10]}"
    )
    head = ["draft", "tokens/s", "speed-up", "tokens a step", "ms a step", "waits of the host a step"]
    rows = [
        [
            name.replace(", 3,", ", tree 3,"), f"{arm['tokens_per_second']:.0f}", f"{arm['speedup']:.2f}",
            f"{arm['tokens_per_step']:.2f}", f"{arm['ms_per_step']:.1f}", f"{arm['host_waits_per_step']:.1f}",
        ]
        for name, arm in found["arms"].items()
    ]  # fmt: skip
    return f"{said}.\n\n" + markdown(head, rows)


_WORKLOADS = {"edit": "editing code", "json": "extracting JSON", "code": "writing code", "chat": "chat"}


def what_pays(document: dict[str, Any]) -> str:
    """Speed-ups of drafts on kinds of work, each draft at its best k there."""
    results = document["results"]
    workloads = {name: results["workloads"][name] for name in _WORKLOADS if name in results["workloads"]}
    drafts = list(dict.fromkeys(draft for its in workloads.values() for draft in its["drafts"]))
    drafts.sort(key=lambda draft: -max(_median(its["drafts"].get(draft)) for its in workloads.values()))
    rows = [["no draft, tokens/s", *(f"{its['plain tokens/s']:.0f}" for its in workloads.values())]]
    for draft in drafts:
        rows.append([f"`{draft}`", *(_paying_cell(its["drafts"].get(draft), its) for its in workloads.values())])
    machines = [its["machine"] for its in workloads.values()]
    loads = [machine["load_average_1m"] for machine in machines]
    said = f"`{results['target']}`, {results['instructions']}, {document['machine']['cpu']}, {_threads(document)}, "
    said += f"{_each([{'n': _count(its['prompts'], 'prompt')} for its in workloads.values()], 'n')} of each kind, load "
    said += f"{min(loads):.1f} to {max(loads):.1f}, commit {_each(machines, 'commit')}, {machines[0]['measured'][:10]}"
    head = ["speed-up [95 % interval], best k", *(_WORKLOADS[name] for name in workloads)]
    return f"{said}.\n\n" + markdown(head, rows)


def _median(facts: dict[str, Any] | None) -> float:
    return 0.0 if facts is None else facts["speed-up"]["median"] or 0.0


def _paying_cell(facts: dict[str, Any] | None, workload: dict[str, Any]) -> str:
    """A draft's speed-up and k; the best of the workload in bold."""
    if facts is None or facts["speed-up"]["ci95"] is None:
        return "–"
    median, ends = facts["speed-up"]["median"], facts["speed-up"]["ci95"]
    mark = "**" * (median == max(map(_median, workload["drafts"].values())))
    return f"{mark}{median:.2f}{mark} [{ends[0]:.2f}, {ends[1]:.2f}], k = {facts['k']}"


def both_engines(document: dict[str, Any]) -> str:
    """Tokens/s of our drafts and of llama.cpp's by the same command, and each over plain decoding of its engine."""
    workloads = {name: document["results"]["workloads"][name] for name in _WORKLOADS}
    rows = []
    for engine in ("specdec", "llama.cpp"):
        found = [its if engine == "specdec" else its["llama.cpp"] for its in workloads.values()]
        rows.append([engine, "none", *(f"{its['plain tokens/s']:.0f}" for its in found)])
        drafts = sorted(found[0]["drafts"], key=lambda draft: -max(_median(its["drafts"].get(draft)) for its in found))
        for draft in drafts:
            cells = [its["drafts"].get(draft) for its in found]
            rows.append([engine, f"`{draft}`", *(_speed_and_gain(facts) for facts in cells)])
    machines = [its["machine"] for its in workloads.values()]
    loads = [machine["load_average_1m"] for machine in machines]
    results = document["results"]
    said = (
        f"`{results['target']}`, ours {results['instructions']}, {document['machine']['cpu']}, {_threads(document)}, "
    )
    said += (
        f"load {min(loads):.1f} to {max(loads):.1f}, commit {_each(machines, 'commit')}, {machines[0]['measured'][:10]}"
    )
    return f"{said}.\n\n" + markdown(["engine", "draft", *(_WORKLOADS[name] for name in workloads)], rows)


def _speed_and_gain(facts: dict[str, Any] | None) -> str:
    if facts is None or facts["speed-up"]["median"] is None:
        return "–"
    return f"{facts['tokens/s']:.0f} ({facts['speed-up']['median']:.2f}, k = {facts['k']})"


def dequantized_agreement(*documents: dict[str, Any]) -> str:
    """Native blocks beside the dequantized model, one file a row."""
    return markdown(
        _AGREEMENT,
        [[document["results"]["file"], *_agreement(document["results"]["agreement"])] for document in documents],
    )


_AGREEMENT = ("file", "tokens", "mean KL divergence, nats", "equal first choices")


def _agreement(facts: dict[str, Any]) -> list[str]:
    return [f"{facts['tokens']:,}", f"{facts['mean KL divergence']:.4f}", f"{facts['equal first choices']:.1%}"]


def llama_cpp_agreement(*documents: dict[str, Any]) -> str:
    """Native blocks and the dequantized model beside llama.cpp's probabilities, one file a row."""
    files = {name: facts for document in documents for name, facts in document["results"].items()}
    rows = [[name, *_agreement(both["native"]), *_agreement(both["float32"])[1:]] for name, both in files.items()]
    return markdown([*_AGREEMENT, "of dequantized float32", "equal first choices"], rows)


_SPEED_ROWS = {
    "plain decoding, tokens/s": "plain tokens/s",
    "a prompt of 500 tokens, tokens/s": "prompt tokens/s",
    "start of the process to first token, s": "first token, s",
    "peak memory, MB": "peak memory, MB",
}


def llama_cpp_speed(*documents: dict[str, Any]) -> str:
    """specdec over llama.cpp, one file and build a column; a column of streams belongs to the speeds before it."""
    speeds = [document for document in documents if "medians" in document["results"]]
    streams = [document["results"] for document in documents if "4 streams" in document["results"]]
    rows = [
        [label, *(_speed_cell(document["results"], key) for document in speeds)] for label, key in _SPEED_ROWS.items()
    ]
    for number in ("4 streams", "8 streams"):
        rows.append(
            [f"{number} through `serve`", *(_streams_cell(document["results"], streams, number) for document in speeds)]
        )
    loads = [document["machine"]["load_average_1m"] for document in documents]
    machines = [document["machine"] for document in documents]
    said = (
        f"{_each(machines, 'cpu')}, {_threads(documents[0])} each, load {min(loads):.1f} to {max(loads):.1f}, commit "
    )
    said += f"{_each(machines, 'commit')}"
    head = ["specdec, llama.cpp: ratio", *(_speed_head(document["results"]) for document in speeds)]
    return f"{said}.\n\n" + markdown(head, rows)


_ARMS = {
    "dequantized": "dequantized",
    "specdec": "native",
    "llama.cpp": "llama.cpp",
    "llama.cpp-built": "llama.cpp built here",
}
_VERSION_ROWS = _SPEED_ROWS | {
    "bytes of the file over measured bandwidth": "share of bandwidth",
    "six rows over one": "6 rows over 1",
}
_DRAFTED_ROWS = {
    "edit": "code edits",
    "edit beside 4 busy": "the same beside four busy processes",
    "4 streams": "4 streams",
    "8 streams": "8 streams",
}


def versions(*documents: dict[str, Any]) -> str:
    """Weights dequantized at load and computed as they are, and llama.cpp, in turn; a table for each file."""
    return "\n".join(map(_versions_of_a_file, documents))


def _versions_of_a_file(document: dict[str, Any]) -> str:
    results = document["results"]
    arms = [arm for arm in _ARMS if arm in results["medians"]]
    lines: dict[str, list[float | None]] = {
        label: [results["medians"][arm].get(key) for arm in arms] for label, key in _VERSION_ROWS.items()
    }
    behind = results.get("behind 4096 tokens", {})
    for label, key in {
        "step behind 4,096 tokens, ms": "step, ms",
        "that step over reading weights and keys": "step over reading",
    }.items():
        lines[label] = [behind.get(arm, {}).get(key) for arm in arms]
    for workload, label in _DRAFTED_ROWS.items():
        its = {name: facts["tokens/s"] for name, facts in results.get(workload, {}).items() if isinstance(facts, dict)}
        for is_drafted in (False, True):
            lines[f"{label}, {'fastest draft' if is_drafted else 'plain'}, tokens/s"] = [
                max(
                    (its[n] for n in its if n.startswith(f"{arm} ") and n.endswith(" plain") != is_drafted),
                    default=None,
                )
                for arm in arms
            ]
    rows = []
    for label, figures in lines.items():
        if not any(figures):
            continue
        by_arm = dict(zip(arms, figures, strict=True))
        ours = by_arm.pop("specdec")
        ratios = ["–" if ours is None or other is None else f"{ours / other:.2f}" for other in by_arm.values()]
        digits = ["–" if one is None else f"{one:.{0 if one >= 10 else 1 if one >= 2 else 2}f}" for one in figures]
        rows.append([label, *digits, *ratios])
    head = ["", *(_ARMS[arm] for arm in arms), *(f"native over {_ARMS[arm]}" for arm in arms if arm != "specdec")]
    said = f"{_quantization(results)}, {results['instructions of ours']}, {measured_on(document)}"
    return f"{said}.\n\n{markdown(head, rows)}"


def _speed_head(results: dict[str, Any]) -> str:
    return f"{_quantization(results)}, {results['instructions of ours']}, {_build(results)}"


def _quantization(results: dict[str, Any]) -> str:
    """The form of a file's weights, by its name."""
    return str(results["file"]).removesuffix(".gguf").rpartition("-")[2].upper()


def _build(results: dict[str, Any]) -> str:
    """The llama.cpp that ran: the prebuilt wheel, or its source built for the processor."""
    return "native build" if "AVX512" in results.get("instructions of llama.cpp", "") else "wheel"


def _speed_cell(results: dict[str, Any], key: str) -> str:
    ours, theirs = (results["medians"][name][key] for name in ("specdec", "llama.cpp"))
    digits = 0 if ours >= 10 else 1
    return f"{ours:.{digits}f}, {theirs:.{digits}f}: **{results['specdec over llama.cpp'][key]:.2f}**"


def _streams_cell(speed: dict[str, Any], streams: Sequence[dict[str, Any]], number: str) -> str:
    same = [each for each in streams if _speed_head(each) == _speed_head(speed)]
    if not same:
        return "–"
    ours, theirs = (same[0][number][f"{engine} plain"] for engine in ("specdec", "llama.cpp"))
    over = ours["over llama.cpp's best"]["median"]
    return f"{ours['tokens/s']:.0f}, {theirs['tokens/s']:.0f}: **{over:.1f}**"


def _interval(value: float, ends: Sequence[float]) -> str:
    return f"{value:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


TABLES: dict[str, tuple[Callable[..., str], *tuple[str, ...]]] = {
    "drafts-builtin": (drafts, "compare_drafts_all.json"),
    "gpu-heads": (gpu_heads, "gpu_day_nvidia_h200.json"),
    "engine-sweep": (engine_sweep, "engine_sweep_vllm.json"),
    "what-pays": (what_pays, "what_pays_qwen.json"),
    "what-pays-eagle3": (what_pays, "what_pays_qwen_eagle3.json"),
    "what-pays-avx2": (what_pays, "what_pays_qwen_avx2.json"),
    "builtin": (builtin, "builtin_pair.json"),
    "builtin-quiet-cache": (builtin, "builtin_pair_zen4.json"),
    "adaptive": (adaptive, "adaptive.json"),
    "streams": (streams, "serve_load.json"),
    "peers-builtin": (peers, "peers_builtin.json"),
    "peers-embedded": (peers, "peers_embedded.json"),
    "trees-builtin": (trees, "trees_builtin.json"),
    "dequantized-agreement": (
        dequantized_agreement,
        "gguf_agreement_qwen.json",
        "gguf_agreement_smollm2.json",
        "gguf_agreement_gemma3.json",
    ),
    "llama-cpp-agreement": (
        llama_cpp_agreement,
        "llama_cpp_agreement.json",
        "llama_cpp_agreement_made.json",
        "llama_cpp_agreement_16_bits.json",
    ),
    "both-engines": (both_engines, "what_pays_both_engines.json"),
    "llama-cpp-versions": (
        versions,
        "llama_cpp_versions.json",
        "llama_cpp_versions_q4_0.json",
        "llama_cpp_versions_q8_0.json",
    ),
    "llama-cpp-wheel": (
        llama_cpp_speed,
        "llama_cpp_qwen.json",
        "llama_cpp_qwen_avx2.json",
        "llama_cpp_q4_0.json",
        "llama_cpp_q8_0.json",
        "llama_cpp_streams.json",
    ),
    "llama-cpp-native": (
        llama_cpp_speed,
        "llama_cpp_native_qwen.json",
        "llama_cpp_q4_0_native.json",
        "llama_cpp_q8_0_native.json",
        "llama_cpp_native_streams.json",
        "llama_cpp_q4_0_native_streams.json",
        "llama_cpp_q8_0_native_streams.json",
    ),
}


def table(name: str, results: Path = RESULTS) -> str:
    """Text of a table; empty while one of its result files is missing.

    Raises:
        SystemExit: no table has this name.
    """
    if name not in TABLES:
        sys.exit(f"a page names table `{name}`; known are {', '.join(TABLES)}")
    make, *files = TABLES[name]
    paths = [results / file for file in files]
    if not all(path.is_file() for path in paths):
        return ""
    return make(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))


def filled(text: str, results: Path = RESULTS) -> str:
    """Text of a page with every table filled from its result."""
    return MARKED.sub(lambda found: found[1] + table(found[2], results) + found[4], text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the pages; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    outdated = [page for page in PAGES if (text := page.read_text(encoding="utf-8")) != filled(text)]
    for page in outdated:
        if check:
            print(f"{page.name} is out of date: run python scripts/readme_tables.py", file=sys.stderr)
        else:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
