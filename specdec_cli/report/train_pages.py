"""A training run's part of pages and pictures, from its document alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec_cli.report.table import NOTHING, PageTable, number, percent
from specdec_cli.train.words import counted

SCHEMA = "specdec.train/1"
_MOST_POINTS = 400

Document = Mapping[str, Any]


def loss_curve(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Step, mean loss and mean share of right guesses of so many neighbouring steps that a picture can show.

    Args:
        rows: of the log.
    """
    steps = [row for row in rows if row["event"] == "step"]
    size = max(1, -(-len(steps) // _MOST_POINTS))
    found = []
    for begin in range(0, len(steps), size):
        part = steps[begin : begin + size]
        found.append({"step": part[-1]["step"], "loss": round(sum(row["loss"] for row in part) / len(part), 5)})
    return found


def training_heading(document: Document) -> str:
    """The run's subject, in a line."""
    recipe = document["recipe"]
    return f"specdec train-draft: {recipe['train']['method']} for {recipe['target']['model']}"


def train_facts(document: Document) -> list[tuple[str, str]]:
    """How the draft was trained, each fact with its name."""
    environment, train = document["environment"], document["recipe"]["train"]
    named = ("cpu", "gpu", "device", "dtype", "threads", "torch", "transformers", "python")
    settled = ", ".join(f"{key} {value}" for key, value in document["settled"].items())
    steps = f"{document['num_steps']}{', interrupted' if document['interrupted'] else ''}"
    return [
        ("method", f"{train['method']}{f': {settled}' if settled else ''}"),
        ("data", str(train["data"])),
        ("steps", f"{steps}, {document['num_tokens']} tokens, {document['seconds']:.0f} s"),
        ("machine", ", ".join(f"{name} {environment[name]}" for name in named if environment.get(name) is not None)),
        ("made", f"{document['created']} by specdec {document['specdec_version']}"),
    ]


def train_findings(document: Document) -> list[str]:
    """The best acceptance that was measured."""
    best = document["best"]
    if best is None:
        return ["acceptance was not measured"]
    held_out = counted(document["recipe"]["train"]["num_held_out"], "held-out prompt")
    length = f"{best['acceptance_length']:.2f}"
    return [f"Acceptance length {length} at k = {best['k']} on {held_out}, after step {best['step']}."]


def train_tables(document: Document) -> Iterator[PageTable]:
    """Acceptance at each evaluation."""
    depths = max((one["k"] for one in document["evaluations"]), default=0)
    heads = ("step", "loss", "length", "accepted", *(f"depth {depth}" for depth in range(1, depths + 1)))
    rows = []
    for one in document["evaluations"]:
        before = [point["loss"] for point in document["curve"] if point["step"] <= one["step"]]
        shares = [percent(rate) for rate in one["acceptance_by_depth"]]
        shares += [NOTHING] * (depths - len(shares))
        figures = [number(before[-1], 3) if before else NOTHING, number(one["acceptance_length"])]
        rows.append([str(one["step"]), *figures, percent(one["acceptance_rate"]), *shares])
    yield PageTable("Acceptance on held-out prompts", heads, rows)
