"""Sentences about one request, token, prompt or run: none says `1 requests`."""

from __future__ import annotations

import re

from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS, NODES, statistics
from specdec_cli.measure.imported.record import ImportedRun
from specdec_cli.report.audit import audit_facts
from specdec_cli.report.bench import lossless_words
from specdec_cli.report.endpoint import acceptance_words, counter_lines, requests_words, throughput_words
from specdec_cli.report.slo import capacity_words


def test_no_sentence_has_one_of_a_plural() -> None:
    level = {"users": 2, "requests": 1, "failed": 1}
    capacity = {"users": 1, "is_bound": True, "levels": [level], "limited_by": "failures"}
    rate = {"median": 1.0, "ci95": None}
    counts = statistics({DRAFTS: 1, DRAFTED: 1, ACCEPTED: 1, NODES: 1})
    counters = {"engine": "specdec", "source": "/metrics", "speculative": counts, "gauges": {}}
    checked = {"runs": 1, "planned_runs": 1, "tokens": 1, "prompts": 1, "draws": 1}
    audit = {
        "checked": checked,
        "mode": "greedy",
        "machine": {},
        "environment": {},
        "created": "",
        "specdec_version": "",
    }
    said = [
        requests_words({"requests": {"answered": 1, "planned": 1}, "plan": {"concurrency": 1, "request_rate": None}}),
        throughput_words(
            {
                "output": {"tokens": 1, "counted_by": "usage", "chunks": 1},
                "throughput": {"requests_per_second": 1.0, "output_tokens_per_second": 1.0, "seconds": 1.0},
            }
        ),
        acceptance_words({"requests": 1, "rate": rate, "length": rate}),
        *counter_lines(counters),
        lossless_words({"promised": True, "checked_tokens": 1, "mismatches": 0}),
        capacity_words("draft", capacity, {"share": 0.9}),
        dict(audit_facts(audit))["compared"],
        ImportedRun("vllm", "log", {DRAFTED: 1, ACCEPTED: 2}).contradiction(),
    ]
    plural = re.compile(r"(?<![\d.])1 (drafted token|token|request|prompt|chunk|step|node|draw|answer)s\b")
    assert [words for words in said if plural.search(str(words))] == []
