"""On a GPU: how near a forward comes to the memory's speed, what more rows cost, what a round takes beside its graphs.

    python benchmarks/gpu.py                              # shapes of 8 B and 13 B, random weights in bfloat16
    python benchmarks/gpu.py --device cpu --decoder auto --targets FOLDER --draft FOLDER --rows 1 4 --context 32

Weights are random: what is measured is time. For each target: the median of a forward by rows behind `--context`
tokens, beside what reading its weights costs at the bandwidth measured in the same run. Then the last target with
`--draft`, whose tokens are accepted by chance (`--acceptance`): tokens per second with and without, and a round beside
the two graphs in it (one guess, one verification), and how often the host waits for the device in a round, counted by
torch's profiler. Kept as results/gpu.json, or gpu_int8.json; elsewhere than on a GPU the script can be tried, and
nothing is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import record
import torch

from specdec_cli import Engine, EngineOptions, SamplingParams
from specdec_cli.engine.build import LoadSettings, ModelSettings, load_engines
from specdec_cli.events import Event, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

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


def forwards(lm: TransformersLM, context: int, rows: Iterable[int], repeats: int) -> dict[int, float]:
    """Seconds of a forward by rows behind so many tokens."""
    tokens = [5 + i % 97 for i in range(context + max(rows))]
    found = {}
    for num in rows:
        found[num] = seconds_of(lm.device, repeats, lm.score, [Row(0, tokens[: context + num], num)])
    lm.release(0)
    return found


def num_waits(names: Iterable[str]) -> int:
    """How many of the calls that a profiler saw are waits."""
    return sum(name.endswith(WAITS) for name in names)


def num_emitted(events: Iterable[Event]) -> int:
    """Tokens that a step gave."""
    return sum(len(one.tokens) for event in events if isinstance(event, Stepped) for one in event.emitted)


def decoded(engine: Engine, context: int, num_tokens: int) -> dict[str, Any]:
    """Seconds of a decoding step and tokens per second, of one sequence; and waits in a step."""
    device = engine.target.device  # type: ignore[attr-defined]
    engine.add([5 + i % 97 for i in range(context)], SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    while not num_emitted(engine.step()):
        pass
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    times, sizes = [], []
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(8):
            engine.step()
    waits = num_waits(event.name for event in profile.events() or ()) / 8
    while engine.has_work:
        began = perf_counter()
        events = engine.step()
        times.append(perf_counter() - began)
        sizes.append(num_emitted(events))
    return {
        "ms_per_step": round(median(times) * 1e3, 3),
        "tokens_per_second": round(sum(sizes) / sum(times), 1),
        "tokens_per_step": round(sum(sizes) / len(sizes), 3),
        "host_waits_per_step": waits,
    }


def rounds(options: argparse.Namespace, settings: LoadSettings, target: str) -> dict[str, Any]:
    """A target with a draft that is right by chance, against itself alone."""
    found: dict[str, Any] = {"target": target, "draft": options.draft}
    for acceptance in (None, *options.acceptance):
        k = 0 if acceptance is None else options.k
        rates = None if acceptance is None else tuple(acceptance**i for i in range(1, k + 1))
        spec = EngineOptions(
            num_speculative_tokens=k, verify="synthetic" if rates else "auto", synthetic_acceptance_rates=rates,
            max_num_seqs=1,
        )  # fmt: skip
        engine = load_engines(target, [options.draft if k else None], options=spec, settings=settings)[0]
        name = "none" if acceptance is None else f"{acceptance:g}"
        decoded(engine, options.context, 16 + 8 * options.k)  # graphs are recorded in this one
        found[name] = decoded(engine, options.context, options.tokens)
        if k:
            tokens = [5 + i % 97 for i in range(options.context)]
            draft, lm = engine.drafter.lm, engine.target  # type: ignore[attr-defined]
            for model in (draft, lm):
                model.score([Row(7, tokens, 1)])
            read, repeats = [*tokens, *tokens[:k]], options.repeats
            guess = seconds_of(lm.device, repeats, draft.guess, [Row(7, tokens, k)], engine.num_tokens)
            verify = seconds_of(lm.device, repeats, lm.score, [Row(7, read, k + 1)])
            found[name] |= {
                "guess_ms": round(guess * 1e3, 3),
                "verify_ms": round(verify * 1e3, 3),
                "round_over_its_graphs": round(found[name]["ms_per_step"] / 1e3 / (guess + verify), 3),
                "speedup": round(found[name]["tokens_per_second"] / found["none"]["tokens_per_second"], 3),
            }
        print(name, json.dumps(found[name]))
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
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here: nothing was measured\n")
    device, before = torch.device(options.device), record.machine()
    speed = bytes_per_second(device, (4 << 30) if device.type == "cuda" else (64 << 20), options.repeats)
    found: dict[str, Any] = {"read_gb_per_second": round(speed / 1e9, 1), "context": options.context}
    found |= {"quantize": options.quantize, "forwards": {}}
    room = max(1024, 2 * options.context + options.tokens)
    for target in options.targets:
        lm = load_lm(
            target, dtype=options.dtype, device=options.device, load_format="dummy", max_num_seqs=1,
            max_model_len=room, decoder=options.decoder, quantize=options.quantize,
        )  # fmt: skip
        seconds = forwards(lm, options.context, options.rows, options.repeats)
        one = seconds[min(seconds)]
        found["forwards"][target] = {
            "decoder": lm.decoder,
            "weight_gb": round(lm.weight_bytes / 1e9, 2),
            "ms_by_rows": {num: round(value * 1e3, 3) for num, value in seconds.items()},
            "over_one_row": {num: round(value / one, 3) for num, value in seconds.items()},
            "share_of_bandwidth": round(lm.weight_bytes / speed / one, 3),
        }
        print(target, json.dumps(found["forwards"][target]))
        del lm
    model = ModelSettings(dtype=options.dtype, device=options.device, load_format="dummy")
    quantized = replace(model, quantize=options.quantize)
    settings = LoadSettings(target=quantized, draft=model, decoder=options.decoder, max_model_len=room)
    found["rounds"] = rounds(options, settings, options.targets[-1])
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        print(record.save("gpu" if options.quantize == "none" else f"gpu_{options.quantize}", before, found))
    else:
        print("this is no GPU: nothing is kept")


if __name__ == "__main__":
    main()
