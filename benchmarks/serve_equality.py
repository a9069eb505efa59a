"""Output through HTTP is the engine's: greedy text as from transformers, seeded text as when it is alone.

    python benchmarks/serve_equality.py [--prompts 200] [--company 32] [--only greedy|seeded]

Greedy, float32, the built-in pair: for each prompt transformers' own text, the engine's (`specdec generate`), and the
server's with each drafter, streamed and not, alone and among 31 others. Seeded: each verification mode has a server;
each prompt's text alone and in company. Float32 differs in its last bits between 1 and 32 rows, so a draw that falls
between two tokens' borders may differ: such a text is counted as different.
"""

from __future__ import annotations

import argparse
import http.client
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import record
from served import Served, serving

from specdec_cli import Engine, SamplingParams

PROMPTS = Path(__file__).parents[1] / "specdec_cli" / "measure" / "workload" / "prompts"
TARGET = Path(__file__).parents[1] / "specdec_cli" / "builtin" / "target"
DRAFTS = ("model", "ngram", "prediction", "none")
MODES = ("rejection", "block", "gumbel", "exact-match")
NUM_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """One request: the prompt's place, its drafter, whether it streams."""

    place: int
    draft: str
    streams: bool


def read_prompts(num: int) -> list[str]:
    """So many different prompts: the package's own, then their beginnings."""
    files = [PROMPTS / name for name in ("stories.jsonl", "mini.jsonl")]
    rows = [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()]
    words = [row.split() for row in rows]
    shares = [[" ".join(one[: max(2, len(one) * share // 4)]) for one in words] for share in (3, 2, 1)]
    found = list(dict.fromkeys([*rows, *(text for share in shares for text in share)]))
    assert len(found) >= num, f"there are {len(found)} prompts"
    return found[:num]


def ask(served: Served, body: dict[str, Any], streams: bool) -> str:
    """The text of a completion; an error is a text that equals no other."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
    head = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": streams}), head)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return f"status {answer.status}: {said}"
    if not streams:
        return str(json.loads(said)["choices"][0]["text"])
    events = [event.removeprefix("data: ") for event in said.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "[DONE]", "a stream ends with [DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def transformers_texts(prompts: Sequence[str]) -> list[str]:
    """Greedy texts of transformers' own `generate`, each prompt alone, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "use_cache": True}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def greedy(prompts: Sequence[str], num_together: int) -> dict[str, Any]:
    """Every prompt by every way, against transformers."""
    expected = transformers_texts(prompts)
    print("transformers has decoded", flush=True)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    outputs = Engine.load().generate(list(prompts), params)
    with serving("--max-num-seqs", str(num_together), "--dtype", "float32") as served:

        def text(asked: Asked) -> str:
            body: dict[str, Any] = {"prompt": prompts[asked.place], "max_tokens": NUM_TOKENS, "temperature": 0}
            body["speculative"] = {"draft": asked.draft}
            if asked.draft == "prediction":
                body["prediction"] = {"type": "content", "content": "Then " + expected[asked.place]}
            return ask(served, body, asked.streams)

        every = [Asked(*one) for one in product(range(len(prompts)), DRAFTS, (False, True))]
        found = {"alone": (every, [text(one) for one in every])}
        print("alone is done", flush=True)
        with ThreadPoolExecutor(num_together) as pool:
            found[f"{num_together} together"] = (every, list(pool.map(text, every)))
        command = served.command
    engine_equal = sum(output.text == one for output, one in zip(outputs, expected, strict=True))
    report: dict[str, Any] = {"command": command, "prompts": len(prompts), "tokens": NUM_TOKENS}
    report["engine equal to transformers"] = f"{engine_equal} of {len(prompts)}"
    for company, (many, texts) in found.items():
        total, same = Counter[str](), Counter[str]()
        for one, said in zip(many, texts, strict=True):
            way = f"{company}, {one.draft}, {'streamed' if one.streams else 'whole'}"
            total[way] += 1
            same[way] += said == expected[one.place]
        report |= {way: f"{same[way]} of {total[way]}" for way in total}
    return report


def seeded(prompts: Sequence[str], num_together: int) -> dict[str, Any]:
    """Each mode's texts of a seed, alone and in company."""
    report = {}
    for mode in MODES:
        with serving("--max-num-seqs", str(num_together), "--verify", mode) as served:

            def text(place: int, served: Served = served) -> str:
                body = {"prompt": prompts[place], "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 100 + place}
                return ask(served, body, place % 2 == 1)

            alone = [text(place) for place in range(len(prompts))]
            with ThreadPoolExecutor(num_together) as pool:
                together = list(pool.map(text, range(len(prompts))))
        same = sum(one == other for one, other in zip(alone, together, strict=True))
        report[mode] = f"{same} of {len(prompts)} equal alone and {num_together} together, {len(set(alone))} different"
        print(mode, report[mode], flush=True)
    return report


def main() -> None:
    """Compare and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--company", type=int, default=32, help="requests at once")
    parser.add_argument("--only", choices=("greedy", "seeded"))
    options = parser.parse_args()
    before = record.machine()
    prompts = read_prompts(options.prompts)
    kept = record.RESULTS / "serve_equality.json"
    results: dict[str, Any] = json.loads(kept.read_text())["results"] if kept.exists() else {}
    for name, compared in (("greedy", greedy), ("seeded", seeded)):
        if options.only in (None, name):
            results[name] = compared(prompts if name == "greedy" else prompts[: options.company * 2], options.company)
            print(json.dumps(results[name], indent=1), flush=True)
            print(record.save("serve_equality", before, results))


if __name__ == "__main__":
    main()
