"""An engine of toys for tests of what stands above it: a table for a target, an n-gram draft, letters for tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typed import stand_in

from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import LMWithoutWeights
from specdec_cli.text.stream import TextStream

LETTERS = "\0abcdefgh .\n"
END = 0


class LetterDetokenizer:
    provisional = ""

    def push(self, token_id: int) -> str:
        return LETTERS[token_id] if token_id else ""

    def flush(self) -> str:
        return ""


class LetterTokenizer:
    """One token a letter; unknown letters are `a`."""

    num_tokens = len(LETTERS)
    eos_token_ids = (END,)
    is_stand_in = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [max(1, LETTERS.find(letter)) for letter in text]

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token] for token in token_ids if token)

    def chat(self, messages, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(" ".join(f"{message['role']} {message['content']}" for message in messages))

    def detokenizer(self, skip_special_tokens: bool = True) -> LetterDetokenizer:
        return LetterDetokenizer()

    def stream(self, stop=(), stop_ids=(), skip_special_tokens: bool = True) -> TextStream:
        return TextStream(LetterDetokenizer(), stop, stop_ids)


class TableLM(LMWithoutWeights):
    """Logits that depend on the last two tokens, drawn once; deterministic, and now and then repeating itself."""

    name = "table"
    max_context = 512
    block_size = 16
    num_blocks = 1024

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = len(LETTERS)
        self.vocab_size = size
        self.table = torch.randn(size, size, size, generator=generator) * 3
        self.table[..., END] = -20.0
        self.num_calls = 0

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        self.num_calls += 1
        logits = []
        for row in rows:
            text = row.as_chain()
            for end in range(len(text) - row.num_logits + 1, len(text) + 1):
                before = text[end - 2] if end > 1 else 0
                logits.append(self.table[before, text[end - 1]])
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def release(self, handle: int) -> None:
        pass

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks


class FailingLM(TableLM):
    """A target whose logits are no numbers once a context with a certain beginning has 8 tokens."""

    def __init__(self, begin: str) -> None:
        super().__init__()
        self.begin = LetterTokenizer().encode(begin)

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        logits = super().score(rows)
        first = 0
        for row in rows:
            if len(row.context) > 8 and list(row.context[: len(self.begin)]) == self.begin:
                logits[first : first + row.num_logits] = float("nan")
            first += row.num_logits
        return logits


def toy_engine(k: int = 4, max_num_seqs: int = 8, verify: str = "auto", target: TableLM | None = None) -> Engine:
    drafter = create("ngram", {"min": 1})
    drafter.load(Resources(lambda name: TableLM(), LetterTokenizer().encode, len(LETTERS)))
    options = EngineOptions(num_speculative_tokens=k, max_num_seqs=max_num_seqs, verify=verify)
    return Engine(target or TableLM(), drafter, stand_in(LetterTokenizer()), options, eos_token_ids=(END,))
