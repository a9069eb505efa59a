"""Chaos around a real server of the built-in pair: clients that leave, ten times too many, a taken port, signals.

    python benchmarks/chaos.py [--disconnects 500] [--only mixed] [--seconds 120]
    python benchmarks/chaos.py --only mixed --seconds 1800 -t FILE.gguf -d ngram --save serve_mixed_load_qwen

A second after the last of the disconnects nothing may run, wait or hold a block. At ten times capacity every refusal
is a 429 within 50 ms, and every admitted request gets a whole answer. SIGTERM lets streams end; a second one ends all.

Mixed: two minutes of grammars and schemas that explode, prompts of 3.8 MB, bodies that stall, and requests with n = 64,
while a plain client asks for 32 tokens again and again. Each of its requests must succeed, the slowest within 5 times
the slowest of an idle server, and the server's memory must come back to within 10 % of what it was, without its KV
cache, which keeps prefixes and fills up to its size. It takes another target (-t) and draft (-d), too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import record
from served import Served, serving

CAPACITY = 8
SERVER = ("--max-num-seqs", "4", "--max-waiting", "4")
MAX_REFUSAL_SECONDS = 0.05


def request(**fields: object) -> bytes:
    """A request for text, head and body."""
    body = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 300} | fields
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(port: int, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(request(**fields))
    return reader, writer


async def answer(port: int, **fields: object) -> tuple[int, bytes, float]:
    """Status, body and seconds of a whole answer."""
    begin = time.perf_counter()
    reader, writer = await ask(port, **fields)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body, time.perf_counter() - begin


def burst(served: Served, num: int, **fields: object) -> list[tuple[int, bytes, float]]:
    """Answers to requests sent in one go on open connections, each with the seconds since it was sent.

    Bare sockets: what a client's own library takes for so many at once is not the server's doing.
    """
    waiting = selectors.DefaultSelector()
    sent: dict[socket.socket, float] = {}
    heard: dict[socket.socket, bytes] = {}
    sockets = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(num)]
    time.sleep(0.2)
    for one in sockets:
        sent[one], heard[one] = time.perf_counter(), b""
        one.sendall(request(**fields))
        one.setblocking(False)
        waiting.register(one, selectors.EVENT_READ)
    answers: list[tuple[int, bytes, float]] = []
    while len(answers) < num:
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket), "only sockets were registered"
            one = key.fileobj
            piece = one.recv(2**20)
            heard[one] += piece
            if not piece:
                head, _, body = heard[one].partition(b"\r\n\r\n")
                answers.append((int(head.split()[1]), body, time.perf_counter() - sent[one]))
                waiting.unregister(one)
                one.close()
    return answers


def idle(served: Served) -> dict[str, float]:
    """Running and waiting requests, and held blocks."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: served.metric(name) for name in names}


async def disconnect(served: Served, num: int) -> dict[str, Any]:
    """Clients that leave at random moments, eight at a time."""
    rng, places = random.Random(0), asyncio.Semaphore(8)

    async def one() -> None:
        async with places:
            _, writer = await ask(served.port, stream=rng.random() < 0.5, n=rng.choice([1, 1, 2]))
            await asyncio.sleep(rng.random() * 0.3)
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

    await asyncio.gather(*(one() for _ in range(num)))
    await asyncio.sleep(1)
    left = await asyncio.to_thread(idle, served)
    status, _, _ = await answer(served.port, max_tokens=5)
    return {"num_disconnects": num, "left_after_one_second": left, "serves_on": status == 200}


async def crowd(served: Served) -> dict[str, Any]:
    """Ten times as many as there are places: one after the other while all places are taken, then all at once."""
    paced: list[tuple[int, bytes, float]] = []
    streams: list[tuple[int, bytes, float]] = []
    while len(paced) < 9 * CAPACITY:
        inside = [asyncio.create_task(answer(served.port, stream=True, max_tokens=400)) for _ in range(CAPACITY)]
        await asyncio.sleep(0.1)
        while len(paced) < 9 * CAPACITY and not any(task.done() for task in inside):
            one = await answer(served.port, max_tokens=5)
            if not any(task.done() for task in inside):  # all places were taken until it was answered
                paced.append(one)
            await asyncio.sleep(0.005)
        streams += await asyncio.gather(*inside)
    at_once = burst(served, 10 * CAPACITY, max_tokens=100)
    refused = [seconds for status, _, seconds in paced if status == 429]
    refused_at_once = [seconds for status, _, seconds in at_once if status == 429]
    return {
        "capacity": CAPACITY,
        "streams": len(streams),
        "streams_complete": sum(b"data: [DONE]" in body and b'"error"' not in body for _, body, _ in streams),
        "one_by_one": {
            "num_asked": len(paced),
            "num_refused": len(refused),
            "refusal_seconds_median": round(median(refused), 4),
            "refusal_seconds_slowest": round(max(refused), 4),
        },
        "all_at_once": {
            "num_asked": len(at_once),
            "num_refused": len(refused_at_once),
            "num_complete": sum(status == 200 and b'"finish_reason":"length"' in body for status, body, _ in at_once),
            "refusal_seconds_median": round(median(refused_at_once), 4),
            "refusal_seconds_slowest": round(max(refused_at_once), 4),
        },
    }


TERMS = " & ".join(f"/(.*[a-{chr(98 + i)}].{{{i}}})/" for i in range(24))
LONG = "Once upon a time " * 224_000
HOSTILE: dict[str, tuple[int, float, dict[str, object]]] = {
    "grammar": (2, 0.5, {"structured_outputs": {"grammar": f"start: T\nT: {TERMS}"}}),
    "schema": (
        1,
        0.5,
        {"guided_json": {"type": "object", "patternProperties": {f"^(a|b)*{i}$": {} for i in range(500)}}},
    ),
    "long prompt": (2, 1.0, {"prompt": LONG}),
    "many choices": (4, 0.1, {"n": 64, "max_tokens": 200, "temperature": 1}),
}
"""By kind: how many clients, seconds between two requests of one, and what they ask for."""
NUM_STALLED = 40
MOST_SLOWDOWN, MOST_GROWTH = 5.0, 0.1


async def stall(port: int, deadline: float, statuses: Counter[str]) -> None:
    """Bodies that begin and never end, one after the other."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000000"
    )
    while time.monotonic() < deadline:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"\r\n\r\n" + b" " * 3_900_000)
            first = await asyncio.wait_for(reader.readline(), max(deadline - time.monotonic(), 0.1))
            statuses[[*first.split(), b"", b"closed"][1].decode()] += 1
        except TimeoutError:
            statuses["still open"] += 1
        except OSError:
            statuses["closed"] += 1
        writer.transport.abort()
        await asyncio.sleep(1)


async def attack(port: int, kind: str, deadline: float, statuses: Counter[str]) -> None:
    """Requests of one kind, one after the other."""
    _, pause, fields = HOSTILE[kind]
    while time.monotonic() < deadline:
        try:
            status, _, _ = await asyncio.wait_for(answer(port, **fields), max(deadline - time.monotonic(), 0.1))
            statuses[str(status)] += 1
        except TimeoutError:
            statuses["left"] += 1
        except (OSError, IndexError):
            statuses["closed"] += 1
        await asyncio.sleep(pause)


class PlainAnswer(NamedTuple):
    """An answer of the plain client.

    Args:
        seconds: until it was there.
        status: of HTTP.
        ran: seconds that the server's threads ran meanwhile, all of them together.
        waited: seconds that they waited for a core, which other processes had or the server's own threads.
    """

    seconds: float
    status: int
    ran: float
    waited: float


async def ask_plainly(served: Served, seconds: float) -> list[PlainAnswer]:
    """A plain client's requests, one after the other."""
    deadline, found = time.monotonic() + seconds, []
    while time.monotonic() < deadline:
        ran, waited = served.scheduled_seconds
        status, _, took = await answer(served.port, max_tokens=32)
        ran_later, waited_later = served.scheduled_seconds
        found.append(PlainAnswer(took, status, ran_later - ran, waited_later - waited))
        await asyncio.sleep(0.2)
    return found


def latency(answers: Sequence[PlainAnswer]) -> dict[str, float]:
    """Seconds of answers: the median and the slowest, of which the server's threads ran and waited so long."""
    slowest = max(answers)
    figures = {"median": median(one.seconds for one in answers), "slowest": slowest.seconds}
    figures |= {"server_ran": slowest.ran, "server_waited_for_a_core": slowest.waited}
    return {name: round(value, 3) for name, value in figures.items()}


async def besiege(port: int, seconds: float, kinds: Sequence[str]) -> dict[str, Counter[str]]:
    """The hostile clients, for a while; the statuses of their answers, by kind."""
    deadline = time.monotonic() + seconds
    statuses: dict[str, Counter[str]] = {kind: Counter() for kind in (*kinds, "stalled body")}
    await asyncio.gather(
        *(attack(port, kind, deadline, statuses[kind]) for kind in kinds for _ in range(HOSTILE[kind][0])),
        *(stall(port, deadline, statuses["stalled body"]) for _ in range(NUM_STALLED)),
    )
    return statuses


def besiege_apart(*arguments: Any) -> dict[str, Counter[str]]:
    """`besiege` in a process of its own: what its bodies cost to write is not the plain client's time."""
    return asyncio.run(besiege(*arguments))


async def mix(
    served: Served, seconds: float, kinds: Sequence[str]
) -> tuple[list[PlainAnswer], dict[str, Counter[str]]]:
    """Everything at once for a while, and a plain client beside it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        hostile = asyncio.get_running_loop().run_in_executor(apart, besiege_apart, served.port, seconds, kinds)
        return await ask_plainly(served, seconds), await hostile


async def mixed(served: Served, seconds: float, kinds: Sequence[str]) -> dict[str, Any]:
    """A plain client on an idle server, and then beside the mixed load; memory before and after."""
    await mix(served, max(10, seconds / 20), kinds)
    await asyncio.sleep(5)
    idle_answers = await ask_plainly(served, 15)
    cache_before, before = served.kv_cache_bytes, served.resident_bytes
    loaded_answers, statuses = await mix(served, seconds, kinds)
    await asyncio.sleep(10)
    cache_after, after = served.kv_cache_bytes, served.resident_bytes
    return {
        "seconds": seconds,
        "plain_requests": len(loaded_answers),
        "plain_requests_failed": sum(one.status != 200 for one in loaded_answers),
        "idle_seconds": latency(idle_answers),
        "loaded_seconds": latency(loaded_answers),
        "slowdown_of_the_slowest": round(max(loaded_answers).seconds / max(idle_answers).seconds, 2),
        "resident_mib": [round(one / 2**20) for one in (before, after)],
        "kv_cache_resident_mib": [round(one / 2**20) for one in (cache_before, cache_after)],
        "memory_growth": round((after - cache_after) / (before - cache_before) - 1, 3),
        "hostile_answers": {kind: dict(counts) for kind, counts in statuses.items()},
    }


def withstood(found: dict[str, Any]) -> bool:
    """Whether the mixed load did what was promised."""
    kept = found["memory_growth"] <= MOST_GROWTH and found["slowdown_of_the_slowest"] <= MOST_SLOWDOWN
    return bool(kept and not found["plain_requests_failed"])


def run_mixed(
    seconds: float, kinds: Sequence[str] = tuple(HOSTILE), models: Sequence[str] = (), name: str = "serve_mixed_load"
) -> bool:
    """Run and keep the mixed load, of the built-in pair or of the models that options name."""
    before = record.machine()
    with serving("--max-waiting", "1024", *models) as served:
        command = " ".join(Path(word).name for word in served.command.split())
        found = {"server": command} | asyncio.run(mixed(served, seconds, kinds))
    print(json.dumps(found, indent=1))
    print(record.save(name, before, found))
    return withstood(found)


def take_the_port(served: Served) -> dict[str, Any]:
    """A second server on the same port."""
    words = [sys.executable, "-m", "specdec_cli", "serve", "--port", str(served.port), "--quiet"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    said = run.stderr.strip().splitlines()[:1]
    return {"exit_code": run.returncode, "said": [line.replace(str(served.port), "PORT") for line in said]}


async def terminate(served: Served, num_signals: int) -> dict[str, Any]:
    """Signals in the middle of four streams."""
    streams = [asyncio.create_task(answer(served.port, stream=True, max_tokens=400)) for _ in range(4)]
    await asyncio.sleep(0.3)
    begin = time.perf_counter()
    for _ in range(num_signals):
        served.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
    heard = await asyncio.gather(*streams, return_exceptions=True)
    code = await asyncio.to_thread(served.process.wait, 60)
    whole = sum(not isinstance(one, BaseException) and b"data: [DONE]" in one[1] for one in heard)
    return {"whole_streams": whole, "exit_code": code, "seconds": round(time.perf_counter() - begin, 2)}


def main() -> int:
    """Do all of it and keep what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disconnects", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the mixed load")
    parser.add_argument("--kinds", nargs="+", choices=tuple(HOSTILE), help="of the mixed load; stalled bodies always")
    parser.add_argument("--only", choices=("mixed",))
    parser.add_argument("-t", "--target", help="of the mixed load's server; with --only mixed")
    parser.add_argument("-d", "--draft", help="of the same")
    parser.add_argument("--save", default="serve_mixed_load", help="name of the mixed load's result")
    options = parser.parse_args()
    if options.only == "mixed":
        given = {"--target": options.target, "--draft": options.draft}
        models = [word for pair in given.items() if pair[1] for word in pair]
        return 0 if run_mixed(options.seconds, options.kinds or tuple(HOSTILE), models, options.save) else 1
    if options.target or options.draft:
        parser.error("--target and --draft go with --only mixed")
    before = record.machine()
    with serving("--max-num-seqs", "8") as served:
        found: dict[str, Any] = {"disconnects": asyncio.run(disconnect(served, options.disconnects))}
        found["port_taken"] = take_the_port(served)
        found["sigterm"] = asyncio.run(terminate(served, 1))
    with serving(*SERVER) as served:
        found["crowd"] = asyncio.run(crowd(served))
        found["two_signals"] = asyncio.run(terminate(served, 2))
    print(json.dumps(found, indent=1))
    print(record.save("serve_chaos", before, found))
    crowded = found["crowd"]
    fine = [
        not any(found["disconnects"]["left_after_one_second"].values()),
        found["disconnects"]["serves_on"],
        found["port_taken"]["exit_code"] != 0,
        found["sigterm"] == found["sigterm"] | {"whole_streams": 4, "exit_code": 0},
        crowded["streams_complete"] == CAPACITY,
        crowded["one_by_one"]["num_refused"] == crowded["one_by_one"]["num_asked"],
        crowded["one_by_one"]["refusal_seconds_slowest"] < MAX_REFUSAL_SECONDS,
        crowded["all_at_once"]["num_refused"] + crowded["all_at_once"]["num_complete"] == 10 * CAPACITY,
        crowded["all_at_once"]["refusal_seconds_slowest"] < MAX_REFUSAL_SECONDS,
    ]
    return 0 if all([*fine, run_mixed(options.seconds)]) else 1


if __name__ == "__main__":
    sys.exit(main())
