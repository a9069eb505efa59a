"""What HTTP costs one stream: tokens per second of a request against those of the engine alone, on the built-in pair.

    python benchmarks/serve_overhead.py [--rounds 10]

One process has two engines alike, one of them behind the server; a client in a second process reads to the end. Engine,
stream and whole answer are measured in turn, forwards and backwards; a ratio is of one round, and the median is kept.
The first time to everything is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import record

from specdec_cli.engine.engine import Engine
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.server import Server, listen
from specdec_cli.serve.settings import Settings

PROMPT, NUM_TOKENS = "Once upon a time", 400
CLIENT = r"""
import socket, sys, time
for line in sys.stdin:
    body = line.strip().encode()
    begin = time.perf_counter()
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as raw:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while part := raw.recv(65536):
            answer += part
    print(time.perf_counter() - begin, answer.count(b'"text"'), answer.count(b" 200 OK"), flush=True)
"""


class Client:
    """A process that asks and reads.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        words = [sys.executable, "-c", CLIENT, str(port)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, stream: bool) -> float:
        """Seconds from the connection to the last byte."""
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        assert self._process.stdin is not None, "its input is a pipe"
        assert self._process.stdout is not None, "its output is a pipe"
        print(json.dumps(body), file=self._process.stdin, flush=True)
        seconds, _, is_fine = self._process.stdout.readline().split()
        assert is_fine == "1", "the request failed"
        return float(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def timed(function: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(arms: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, Any]:
    """Tokens per second of each arm, and against the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-2, num_rounds):
        for name in list(arms) if turn % 2 == 0 else list(reversed(arms)):
            used = time.process_time()
            found = arms[name]()
            if turn >= 0:
                seconds[name].append(found)
                cpu[name].append(time.process_time() - used)
    first = next(iter(arms))
    return {
        name: {
            "tokens_per_second": round(NUM_TOKENS / median(each), 1),
            "best_tokens_per_second": round(NUM_TOKENS / min(each), 1),
            "of_the_engine": round(median(a / b for a, b in zip(seconds[first], each, strict=True)), 3),
            "of_the_engine_best": round(min(seconds[first]) / min(each), 3),
            "of_the_engine_in_cpu_seconds": round(median(a / b for a, b in zip(cpu[first], cpu[name], strict=True)), 3),
        }
        for name, each in seconds.items()
    }


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    before = record.machine()
    settings = Settings(Serve(port=0))
    models = Models([Model("builtin", Engine.load, settings)])
    models.all[0].load()
    engine, params = Engine.load(), SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    server = Server(models, settings, listen("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(server.listener.getsockname()[1])
    arms = {
        "engine": lambda: timed(lambda: list(engine.stream(PROMPT, params))),
        "stream": lambda: client.ask(stream=True),
        "whole answer": lambda: client.ask(stream=False),
    }
    found = measure(arms, options.rounds)
    client.close()
    server.should_exit = True
    thread.join()
    for name, one in found.items():
        print(f"{name:14}{one['tokens_per_second']:8} tokens/s   {one['of_the_engine']} of the engine's own")
    print(record.save("serve_overhead", before, {"tokens": NUM_TOKENS, "rounds": options.rounds, "arms": found}))


if __name__ == "__main__":
    main()
