"""DFlash (arXiv 2602.06036): a block of masks behind the target's hidden states drafts all tokens in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.layers_head import LayersDrafter
from specdec_cli.drafters.one_pass import grow_marginals, grow_whole, rows_at

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.heads.block_sequences import BlockSequences


@dataclass
class Drafter(LayersDrafter["BlockSequences"]):
    """Guesses with a DFlash draft, or with DSpark's, whose Markov head knows the token before each.

    Args:
        model: hub id or folder of the draft.
        layers: target layers whose outputs it reads, counted from 0 and joined by dashes, such as 1-9-17; unset takes
            those that its configuration names.
    """

    one_pass = True

    def load_sequences(self, resources: Resources) -> BlockSequences:
        """The sequences of the draft.

        Raises:
            RunError: its files are missing, broken, or of other shapes.
            UsageError: it was made for another target.
        """
        from dataclasses import replace

        from specdec_cli.lm.heads.block_head import BlockHead
        from specdec_cli.lm.heads.block_sequences import BlockSequences
        from specdec_cli.lm.heads.dflash_files import DFlashConfig

        target = resources.target
        assert target is not None, "a head is loaded for a target"
        config = self.published(resources.revision)
        assert isinstance(config, DFlashConfig), "the format that has the method has its configuration"
        head = BlockHead(replace(config, layers=self.layer_taps), target)
        return BlockSequences(head, target, self.model)

    def _grow(self, drafting: Sequence[Growth], depths: Mapping[int, int]) -> None:
        """Grow guesses by a block; DSpark's heads look at the token before each, and nothing else does."""
        block, dspark = _Block(self.held, drafting, depths), self.held.head.config.dspark
        if dspark.rank or dspark.has_confidence:
            confidence = block.confidence if dspark.has_confidence else None
            grow_whole(drafting, depths, block.logits, self._num_tokens, self._name, confidence)
        else:
            grow_marginals(drafting, block.marginals(), self._num_tokens, self._name)

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each depth's logits; with a Markov head, behind the path's token before it."""
        self._feed(rows, [len(path) for path in paths])
        head = self.held.head
        states = self.held.blocks([(row.handle, row.context[-1]) for row in rows])
        found = []
        for row, path, own in zip(rows, paths, states, strict=True):
            its = own[: len(path)]
            found.append(head.behind(head.logits(its), its, [row.context[-1], *path[:-1]]))
        return found


class _Block:
    """The blocks of a call: what their rows say of the next depth of every guess.

    Args:
        held: the sequences.
        drafts: the guesses, before their first token.
        depths: of each by its place, how deep it may grow.
    """

    def __init__(self, held: BlockSequences, drafts: Sequence[Growth], depths: Mapping[int, int]) -> None:
        import torch

        self._head = held.head
        blocks = held.blocks([(draft.row.handle, draft.row.context[-1]) for draft in drafts])
        states = [one[: depths[draft.place]] for draft, one in zip(drafts, blocks, strict=True)]
        logits = torch.split(self._head.logits(torch.cat(states)), [len(one) for one in states])
        self._states = {draft.place: one for draft, one in zip(drafts, states, strict=True)}
        self._logits = {draft.place: one for draft, one in zip(drafts, logits, strict=True)}

    def marginals(self) -> dict[int, Tensor]:
        """Logits [depth, V] float32 of each guess by its place, where no token before changes them."""
        return {place: self._head.spread(one) for place, one in self._logits.items()}

    def logits(self, growing: Sequence[Growth]) -> Tensor:
        """Logits [ends, V] float32 of every guess's next depth."""
        return self._head.behind(rows_at(growing, self._logits), rows_at(growing, self._states), _before(growing))

    def confidence(self, growing: Sequence[Growth]) -> Tensor:
        """P [ends] that a token of this depth is accepted."""
        return self._head.confidence(rows_at(growing, self._states), _before(growing))


def _before(growing: Sequence[Growth]) -> list[int]:
    """The token at every end."""
    return [one.tokens[end] if end >= 0 else one.row.context[-1] for one in growing for end in one.ends]
