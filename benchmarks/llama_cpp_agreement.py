"""Our logits of GGUF files beside those that llama.cpp gives the same tokens, as scripts/llama_cpp_logits.py recorded.

    python benchmarks/llama_cpp_agreement.py FILE.gguf... [--recorded FILE.npz] [--save llama_cpp_agreement]

Arms: native blocks, and the dequantized float32 model, which shows what llama.cpp's own rounding costs. The recorded
distributions have their most likely tokens only; all others count as one in the KL divergence.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf_blocks
import numpy
import record
import torch

from specdec_cli.lm.load import load_lm

RECORDED = Path(__file__).parents[1] / "tests" / "real_models" / "llama_cpp_logits.npz"


def agreement(path: str, num_tokens: int, arm: str, recording: Path = RECORDED) -> dict[str, float]:
    """Mean KL divergence from llama.cpp and equal first choices over the first recorded tokens.

    Args:
        path: a recorded file.
        num_tokens: how many.
        arm: `native` or `float32`.
        recording: what llama.cpp gave.
    """
    recorded = numpy.load(recording)
    tokens, ids, theirs = (recorded[f"{Path(path).name}/{part}"][:num_tokens] for part in ("tokens", "ids", "logprobs"))
    lm = load_lm(path, max_model_len=len(tokens) + 16, max_num_seqs=1, **gguf_blocks.COMPARED[arm])
    ours = gguf_blocks.logits(lm, tokens.tolist())
    top = torch.from_numpy(ids.astype(numpy.int64))
    right, its = (_with_rest(part) for part in (torch.from_numpy(theirs).double(), _log_softmax(ours, top)))
    kl = (right.exp() * (right - its)).sum(-1)
    same = (ours.argmax(-1) == top[:, 0]).double()
    return {
        "tokens": len(tokens),
        "mean KL divergence": round(float(kl.mean()), 5),
        "99th percentile": round(float(kl.quantile(0.99)), 5),
        "equal first choices": round(float(same.mean()), 4),
    }


def _log_softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens [n, k] by logits [n, V]."""
    return torch.cat(
        [
            torch.log_softmax(some.double(), -1).gather(1, chosen)
            for some, chosen in zip(torch.split(logits, 64), torch.split(ids, 64), strict=True)
        ]
    )


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, k] and that of all other tokens: [n, k + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log()
    return torch.cat([logprobs, rest], -1)


def main() -> None:
    """Compare files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="of other files")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before = record.machine()
    results: dict[str, Any] = {
        Path(path).name: {arm: agreement(path, given.tokens, arm, given.recorded) for arm in ("native", "float32")}
        for path in given.files
    }
    print(json.dumps(results, indent=1))
    if given.save:
        record.save(given.save, before, results)


if __name__ == "__main__":
    main()
