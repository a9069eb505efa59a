"""Whether gates hold still: each of four commands, twenty times on unchanged code, must give the same exit code.

    python benchmarks/gates_hold.py [--runs 20]

Two gates on the speed-up (one that should pass, one that should fail) and two on a regression against an earlier result
(of the same settings, and of a deeper draft that is really faster). Machine noise must not flip any of them.
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

BENCH = ("bench", "--dataset", "builtin:stories", "--num-prompts", "36", "-n", "48", "--quiet", "--json")


def run(*options: str) -> int:
    """The command's exit code; its document is thrown away."""
    command = [sys.executable, "-m", "specdec_cli", *BENCH, *options]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    """Run every gate as often as asked and keep the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    before = record.machine()
    with tempfile.TemporaryDirectory() as folder:
        same, deeper = (str(Path(folder) / name) for name in ("same.json", "deeper.json"))
        assert run("-k", "1", "--output", same) == 0, "the baseline could be measured"
        assert run("-k", "3", "--output", deeper) == 0, "the other baseline could be measured"
        gates = {
            "speedup.decode < 1.1 at k = 3: passes": (0, ("-k", "3", "--fail-if", "speedup.decode < 1.1")),
            "speedup.decode < 3 at k = 3: fails": (3, ("-k", "3", "--fail-if", "speedup.decode < 3")),
            "5 % below a baseline of the same k: passes": (0, ("-k", "1", "--baseline", same)),
            "acceptance length below 2.4 at k = 1: fails": (
                3,
                ("-k", "1", "--fail-if", "draft.speculative.acceptance_length < 2.4"),
            ),
            "2 % below a baseline of k = 3 at k = 1: fails": (
                3,
                ("-k", "1", "--baseline", deeper, "--max-regression", "2%"),
            ),
        }
        rows = []
        for name, (expected, arguments) in gates.items():
            codes = [run(*arguments) for _ in range(options.runs)]
            rows.append({"gate": name, "expected": expected, "as_expected": codes.count(expected), "runs": len(codes)})
            print(json.dumps({**rows[-1], "load": os.getloadavg()[0]}), flush=True)
    print(record.save("gates_hold", before, {"command": " ".join(BENCH), "gates": rows}))


if __name__ == "__main__":
    main()
