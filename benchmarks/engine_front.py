"""`specdec serve --engine vllm` from outside: one streamed answer, its counts, a client that leaves, and the end.

    from engine_front import front

    front(["-t", "TARGET", "-d", "DRAFT", "-k", "4", "--engine", "vllm"])

Counts of the answer are compared with the increase of vLLM's own counters, which the server in front hands through.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import psutil

from specdec_cli.measure.endpoint.counters import parse

SECONDS_TO_START = 600.0
SECONDS_TO_SETTLE = 20.0
PROMPT = "Once upon a time, there was a little"
_COUNTS = {
    "num_spec_steps": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_draft_tokens": "spec_decode_num_accepted_tokens",
}


class Front:
    """A running `specdec serve` with an engine behind it.

    Args:
        words: its options.
    """

    def __init__(self, words: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "specdec_cli", "serve", "--port", str(port), *words]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Until it is ready."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server ended before it was ready"
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise TimeoutError("the server does not get ready")

    def descendants(self) -> list[psutil.Process]:
        """Every process below it: vLLM's."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def counters(self) -> dict[str, float]:
        """The engine's counters, once they stand still."""
        last: dict[str, float] = {}
        while True:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
                page = parse(response.read().decode(), "/metrics", "")
            assert page is not None, "/metrics has counters of a known engine"
            if page.counters == last:
                return last
            last = page.counters
            time.sleep(0.5)

    def running(self) -> int:
        """Requests that the engine decodes now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return round(sum(float(one.split()[-1]) for one in lines if one.startswith("vllm:num_requests_running{")))

    def stream(self, most: int, chunks: int | None = None) -> list[dict[str, Any]]:
        """A streamed answer's events; after `chunks` of them the client leaves."""
        body = {"prompt": PROMPT, "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        events: list[dict[str, Any]] = []
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                if chunks is not None and len(events) >= chunks:
                    break
        return events

    def end(self) -> tuple[int, str]:
        """Ask it to end; its exit code and its last line on stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, (said.strip().splitlines() or [""])[-1]


def front(words: list[str]) -> dict[str, Any]:
    """Start it, ask it, leave it, end it."""
    one = Front(words)
    try:
        one.wait()
        below = one.descendants()
        before = one.counters()
        events = one.stream(96)
        added = {name: value - before.get(name, 0.0) for name, value in one.counters().items()}
        own = next(found["speculative_decoding"] for event in events if (found := event.get("metrics")))
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        one.stream(400, chunks=3)
        left, seconds = time.monotonic(), None
        while seconds is None and time.monotonic() - left < SECONDS_TO_SETTLE:
            seconds = time.monotonic() - left if one.running() == 0 else None
        code, last = one.end()
    finally:
        if one.process.poll() is None:
            one.end()
    _, alive = psutil.wait_procs(below, timeout=10)
    return {
        "streamed_events": len(events),
        "text": text[:80],
        "answer": own,
        "metrics": {name: round(added[counter]) for name, counter in _COUNTS.items()},
        "equal": all(own[name] == round(added[counter]) for name, counter in _COUNTS.items()),
        "seconds_until_a_left_request_ended": seconds,
        "exit_code": code,
        "last_line": last,
        "processes_of_the_engine": len(below),
        "left_running": [process.pid for process in alive],
    }
