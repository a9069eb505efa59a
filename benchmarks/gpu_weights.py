"""On a GPU: would fp8 or int4 weights by torch's own kernels make a step of one stream 1.5 times as fast as bfloat16?

    python benchmarks/gpu_weights.py           # the shape of Llama 3 8B, random weights
    benchmarks/gpu_day.sh --cpu --steps weights  # a small shape, to try it

Three times are measured for each number of rows: a step of the engine behind `--context` tokens in bfloat16; the
products of all its decoder layers alone, one after another in one CUDA graph; and the same products with other weights.
A step with these takes what it takes now, less the first products, plus the second. The weights are

- int8, as `--quantize int8` has them, with our own kernels;
- fp8, with `torch._scaled_mm`: a scale for each output and for each row of activations, which the graph computes;
- int4, with `torch.ops.aten._weight_int4pack_mm`: groups of 128 inputs.

The output layer stays as it is. Where a GPU or a torch refuses a kernel, its reason stands in place of the times. Kept
as results/gpu_weights.json; without a GPU the script can be tried, and nothing is kept except in `--output`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import record
import torch
from gpu import forwards, seconds_of
from torch import Tensor, nn

from specdec_cli import Engine, EngineOptions
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.kernels.kinds import pack
from specdec_cli.lm.kernels.linear import PackedLinear
from specdec_cli.lm.transformers_lm import TransformersLM

PAYS = 1.5
"""A step of one row must be so many times as fast."""
GROUP = 128
FLOAT8 = torch.float8_e4m3fn
Product = Callable[[Tensor], Tensor]


def layers_of(lm: TransformersLM) -> list[tuple[Product, int, int]]:
    """The linear layers of all decoder layers in order, each with its outputs and inputs."""
    found: list[tuple[Product, int, int]] = []
    for name, module in lm.model.named_modules():
        if ".layers." not in name:
            continue
        if isinstance(module, PackedLinear):
            found.append((module, module.num_outputs, module.num_inputs))
        elif isinstance(module, nn.Linear):
            found.append((module, module.out_features, module.in_features))
    assert found, "transformers' forward has its linear layers in modules"
    return found


def int8(num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    """The engine's own layer."""
    return pack(torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device=device), None, "int8")


def fp8(num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    """Weights and activations of 8 bits."""
    weight = torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device=device).to(FLOAT8).t()
    scales = torch.ones(1, num_outputs, device=device)

    def product(rows: Tensor) -> Tensor:
        own = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FLOAT8).max
        found: Tensor = torch._scaled_mm((rows / own).to(FLOAT8), weight, own, scales, out_dtype=rows.dtype)
        return found

    return product


def int4(num_outputs: int, num_inputs: int, device: torch.device) -> Product:
    """Weights of 4 bits, activations as they are."""
    aten, group = torch.ops.aten, min(GROUP, num_inputs)
    scales = torch.ones(num_inputs // group, num_outputs, 2, dtype=torch.bfloat16, device=device)
    if device.type == "cuda":
        pairs = torch.randint(256, (num_outputs, num_inputs // 2), dtype=torch.uint8, device=device)
        packed, multiply = aten._convert_weight_to_int4pack(pairs, 8), aten._weight_int4pack_mm
    else:
        numbers = torch.randint(16, (num_outputs, num_inputs), dtype=torch.int32)
        packed, multiply = aten._convert_weight_to_int4pack_for_cpu(numbers, 1), aten._weight_int4pack_mm_for_cpu
    return lambda rows: multiply(rows, packed, group, scales)


WEIGHTS: dict[str, Callable[[int, int, torch.device], Product]] = {"int8": int8, "fp8": fp8, "int4": int4}


def milliseconds(
    products: Sequence[Product], inputs: Sequence[int], rows: Sequence[int], device: torch.device, repeats: int
) -> dict[int, float]:
    """Of all products, one after another, by rows of bfloat16: on a GPU of a graph's replay."""
    found = {}
    for num in rows:
        given = {width: torch.randn(num, width, dtype=torch.bfloat16, device=device) for width in set(inputs)}

        def run(given: dict[int, Tensor] = given) -> graphs.Outputs:
            return tuple(product(given[width]) for product, width in zip(products, inputs, strict=True))

        with torch.inference_mode():
            replay = graphs.record(run, device, graphs.GraphPool(device))[0] if device.type == "cuda" else run
            found[num] = seconds_of(device, repeats, replay) * 1e3
    return found


def measured(lm: TransformersLM, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step and of its products by weights and rows, and what steps with other weights gain."""
    layers, device = layers_of(lm), lm.device
    inputs = [num_inputs for _, _, num_inputs in layers]
    steps, _ = forwards(lm, options.context, options.rows, options.repeats)
    now = milliseconds([product for product, _, _ in layers], inputs, options.rows, device, options.repeats)
    found: dict[str, Any] = {
        "step_ms": {num: round(seconds * 1e3, 3) for num, seconds in steps.items()},
        "products_ms": {"bfloat16": {num: round(ms, 3) for num, ms in now.items()}},
        "step_speedup": {},
        "refused": {},
    }
    for name, make in WEIGHTS.items():
        try:
            products = [make(num_outputs, num_inputs, device) for _, num_outputs, num_inputs in layers]
            its = milliseconds(products, inputs, options.rows, device, options.repeats)
        except RuntimeError as error:
            found["refused"][name] = str(error).splitlines()[0]
            continue
        found["products_ms"][name] = {num: round(ms, 3) for num, ms in its.items()}
        found["step_speedup"][name] = {
            num: round(steps[num] * 1e3 / (steps[num] * 1e3 - now[num] + its[num]), 3) for num in options.rows
        }
        del products
    fewest = min(options.rows)
    found["pays"] = {name: its[fewest] >= PAYS for name, its in found["step_speedup"].items()}
    return found


def main() -> None:
    """Measure, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decoder", default="graphs")
    parser.add_argument("--target", default="shape:llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="where the result is kept; default: results/")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU here: nothing was measured\n")
    before = record.machine()
    model = ModelSettings(dtype="bfloat16", device=options.device, load_format="dummy")
    settings = LoadSettings(
        target=model, draft=model, decoder=options.decoder, max_model_len=options.context + max(options.rows) + 1
    )
    lm = Engine.load(options.target, None, options=EngineOptions(max_num_seqs=1), settings=settings).target
    assert isinstance(lm, TransformersLM), "a shape is a transformers model"
    found = {"target": options.target, "context": options.context, "decoder": lm.decoder, **measured(lm, options)}
    if lm.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(lm.device)
    print(json.dumps(found, indent=1))
    if lm.device.type == "cuda" or options.output:
        print(record.save("gpu_weights", before, found, path=options.output))
    else:
        print("this is no GPU: nothing is kept")


if __name__ == "__main__":
    main()
