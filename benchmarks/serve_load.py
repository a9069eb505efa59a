"""The server under load, on the built-in pair: a long run of 16 streams, and tokens per second at 1 to 16 streams.

    python benchmarks/serve_load.py [--minutes 5] [--rounds 48] [--only endurance|throughput|generate]

Endurance: streams one after the other in 16 places. None may fail, memory may grow by less than 2 % after the first
minute, and every block is free at the end. Throughput: the arms are requests to servers that all run, idle but for one;
they are measured in turn, in an order drawn by chance each time; a ratio is of one round, and the median is kept. A
second server without a draft tells how much of a ratio is the machine's noise.
Generate: one stream of each server with a draft, `specdec generate` with the same options and `specdec generate -k 4`
in turn, first token to last, as both say it. The clients run beside the server on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import record
from served import Served, serving

from specdec_cli.measure.stats import bootstrap_median

STREAMS = (1, 4, 8, 16)
NUM_TOKENS = 128
NUM_LONG = 400  # of one stream and one `generate`: what a new process is slow with at first weighs less
SERVER = ("--max-num-seqs", "16")
FIXED = "fixed k=4"
ARMS = {
    "none": ("--draft", "none"),
    FIXED: ("-k", "4"),
    "adaptive": ("-k", "4", "--depth-policy", "adaptive"),
    "adaptive up to k=8": ("-k", "8", "--depth-policy", "adaptive"),
}
AGAIN = "none again"
PROMPTS = (
    "Once upon a time there was a",
    "Tom had a red ball. One day",
    "The little dog was very",
    "Lily and her mom went to the",
    "A bird sat on a tree and",
    "In the morning Ben saw a",
    "There was a big cat who",
    "Sue liked to play with",
)


@dataclass
class Heard:
    """What the clients counted."""

    num_tokens: int = 0
    num_streams: int = 0
    num_failed: int = 0


async def stream_one(served: Served, place: int, num_tokens: int, heard: Heard) -> None:
    """One greedy stream, read to its end."""
    body = {"prompt": PROMPTS[place % len(PROMPTS)], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=2**24)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    heard.num_streams += 1
    usage = next((line for line in reversed(answer.splitlines()) if b'"usage":{' in line), b"data: {}")
    emitted = json.loads(usage[6:]).get("usage", {}).get("completion_tokens", 0)
    heard.num_tokens += emitted
    heard.num_failed += emitted != num_tokens or b"data: [DONE]" not in answer


async def endure(served: Served, num_places: int, seconds: float) -> dict[str, Any]:
    """Keep so many places busy for a while; memory is read every second."""
    heard, deadline = Heard(), time.monotonic() + seconds
    memory: list[int] = []

    async def one_place(place: int) -> None:
        for turn in range(10**9):
            if time.monotonic() >= deadline:
                return
            await stream_one(served, place, 32 + 37 * (place + turn) % 160, heard)

    async def watch() -> None:
        while True:
            memory.append(served.resident_bytes)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    begin = time.monotonic()
    await asyncio.gather(*(one_place(place) for place in range(num_places)))
    lasted = time.monotonic() - begin
    watching.cancel()
    await asyncio.sleep(1)
    warm = min(60, len(memory) // 5)
    return {
        "streams_at_once": num_places,
        "seconds": round(lasted, 1),
        "num_streams": heard.num_streams,
        "num_failed": heard.num_failed,
        "tokens_per_second": round(heard.num_tokens / lasted, 1),
        "resident_mib_after_warm_up": round(memory[warm] / 2**20, 1),
        "resident_mib_at_the_end": round(memory[-1] / 2**20, 1),
        "memory_growth": round(memory[-1] / memory[warm] - 1, 4),
        "blocks_used_when_idle": served.metric("kv_cache_usage_perc"),
        "running_when_idle": served.metric("num_requests_running"),
    }


async def decode_rate(served: Served, place: int) -> float:
    """Tokens per second of one stream from its first text to its end, as a client hears it."""
    body = {"prompt": PROMPTS[place], "max_tokens": NUM_LONG, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=2**24)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    while b'"text"' not in await reader.readline():
        pass
    begin = time.perf_counter()
    await reader.read()
    seconds = time.perf_counter() - begin
    writer.close()
    return (NUM_LONG - 1) / seconds


def generated_rate(place: int, options: Sequence[str]) -> float:
    """The same as `specdec generate` says it."""
    words = [sys.executable, "-m", "specdec_cli", "generate", PROMPTS[place], *options, "-n", str(NUM_LONG)]
    done = subprocess.run([*words, "--ignore-eos", "--json", "--quiet"], stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout)["outputs"][0]["timing"]["decode_tokens_per_second"])


def against_generate(servers: dict[str, Served], num_rounds: int) -> dict[str, Any]:
    """One stream of each server and `specdec generate` with its options on each prompt in turn."""
    ours: dict[str, list[float]] = {name: [] for name in servers}
    theirs: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(num_rounds + 1):
        for place in range(len(PROMPTS)):
            for name, served in servers.items():
                streamed = median(asyncio.run(decode_rate(served, place)) for _ in range(3))
                if turn:
                    ours[name].append(streamed)
                    theirs[name].append(generated_rate(place, ARMS[name]))
    return {
        name: {
            "tokens_per_second": round(median(rates), 1),
            "generate with the same options": beside(rates, theirs[name]),
            f"generate with a {FIXED}": beside(rates, theirs[FIXED]),
        }
        for name, rates in ours.items()
    }


def beside(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The others' rates, and ours over theirs."""
    ratio = bootstrap_median(np.array(ratios(ours, theirs)))
    ends = [round(end, 3) for end in ratio.ci95 or ()]
    return {"tokens_per_second": round(median(theirs), 1), "ratio": round(ratio.median, 3), "ci95": ends}


async def throughput(served: Served, num_places: int) -> float:
    """Tokens per second of streams that begin together."""
    heard, begin = Heard(), time.perf_counter()
    await asyncio.gather(*(stream_one(served, place, NUM_TOKENS, heard) for place in range(num_places)))
    seconds = time.perf_counter() - begin
    assert not heard.num_failed, "a stream failed"
    return heard.num_tokens / seconds


def compare(arms: dict[str, Served], num_rounds: int) -> list[dict[str, Any]]:
    """Each arm at each number of streams, in turn."""
    found, chance = [], random.Random(0)
    for num_places in STREAMS:
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for served in arms.values():
            asyncio.run(throughput(served, num_places))
        before = {name: served.metric("spec_decode_num_draft_tokens_total") for name, served in arms.items()}
        for _ in range(num_rounds):
            for name in chance.sample(list(arms), len(arms)):
                rates[name].append(asyncio.run(throughput(arms[name], num_places)))
        point: dict[str, Any] = {"streams": num_places}
        point |= {name: round(median(each), 1) for name, each in rates.items()}
        num_tokens = num_rounds * num_places * NUM_TOKENS
        point["drafted a token"] = {
            name: round((served.metric("spec_decode_num_draft_tokens_total") - before[name]) / num_tokens, 2)
            for name, served in arms.items()
        }
        intervals = {}
        for name in list(arms)[1:]:
            ratio = bootstrap_median(np.array(ratios(rates[name], rates["none"])))
            point[f"{name} / none"] = round(ratio.median, 3)
            intervals[f"{name} / none"] = [round(end, 3) for end in ratio.ci95 or ()]
        point["ci95"] = intervals
        print(point, flush=True)
        found.append(point | {"every_round": {name: [round(one, 1) for one in each] for name, each in rates.items()}})
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of rates measured in the same round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=16, help="of the endurance run")
    parser.add_argument("--rounds", type=int, default=48, help="of the throughput")
    parser.add_argument("--only", choices=("endurance", "throughput", "generate"))
    options = parser.parse_args()
    if options.only in (None, "endurance"):
        before = record.machine()
        with serving(*SERVER) as served:
            found = asyncio.run(endure(served, options.streams, options.minutes * 60))
            found = {"server": served.command} | found
        print(json.dumps(found, indent=1))
        print(record.save("serve_endurance", before, found))
    if options.only in (None, "generate"):
        before = record.machine()
        with ExitStack() as stack:
            names = [name for name in ARMS if name != "none"]
            servers = {name: stack.enter_context(serving(*SERVER, *ARMS[name])) for name in names}
            found = against_generate(servers, 2)
        print(json.dumps(found, indent=1))
        print(record.save("serve_against_generate", before, found))
    if options.only in (None, "throughput"):
        before, words_of = record.machine(), ARMS | {AGAIN: ARMS["none"]}
        with ExitStack() as stack:
            arms = {name: stack.enter_context(serving(*SERVER, *words)) for name, words in words_of.items()}
            commands = {name: served.command for name, served in arms.items()}
            points = compare(arms, options.rounds)
        print(record.save("serve_load", before, {"servers": commands, "tokens_a_stream": NUM_TOKENS, "points": points}))


if __name__ == "__main__":
    main()
