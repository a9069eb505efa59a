"""A `specdec serve` of its own for a benchmark: started on a free port, waited for, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS_TO_START = 120.0
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Args:
        port: where it listens on 127.0.0.1.
        process: it.
        command: how it was started, for the record.
    """

    port: int
    process: subprocess.Popen[bytes]
    command: str

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    @property
    def kv_cache_bytes(self) -> int:
        """Memory that a real model's KV cache holds now: it keeps prefixes, and fills up to its size.

        A KV cache is one mapping without a file, and of a GiB or more; the built-in pair's is smaller, and counts as 0.
        """
        total, is_cache = 0, False
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                begin, end = (int(number, 16) for number in words[0].split("-"))
                is_cache = len(words) == 5 and end - begin >= 2**30
            elif is_cache and words[0] == "Rss:":
                total += int(words[1]) * 1024
        return total

    @property
    def scheduled_seconds(self) -> tuple[float, float]:
        """How long its threads ran and how long they waited for a core, all of them together."""
        counts = [path.read_text().split() for path in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")]
        return sum(int(count[0]) for count in counts) / 1e9, sum(int(count[1]) for count in counts) / 1e9

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(ticks[11]) + int(ticks[12])) / 100

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric's series; `specdec:` goes before its name."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"specdec:{name}{{")]
        assert lines, f"/metrics has no series specdec:{name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def is_ready(self) -> bool:
        """Whether /health says ok."""
        try:
            return bool(json.loads(self.get("/health"))["status"] == "ok")
        except (urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def serving(*options: str, tree: Path | None = None) -> Iterator[Served]:
    """Run `specdec serve` with further options until the block ends, with a tree's code where one is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--port", str(port), "--quiet", *options]
    environment = os.environ if tree is None else os.environ | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen([sys.executable, "-m", "specdec_cli", *words], cwd=tree, env=environment)
    served = Served(port, process, " ".join(["specdec", *without_port(words)]))
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not served.is_ready():
            assert process.poll() is None, "the server ended before it was ready"
            assert time.monotonic() < deadline, "the server does not get ready"
            time.sleep(0.1)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def without_port(words: Sequence[str]) -> list[str]:
    """The command's words without the free port."""
    at = words.index("--port")
    return [*words[:at], *words[at + 2 :]]
