"""The engine beside its peers on one checkpoint: `specdec bench` with all of them in turn, for several k.

    python benchmarks/peers.py                                             # the built-in pair, against transformers
    python benchmarks/peers.py --name embedded --target E/target --draft E/draft_n0.02 --dtype bfloat16 -k 3 5 7
    python benchmarks/peers.py ... --openvino E/bin/python      # OpenVINO GenAI, in the environment of openvino_arm.py
    python benchmarks/peers.py ... --endpoint llama.cpp=http://127.0.0.1:8080/v1

Each k is one `specdec bench --against transformers,transformers-assisted`: our arms with and without the draft,
transformers' plain and assisted generation, interleaved in one process; medians with bootstrap 95 % intervals, and the
bandwidth measured in the same run. OpenVINO GenAI decodes the same token ids before and after each of them, plain and
with the draft. A server of another engine that has the same checkpoint is measured by `specdec bench --endpoint`
between two k, at the k that it was started with (llama.cpp's converter knows pre-tokenizers by a hash and refuses the
embedded pair's, which is GPT-2's). Kept as results/peers_NAME.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import record
import torch
from transformers import AutoTokenizer

from specdec_cli.measure.workload.workload import read_rows

PEERS = ("transformers", "transformers-assisted")
SERVER_FIGURES = ("endpoint", "machine", "timing", "throughput", "counters")


def bench(*options: str) -> dict[str, Any]:
    """The document of one `specdec bench`."""
    command = [sys.executable, "-m", "specdec_cli", "bench", "--quiet", "--json", *options]
    document: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return document


def figures(document: dict[str, Any]) -> dict[str, Any]:
    """Figures to compare: tokens per second, speed-ups with intervals, shares of the machine."""
    against = {
        name: {
            "tokens_per_second": one["timing"]["decode_tokens_per_second"],
            "draft_over_it": one["speedup"]["decode"],
            "equal": one["equal"],
        }
        for name, one in document["against"].items()
    }
    roofs = document["roofline"]
    return {
        "load": [document["machine"]["load_before"], document["machine"]["load_after"]],
        "plain_tokens_per_second": document["plain"]["timing"]["decode_tokens_per_second"],
        "draft_tokens_per_second": document["draft"]["timing"]["decode_tokens_per_second"],
        "acceptance_rate": document["draft"]["speculative"]["acceptance_rate"],
        "tokens_per_step": document["tokens_per_step"],
        "speedup": document["speedup"]["decode"],
        "efficiency": document["efficiency"],
        "lossless": document["lossless"],
        "bandwidth_gb_per_second": roofs["bandwidth_bytes_per_second"] / 1e9,
        "plain_share_of_roofline": (roofs["plain"] or {}).get("fraction"),
        "verify_share_of_roofline": (roofs["verify"] or {}).get("fraction"),
        "against": against,
    }


def openvino(python: str, options: argparse.Namespace, k: int) -> dict[str, Any]:
    """OpenVINO GenAI's arms: tokens over seconds of all prompts; how many texts equal its own plain ones."""
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    rows = read_rows(options.dataset, None, options.num_prompts).rows
    prompts = [tokenizer(row.prompt)["input_ids"] for row in rows]
    job = {
        "target": str(Path(options.target).resolve()),
        "draft": str(Path(options.draft).resolve()),
        "folder": str(Path(options.target).resolve().parent),
        "k": k,
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
        "prompts": prompts,
    }
    command = [python, str(Path(__file__).with_name("openvino_arm.py"))]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads(done.stdout.splitlines()[-1])
    plain, draft = document["arms"]["plain"], document["arms"]["draft"]
    return {
        "version": document["version"],
        "threads": job["threads"],
        "num_texts": len(prompts),
        **{
            f"{name}_tokens_per_second": sum(len(one["token_ids"]) - 1 for one in rows)
            / sum(one["decode_seconds"] for one in rows)
            for name, rows in document["arms"].items()
        },
        "texts_equal_to_its_plain": sum(
            one["token_ids"] == other["token_ids"] for one, other in zip(plain, draft, strict=True)
        ),
    }


def main() -> None:
    """Measure every k and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="builtin")
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", default="builtin:draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--draft-quantize", default="none")
    parser.add_argument("--dataset", default="builtin:stories")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("-k", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--without-peers", action="store_true", help="our own arms alone")
    parser.add_argument(
        "--openvino",
        metavar="PYTHON",
        help="an interpreter that has openvino_arm.py's packages; converts beside the target",
    )
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL")
    options = parser.parse_args()
    before = record.machine()
    workload = ["--dataset", options.dataset, "--num-prompts", str(options.num_prompts), "-n", str(options.tokens)]
    pair = ["--target", options.target, "--draft", options.draft, "--dtype", options.dtype]
    if options.quantize != "none":
        pair += ["--quantize", options.quantize]
    if options.draft_quantize != "none":
        pair += ["--draft-quantize", options.draft_quantize]
    peers = ["none"] if options.without_peers else ["none", *PEERS]
    rows: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    for k in options.k:
        arguments = (*pair, *workload, "-k", str(k), "--repeats", str(options.repeats), "--against", ",".join(peers))
        if options.openvino:
            before_it = openvino(options.openvino, options, k)
        rows.append({"k": k, **figures(bench(*arguments))})
        if options.openvino:
            rows[-1]["openvino"] = [before_it, openvino(options.openvino, options, k)]
        print(json.dumps(rows[-1]), flush=True)
        for named in options.endpoint:
            name, _, url = named.partition("=")
            document = bench("--endpoint", url, *workload)
            servers.append({"name": name, "k_before": k, **{key: document[key] for key in SERVER_FIGURES}})
            print(json.dumps(servers[-1]), flush=True)
    best = max(rows, key=lambda row: row["draft_tokens_per_second"])
    results = {
        **{
            key: value for key, value in vars(options).items() if key not in ("endpoint", "openvino", "target", "draft")
        },
        "target": Path(options.target).name,
        "draft": Path(options.draft).name,
        "best_k": best["k"],
        "rows": rows,
        "servers": servers,
    }
    print(record.save(f"peers_{options.name}", before, results))


if __name__ == "__main__":
    main()
