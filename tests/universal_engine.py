"""Engines whose draft has another tokenizer: random checkpoints, and models that recite a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from many_tokenizers import tokenizer
from tiny_engine import tiny_lm
from typed import stand_in

from specdec_cli import drafters
from specdec_cli.drafters import universal
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.events import Event
from specdec_cli.lm.door import LM
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.measure.audit.table import TableLM


def vocabulary(kind: str) -> int:
    """Tokens that a kind's models score, padding included."""
    return tokenizer(kind).num_tokens + 3


def random_lm(folder: Path, kind: str, seed: int = 1, **shape: Any) -> TransformersLM:
    """A tiny random checkpoint over a kind's vocabulary."""
    return tiny_lm(folder, "llama", seed, **{"vocab_size": vocabulary(kind), "max_position_embeddings": 288} | shape)


def reciter(kind: str, text: str, sharpness: float = 6.0) -> TableLM:
    """A model that goes on with a text as its tokenizer cuts it, and anywhere else is unsure, in its own way.

    Args:
        kind: of its tokenizer.
        text: what it recites; a context ends somewhere in it.
        sharpness: logit of the token that follows; others have normal ones.
    """
    own = tokenizer(kind)

    def function(context: tuple[int, ...]) -> np.ndarray:
        said = own.decode(context).lstrip()
        logits = np.random.default_rng([7, len(said) % 5]).normal(0.0, 1.0, vocabulary(kind))
        if said and text.startswith(said):
            rest = own.encode(text, False)[len(own.encode(said, False)) :]
            if rest:
                logits[rest[0]] = sharpness
        return logits

    return TableLM(function, vocabulary(kind), name=f"reciter of {kind}", max_context=400)


def universal_drafter(
    target_kind: str, draft: LM, draft_kind: str, match: str = "auto", num_tokens: int | None = None
) -> universal.Drafter:
    """A loaded drafter."""
    made = drafters.create("universal", {"model": draft.name, "match": match})
    first = tokenizer(target_kind)
    made.load(
        Resources(
            stand_in(lambda _: draft),
            None,
            num_tokens or first.num_tokens,
            tokenizer=first,
            load_tokenizer=lambda _: tokenizer(draft_kind),
        )
    )
    return stand_in(made)


class Audited(Engine):
    """An engine that looks at the books of both models after every step."""

    def _step(self) -> list[Event]:
        events = super()._step()
        models = [self.target, getattr(self.drafter.lm, "own", None)]
        for lm in models:
            if isinstance(lm, TransformersLM):
                lm.check_integrity()
                assert self.has_work or lm.num_free_blocks == lm.num_blocks, "an idle engine holds blocks"
        assert not self.drafters.notices, self.drafters.notices
        return events


def universal_engine(
    target: LM,
    target_kind: str,
    draft: LM | None,
    draft_kind: str = "",
    match: str = "auto",
    k: int = 4,
    **options: Any,
) -> Audited:
    """An engine with a draft of another tokenizer; without a draft, plain decoding."""
    drafter = drafters.create("none", {}) if draft is None else universal_drafter(target_kind, draft, draft_kind, match)
    return Audited(target, drafter, tokenizer(target_kind), EngineOptions(num_speculative_tokens=k, **options))


PROMPTS = [
    "Once upon a time there was a lion",
    "the café 🙂🙂 on",
    "def mean(values):\n    if",
    "你好 the bear went to the river, " * 6,
]


def ids(kind: str, texts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Prompts in a kind's tokens, one behind special tokens, one that ends in half a character."""
    own = tokenizer(kind)
    found = [own.encode(text, False) for text in texts]
    found[0] = [1, 3, *found[0]]
    half = own.encode("the 🙂", False)
    return [*found, half[:-1] if len(half) > 3 else half]
