"""vLLM's own rejection sampler on a CPU against the rules that predict it; run it with vLLM's Python.

    /path/to/vllmenv/bin/python benchmarks/vllm_sampler.py      # half a minute, no server

Steps of four drafted tokens with fixed distributions p and q: the draft's likeliest tokens (`one-hot`), and drawn ones
with their probabilities (`rejection`). The sampler runs as it is and with `vllm_cpu_fix`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import record
import torch

HERE = Path(__file__).parent
VOCABULARY, TOKENS, SEQUENCES, BATCHES = 512, 4, 64, 300


def expected(chances: torch.Tensor) -> float:
    """Acceptance length where each token is accepted with its chance [k], if all before it are."""
    return 1 + float(chances.cumprod(0).sum())


def counted(p_logits: torch.Tensor, q: torch.Tensor | None, likeliest: torch.Tensor) -> float:
    """Acceptance length of vLLM's sampler at temperature 1.

    Args:
        p_logits: [k, V] the target's.
        q: [k, V] what drafted tokens are drawn from; None drafts the likeliest.
        likeliest: [k] the draft's likeliest tokens.
    """
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")
    rows, steps, accepted = SEQUENCES * TOKENS, 0, 0
    cumulative = torch.arange(1, SEQUENCES + 1, dtype=torch.int32) * TOKENS
    asked: Any = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(SEQUENCES), top_k=None, top_p=None, generators={}
    )
    for _ in range(BATCHES):
        logits = p_logits.repeat(SEQUENCES, 1)
        drafted = likeliest.repeat(SEQUENCES)
        if q is not None:
            drafted = torch.multinomial(q, SEQUENCES, replacement=True).t().reshape(rows)
        probabilities = None if q is None else q.repeat(SEQUENCES, 1).contiguous()
        judged = sampler.apply_sampling_constraints(logits, cumulative, asked)
        bonus = torch.zeros(SEQUENCES, 1, dtype=torch.int64)
        counts = [TOKENS] * SEQUENCES
        emitted = sampler.rejection_sample(drafted, counts, TOKENS, cumulative, probabilities, judged, bonus, asked)
        steps += SEQUENCES
        accepted += int((emitted >= 0).sum()) - SEQUENCES
    return 1 + accepted / steps


def measure() -> dict[str, Any]:
    """Both rules, in this process."""
    platform: Any = import_module("vllm.platforms").current_platform
    platform.import_kernels()
    platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    p_logits = torch.randn(TOKENS, VOCABULARY) * 3
    q = (p_logits + torch.randn(TOKENS, VOCABULARY) * 0.7).softmax(-1)
    p, likeliest = p_logits.softmax(-1), q.argmax(-1)
    chances = {"one-hot": p.gather(1, likeliest[:, None])[:, 0], "rejection": torch.minimum(p, q).sum(-1)}
    return {
        rule: {"predicted": expected(chances[rule]), "counted": counted(p_logits, drawn, likeliest)}
        for rule, drawn in (("one-hot", None), ("rejection", q))
    }


def main() -> None:
    """Measure as it is and repaired, each in a process of its own, and keep the result."""
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
        return
    before = record.machine()
    results: dict[str, Any] = {"vllm": version("vllm-cpu"), "steps": SEQUENCES * BATCHES}
    for name, path in (("as it is", ""), ("repaired", str(HERE / "vllm_cpu_fix"))):
        words = [sys.executable, str(Path(__file__).resolve()), "measure"]
        run = subprocess.run(words, stdout=subprocess.PIPE, check=True, env=os.environ | {"PYTHONPATH": path})
        found = json.loads(run.stdout.splitlines()[-1])
        for one in found.values():
            one["error"] = one["predicted"] / one["counted"] - 1
        results[name] = found
        print(name, found)
    print(record.save("vllm_sampler", before, results))


if __name__ == "__main__":
    main()
