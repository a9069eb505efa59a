"""Any OpenAI-compatible server, measured by `specdec bench --endpoint`; the document is kept with machine and load.

    python benchmarks/endpoint.py http://127.0.0.1:8000 --name vllm --started 'vllm serve …' -- --concurrency 4 -n 64

Options behind `--` go to `specdec bench`. Where the server runs on this machine, the load is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import record


def main() -> None:
    """Measure one server and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--name", required=True, help="the result is kept as endpoint_NAME.json")
    parser.add_argument("--started", required=True, help="how the server was started, for the record")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    before = record.machine()
    asked = [*("bench", "--endpoint", options.url), *words[end + 1 :]]
    run = subprocess.run(
        [sys.executable, "-m", "specdec_cli.cli.main", *asked, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode:
        sys.exit(run.returncode)
    document = json.loads(run.stdout)
    command = " ".join(["specdec", *asked])
    results = {"server_started_with": options.started, "command": command, "document": document}
    print(record.save(f"endpoint_{options.name}", before, results))


if __name__ == "__main__":
    main()
