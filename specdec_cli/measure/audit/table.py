"""A language model without a network: a function from contexts to logits, behind the same door.

Audits and tests use it: its distributions can be enumerated, and thousands of rows cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import CHAIN, LM, DraftForm, Recording, Row, Tap
from specdec_cli.lm.files.origin import Origin
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.traffic import Traffic


class LMWithoutWeights:
    """Base of LMs without weights: they have no size, know no quicker way than `score` and share no prefixes.

    A subclass adds `name`, `vocab_size`, `max_context`, `num_blocks`, `block_size`, `num_free_blocks`, `score` and
    `release`.
    """

    name: str
    device = torch.device("cpu")
    dtype = torch.float32
    scores_trees = False
    decoder = "table"
    decoder_obstacle: str | None = None
    graphs_obstacle: str | None = None
    recording: Recording = "none"
    state_bytes = num_prefix_states = 0
    num_parameters: int | None = None
    num_bytes: int | None = None
    traffic: Traffic | None = None
    taps: tuple[Tap, ...] = ()

    @property
    def origin(self) -> Origin:
        """The name alone."""
        return Origin(self.name)

    def guess(self, rows: Sequence[Row], num_tokens: int, form: DraftForm = CHAIN) -> None:
        """None: it has no faster way than `score`."""

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """0: it shares no prefixes."""
        return 0

    def tap(self, taps: Sequence[Tap]) -> None:
        """Refuse taps with a UsageError: it has no hidden states."""
        if taps:
            raise UsageError(f"the draft reads hidden states, and `{self.name}` has none", "choose another draft")

    def self_draft(self, draft: SelfDraft) -> LM:
        """Refuse with a UsageError: it has no weights."""
        message = f"the draft `{draft.spec}` is made of the target's weights, and `{self.name}` has none"
        raise UsageError(message, "choose another draft")

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Refuse with a UsageError: it has no embeddings."""
        raise UsageError(f"`{self.name}` has no embeddings", "choose another draft")

    def head(self, hidden: Tensor) -> Tensor:
        """Refuse with a UsageError: it has no output layer."""
        raise UsageError(f"`{self.name}` has no output layer", "choose another draft")


class TableLM(LMWithoutWeights):
    """A model whose logits are looked up.

    Args:
        function: from a context's last `order` tokens (fewer at its beginning) to V logits; called once for each.
        vocab_size: V.
        order: how many last tokens the logits depend on; None is all of them.
        name: as shown in reports and messages.
        max_context: most tokens of context.
        num_blocks: blocks that sequences share, counted like a cache's.
        block_size: tokens in a block.
    """

    scores_trees = True

    def __init__(
        self,
        function: Callable[[tuple[int, ...]], Sequence[float] | np.ndarray | Tensor],
        vocab_size: int,
        *,
        order: int | None = None,
        name: str = "table",
        max_context: int = 4096,
        num_blocks: int = 1 << 20,
        block_size: int = 16,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._function = function
        self._order = order
        self._places: dict[tuple[int, ...], int] = {}
        self._table = torch.empty(64, vocab_size)
        self._blocks: dict[int, int] = {}

    @classmethod
    def random(
        cls, vocab_size: int, *, order: int = 2, seed: int = 0, scale: float = 1.0, name: str = "table"
    ) -> TableLM:
        """Normal logits of standard deviation `scale`, drawn for each context of `order` tokens."""

        def function(context: tuple[int, ...]) -> np.ndarray:
            return np.random.default_rng([seed, len(context), *context]).normal(0.0, scale, vocab_size)

        return cls(function, vocab_size, order=order, name=name)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.num_blocks - sum(self._blocks.values())

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32, rows one after another, each row's positions in order."""
        places: list[int] = []
        for row in rows:
            assert 0 <= row.num_logits <= row.num_tokens, "more logits are wanted than there are tokens"
            assert row.longest <= self.max_context, "a row does not fit the model"
            self._blocks[row.handle] = -(-row.num_tokens // self.block_size)
            places += map(self._place, self._seen(row))
        assert self.num_free_blocks >= 0, "more blocks are used than there are"
        return self._table[places]

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        self._blocks.pop(handle, None)

    def check_integrity(self) -> None:
        """Assert that no more blocks are used than there are."""
        assert 0 <= self.num_free_blocks <= self.num_blocks, "free + used blocks differ from the total"

    def _seen(self, row: Row) -> Iterator[tuple[int, ...]]:
        """The last tokens before each wanted place, on its own path, which determine its logits."""
        order, drafted = self._order, row.drafted
        text = row.as_chain() if drafted.is_chain else row.context
        length, num_tokens = len(text), row.num_tokens
        for end in range(num_tokens - row.num_logits + 1, length + 1):
            yield tuple(text[0 if order is None else max(0, end - order) : end])
        for node in range(max(num_tokens - row.num_logits, length) - length, num_tokens - length):
            seen = (*text[0 if order is None else max(0, length - order) :], *drafted.tokens_to(node))
            yield seen if order is None else seen[-order:]

    def _place(self, context: tuple[int, ...]) -> int:
        """The table's row for a context, filled in when it is first asked for."""
        place = self._places.get(context)
        if place is None:
            place = self._places[context] = len(self._places)
            if place == len(self._table):
                self._table = torch.cat((self._table, torch.empty_like(self._table)))
            self._table[place] = torch.as_tensor(self._function(context), dtype=torch.float32)
        return place
