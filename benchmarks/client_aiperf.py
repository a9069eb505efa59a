"""AIPerf against a server: the acceptance in its report is held against the server's own counters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client_libraries import Place

PROGRAM = "aiperf"
NUM_REQUESTS, NUM_TOKENS = 12, 32
_COUNTERS = {
    "total_spec_decode_steps": "spec_decode_num_drafts_total",
    "total_draft_tokens": "spec_decode_num_draft_tokens_total",
    "total_accepted_draft_tokens": "spec_decode_num_accepted_tokens_total",
}
_PROMPTS = (
    "Once upon a time",
    "The little dog ran to the park and",
    "Lily and Tom wanted to play",
    "One day, a big bear",
)


def try_aiperf(place: Place, folder: str) -> Iterator[dict[str, Any]]:
    """Twelve streamed chats; its totals must be what the server counted, and its report must find the length."""
    with tempfile.TemporaryDirectory() as made:
        run, prompts = Path(made) / "coding", Path(made) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in _PROMPTS))
        before = _counts(place)
        done = _run(
            *("profile", "-m", place.model, "--url", place.url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", folder, "--api-key", place.api_key, "--use-server-token-count"),
            *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
            *("--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
            *("--extra-inputs", f"max_tokens:{NUM_TOKENS}", "--extra-inputs", "temperature:0"),
            *("--export-level", "records", "--artifact-dir", str(run), "--ui", "none"),
        )
        if done.returncode:
            yield {"what": "profile", "result": f"exit {done.returncode}: {done.stdout[-500:]}"}
            return
        after = _counts(place)
        report = json.loads((run / "profile_export_aiperf.json").read_text())
        told = {name: report[name]["avg"] for name in _COUNTERS}
        counted = {name: after[name] - before[name] for name in _COUNTERS}
        yield {"what": "totals", "aiperf": told, "server": counted, "result": _result(told == counted)}
        records = [json.loads(line) for line in (run / "profile_export.jsonl").read_text().splitlines()]
        num_steps = sum(len(record["spec_decode_acceptance"]["per_step_accepted"] or ()) for record in records)
        yield {
            "what": "profile_export.jsonl",
            "steps": num_steps,
            "result": _result(num_steps == counted["total_spec_decode_steps"]),
        }
        yield _speed_bench(run, 1 + counted["total_accepted_draft_tokens"] / counted["total_spec_decode_steps"])


def _speed_bench(run: Path, length: float) -> dict[str, Any]:
    """The report by category; the run's own data set takes the name of one, because hubs may be out of reach."""
    config = run / "profile_export_aiperf.json"
    document = json.loads(config.read_text())
    document["input_config"]["datasets"][0]["format"] = f"speed_bench_{run.name}"
    config.write_text(json.dumps(document))
    table = run / "report.csv"
    done = _run("speed-bench-report", str(run), "--metric", "accept_length", "--format", "csv", "--output", str(table))
    if done.returncode:
        return {"what": "speed-bench-report", "result": f"exit {done.returncode}: {done.stdout[-500:]}"}
    shown = float(table.read_text().split()[-1].split(",")[-1])
    is_equal = abs(shown - length) < 0.01
    return {"what": "speed-bench-report", "aiperf": shown, "server": length, "result": _result(is_equal)}


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which(PROGRAM)
    assert program is not None, "main looked for the program"
    # Offline, AIPerf takes a local tokenizer's folder for a hub id; PYTHONPATH is of another environment.
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, env=environment)


def _counts(place: Place) -> dict[str, float]:
    """The server's counters, summed over their labels, by AIPerf's names."""
    asked = urllib.request.Request(place.url + "/metrics", headers={"authorization": f"Bearer {place.api_key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = [line.rpartition(" ") for line in lines]
    named = [(name.partition("{")[0].partition(":")[2], float(value)) for name, _, value in values]
    return {ours: sum(value for name, value in named if name == theirs) for ours, theirs in _COUNTERS.items()}


def _result(is_equal: bool) -> str:
    return "equal" if is_equal else "different"
