"""The pair of k and p-min that `sweep-k --engine llamacpp` recommends, against every pair measured.

    python benchmarks/llama_cpp_sweep.py MODEL.gguf --llamacpp E/bin/python     # a Python with the wheel xllamacpp

Three pairs are made of one model: `dear`, the model with layers that add nothing and a draft without some of its layers
(`gguf_layers`); `own`, that draft beside the model itself, where it cannot pay; and `lookup`, llama.cpp's
`ngram-simple` on prompts that repeat code. Each is swept by the command, then every k and p-min of a grid is started
and measured once, and no draft before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import record
from gguf_layers import write_layers

from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.shared import Shared
from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.measure.elsewhere.engine_sweep import measured_pass
from specdec_cli.measure.endpoint.address import ENGINE_OPTION, parse_address
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.workload.workload import read_rows

WORKLOADS = Path(__file__).parent / "workloads"
NUM_IDLE, WITHOUT = 48, frozenset({12, 14, 16, 18})


@dataclass(frozen=True)
class Pair:
    """Models, prompts and grid of one comparison.

    Args:
        name: of the pair.
        target: a GGUF file.
        draft: as `--draft` takes it.
        prompts: of `workloads`.
        ks: to measure.
        p_mins: to measure with each k; 0 is without.
    """

    name: str
    target: Path
    draft: str
    prompts: str
    ks: tuple[int, ...]
    p_mins: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Starts:
    """A pair's servers and requests."""

    pair: Pair
    options: argparse.Namespace

    @property
    def settings(self) -> list[str]:
        """The recipe's values, for `--set`."""
        method = "draft.model" if self.pair.draft.endswith(".gguf") else "draft.method"
        draft, _, more = self.pair.draft.partition(":")
        further = [f"draft.{one}" for one in more.split(",") if one]
        sizes = ["engine.max_num_seqs=1", "engine.max_model_len=1024"]
        length = f"sampling.max_new_tokens={self.options.tokens}"
        engine = [f"target.model={self.pair.target}", "engine.name=llamacpp", *sizes, length]
        return [f"{method}={draft}", *further, *engine]

    @property
    def threads(self) -> str:
        """Further options of the server."""
        return f"--threads {self.options.threads} --threads-batch {self.options.threads}"

    def sweep(self) -> dict[str, Any]:
        """The command's document."""
        result, options = self.options.folder / f"{self.pair.name}.json", self.options
        line = [sys.executable, "-m", "specdec_cli", "sweep-k", "--chat", "--output", str(result), "--force"]
        line += ["--engine-command", options.llamacpp, "--engine-args", self.threads, "--k-max", str(max(self.pair.ks))]
        line += ["--dataset", str(WORKLOADS / self.pair.prompts), "--num-prompts", str(options.num_prompts)]
        subprocess.run([*line, *(word for one in self.settings for word in ("--set", one))], check=True)
        return dict(json.loads(result.read_text()))

    def tokens_per_second(self, shape: DraftShape) -> float:
        """Speed of a start of its own."""
        command, arguments = self.options.llamacpp, self.threads
        shared = Shared(sets=tuple(self.settings), takes_engine=True, engine_command=command, engine_args=arguments)
        engine = OtherEngine.of(shared.resolve(), shared).without_prefix_caching().with_p_min(shape.p_min)
        num, sampling = self.options.num_prompts, engine.resolved.recipe.sampling
        rows = read_rows(str(WORKLOADS / self.pair.prompts), None, num, True).rows[:num]
        with engine.process(open_screen(True, streams_text=False), shape.k) as url:
            plan = EndpointPlan(parse_address(url, ENGINE_OPTION), chat=True, timeout_s=300, protocol=engine.protocol)
            totals = measured_pass(plan, sampling, rows, drafts=shape.k > 0, may_find_none=shape.p_min > 0)
        print(f"{self.pair.name}, {shape}: {totals}", file=sys.stderr, flush=True)
        return totals.num_tokens / totals.seconds


def compare(starts: Starts) -> dict[str, Any]:
    """The recommendation beside the best pair of the grid."""
    begin = perf_counter()
    document = starts.sweep()
    swept = perf_counter()
    recommended, at_size = document["recommended"], document["by_batch_size"][0]
    chosen = DraftShape(recommended["k"], p_min=recommended.get("p_min") or 0.0)
    grid = [DraftShape(k, p_min=p_min) for k in starts.pair.ks for p_min in starts.pair.p_mins]
    speeds = {shape: starts.tokens_per_second(shape) for shape in dict.fromkeys((PLAIN, *grid, chosen))}
    plain = (speeds[PLAIN], starts.tokens_per_second(PLAIN))
    speeds[PLAIN] = sum(plain) / 2
    exhaustive = perf_counter() - swept
    best = max(speeds, key=lambda shape: speeds[shape])
    predicted = {
        DraftShape(row["k"], p_min=row.get("p_min", 0.0)): row["predicted"]
        for row in (*at_size["rows"], *at_size.get("by_p_min", ()))
    }
    rows = [
        {"k": shape.k, "p_min": shape.p_min, "tokens_per_second": speed, "speedup": speed / speeds[PLAIN]}
        | ({} if shape not in predicted else {"predicted_speedup": predicted[shape]["speedup"]})
        for shape, speed in sorted(speeds.items())
    ]
    return {
        "target": starts.pair.target.name,
        "draft": Path(starts.pair.draft).name,
        "prompts": starts.pair.prompts,
        "recommended": {key: recommended.get(key) for key in ("k", "p_min", "verdict", "why")},
        "best": {"k": best.k, "p_min": best.p_min},
        "loss_against_best": 1 - speeds[chosen] / speeds[best],
        "plain_tokens_per_second": plain,
        "seconds": {"sweep": round(swept - begin, 1), "exhaustive": round(exhaustive, 1)},
        "starts": list(zip(*(document["engine_sweep"].get(key, []) for key in ("starts", "p_mins")), strict=False)),
        "median_error": document["engine_sweep"]["median_error"],
        "costs": document["engine_sweep"]["costs"],
        "rows": rows,
    }


def main() -> None:
    """Make the files that are not there, compare, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llamacpp", required=True, help="a Python with the wheel xllamacpp")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for the made files")
    parser.add_argument("--pairs", default="dear,own,lookup")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="two k and two p-min, to try the script; keeps no result")
    options = parser.parse_args()
    dear, draft = options.folder / "dear.gguf", options.folder / "draft.gguf"
    if not dear.exists():
        write_layers(options.model, dear, frozenset(), NUM_IDLE)
    if not draft.exists():
        write_layers(options.model, draft, WITHOUT, 0)
    pairs = [
        Pair("dear", dear, str(draft), "code.jsonl", (1, 2, 3, 4), (0.0, 0.6, 0.9)),
        Pair("own", options.model, str(draft), "code.jsonl", (1, 2, 4), (0.0, 0.6)),
        Pair("lookup", options.model, "ngram-simple:size_n=2", "edit.jsonl", (2, 4, 8, 12)),
    ]
    if options.short:
        pairs = [Pair(pair.name, pair.target, pair.draft, pair.prompts, (1, 2), pair.p_mins[-2:]) for pair in pairs]
    about = {"file": options.model.name, "idle_layers": NUM_IDLE, "layers_left_out_of_the_draft": sorted(WITHOUT)}
    about |= {"num_prompts": options.num_prompts, "tokens": options.tokens, "threads": options.threads}
    before, results = record.machine(), dict[str, Any]()
    for pair in pairs:
        if pair.name in options.pairs.split(","):
            results[pair.name] = compare(Starts(pair, options))
            print(json.dumps(results[pair.name], indent=1))
            if not options.short:
                print(record.save("llama_cpp_sweep", dict(before), about | results, options.threads))


if __name__ == "__main__":
    main()
