"""Tiny PARD drafts as they are published, trained ones among them, and their logits by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_engine import letter_tokenizer
from tiny_models import VOCAB, make_tiny
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

MASK = VOCAB + 3
MORE = VOCAB + 8  # tokens of the draft: a mask beside padding that the target has not


def publish_pard(folder: Path, family: str = "llama", seed: int = 5, **keys: Any) -> Path:
    """Save a random PARD draft: an ordinary checkpoint, with the mask token in its configuration."""
    make_tiny(family, folder, seed, vocab_size=MORE)
    letter_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"pard_token": MASK, "spd_type": "pard", **keys}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def depth_logits(folder: Path, context: Sequence[int], k: int) -> Tensor:
    """Logits [k, VOCAB] of the next tokens: of the last token and of k - 1 masks behind it, in one plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([[*context, *[MASK] * (k - 1)]])).logits[0, -k:, :VOCAB]


def train_pard(folder: Path, text: Sequence[int], first: int, k: int, steps: int = 60) -> None:
    """Fit a published PARD draft to one text from a position on, for k tokens at every start."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    starts = range(first, len(text) - k)
    longest = max(starts) + k - 1
    inputs = torch.full((len(starts), longest), MASK)
    for i, start in enumerate(starts):
        inputs[i, :start] = torch.tensor(text[:start])
    wanted = torch.tensor([text[start : start + k] for start in starts])
    places = torch.tensor([[start - 1 + j for j in range(k)] for start in starts])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(inputs).logits.gather(1, places[..., None].expand(-1, -1, MORE))
        functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder, state_dict=state)
    (folder / "config.json").write_text(config)
