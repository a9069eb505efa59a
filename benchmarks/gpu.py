"""On a GPU: how near a forward comes to the memory's speed, what more rows cost, what a round takes beside its graphs.

    python benchmarks/gpu.py                              # shapes of 8 B and 13 B, random weights in bfloat16
    python benchmarks/gpu.py --device cpu --decoder auto --targets FOLDER --draft FOLDER --rows 1 4 --context 32

Weights are random: what is measured is time. For each target: the median of a forward by rows behind `--context`
tokens, beside what reading its weights and the context's keys and values costs at the bandwidth measured in the same
run, and the numbers of rows with which the first row's logits have other bits. Then the last target with `--draft`,
whose tokens stand by chance (`--acceptance`) or by what they are (`greedy`; random weights hardly ever agree): tokens
per second with and without, a round beside the graphs in it, replayed alone (one guess, one verification, one decision
where rounds are launched ahead), and how often the host waits for the device in a round, counted by torch's profiler.
`none` and `greedy` are measured in turn with arms that wait for each round before the next is launched; a speed-up is
over the `none` that launches its rounds in the same way. Kept as results/gpu.json, or gpu_int8.json; elsewhere than on
a GPU the script can be tried, and nothing is kept except in `--output`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli import Engine, EngineOptions, SamplingParams
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.stepper import Clock
from specdec_cli.events import Event, Noticed, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.transformers_lm import TransformersLM

WAITING = ", waiting"
"""Marks arms whose rounds are launched after the host has read the ones before them."""
WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "cudaMemcpy")
"""Calls in which a host waits; a copy that does not is `cudaMemcpyAsync`."""


def seconds_of(device: torch.device, repeats: int, run: Callable[..., Any], *given: Any) -> float:
    """Median seconds of a call, the device's work included."""
    times = []
    for _ in range(repeats + 3):
        wait(device)
        began = perf_counter()
        run(*given)
        wait(device)
        times.append(perf_counter() - began)
    return median(times[3:])


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_per_second(device: torch.device, num_bytes: int, repeats: int) -> float:
    """At which a device reads memory."""
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / seconds_of(device, repeats, numbers.sum)


def forwards(lm: TransformersLM, context: int, rows: Iterable[int], repeats: int) -> tuple[dict[int, float], list[int]]:
    """Seconds of a forward by rows behind so many tokens; and the rows with which the first one gets other bits."""
    tokens = [5 + i % 97 for i in range(context + max(rows))]
    found, first = {}, {}
    for num in rows:
        fed = [Row(0, tokens[: context + num], num)]
        found[num] = seconds_of(lm.device, repeats, lm.score, fed)
        first[num] = lm.score(fed)[0]
    lm.release(0)
    alone = first[min(first)]
    return found, [num for num, logits in first.items() if not torch.equal(logits, alone)]


class Recorder:
    """Records graphs as `lm.graphs` does, and remembers how often each was replayed."""

    def __init__(self) -> None:
        self.times: Counter[graphs.Replay] = Counter()
        self._record = graphs.record

    def __call__(self, run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[graphs.Replay, Any]:
        """As `graphs.record`."""
        replay, output = self._record(run, device, pool)

        def counted() -> None:
            self.times[replay] += 1
            replay()

        return counted, output

    def seconds(self, device: torch.device, repeats: int, num: int) -> float:
        """Of one replay of each of the graphs that were replayed most often, by the device's own clock."""
        total = 0.0
        for replay, _ in self.times.most_common(num):
            clock, times = Clock(device), []
            for _ in range(repeats + 3):
                wait(device)
                begin = clock.mark()
                replay()
                times.append(clock.seconds(begin, clock.mark()))
            total += median(times[3:])
        return total


def num_waits(names: Iterable[str]) -> int:
    """How many of the calls that a profiler saw are waits."""
    return sum(name.endswith(WAITS) for name in names)


def num_emitted(events: Iterable[Event]) -> int:
    """Tokens that a step gave."""
    return sum(len(one.tokens) for event in events if isinstance(event, Stepped) for one in event.emitted)


def decoded(engine: Engine, context: int, num_tokens: int, k: int, temperature: float = 0) -> dict[str, Any]:
    """Seconds of a decoding step and tokens per second, of one sequence."""
    begin(engine, context, num_tokens, k, temperature)
    times, sizes = [], []
    while engine.has_work:
        began = perf_counter()
        events = engine.step()
        times.append(perf_counter() - began)
        tell(events)
        sizes.append(num_emitted(events))
    return {
        "ms_per_step": round(median(times) * 1e3, 3),
        "tokens_per_second": round(sum(sizes) / sum(times), 1),
        "tokens_per_step": round(sum(sizes) / len(sizes), 3),
    }


def waits_per_step(engine: Engine, context: int, k: int, temperature: float = 0) -> float:
    """How often the host waits for the device in a decoding step of one sequence."""
    begin(engine, context, 16 + 9 * (k + 1), k, temperature)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (engine.target.device.type == "cuda")
    waits = []
    for num_steps in (0, 8):  # to end a profile is a wait, too
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(num_steps):
                engine.step()
        waits.append(num_waits(event.name for event in profile.events() or ()))
    while engine.has_work:
        engine.step()
    return (waits[1] - waits[0]) / 8


def begin(engine: Engine, context: int, num_tokens: int, k: int, temperature: float = 0) -> None:
    """Add a sequence, and read its prompt."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=temperature, seed=1)
    engine.add([5 + i % 97 for i in range(context)], params, num_speculative_tokens=k)
    events: list[Event] = []
    while not num_emitted(events):
        events = engine.step()
        tell(events)


def tell(events: Iterable[Event]) -> None:
    """Print what an engine says of itself, such as that a graph cannot be recorded."""
    for event in events:
        if isinstance(event, Noticed):
            print(event.message, flush=True)


def rounds(options: argparse.Namespace, settings: LoadSettings, target: str) -> dict[str, Any]:
    """A target with a draft that is right by chance, against itself alone."""
    found: dict[str, Any] = {"target": target, "draft": options.draft, "k": options.k}
    recorder = Recorder()
    graphs.record = recorder
    spec = EngineOptions(num_speculative_tokens=options.k, max_num_seqs=1)
    loaded = load_engines(Engine, target, [options.draft], options=spec, settings=settings)[0]
    judged = {name + more: None for name in ("none", "greedy") for more in ("", WAITING)}
    arms: dict[str, float | None] = {**judged, **{f"{one:g}": one for one in options.acceptance}}
    for name, acceptance in arms.items():
        k = 0 if name.startswith("none") else options.k
        goes_ahead = not name.endswith(WAITING)
        chance = spec
        if acceptance is not None:
            rates = tuple(acceptance**i for i in range(1, k + 1))
            chance = replace(spec, verify="synthetic", synthetic_acceptance_rates=rates)
        engine = Engine(loaded.target, loaded.drafter, loaded.tokenizer, chance, goes_ahead=goes_ahead)
        decoded(engine, options.context, 16 + 8 * options.k, k)  # graphs are recorded in this one
        recorder.times.clear()
        its = decoded(engine, options.context, options.tokens, k)
        its["host_waits_per_step"] = waits_per_step(engine, options.context, k)
        if recorder.times:
            parts = recorder.seconds(engine.target.device, options.repeats, (2 if k else 1) + goes_ahead)
            its |= {"graphs_ms": round(parts * 1e3, 3), "over_its_graphs": round(its["ms_per_step"] / 1e3 / parts, 3)}
        if k:
            plain = "none" if goes_ahead else f"none{WAITING}"
            its["speedup"] = round(its["tokens_per_second"] / found[plain]["tokens_per_second"], 3)
        found[name] = its
        print(name, json.dumps(its))
    return found


def main() -> None:
    """Measure every target, then rounds with the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decoder", default="graphs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none", help="the targets' linear layers: none or int8")
    parser.add_argument("--targets", nargs="+", default=["shape:llama-3-8b", "shape:llama-2-13b"])
    parser.add_argument("--draft", default="shape:tinyllama-1.1b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 5, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.8])
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, help="default: 1024, or what context and tokens take")
    parser.add_argument("--output", type=Path, help="where the result is kept; default: results/")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here: nothing was measured\n")
    device, before = torch.device(options.device), record.machine()
    speed = bytes_per_second(device, (4 << 30) if device.type == "cuda" else (64 << 20), options.repeats)
    found: dict[str, Any] = {"read_gb_per_second": round(speed / 1e9, 1), "context": options.context}
    found |= {"quantize": options.quantize, "forwards": {}}
    room = options.max_model_len or max(1024, 2 * options.context + options.tokens)
    model = ModelSettings(dtype=options.dtype, device=options.device, load_format="dummy")
    settings = LoadSettings(
        target=replace(model, quantize=options.quantize), draft=model, decoder=options.decoder, max_model_len=room,
    )  # fmt: skip
    for target in options.targets:
        lm = Engine.load(target, None, options=EngineOptions(max_num_seqs=1), settings=settings).target
        assert isinstance(lm, TransformersLM), "a shape is a transformers model"
        seconds, others = forwards(lm, options.context, options.rows, options.repeats)
        one = seconds[min(seconds)]
        read = sum(weight.num_bytes for weight in lm.weights if not weight.is_looked_up)
        read += options.context * lm.kv_bytes_per_token
        found["forwards"][target] = {
            "decoder": lm.decoder,
            "read_gb": round(read / 1e9, 2),
            "ms_by_rows": {num: round(value * 1e3, 3) for num, value in seconds.items()},
            "over_one_row": {num: round(value / one, 3) for num, value in seconds.items()},
            "rows_with_other_bits": others,
            "share_of_bandwidth": round(read / speed / one, 3),
        }
        print(target, json.dumps(found["forwards"][target]))
        del lm
    found["rounds"] = rounds(options, settings, options.targets[-1])
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    if device.type == "cuda" or options.output:
        name = "gpu" if options.quantize == "none" else f"gpu_{options.quantize}"
        print(record.save(name, before, found, path=options.output))
    else:
        print("this is no GPU: nothing is kept")


if __name__ == "__main__":
    main()
