"""Why vLLM accepts other drafted tokens than a trace predicts at temperature 0: step by step on the embedded pair.

    python benchmarks/vllm_rounding.py /path/to/vllm /tmp/embedded --k 4 --num-prompts 16 --max-new-tokens 96

vLLM decodes each prompt without a draft, then with it, and reports what every step accepted. The draft then reads both
texts by specdec and by vLLM itself. At the very places where vLLM's steps began, each reading says what would have been
accepted; steps that could reach the text's end are left out. `plain` is the length that follows from the text without a
draft, as `sweep-k --engine vllm` predicts it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import record
from engine_served import vllm_serving

from specdec_cli.document import as_json
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.remote_trace import RemoteTracer
from specdec_cli.measure.predict.trace import Trace, TracedPrompt
from specdec_cli.measure.predict.tracing import trace_draft
from specdec_cli.measure.stats import ratio_of_totals
from specdec_cli.measure.workload.workload import read_rows
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

Bools = npt.NDArray[np.bool_]


class Texts:
    """The texts of the target, and the tokens that its steps accepted.

    Args:
        trace: the texts, for readers.
        steps: of each prompt, tokens that each step accepted; empty without a draft.
    """

    def __init__(self, trace: Trace, steps: list[list[int]]) -> None:
        self.trace, self.steps = trace, steps

    def outputs(self) -> list[tuple[int, ...]]:
        """Each prompt's output."""
        return [prompt.output for prompt in self.trace.prompts]


async def decoded(url: str, rows: Any, most: int) -> Texts:
    """The texts of all prompts, one at a time."""
    prompts, steps = [], []
    async with Endpoint(parse_address(url), None, 300.0, 1) as target:
        model = await target.choose_model("")
        for row in rows:
            body = {"model": model, "prompt": row.prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
            found = await target.whole("/completions", body | {"return_token_ids": True})
            choice = found["choices"][0]
            told = (found.get("metrics") or {}).get("speculative_decoding") or {}
            steps.append(told.get("per_step_accepted") or [])
            params = SamplingParams(max_new_tokens=most, temperature=0.0, ignore_eos=True)
            ids, output = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
            prompts.append(TracedPrompt(ids, output, len(ids) + most, params, None))
    highest = 1 + max(token for prompt in prompts for token in (*prompt.token_ids, *prompt.output))
    num = sum(len(prompt.output) for prompt in prompts)
    return Texts(Trace(model, highest, (), None, prompts, np.zeros(num, dtype=np.float32)), steps)


async def read_there(url: str, trace: Trace, most: int) -> list[Bools]:
    """Whether each token is the likeliest one of vLLM's draft, by prompt."""
    async with Endpoint(parse_address(url), None, 300.0, 1) as draft:
        tracer = RemoteTracer(draft, "", [], Sampling(max_new_tokens=most), False, 1)
        found = await tracer.trace_draft(trace, draft, await draft.choose_model(""), lambda _done, _total: None)
    return by_prompt(trace, found.is_argmax)


def read_here(draft: Path, dtype: str, trace: Trace) -> list[Bools]:
    """The same of specdec's draft."""
    drafter, lm = create("model", {"model": "draft"}), load_lm(str(draft), dtype=dtype, max_num_seqs=1)
    trace.num_tokens = lm.vocab_size
    drafter.load(Resources(lambda _: lm, None, lm.vocab_size))
    found = trace_draft(trace, drafter, 1)
    assert isinstance(found, ModelTrace), "a model's trace"
    return by_prompt(trace, found.is_argmax)


def by_prompt(trace: Trace, values: Bools) -> list[Bools]:
    """One array for each prompt's output."""
    ends = np.cumsum([len(prompt.output) for prompt in trace.prompts])
    return np.split(values, ends[:-1])


def accepted_at(matches: Bools, start: int, k: int) -> int:
    """Drafted tokens accepted by a step whose first one stands at `start`."""
    held = matches[start : start + k]
    return len(held) if held.all() else int(held.argmin())


def against(texts: Texts, reading: list[Bools], k: int) -> dict[str, Any]:
    """A reading beside vLLM's steps, at the places where these began."""
    counts = np.zeros((len(reading), 3))
    more = fewer = 0
    for place, (steps, matches) in enumerate(zip(texts.steps, reading, strict=True)):
        start = 1
        for accepted in steps:
            if start + k > len(matches):
                break
            own = accepted_at(matches, start, k)
            counts[place] += (1, accepted, own)
            more, fewer = more + (accepted > own), fewer + (accepted < own)
            start += accepted + 1
    num, theirs, ours = counts.T
    return {
        "steps": int(num.sum()),
        "counted": as_json(ratio_of_totals(num + theirs, num)),
        "read": as_json(ratio_of_totals(num + ours, num)),
        "steps_in_which_vllm_accepted_more": int(more),
        "fewer": int(fewer),
    }


def walked(reading: list[Bools], k: int) -> dict[str, Any]:
    """Acceptance length of a walk along a text that follows the reading itself."""
    counts = np.zeros((len(reading), 2))
    for place, matches in enumerate(reading):
        start = 1
        while start + k <= len(matches):
            accepted = accepted_at(matches, start, k)
            counts[place] += (accepted + 1, 1)
            start += accepted + 1
    found: dict[str, Any] = as_json(ratio_of_totals(*counts.T))
    return found


def compared(given: argparse.Namespace, dtype: str, log: Path) -> dict[str, Any]:
    """One dtype."""
    rows = read_rows("builtin:mini", None, given.num_prompts).rows
    target, draft = given.pair / "target", given.pair / given.draft
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": given.k}
    serve = partial(vllm_serving, given.vllm, log=log, max_num_seqs=1, dtype=dtype)
    with serve(target, None) as url:
        plain = asyncio.run(decoded(url, rows, given.max_new_tokens))
    with serve(target, config) as url:
        drafted = asyncio.run(decoded(url, rows, given.max_new_tokens))
    with serve(draft, None) as url:
        there = [asyncio.run(read_there(url, one.trace, given.max_new_tokens)) for one in (plain, drafted)]
    here = {name: [read_here(draft, name, one.trace) for one in (plain, drafted)] for name in ("bfloat16", "float32")}
    readings = {"vLLM": there, **{f"specdec in {name}": found for name, found in here.items()}}
    same = sum(one == other for one, other in zip(plain.outputs(), drafted.outputs(), strict=True))
    found: dict[str, Any] = {"prompts": len(rows), "texts_that_are_the_same_with_the_draft": same}
    for name, (along_plain, along_drafted) in readings.items():
        own = walked(along_plain, given.k)
        found[f"read by {name}"] = against(drafted, along_drafted, given.k) | {"plain": own}
        print(dtype, name, found[f"read by {name}"], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Compare in both dtypes, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", help="vLLM's program")
    parser.add_argument("pair", type=Path, help="folder that embedded_pair.py makes")
    parser.add_argument("--draft", default="draft_n0.02")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    given = parser.parse_args()
    before = record.machine()
    sizes = {"k": given.k, "num_prompts": given.num_prompts, "max_new_tokens": given.max_new_tokens}
    results: dict[str, Any] = {"options": sizes | {"draft": given.draft}}
    with tempfile.TemporaryDirectory() as name:
        for dtype in given.dtype:
            results[dtype] = compared(given, dtype, Path(name) / "vllm.log")
            print(record.save("vllm_rounding", before, results))


if __name__ == "__main__":
    main()
