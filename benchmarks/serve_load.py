"""The server under load, on the built-in pair: a long run of 16 streams, and tokens per second at 1 to 16 streams.

    python benchmarks/serve_load.py [--minutes 5] [--starts 6] [--rounds 6] [--only PART]

Endurance: streams one after the other in 16 places. None may fail, memory may grow by less than 2 % after the first
minute, and every block is free at the end. Throughput: the arms are servers that all run, idle but for one; for a
second streams follow each other in so many places, on one server after the other in an order drawn by chance each time;
a ratio is of one round, and the median is kept. A second server without a draft tells how much of a ratio is the
machine's noise.
Generate: one stream of each server with a draft, `specdec generate` with the same options and `specdec generate -k 4`
in turn, first token to last, as both say it. The clients run beside the server on the same cores. A process is faster
or slower than the next by some per cent for as long as it runs, so throughput and generate start their servers several
times, and intervals are over starts; for throughput in an order drawn by chance, for one that starts later may be the
faster one.
Fairness: seconds of a client's short requests, one after the other, on an idle server and then beside four requests of
64 choices each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import record
from served import Served, serving

from specdec_cli.measure.stats import bootstrap_pooled_median

STREAMS = (1, 4, 8, 16)
SECONDS_TO_SETTLE, SECONDS = 0.2, 1.0  # of a throughput
NUM_LONG = 400  # of one stream and one `generate`: what a new process is slow with at first weighs less
NUM_SHORT, NUM_CHOICES = 4, 64  # of fairness: tokens, and choices of a request
SERVER = ("--max-num-seqs", "16")
FIXED = "fixed k=4"
ARMS = {
    "none": ("--draft", "none"),
    FIXED: ("-k", "4"),
    "adaptive": ("-k", "4", "--depth-policy", "adaptive"),
    "adaptive up to k=8": ("-k", "8", "--depth-policy", "adaptive"),
}
AGAIN = "none again"
Rates = list[list[float]]
"""Of each start, tokens per second of its rounds."""
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
    """The clients' counts."""

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


async def keep_busy(served: Served, place: int, deadline: float, heard: Heard) -> None:
    """Streams of several lengths one after the other, until it is late."""
    for turn in range(10**9):
        if time.monotonic() >= deadline:
            return
        await stream_one(served, place + turn, 32 + 37 * (place + turn) % 160, heard)


async def endure(served: Served, num_places: int, seconds: float) -> dict[str, Any]:
    """Keep so many places busy for a while; memory is read every second."""
    heard, deadline = Heard(), time.monotonic() + seconds
    memory: list[int] = []

    async def watch() -> None:
        while True:
            memory.append(served.resident_bytes)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    begin = time.monotonic()
    await asyncio.gather(*(keep_busy(served, place, deadline, heard) for place in range(num_places)))
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


def against_generate(num_starts: int) -> dict[str, Any]:
    """One stream of each server and `specdec generate` with its options on each prompt in turn."""
    speculating = {name: words for name, words in ARMS.items() if name != "none"}
    ours: dict[str, Rates] = {name: [] for name in speculating}
    theirs: dict[str, Rates] = {name: [] for name in speculating}
    for _ in range(num_starts):
        with started(speculating) as servers:
            for name, served in servers.items():
                for place in range(len(PROMPTS)):  # to warm it
                    asyncio.run(decode_rate(served, place))
                ours[name].append([])
                theirs[name].append([])
            for place in range(len(PROMPTS)):
                for name, served in servers.items():
                    ours[name][-1].append(median(asyncio.run(decode_rate(served, place)) for _ in range(3)))
                    theirs[name][-1].append(generated_rate(place, ARMS[name]))
    return {
        name: {
            "tokens_per_second": middle(rates),
            "generate with the same options": beside(rates, theirs[name]),
            f"generate with a {FIXED}": beside(rates, theirs[FIXED]),
        }
        for name, rates in ours.items()
    }


def beside(ours: Rates, theirs: Rates) -> dict[str, Any]:
    """The others' rates, and ours over theirs, each pair's and of each start the median."""
    ratio, ends, of_starts = compared(ours, theirs)
    return {"tokens_per_second": middle(theirs), "ratio": ratio, "ci95": ends, "of_starts": of_starts}


async def throughput(served: Served, num_places: int) -> float:
    """Tokens per second while so many streams run, each followed by the next: the server counts them."""
    heard, deadline = Heard(), time.monotonic() + SECONDS_TO_SETTLE + SECONDS
    streams = [asyncio.create_task(keep_busy(served, place, deadline, heard)) for place in range(num_places)]
    await asyncio.sleep(SECONDS_TO_SETTLE)
    counts = [await counted(served)]
    await asyncio.sleep(deadline - time.monotonic())
    counts.append(await counted(served))
    await asyncio.gather(*streams)
    assert not heard.num_failed, "a stream failed"
    (begin, num_before), (end, num_after) = counts
    return (num_after - num_before) / (end - begin)


def tokens(served: Served) -> tuple[float, float]:
    """Tokens drafted and emitted so far."""
    return served.metric("spec_decode_num_draft_tokens_total"), served.metric("generation_tokens_total")


def drafted_a_token(counts: Sequence[tuple[float, float]]) -> float:
    """Tokens drafted for one emitted, from counts before and after some rounds, of one start after the other."""
    drafted, emitted = (sum(each[1::2]) - sum(each[::2]) for each in zip(*counts, strict=True))
    ratio: float = round(drafted / emitted, 2)
    return ratio


async def counted(served: Served) -> tuple[float, float]:
    """A moment, and the tokens that were emitted by then."""
    num = await asyncio.to_thread(served.metric, "generation_tokens_total")
    return time.monotonic(), num


def compare(words_of: Mapping[str, Sequence[str]], num_starts: int, num_rounds: int) -> list[dict[str, Any]]:
    """Each arm at each number of streams, in turn."""
    chance = random.Random(0)
    rates: dict[int, dict[str, Rates]] = {num: {name: [] for name in words_of} for num in STREAMS}
    counts: dict[tuple[int, str], list[tuple[float, float]]] = {}  # before and after, by streams and arm
    for _ in range(num_starts):
        with started(dict(chance.sample(list(words_of.items()), len(words_of)))) as arms:
            for num_places in STREAMS:
                for name, served in arms.items():
                    asyncio.run(throughput(served, num_places))
                    counts.setdefault((num_places, name), []).append(tokens(served))
                    rates[num_places][name].append([])
                for _ in range(num_rounds):
                    for name in chance.sample(list(arms), len(arms)):
                        rates[num_places][name][-1].append(asyncio.run(throughput(arms[name], num_places)))
                for name, served in arms.items():
                    counts[num_places, name].append(tokens(served))
    points = []
    for num_places, of_arms in rates.items():
        point: dict[str, Any] = {"streams": num_places}
        point |= {name: middle(each) for name, each in of_arms.items()}
        point["drafted a token"] = {name: drafted_a_token(counts[num_places, name]) for name in of_arms}
        intervals, of_starts = {}, {}
        for name in list(of_arms)[1:]:
            ratio = f"{name} / none"
            point[ratio], intervals[ratio], of_starts[ratio] = compared(of_arms[name], of_arms["none"])
        point |= {"ci95": intervals, "of_starts": of_starts}
        print(point, flush=True)
        points.append(point | {"every_round": rounded(of_arms)})
    return points


@contextmanager
def started(words_of: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Served]]:
    """A server for each of these options."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(*SERVER, *words)) for name, words in words_of.items()}


def compared(ours: Rates, theirs: Rates) -> tuple[float, list[float], list[float]]:
    """The median ratio of rates measured in the same round, its interval over starts, and each start's median."""
    ratios = [np.array(mine) / np.array(others) for mine, others in zip(ours, theirs, strict=True)]
    found = bootstrap_pooled_median(ratios)
    ends = [round(end, 3) for end in found.ci95 or ()]
    return round(found.median, 3), ends, [round(float(np.median(each)), 3) for each in ratios]


async def wait_for(served: Served, **fields: Any) -> float:
    """Seconds until a completion is there."""
    data, begin = json.dumps({"prompt": PROMPTS[0], "ignore_eos": True} | fields).encode(), time.perf_counter()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=2**24)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    return time.perf_counter() - begin


async def be_fair(served: Served) -> dict[str, Any]:
    """A client's short requests on an idle server, and beside four requests of many choices."""
    short: dict[str, Any] = {"max_tokens": NUM_SHORT}
    await wait_for(served, **short)
    idle = [await wait_for(served, **short) for _ in range(20)]
    large = {"n": NUM_CHOICES, "max_tokens": 200, "temperature": 1}
    others = asyncio.gather(*(wait_for(served, **large) for _ in range(4)))
    beside: list[float] = []
    await asyncio.sleep(SECONDS_TO_SETTLE)
    while not others.done():
        beside.append(await wait_for(served, **short))
        await asyncio.sleep(0.1)
    return {
        "tokens_of_a_short_request": NUM_SHORT,
        "choices_of_each_large_request": NUM_CHOICES,
        "large_requests_seconds": [round(took, 2) for took in await others],
        "short_requests": {
            name: {"num": len(took), "median_seconds": round(median(took), 3), "slowest_seconds": round(max(took), 3)}
            for name, took in (("idle", idle), ("beside", beside))
        },
    }


def middle(rates: Rates) -> float:
    """The median of all starts' rates."""
    return round(median(one for each in rates for one in each), 1)


def rounded(of_arms: Mapping[str, Rates]) -> dict[str, Rates]:
    """Rates as they are kept."""
    return {name: [[round(one, 1) for one in each] for each in rates] for name, rates in of_arms.items()}


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=16, help="of the endurance run")
    parser.add_argument("--starts", type=int, default=6, help="of the servers, for throughput and generate")
    parser.add_argument("--rounds", type=int, default=6, help="of each start, for throughput")
    parser.add_argument("--only", choices=("endurance", "throughput", "generate", "fairness"))
    options = parser.parse_args()
    if options.only in (None, "endurance"):
        before = record.machine()
        with serving(*SERVER) as served:
            found = asyncio.run(endure(served, options.streams, options.minutes * 60))
            found = {"server": served.command} | found
        print(json.dumps(found, indent=1))
        print(record.save("serve_endurance", before, found))
    if options.only in (None, "fairness"):
        before = record.machine()
        with serving("--max-waiting", "1024") as served:
            found = {"server": served.command} | asyncio.run(be_fair(served))
        print(json.dumps(found, indent=1))
        print(record.save("serve_fairness", before, found))
    if options.only in (None, "generate"):
        before = record.machine()
        found = against_generate(options.starts)
        print(json.dumps(found, indent=1))
        print(record.save("serve_against_generate", before, found))
    if options.only in (None, "throughput"):
        before, words_of = record.machine(), ARMS | {AGAIN: ARMS["none"]}
        points = compare(words_of, options.starts, options.rounds)
        commands = {name: " ".join(["specdec", "serve", *SERVER, *words]) for name, words in words_of.items()}
        print(record.save("serve_load", before, {"servers": commands, "points": points}))


if __name__ == "__main__":
    main()
