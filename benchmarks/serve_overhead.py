"""The cost of HTTP for one stream: tokens per second of a request and of the engine alone, on the built-in pair.

    python benchmarks/serve_overhead.py [--rounds 10]

One process has two engines around the same models (where weights lie in memory makes some per cent), one of them behind
the server, never both at work; a client in a second process reads to the end. Engine, stream and whole answer are
measured in turn, forwards and backwards; a ratio is of one round, and the median is kept. The first time to everything
is left out. Seconds are those of a request, from its connection to its last byte; of a stream and of the engine also
those of decoding, from the first token to the last.
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
from specdec_cli.events import Stepped
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.http.server import Server, listen
from specdec_cli.serve.models import Model, Models
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
        answer, first = b"", 0.0
        while part := raw.recv(65536):
            answer += part
            first = first or (time.perf_counter() if b'"text"' in answer else 0.0)
    end = time.perf_counter()
    print(end - begin, end - first, answer.count(b'"text"'), answer.count(b" 200 OK"), flush=True)
"""


class Client:
    """A process that asks and reads.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        words = [sys.executable, "-c", CLIENT, str(port)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, stream: bool) -> tuple[float, list[float]]:
        """Seconds from the connection to the last byte, and of a stream from the first token on."""
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        assert self._process.stdin is not None, "its input is a pipe"
        assert self._process.stdout is not None, "its output is a pipe"
        print(json.dumps(body), file=self._process.stdin, flush=True)
        seconds, decoding, _, is_fine = self._process.stdout.readline().split()
        assert is_fine == "1", "the request failed"
        return float(seconds), [float(decoding)] * stream

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def decode(engine: Engine, params: SamplingParams) -> tuple[float, list[float]]:
    """Seconds of a text, and from its first token on."""
    begin, first = time.perf_counter(), 0.0
    for event in engine.stream(PROMPT, params):
        if isinstance(event, Stepped) and event.emitted:
            first = first or time.perf_counter()
    end = time.perf_counter()
    return end - begin, [end - first]


def measure(arms: dict[str, Callable[[], tuple[float, list[float]]]], num_rounds: int) -> dict[str, Any]:
    """Tokens per second of each arm, and against the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    decoding: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-2, num_rounds):
        for name in list(arms) if turn % 2 == 0 else list(reversed(arms)):
            used = time.process_time()
            found, of_decoding = arms[name]()
            if turn >= 0:
                seconds[name].append(found)
                decoding[name] += of_decoding
                cpu[name].append(time.process_time() - used)
    first = next(iter(arms))
    return {
        name: {
            "tokens_per_second": round(NUM_TOKENS / median(each), 1),
            "best_tokens_per_second": round(NUM_TOKENS / min(each), 1),
            "of_the_engine": round(median(a / b for a, b in zip(seconds[first], each, strict=True)), 3),
            "of_the_engine_best": round(min(seconds[first]) / min(each), 3),
            **_of_decoding(decoding[first], decoding[name]),
            "of_the_engine_in_cpu_seconds": round(median(a / b for a, b in zip(cpu[first], cpu[name], strict=True)), 3),
        }
        for name, each in seconds.items()
    }


def _of_decoding(engine: list[float], own: list[float]) -> dict[str, float]:
    """The share of the engine's speed, first token to last, where both are known."""
    return {"decoding_of_the_engine": round(median(a / b for a, b in zip(engine, own, strict=True)), 3)} if own else {}


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    before = record.machine()
    settings = Settings(Serve(port=0))
    models = Models([Model("builtin", Engine.load, settings.serve)])
    models.all[0].load()
    served, params = models.all[0].bridge.engine, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    engine = Engine(served.target, served.drafter, served.tokenizer, served.options, served.eos_token_ids)
    server = Server(models, settings, listen("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(server.listener.getsockname()[1])
    arms = {
        "engine": lambda: decode(engine, params),
        "stream": lambda: client.ask(stream=True),
        "whole answer": lambda: client.ask(stream=False),
    }
    found = measure(arms, options.rounds)
    client.close()
    server.should_exit = True
    thread.join()
    for name, one in found.items():
        decoding = one.get("decoding_of_the_engine", "")
        print(f"{name:14}{one['tokens_per_second']:8} tokens/s   {one['of_the_engine']} of the engine's own {decoding}")
    print(record.save("serve_overhead", before, {"tokens": NUM_TOKENS, "rounds": options.rounds, "arms": found}))


if __name__ == "__main__":
    main()
