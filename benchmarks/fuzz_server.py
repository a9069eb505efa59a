"""The server against its own description: schemathesis makes requests of /openapi.json, right ones and wrong ones.

    python -m venv fuzz && fuzz/bin/pip install schemathesis
    python benchmarks/fuzz_server.py --schemathesis fuzz/bin/st

None may be answered with 5xx or take more than 5 seconds. The context is short, so that a long answer is no hang. The
requests that make up the coverage of the description are always the same; the others follow from the seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from served import serving

MAX_SECONDS = 5.0
SERVER = ("--max-choices", "4", "--max-model-len", "64")


def fuzz(schemathesis: str, url: str, num_examples: int, seed: int, report: Path) -> None:
    """Let schemathesis write what it asked and heard into a file."""
    words = [schemathesis, "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--seed", str(seed)]
    words += ["--checks", "not_a_server_error", "--max-response-time", f"{MAX_SECONDS:g}", "--no-shrink", "--no-color"]
    words += ["--max-examples", str(num_examples), "--continue-on-failure", "--max-failures", "1000"]
    words += ["--report", "ndjson", "--report-ndjson-path", str(report)]
    subprocess.run(words, check=False, stdout=sys.stderr, cwd=report.parent)


def exchanges(report: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Operation and answer of every request; None where there was no answer."""
    for line in report.read_text(encoding="utf-8").splitlines():
        scenario = json.loads(line).get("ScenarioFinished")
        for one in scenario["recorder"]["interactions"].values() if scenario else ():
            yield scenario["recorder"]["label"], one.get("response")


def main() -> int:
    """Fuzz a server of the built-in pair and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="st", help="its command")
    parser.add_argument("--examples", type=int, default=100, help="random requests for each operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder, serving(*SERVER) as served:
        report = Path(folder) / "report.ndjson"
        fuzz(options.schemathesis, served.url, options.examples, options.seed, report)
        found = list(exchanges(report))
        still_ready, num_open = served.is_ready(), served.metric("num_requests_running")
    heard = [answer for _, answer in found if answer is not None]
    statuses: dict[str, Counter[str]] = {}
    for operation, answer in found:
        statuses.setdefault(operation, Counter())[str(answer["status_code"]) if answer else "none"] += 1
    version = subprocess.run([options.schemathesis, "--version"], capture_output=True, text=True, check=False)
    results = {
        "server": served.command,
        "schemathesis": version.stdout.strip(),
        "seed": options.seed,
        "num_requests": len(found),
        "num_server_errors": sum(answer["status_code"] >= 500 for answer in heard),
        "num_unanswered": len(found) - len(heard),
        "num_over_5_seconds": sum(answer["elapsed"] > MAX_SECONDS for answer in heard),
        "slowest_seconds": round(max(answer["elapsed"] for answer in heard), 3),
        "ready_and_idle_afterwards": still_ready and num_open == 0,
        "statuses": {operation: dict(sorted(counts.items())) for operation, counts in statuses.items()},
    }
    print(json.dumps(results, indent=1))
    print(record.save("fuzz_server", before, results))
    names = ("num_server_errors", "num_unanswered", "num_over_5_seconds")
    return int(any(results[name] for name in names) or not results["ready_and_idle_afterwards"])


if __name__ == "__main__":
    sys.exit(main())
