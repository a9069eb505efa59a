"""Plots and the page: from documents alone, with nothing to execute, nothing fetched, and hostile names as text."""

import copy
import html.parser
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typed import not_none, stand_in

from specdec_cli.errors import UsageError
from specdec_cli.report import plot
from specdec_cli.report.html import html as page_of

pytest.importorskip("matplotlib")
EVIL = "<script>alert(1)</script>\x1b[31m$x_1$ & \"'"
NO = {"median": None, "ci95": None, "pairs": 0}


def interval(median: float) -> dict[str, Any]:
    return {"median": median, "ci95": [median - 0.1, median + 0.1], "pairs": 8}


def counts(num: int = 40, k: int = 3) -> dict[str, Any]:
    return {
        "num_emitted_tokens": num, "acceptance_rate": 0.6, "acceptance_length": 2.4,
        "per_position_acceptance_rates": [0.8, 0.6, None][:k], "conditional_acceptance_rates": [0.8, 0.7, None][:k],
        "draft_seconds": 0.1, "verify_seconds": 0.3, "overhead_seconds": 0.05,
    }  # fmt: skip


def totals() -> dict[str, Any]:
    timing = {"ttft_s": 0.01, "decode_s": 0.5, "total_s": 0.51, "decode_tokens_per_second": 80.0}
    return {"timing": timing, "speculative": counts()}


def head(schema: str) -> dict[str, Any]:
    return {
        "schema": schema, "specdec_version": "0", "created": "2026-01-01T00:00:00Z",
        "environment": {"platform": EVIL, "device": "cpu", "dtype": "float32", "threads": 2, "torch": "2"},
        "recipe": {
            "target": {"model": EVIL}, "draft": {"model": EVIL, "method": None}, "speculation": {"verify": "auto"},
        },
        "workload": {"num_prompts": 4, "dataset": EVIL},
        "plan": {"repeats": 2, "batch_size": 1, "order": "A B B A", "passes": 9, "interrupted": True},
        "machine": {"load_before": 0.1, "load_after": 0.2, "num_cores": 2, "busy": EVIL},
        "lossless": {"promised": True, "verify": "greedy", "checked_tokens": 8, "mismatches": 0},
        "notices": [EVIL],
        "gates": [{"expression": EVIL, "passed": False, "reason": EVIL}],
    }  # fmt: skip


def bench() -> dict[str, Any]:
    speedup = {"decode": interval(1.5), "latency": interval(1.4)}
    task = {"num_prompts": 2, "plain": totals(), "draft": totals(), "speedup": speedup}
    return head("specdec.bench/1") | {
        "plain": totals(), "draft": totals(), "against": {"transformers": totals() | {"speedup": speedup}},
        "speedup": speedup, "by_task": {EVIL: task, "_hidden": task}, "findings": [EVIL, "two"],
    }  # fmt: skip


def sweep() -> dict[str, Any]:
    shares = {"draft": 0.2, "verify": 0.7, "overhead": 0.1}
    rows = []
    for k in (1, 2, 3):
        said = {"speedup": 1 + k / 10, "ci95": [1.0, 1.6], "per_position_acceptance_rates": [0.8] * k}
        row: dict[str, Any] = {"k": k, "acceptance_length": 1.5, "predicted": said | {"shares": shares}}
        rows.append(row | {"measured": said if k > 1 else None})
    found = {
        "rows": rows,
        "recommended": {"k": 2, "speedup": interval(1.2), "why": EVIL, "verdict": "speculate", "needs": []},
        "costs": {
            "draft_seconds_per_token": 0.001, "overhead_seconds": 0.001, "target_seconds_by_rows": [0.01, 0.011],
        },
    }  # fmt: skip
    return head("specdec.sweep-k/1") | found | {
        "by_batch_size": [{"batch_size": 1} | found], "k_by_batch": "1:2",
        "iid": {"alpha": 0.7, "speedup_by_k": {"1": 1.1, "2": 1.2, "3": 1.3}},
    }  # fmt: skip


def sweep_of_batch_sizes() -> dict[str, Any]:
    document = sweep()
    [first] = document["by_batch_size"]
    none = {"k": 0, "speedup": None, "why": "no", "verdict": "do-not-speculate", "needs": []}
    return document | {
        "by_batch_size": [first, first | {"batch_size": 4, "recommended": none}], "k_by_batch": "1:2,4:0",
    }  # fmt: skip


def compare() -> dict[str, Any]:
    rows = [
        {
            "draft": name, "best_k": k, "cost_ratio": cost, "acceptance_rate": rate, "acceptance_length": 2.0,
            "memory_bytes": 10**6 * k, "speedup": interval(1.2), "latency_speedup": interval(1.1),
            "predicted": [{"k": 1, "speedup": interval(1.1)}] if k else None,
            "measured": [{"k": k, "speedup": interval(1.2)}], **totals(),
        }
        for name, k, cost, rate in ((EVIL, 2, 0.1, 0.8), ("_b", 3, 0.4, 0.9), ("none", 0, 0.0, None))
    ]  # fmt: skip
    document = head("specdec.compare-drafts/1") | {
        "plain": totals(), "rows": rows, "recommendation": EVIL,
        "task_winners": {EVIL: {"draft": EVIL, "speedup": NO}},
        "pairwise": [{"a": EVIL, "b": "none", "speedup_ratio": 1.2, "ci95": None, "p_a_faster": 1.0}],
    }  # fmt: skip
    document["recipe"]["draft"] = [document["recipe"]["draft"], {"model": None, "method": "none"}]
    return document


def endpoint() -> dict[str, Any]:
    times = interval(0.2) | {"p95": 0.3, "p99": 0.4, "values": 8}
    timing = {"ttft_s": times, "tpot_s": NO | {"p95": None, "p99": None, "values": 0}, "latency_s": times}
    task = {"num_prompts": 2, "output_tokens": None, "timing": timing, "acceptance": None}
    plan = {
        "concurrency": None, "request_rate": 2.5, "repeats": 2, "chat": True, "interrupted": True,
    }  # fmt: skip
    document = head("specdec.bench-endpoint/1") | {
        "recipe": {"sampling": {}, "workload": {}, "gates": {}}, "plan": plan, "timing": timing,
        "endpoint": {"url": EVIL, "model": EVIL, "server": EVIL, "version": "1", "proxy": EVIL},
        "requests": {"planned": 8, "answered": 7, "failed": 1}, "by_task": {EVIL: task, "_b": task},
        "by_turn": {"1": task, "2": task}, "output": {"tokens": 80, "counted_by": "the server's usage", "chunks": 40},
        "throughput": {"seconds": 4.0, "output_tokens_per_second": 20.0, "requests_per_second": 2.0},
        "acceptance": {"requests": 7, "rate": interval(0.6), "length": NO}, "counters": None,
        "errors": [{"index": 1, "id": EVIL, "repeat": 0, "status": 500, "message": EVIL}],
    }  # fmt: skip
    del document["lossless"]
    return document


PAIRS = [bench, sweep, sweep_of_batch_sizes, compare]
DOCUMENTS = [*PAIRS, endpoint]


class Reader(html.parser.HTMLParser):
    """Tags, the open ones, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.open, self.text, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("make", DOCUMENTS)
def test_the_page_is_one_file_of_text_and_pictures(make) -> None:
    document = make()
    before = copy.deepcopy(document)
    text = page_of(document)
    assert document == before
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "script" not in reader.tags
    assert "alert(1)" in "".join(reader.text), "names are there, as text"
    assert "\x1b" not in text
    assert reader.tags.count("svg") == len(plot.panels_of(document))
    fetched = [value for _, name, value in reader.attributes if name in ("src", "href", "xlink:href")]
    assert [value for value in fetched if not str(value).startswith("#")] == []
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "prefers-color-scheme: dark" in text
    assert "#010203" not in text, "the pictures take the page's ink"
    assert text.count("currentColor") > 10


@pytest.mark.in_turn(1, every=5)
@pytest.mark.parametrize("make", DOCUMENTS)
def test_the_same_document_gives_the_same_picture(make) -> None:
    document = make()
    svg = plot.picture(document, ".svg")
    assert svg == plot.picture(make(), ".svg")
    words = "".join(ET.fromstring(svg).itertext())
    assert "alert(1)" in words
    for panel in plot.panels_of(document):
        assert panel.title in words
    assert plot.picture(document, ".png").startswith(b"\x89PNG")


def test_what_is_drawn_is_what_stands_there() -> None:
    found, measured = plot.plot(sweep()).axes[0], []
    [line] = [one for one in found.lines if one.get_label() == "predicted"]
    assert list(stand_in(line.get_ydata())) == pytest.approx([1.1, 1.2, 1.3])
    measured = [tuple(one[0].get_xdata()) for one in found.containers]
    assert measured == [(2,), (3,)]
    both = plot.plot(sweep_of_batch_sizes()).axes[0]
    assert [text.get_text() for text in not_none(both.get_legend()).get_texts()] == ["batch size 1", "batch size 4"]
    assert len(both.containers) == 4
    tasks = plot.plot(bench()).axes[0]
    assert [label.get_text().strip() for label in tasks.get_yticklabels()][2] == "_hidden"
    assert len(tasks.containers) == 3
    pareto = plot.plot(compare()).axes[0]
    assert [tuple(stand_in(one.get_offsets())[0]) for one in pareto.collections] == [(0.1, 0.8), (0.4, 0.9)]


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("make", PAIRS)
def test_a_picture_of_synthetic_acceptance_says_so(make) -> None:
    document = make()
    assert b"synthetic" not in plot.picture(document, ".svg")
    document["recipe"]["speculation"]["verify"] = "synthetic"
    assert b", synthetic acceptance" in plot.picture(document, ".svg")


def test_a_servers_acceptance_is_by_task_or_by_position() -> None:
    document = endpoint()
    points = plot.plot(document).axes[3]
    assert [tuple(one[0].get_xdata()) for one in points.containers] == [(0.6,)]
    rates = {"per_position_acceptance_rates": [0.9, 0.5], "conditional_acceptance_rates": [0.9, 0.55]}
    document |= {"acceptance": None, "counters": {"speculative": rates}}
    lines = plot.plot(document).axes[3].lines
    assert [list(stand_in(line.get_ydata())) for line in lines] == [[0.9, 0.5], [0.9, 0.55]]
    document["counters"] = None
    assert b"nothing was measured" in plot.picture(document, ".svg")


def test_nothing_measured_is_said() -> None:
    document = bench()
    document["speedup"] = {"decode": NO, "latency": NO}
    document["by_task"] = {}
    assert b"nothing was measured" in plot.picture(document, ".svg")
    assert page_of(document)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png or \.svg"):
        plot.check_plot(tmp_path / "x.pdf")
    with pytest.raises(UsageError, match=r"no plot of `specdec\.generate/1`"):
        plot.plot({"schema": "specdec.generate/1"})
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="`--plot` draws with matplotlib, which is not installed") as error:
        plot.check_plot(tmp_path / "x.svg")
    assert error.value.hint == "`pip install 'specdec-cli[plots]'`"
