"""Pictures of a measurement, drawn from its JSON document alone: a saved one gives the same pictures again.

A document's schema says which panels it has; each panel is one set of axes. matplotlib comes with the extra `plots`.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_cli.errors import UsageError
from specdec_cli.report.endpoint import FIGURE_NAMES, acceptance_by_position
from specdec_cli.report.train import training_heading
from specdec_cli.text.printable import printable
from specdec_cli.train.documents import TrainDocument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]

ENDINGS = (".png", ".svg")
_SIZE = 5.2, 3.4  # inches of one panel
_LONG = 24  # letters of a name that leaves no room for another beside it
_INK = "#010203"  # stands for the page's own colour of text
_BLUE, _ORANGE, _GREEN, _GREY = "#3b7dd8", "#d9822b", "#2f9e63", "#8a8f98"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#b4579f", "#c0504d", "#5aa7b8", "#8c6d3f", _GREY)
_STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
_PARTS = (("draft", _ORANGE), ("verify", _BLUE), ("overhead", _GREY))


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Args:
        title: what it shows.
        draw: draws it from a document; nothing where the document has nothing to show.
    """

    title: str
    draw: Callable[[Axes, Document], None]


def check_available(flag: str) -> None:
    """Refuse to begin work whose pictures could not be drawn at its end.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"`{flag}` draws with matplotlib, which is not installed", "`pip install 'specdec-cli[plots]'`"
        )
    # Where the home is read-only it says in two paragraphs that it keeps its settings elsewhere.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def check_plot(path: Path) -> None:
    """Refuse a picture that is neither PNG nor SVG.

    Raises:
        UsageError: it is not, or matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"`--plot {path}` must end in {' or '.join(ENDINGS)}", "for example `--plot speedup.svg`")
    check_available("--plot")


def plot(document: Document) -> Figure:
    """All panels of a document in one figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = panels_of(document)
    width, height = _SIZE
    with rc_context(dict(_STYLE)):
        figure = Figure(figsize=(width * 2, height * -(-len(panels) // 2) + 0.4), layout="constrained")
        figure.suptitle(_safe(heading(document)))
        for place, panel in enumerate(panels):
            _drawn(panel, figure.add_subplot(-(-len(panels) // 2), 2, place + 1), document)
    return figure


def picture(document: Document, ending: str) -> bytes:
    """The figure as a file's content, for a white page.

    Args:
        document: of a measurement.
        ending: `.png` or `.svg`.
    """
    from matplotlib import rc_context

    file = io.BytesIO()
    metadata = {"Date": None} if ending == ".svg" else {}
    with rc_context(dict(_STYLE) | {"svg.hashsalt": "specdec"}):
        plot(document).savefig(file, format=ending[1:], dpi=150, facecolor="white", metadata=metadata)
    return file.getvalue()


def inline_svgs(document: Document) -> list[tuple[str, str]]:
    """Each panel's title and SVG, to stand in a page: it takes the page's colour of text and has no background."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    svgs = []
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    for place, panel in enumerate(panels_of(document)):
        with rc_context(dict(_STYLE) | ink | {"svg.hashsalt": f"specdec {place}"}):
            figure = Figure(figsize=_SIZE, layout="constrained")
            _drawn(panel, figure.add_subplot(), document, has_title=False)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "currentColor")
        text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        svgs.append((panel.title, re.sub(r'<g id="[^"]*">', "<g>", text)))
    return svgs


def panels_of(document: Document) -> Sequence[Panel]:
    """The plots of a document.

    Raises:
        UsageError: no document of a measurement.
    """
    panels = _PANELS.get(str(document.get("schema")))
    if panels is None:
        raise UsageError(f"there is no plot of `{document.get('schema')}`", f"there are plots of {', '.join(_PANELS)}")
    by = (document.get("plan") or {}).get("by")
    return panels if by is None else [*panels, Panel(f"Acceptance length by {by}", _length_by_group)]


def _drawn(panel: Panel, axes: Axes, document: Document, has_title: bool = True) -> None:
    if has_title:
        axes.set_title(panel.title, fontsize=10, loc="left")
    panel.draw(axes, document)
    if labels := axes.get_legend_handles_labels()[1]:
        columns = 1 if max(map(len, labels)) > _LONG else min(len(labels), 3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)
    if not axes.has_data():
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)


def heading(document: Document) -> str:
    """The measurement's subject, in a line."""
    recipe, name = document["recipe"], str(document["schema"]).partition("/")[0].removeprefix("specdec.")
    if "endpoint" in document:
        return f"specdec {name}: {subject(document)}"
    if document["schema"] == TrainDocument.schema_name:
        return training_heading(document)
    drafts = recipe["draft"] if isinstance(recipe["draft"], list) else [recipe["draft"]]
    named = ", ".join(_draft_words(str(draft.get("model") or draft.get("method"))) for draft in drafts)
    is_synthetic = recipe["speculation"]["verify"] == "synthetic"
    return f"specdec {name}: {recipe['target']['model']} with {named}{', synthetic acceptance' * is_synthetic}"


def subject(document: Document) -> str:
    """The measurement's subject: the target, or a server's model and its address."""
    if "endpoint" in document:
        return f"{document['endpoint']['model']} at {document['endpoint']['url']}"
    return str(document["recipe"]["target"]["model"])


def _safe(text: object) -> str:
    """Text as it is: no formula, no control characters, no label that matplotlib hides."""
    return " " * str(text).startswith("_") + printable(str(text)).replace("\n", " ").replace("$", r"\$")


def _draw_points(axes: Axes, rows: Sequence[tuple[str, Mapping[str, Any]]], scale: float = 1) -> None:
    """Figures with their intervals below each other, the first one apart; what was not measured is left out."""
    rows = [(name, interval) for name, interval in rows if interval["median"] is not None]
    for place, (_, interval) in enumerate(rows):
        ends = None if interval["ci95"] is None else [scale * end for end in interval["ci95"]]
        _point(axes, scale * interval["median"], place, ends, _BLUE if place else _ORANGE, is_flat=True)
    axes.set_yticks(range(len(rows)), [_safe(name) for name, _ in rows])
    axes.invert_yaxis()


def _speedup_by_task(axes: Axes, document: Document) -> None:
    rows = [("all", document["speedup"]["decode"])]
    rows += [(task, part["speedup"]["decode"]) for task, part in document["by_task"].items()]
    _draw_points(axes, rows)
    if axes.has_data():
        axes.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    axes.set_xlabel("speed-up of decoding (95 % interval)")


def _length_by_group(axes: Axes, document: Document) -> None:
    """1 + accepted tokens per step, of all steps of each group of prompts together."""
    groups = {"all": document, **document["by_task"]}
    if "endpoint" in document:
        rows = [(name, part["acceptance"]["length"]) for name, part in groups.items() if part["acceptance"]]
    else:
        lengths = {name: part["draft"]["speculative"]["acceptance_length"] for name, part in groups.items()}
        rows = [(name, {"median": length, "ci95": None}) for name, length in lengths.items()]
    _draw_points(axes, rows)
    axes.set_xlabel("tokens per step that drafted")


def _point(
    axes: Axes, x: float, y: float, ends: Sequence[float] | None, colour: str, is_flat: bool = False, label: str = ""
) -> None:
    """A figure with its interval, which is along x where it is flat."""
    at = x if is_flat else y
    spread = None if ends is None else [[max(at - ends[0], 0)], [max(ends[1] - at, 0)]]
    along, across = (spread, None) if is_flat else (None, spread)
    axes.errorbar(
        [x], [y], xerr=along, yerr=across, fmt="o", markersize=5, capsize=3, color=colour, label=label or None
    )


def _by_position(axes: Axes, series: Sequence[tuple[str, Sequence[float | None]]]) -> None:
    for place, (name, rates) in enumerate(series):
        known = [(i + 1, rate) for i, rate in enumerate(rates) if rate is not None]
        if known:
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(*zip(*known, strict=True), "o-", markersize=4, color=colour, label=_safe(name))
    axes.set_ylim(0, 1.03)
    _whole_numbers(axes)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted up to here")


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _time_split(axes: Axes, names: Sequence[str], parts: Sequence[Mapping[str, float]], label: str) -> None:
    for place, (name, colour) in enumerate(_PARTS if parts else ()):
        starts = [sum(part[other] for other, _ in _PARTS[:place]) for part in parts]
        axes.barh(range(len(parts)), [part[name] for part in parts], left=starts, color=colour, label=name, height=0.6)
    axes.set_yticks(range(len(names)), [_safe(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


def _per_token(counts: Mapping[str, Any]) -> dict[str, float] | None:
    """Milliseconds of a decoded token, by what they went to."""
    num = counts["num_emitted_tokens"]
    return {name: 1000 * counts[f"{name}_seconds"] / num for name, _ in _PARTS} if num else None


def _split_of(axes: Axes, named: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    known = [(name, split) for name, counts in named if (split := _per_token(counts)) is not None]
    _time_split(axes, [name for name, _ in known], [split for _, split in known], "milliseconds per decoded token")


def _bench_positions(axes: Axes, document: Document) -> None:
    counts = document["draft"]["speculative"]
    marginal, conditional = (counts[f"{kind}_acceptance_rates"] for kind in ("per_position", "conditional"))
    _by_position(axes, [("all up to this position", marginal), ("this position, given those before", conditional)])
    axes.set_ylabel("accepted")


def _endpoint_times(axes: Axes, document: Document, figure: str) -> None:
    """A figure of all answers and of each task, with its interval."""
    named = {"all": document["timing"], **{task: part["timing"] for task, part in document["by_task"].items()}}
    _draw_points(axes, [(task, timing[figure]) for task, timing in named.items()], scale=1000)
    axes.set_xlabel(f"{FIGURE_NAMES[figure]}, milliseconds (95 % interval)")


def _endpoint_acceptance(axes: Axes, document: Document) -> None:
    """Acceptance by task if the answers report it, else by position if the server's counters do."""
    if document["acceptance"] is None:
        _by_position(axes, acceptance_by_position(document))
        return
    named = {"all": document, **document["by_task"]}
    _draw_points(axes, [(task, part["acceptance"]["rate"]) for task, part in named.items() if part["acceptance"]])
    axes.set_xlabel("accepted share of drafted tokens (95 % interval)")


def _bench_split(axes: Axes, document: Document) -> None:
    _split_of(axes, [(name, document[key]["speculative"]) for name, key in (("no draft", "plain"), ("draft", "draft"))])


def _sweep_speedup(axes: Axes, document: Document) -> None:
    by_size = document["by_batch_size"]
    for place, at_size in enumerate(by_size):
        if len(by_size) > 1:
            colours = (_COLOURS[place % len(_COLOURS)],) * 2
            labels = "", f"batch size {at_size['batch_size']}"
        else:
            colours, labels = (_BLUE, _ORANGE), ("predicted", "measured")
        _sweep_curves(axes, at_size["rows"], colours, labels, 0.18 / len(by_size))
    ks = [row["k"] for row in document["rows"] if row["predicted"] is not None]
    textbook = [(k, document["iid"]["speedup_by_k"].get(str(k))) for k in ks]
    if textbook and len(by_size) == 1 and all(value is not None for _, value in textbook):
        axes.plot(*zip(*textbook, strict=True), ":", color=_GREY, label="textbook")
    _against_k(axes)


def _sweep_curves(
    axes: Axes, rows: Sequence[Mapping[str, Any]], colours: tuple[str, str], labels: tuple[str, str], alpha: float
) -> None:
    """A line of what was predicted and points of what was measured."""
    known = [(row["k"], at_k) for row in rows if (at_k := row["predicted"]) and at_k["speedup"] is not None]
    if known:
        ks = [k for k, _ in known]
        axes.plot(ks, [at_k["speedup"] for _, at_k in known], "-", color=colours[0], label=labels[0] or None)
        ends = [at_k["ci95"] or [at_k["speedup"]] * 2 for _, at_k in known]
        axes.fill_between(ks, [e[0] for e in ends], [e[1] for e in ends], color=colours[0], alpha=alpha, linewidth=0)
    label = labels[1]
    for row in rows:
        if row["measured"] is not None:
            _point(axes, row["k"], row["measured"]["speedup"], row["measured"]["ci95"], colours[1], label=label)
            label = ""


def _against_k(axes: Axes) -> None:
    if axes.has_data():
        axes.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    _whole_numbers(axes)
    axes.set_xlabel("k")
    axes.set_ylabel("speed-up of decoding (95 %)")


def _sweep_positions(axes: Axes, document: Document) -> None:
    series = []
    for kind in ("predicted", "measured"):
        rows = [row for row in document["rows"] if row[kind] is not None]
        if rows:
            deepest = rows[-1]
            series.append((f"{kind}, k = {deepest['k']}", deepest[kind]["per_position_acceptance_rates"]))
    _by_position(axes, series)


def _sweep_split(axes: Axes, document: Document) -> None:
    rows = [row for row in document["rows"] if row["predicted"] and row["predicted"]["shares"]]
    shares = [{name: 100 * row["predicted"]["shares"][name] for name, _ in _PARTS} for row in rows]
    at = f" at batch size {document['by_batch_size'][0]['batch_size']}" if len(document["by_batch_size"]) > 1 else ""
    _time_split(axes, [f"k = {row['k']}" for row in rows], shares, f"predicted share of a step{at}, %")


def _draft_words(name: str) -> str:
    """A draft's name, from a module whose statistics completion must not wait for."""
    from specdec_cli.report.compare_drafts import draft_words

    return draft_words(name)


def _pareto(axes: Axes, document: Document) -> None:
    for place, row in enumerate(document["rows"]):
        if row["cost_ratio"] is None or row["acceptance_rate"] is None:
            continue
        speedup, colour = row["speedup"]["median"], _COLOURS[place % len(_COLOURS)]
        message = "" if speedup is None else f" {speedup:.2f}× (k = {row['best_k']})"
        axes.scatter([row["cost_ratio"]], [row["acceptance_rate"]], s=60 * (speedup or 0.5), color=colour, alpha=0.85)
        axes.annotate(
            _safe(_draft_words(row["draft"])) + message,
            (row["cost_ratio"], row["acceptance_rate"]),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=8,
        )
    axes.margins(0.25)
    axes.set_xlabel("cost of a drafted token (plain step = 1)")
    axes.set_ylabel("acceptance rate")


def _compare_speedup(axes: Axes, document: Document) -> None:
    for place, row in enumerate(row for row in document["rows"] if row["best_k"]):
        colour = _COLOURS[place % len(_COLOURS)]
        known = [(at_k["k"], at_k["speedup"]["median"]) for at_k in row["predicted"] or () if at_k["speedup"]["median"]]
        if known:
            axes.plot(*zip(*known, strict=True), "-", color=colour, linewidth=1.2)
        label = _safe(_draft_words(row["draft"]))
        for at_k in row["measured"]:
            if at_k["speedup"]["median"] is not None:
                _point(axes, at_k["k"], at_k["speedup"]["median"], at_k["speedup"]["ci95"], colour, label=label)
                label = ""
    _against_k(axes)


def _compare_positions(axes: Axes, document: Document) -> None:
    rows = [row for row in document["rows"] if row["best_k"]]
    _by_position(axes, [(row["draft"], row["speculative"]["per_position_acceptance_rates"]) for row in rows])


def _compare_split(axes: Axes, document: Document) -> None:
    rows = [(row["draft"], row["speculative"]) for row in document["rows"] if row["best_k"]]
    _split_of(axes, [("no draft", document["plain"]["speculative"]), *rows])


def _training_acceptance(axes: Axes, document: Document) -> None:
    points = [(evaluation["step"], evaluation["acceptance_length"]) for evaluation in document["evaluations"]]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, color=_BLUE)
    axes.set_xlabel("step")
    axes.set_ylabel("tokens a verification")


def _training_positions(axes: Axes, document: Document) -> None:
    evaluations, best = document["evaluations"], document["best"]
    shown = [evaluation for evaluation in (*evaluations[:1], best) if evaluation is not None]
    _by_position(axes, [(f"step {evaluation['step']}", evaluation["acceptance_by_depth"]) for evaluation in shown])


def _training_loss(axes: Axes, document: Document) -> None:
    points = [(point["step"], point["loss"]) for point in document["curve"]]
    if points:
        axes.plot(*zip(*points, strict=True), color=_ORANGE)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")


_PANELS: Mapping[str, Sequence[Panel]] = {
    "specdec.bench/1": (
        Panel("Speed-up by task", _speedup_by_task),
        Panel("Acceptance by position", _bench_positions),
        Panel("Where the time goes", _bench_split),
    ),
    "specdec.sweep-k/1": (
        Panel("Speed-up against k (line: predicted)", _sweep_speedup),
        Panel("Acceptance by position", _sweep_positions),
        Panel("Where the time goes", _sweep_split),
    ),
    "specdec.compare-drafts/1": (
        Panel("Cost against acceptance; larger is faster", _pareto),
        Panel("Speed-up against k (lines: predicted)", _compare_speedup),
        Panel("Acceptance by position", _compare_positions),
        Panel("Where the time goes", _compare_split),
    ),
    TrainDocument.schema_name: (
        Panel("Acceptance length on held-out prompts", _training_acceptance),
        Panel("Acceptance by position", _training_positions),
        Panel("Loss", _training_loss),
    ),
    "specdec.bench-endpoint/1": (
        Panel("Time to first text", partial(_endpoint_times, figure="ttft_s")),
        Panel("Time per token after it", partial(_endpoint_times, figure="tpot_s")),
        Panel("Whole answers", partial(_endpoint_times, figure="latency_s")),
        Panel("Acceptance", _endpoint_acceptance),
    ),
}
