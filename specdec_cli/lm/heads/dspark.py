"""DSpark drafts (arXiv 2607.05147): DFlash drafts with a Markov head and a confidence head behind a block's rows.

The Markov head adds to a row's logits what follows from the token before it: W2 e, where e is that token's row of W1. A
gated head scales e by the row's own state, a recurrent one (`rnn`) carries a state along the block. The confidence head
predicts that a row's token is accepted if those before it are; it reads what stands before that token alone, so that a
guess may end where it is low and the output stays the target's.

Sources: deepseek-ai/DeepSpec (`modeling/dspark`) and the speculators library (`models/dspark`). Rows predict the token
behind their own place unless `sample_from_anchor` is false. A file beside the weights may have temperatures that divide
the confidences' logits, in the form of SGLang's `--speculative-dspark-confidence-sts-path`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.draft_formats import DraftFolder
from specdec_cli.lm.files.names import TEMPERATURES_FILE
from specdec_cli.lm.files.reading import read_object
from specdec_cli.lm.heads.dflash import BlockHead, DFlashDraft, read_block
from specdec_cli.lm.heads.draft_sequences import Ahead, RecordedAhead
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.published import NONE_ELSE
from specdec_cli.lm.heads.stacks import product_of
from specdec_cli.transfer import sent

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM

_PRODUCTS = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}
"""The types of Markov heads, and the product that each has beside W1 and W2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkDraft(DFlashDraft):
    """A DSpark draft by its folder.

    Args:
        rank: of the Markov head; 0 without one.
        markov_type: `vanilla`, `gated` or `rnn`.
        has_confidence: whether there is a head that predicts acceptance.
        confidence_reads_token: whether that reads the token before it, too.
        temperatures: by which the logits of the confidences are divided, one for each token of a draft; empty for 1.
    """

    rank: int
    markov_type: str
    has_confidence: bool
    confidence_reads_token: bool
    temperatures: tuple[float, ...] = ()

    @property
    def parts(self) -> list[str]:
        """Its heads."""
        kind = "" if self.markov_type == "vanilla" else f"{self.markov_type} "
        markov = [f"a {kind}Markov head of rank {self.rank}"] if self.rank else []
        confidence = "a calibrated confidence head" if self.temperatures else "a confidence head"
        return [*markov, *([confidence] if self.has_confidence else [])]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of DFlash's tensors and of the heads."""
        shapes, rank, size = DFlashDraft.shapes(self), self.rank, int(self.layer.hidden_size)
        if rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size or 0, rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size or 0, rank)
        product = _PRODUCTS[self.markov_type]
        if rank and product is not None:
            num, width = (rank, size + rank) if self.markov_type == "gated" else (3 * rank, size + 2 * rank)
            shapes |= {f"markov_head.{product}.weight": (num, width), f"markov_head.{product}.bias": (num,)}
        if self.has_confidence:
            width = size + (rank if self.confidence_reads_token else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias?": (1,)}
        return shapes


def read(name: str, source: DraftFolder) -> DSparkDraft:
    """The DSpark draft in a folder.

    Raises:
        UsageError: a variant that is not supported.
        RunError: its configuration cannot be read.
    """

    def parts(keys: Mapping[str, Any]) -> dict[str, Any]:
        rank = source.whole_number(keys, "markov_rank") or 0
        markov_type = str(keys.get("markov_head_type", "vanilla"))
        if rank and markov_type not in _PRODUCTS:
            message = f"the Markov head of `{name}` is of the type `{markov_type}`, which is not supported"
            raise UsageError(message, NONE_ELSE)
        has_confidence = bool(keys.get("enable_confidence_head", False))
        reads = has_confidence and rank > 0 and bool(keys.get("confidence_head_with_markov", False))
        return {
            "rank": rank,
            "markov_type": markov_type if rank else "vanilla",
            "has_confidence": has_confidence,
            "confidence_reads_token": reads,
        }

    draft = read_block(DSparkDraft, name, source, parts)
    return replace(draft, temperatures=_temperatures(draft)) if draft.has_confidence else draft


def _temperatures(draft: DSparkDraft) -> tuple[float, ...]:
    """The temperatures in the file beside a draft's weights; none without the file.

    Raises:
        RunError: it does not have one for each token of a draft.
    """
    path = draft.folder / TEMPERATURES_FILE
    if not path.is_file():
        return ()
    given: Any = read_object(path).get("temperatures")
    is_valid = isinstance(given, list) and all(type(each) in (int, float) and 0 < each < inf for each in given)
    if not is_valid or len(given) != draft.most_tokens:
        message = f"`{path}` does not have {draft.most_tokens} `temperatures` above 0, one for each token of a draft"
        raise RunError(message, "fit them again, or delete the file")
    return tuple(map(float, given))


class DSparkHead(BlockHead):
    """A DSpark draft: a row's logits and confidence depend on the tokens before it."""

    draft: DSparkDraft
    records_trees = False

    def __init__(self, draft: DSparkDraft, target: LM) -> None:
        super().__init__(draft, target)
        self._markov = product_of(self.weights, "markov_head.markov_w2") if draft.rank else None
        self._temperatures = torch.tensor(draft.temperatures, device=target.device)

    def given(self, logits: list[Tensor], states: list[Tensor]) -> Ahead:
        """Logits that `behind` completes."""
        return Ahead(logits, states, self.behind, self.confidence if self.draft.has_confidence else None)

    def behind(self, logits: Tensor, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        """Logits [n, V] float32 of rows behind given tokens; arguments as `Ahead` has them."""
        if self._markov is not None:
            logits = logits + self._markov(self._latent(states, before)).float()
        return self.spread(logits)

    def recorded(self, logits: Tensor, states: Tensor) -> RecordedAhead:
        """Logits that the Markov head completes behind the tokens before."""
        carried = [states.new_zeros(len(states), self.draft.rank)]

        def behind(depth: int, before: Tensor) -> Tensor:
            tokens, own = self._rows_of(before[:, -1]), states[:, depth]
            if self._markov is None:
                return self.spread(logits[:, depth])
            if self.draft.markov_type == "rnn":
                carried[0], tokens = self._carried_on(carried[0], tokens, own)
            elif self.draft.markov_type == "gated":
                tokens = self._gated(tokens, own)
            return self.spread(logits[:, depth] + self._markov(tokens).float())

        return RecordedAhead(logits, behind)

    def confidence(self, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        """P [n] that rows' tokens are accepted if those before them are; arguments as `Ahead` has them."""
        features = torch.stack([own[-1] for own in states])
        if self.draft.confidence_reads_token:
            features = torch.cat([features, self._rows_of([tokens[-1] for tokens in before])], -1)
        logits = self._linear(features, "confidence_head.proj").float()[:, 0]
        if self.draft.temperatures:
            logits = logits / self._temperatures[[len(tokens) - 1 for tokens in before]]
        return logits.sigmoid()

    def _latent(self, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        """The input [n, rank] of W2."""
        if self.draft.markov_type == "rnn":
            return self._recurrent(states, before)
        latent = self._rows_of([tokens[-1] for tokens in before])
        if self.draft.markov_type == "gated":
            latent = self._gated(latent, torch.stack([its[-1] for its in states]))
        return latent

    def _gated(self, latent: Tensor, states: Tensor) -> Tensor:
        """The gated head's [n, rank] of rows of W1 and states [n, hidden]."""
        return latent * self._linear(torch.cat([states, latent], -1), "markov_head.gate_proj").sigmoid()

    def _recurrent(self, states: Sequence[Tensor], before: Sequence[Sequence[int]]) -> Tensor:
        """The recurrent head's output [n, rank] at the end of each path, from zeros at its block's start."""
        carried = states[0].new_zeros(len(states), self.draft.rank)
        latent = torch.zeros_like(carried)
        for depth in range(max(map(len, before))):
            going = [i for i, tokens in enumerate(before) if len(tokens) > depth]
            tokens = self._rows_of([before[i][depth] for i in going])
            own = torch.stack([states[i][depth] for i in going])
            carried[going], latent[going] = self._carried_on(carried[going], tokens, own)
        return latent

    def _carried_on(self, carried: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrent head's state [n, rank] after further tokens, and its output; tokens are rows of W1."""
        joined = self._linear(torch.cat([carried, tokens, states], -1), "markov_head.joint_proj")
        gate, candidate, output = joined.chunk(3, -1)
        kept = gate.sigmoid()
        return kept * carried + (1 - kept) * candidate.tanh(), output.tanh()

    def _rows_of(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Rows [n, rank] of W1."""
        table = self.weights["markov_head.markov_w1.weight"]
        return functional.embedding(sent(tokens, torch.int64, table.device), table)

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def sequences(draft: DSparkDraft, target: LM, _num_tokens: int) -> HeadSequences:
    """The draft's sequences, its weights loaded."""
    return HeadSequences([DSparkHead(draft, target)], target, draft.name, draft.num_taps)
