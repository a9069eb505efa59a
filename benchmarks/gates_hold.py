"""Whether gates hold still: each of four commands, twenty times on unchanged code, must give the same exit code.

    python benchmarks/gates_hold.py [--runs 20] [--only WORDS]

Two gates on the speed-up and one on the acceptance length; two on a regression against an earlier result: of the same
settings, which is none, and of the draft where now one with random weights guesses, which is one. Machine noise must
not flip any of them; a run adds its gates to the kept ones.

Noise can flip a difference of the size of the intervals (k = 1 held against k = 3 failed 15 times of 20 with 12
prompts; n-grams against the draft, 15 % lower at least, 4 of 20 on a busy machine), and a margin narrower than the
machine's drift (5 % below the same settings failed 2 times of 20 while the load went up and down).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record

BENCH = ("bench", "--dataset", "builtin:stories", "--num-prompts", "24", "-n", "48", "--quiet", "--json")


def run(*options: str) -> int:
    """The command's exit code; its document is thrown away."""
    command = [sys.executable, "-m", "specdec_cli", *BENCH, *options]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    """Run every gate as often as asked and keep the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default="", help="gates with these words in their name")
    options = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        baseline = str(Path(folder) / "baseline.json")
        assert run("-k", "3", "--output", baseline) == 0, "the baseline could be measured"
        gates = {
            "speedup.decode < 1.1 at k = 3: passes": (0, ("-k", "3", "--fail-if", "speedup.decode < 1.1")),
            "speedup.decode < 3 at k = 3: fails": (3, ("-k", "3", "--fail-if", "speedup.decode < 3")),
            "15 % below a baseline of the same settings: passes": (
                0,
                ("-k", "3", "--baseline", baseline, "--max-regression", "15%"),
            ),
            "15 % below that baseline with an untrained draft: fails": (
                3,
                ("-k", "3", "--set", "draft.load_format=dummy", "--baseline", baseline, "--max-regression", "15%"),
            ),
            "acceptance length below 2.4 at k = 1: fails": (
                3,
                ("-k", "1", "--fail-if", "draft.speculative.acceptance_length < 2.4"),
            ),
        }
        rows = []
        for name, (expected, arguments) in gates.items():
            if options.only not in name:
                continue
            codes = [run(*arguments) for _ in range(options.runs)]
            row = {"gate": name, "expected": expected, "as_expected": codes.count(expected), "runs": len(codes)}
            rows.append({**row, "load": round(os.getloadavg()[0], 2), "commit": before["commit"]})
            print(json.dumps(rows[-1]), flush=True)
    path = record.RESULTS / "gates_hold.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"]["gates"] if path.exists() else []
    new = {row["gate"] for row in rows}
    rows = [row for row in kept if row["gate"] in gates and row["gate"] not in new] + rows
    print(record.save("gates_hold", before, {"command": " ".join(BENCH), "gates": rows}))


if __name__ == "__main__":
    main()
