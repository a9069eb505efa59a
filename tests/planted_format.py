"""A published format of drafts as a contributor adds one: this file in `lm/heads`, and a row in its table.

Its draft repeats the last token, whatever the target's final state is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.lm.door import LM
from specdec_cli.lm.files.draft_formats import DraftFolder, DraftFormat, PublishedKind
from specdec_cli.lm.heads.draft_sequences import Ahead, DraftSequences
from specdec_cli.lm.heads.head import checked_tensors
from specdec_cli.lm.heads.published import PublishedDraft

ROW = DraftFormat(
    module="echo",
    kinds=(PublishedKind("echo", "an Echo draft", "echo", ("echo",), one_pass=True),),
    words=("echo",),
    tensors=(("echo_scale",),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoDraft(PublishedDraft):
    """An Echo draft by its folder."""

    most_tokens: int

    def __str__(self) -> str:
        return f"Echo draft: reads {self.reading}; repeats the last token up to {self.most_tokens} times"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"echo_scale": (1,)}


def read(name: str, source: DraftFolder) -> EchoDraft:
    most = int(source.content.get("echo_tokens", 3))
    return EchoDraft(name=name, source=source, taps=("final",), most_tokens=most)


class EchoSequences(DraftSequences):
    def __init__(self, draft: EchoDraft, target: LM) -> None:
        self.draft, self.weights = draft, checked_tensors(draft, target)
        self.vocab_size, self._fed = target.vocab_size, set[int]()

    @property
    def most_tokens(self) -> int:
        return self.draft.most_tokens

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, 4

    def release(self, handle: int) -> None:
        self._fed.discard(handle)

    def feed(self, new: Sequence[tuple[int, Sequence[int], Tensor]], depths: Sequence[int]) -> None:
        self._fed |= {handle for handle, _, _ in new}

    def can_draft(self, handle: int) -> bool:
        return handle in self._fed

    def ahead(self, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        rows = []
        for _, token, depth in ends:
            rows.append(torch.zeros(depth, self.vocab_size))
            rows[-1][:, token] = 9.0
        return Ahead(rows)


def sequences(draft: EchoDraft, target: LM, num_tokens: int) -> EchoSequences:
    return EchoSequences(draft, target)
