"""A drafter that reads the target's hidden states: linear heads, trained on taps of the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutModel
from specdec_cli.drafters.growing_draft import GrowingDraft
from specdec_cli.lm.door import LM, Row, Tap, Tapped

TAPS: tuple[Tap, ...] = (0, "final")


@dataclass
class Drafter(WithoutModel):
    """Guesses k tokens, each by a head of its own, from the last position's states and the last token's embedding.

    A tree has each head's likeliest tokens at its depth, whatever stands before them (as Medusa's).
    It needs the features of that one position, and checks that it is given all of them.

    Args:
        needs_all: adopts nothing of a cached prefix, as a drafter with a cache of its own would.
    """

    needs_all: bool = True

    taps: Sequence[Tap] = TAPS
    builds_trees = True

    def __post_init__(self) -> None:
        self.heads: Tensor | None = None  # [k, inputs, V]; None guesses at random
        self.seen: dict[int, list[Tensor]] = {}
        self.num_seen: dict[int, int] = {}
        self.lives: list[
            tuple[int, list[int], Tensor]
        ] = []  # of each sequence where its features begin, text, and they
        self.contexts: dict[int, list[int]] = {}

    def load(self, resources: Resources) -> None:
        assert resources.target is not None
        self.target, self.num_tokens = resources.target, resources.num_tokens

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        return 0 if self.needs_all else len(context)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: DraftRow) -> Guesses:
        begins = row.handle not in self.seen
        seen = self.seen.setdefault(row.handle, [])
        if row.features is not None:
            seen.append(row.features)
        if begins:
            self.num_seen[row.handle] = len(row.context) - 1 - sum(map(len, seen))
            assert not self.needs_all or self.num_seen[row.handle] == 0, "a new sequence has features from its first on"
        num = self.num_seen[row.handle] + sum(map(len, seen))
        assert num == len(row.context) - 1, "each kept position's features come once"
        self.contexts[row.handle] = list(row.context)
        generator = torch.Generator().manual_seed(len(row.context))
        if self.heads is None:
            scores = torch.randn(row.k, self.num_tokens, generator=generator)
        else:
            scores = (self.inputs(seen[-1][-1:], row.context[-1:]) @ self.heads[: row.k])[:, 0]
        return Guesses(_drafted(row, scores.softmax(-1)))

    def release(self, handle: int) -> None:
        if handle in self.seen:
            seen = self.seen.pop(handle)
            begin, context = self.num_seen.pop(handle), self.contexts.pop(handle)
            self.lives.append((begin, context, torch.cat(seen) if seen else torch.empty(0)))

    def inputs(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """What a head reads [n, inputs] of features [n, taps, hidden] and the tokens that follow these positions."""
        parts = [features.flatten(1).float(), self.target.embed(tokens).float(), torch.ones(len(features), 1)]
        return torch.cat(parts, 1)

    def train(self, texts: Sequence[Sequence[int]], k: int, num_steps: int = 150) -> None:
        """Fit the heads to texts."""
        inputs, wanted = [], []
        for text in texts:
            states = tapped(self.target, text)
            inputs.append(self.inputs(states[: -k - 1], text[1:-k]))
            wanted.append(torch.tensor([text[2 + i : len(text) - k + 1 + i] for i in range(k)]))
        given, right = torch.cat(inputs), torch.cat(wanted, 1)
        heads = torch.zeros(k, given.shape[1], self.num_tokens, requires_grad=True)
        optimizer = torch.optim.Adam([heads], lr=0.03)
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy((given @ heads).flatten(0, 1), right.flatten())
            loss.backward()
            optimizer.step()
        self.heads = heads.detach()


def _drafted(row: DraftRow, probs: Tensor) -> Drafted:
    """A guess in the row's shape, of the probabilities [k, V] at each depth."""
    if row.tree is None:
        return Drafted.chain(probs.argmax(-1).tolist())
    if row.tree.is_dynamic:
        growth = GrowingDraft(row, 0)
        for its in probs:
            if growth.is_done:
                break
            best = its.topk(min(row.most_nodes, len(its)))
            growth.grow_likely([list(zip(best.indices.tolist(), best.values.tolist(), strict=True))] * growth.num_ends)
        return growth.guesses().drafted
    shape, order = row.tree.cut(row.k), probs.argsort(descending=True)
    flat = Drafted(tuple(range(len(shape.parents))), shape.parents)
    siblings = [shape.children(parent) for parent in shape.parents]
    tokens = [int(order[flat.depth(node) - 1, its.index(node)]) for node, its in enumerate(siblings)]
    return flat.with_tokens(tokens)


def tapped(lm: LM, text: Sequence[int]) -> Tensor:
    """Hidden states [tokens, taps, hidden] of a text."""
    row = Row(-1, text, 0, tapped=Tapped())
    lm.tap(TAPS)
    lm.score([row])
    lm.release(-1)
    assert row.tapped is not None
    assert row.tapped.states is not None
    return row.tapped.states


def feature_drafter(target: LM, trained: Sequence[Sequence[int]] = (), k: int = 4, needs_all: bool = True) -> Drafter:
    """One that is loaded and, where there are texts, trained."""
    made = Drafter(needs_all)
    made.load(Resources(lambda _: target, None, target.vocab_size, target))
    if trained:
        made.train(trained, k)
    return made
