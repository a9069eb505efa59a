"""The LM's door: whole contexts in, logits out. The cache behind it is a function of the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.errors import RunError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_cli.lm.cache.pending_tokens import PendingTokens
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.forward.device_drafts import DraftOnDevice
    from specdec_cli.lm.forward.device_rounds import TargetOnDevice
    from specdec_cli.lm.hidden_states import HiddenStates
    from specdec_cli.lm.self_draft import SelfDraft
    from specdec_cli.lm.traffic import Traffic
    from specdec_cli.tree_shape import TreeShape

Tap = int | Literal["final"]
"""Hidden states: the output of layer i, counted from 0, or what the output layer reads, behind the final norm."""
Recording = Literal["none", "tried", "required"]
"""Whether something is recorded as CUDA graphs: not at all, where that works, or always, so that it must work."""


@dataclass(slots=True)
class Tapped:
    """Hidden states of the tokens that a forward feeds of a row; the LM fills it in.

    Args:
        first: place of the first fed token in the row: context tokens first, drafted nodes behind them.
        hidden: these states; nothing writes into them later. None where nothing was fed.
    """

    first: int = 0
    hidden: HiddenStates | None = None

    @property
    def states(self) -> Tensor | None:
        """[fed tokens, len(taps), hidden] in the model's dtype, the taps in the order of `LM.taps`."""
        return None if self.hidden is None else self.hidden.tensor()


@dataclass(frozen=True, slots=True)
class Draw:
    """How a continuation is drawn by chance: by the inverse of each token's cumulative probabilities, or by noise.

    A dynamic tree draws nothing: of it these say how probabilities follow from logits.

    Args:
        temperature: above 0.
        top_k: as in SamplingParams; None leaves all.
        top_p: top-p; 1 keeps all tokens.
        min_p: min-p; 0 keeps all tokens.
        uniforms: numbers in [0, 1), one for each token.
        noise: of each depth [n, V] float64; tokens of the largest log q + noise are taken. CUDA graphs alone take it.
    """

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    uniforms: Sequence[float] = ()
    noise: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftForm:
    """The form of what `guess` finds behind a context; a chain of tokens each of which is read, unless it says more.

    Args:
        tree: the shape of a tree; None for a chain.
        mask: stands for tokens that are not found yet, so that one pass gives all of them; None where each is read.
    """

    tree: TreeShape | None = None
    mask: int | None = None

    def num_known(self, num_tokens: int, num_logits: int) -> int:
        """How many first tokens of a feed are known before any is found.

        Args:
            num_tokens: of the feed.
            num_logits: the last known token of the context, and the places behind it.
        """
        return num_tokens + 1 - num_logits if self.mask is None else num_tokens


CHAIN = DraftForm()
"""The one form whose tokens stand behind the context as text."""


@dataclass(slots=True)
class Row:
    """One sequence of a forward.

    Args:
        handle: names the sequence in this LM; a new one starts empty.
        context: every token so far. The LM keeps the common prefix that it holds for the handle, discards the rest and
            feeds what is missing.
        num_logits: logits are wanted after the last `num_logits` tokens, drafted ones counted as well; 0 only fills the
            cache (a prompt's chunk).
        drafted: nodes that follow the context, each of which reads the context and its own path.
        unread: tokens that stand-ins in the context or among the drafted stand for.
        draw: how to sample the continuation; None takes the most likely tokens.
        tapped: where `score` puts the fed tokens' hidden states; None wants none.
    """

    handle: int
    context: Sequence[int]
    num_logits: int
    drafted: Drafted = NOTHING
    unread: PendingTokens | None = None
    draw: Draw | None = None
    tapped: Tapped | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the context and drafted ones."""
        return len(self.context) + len(self.drafted)

    @property
    def longest(self) -> int:
        """Length of the longest text that it reads: the context and the deepest path."""
        return len(self.context) + self.drafted.max_depth

    def as_chain(self) -> list[int]:
        """The context and the drafted tokens as one text.

        Raises:
            RunError: the drafted nodes are a tree, which has no such text.
        """
        if not self.drafted.is_chain:
            raise RunError("this model cannot score a drafted tree", "use a draft that proposes a chain")
        return [*self.context, *self.drafted.tokens]


@dataclass(slots=True)
class Continuations:
    """Predictions after some contexts.

    Args:
        tokens: of each; stand-ins where they are unread.
        unread: tokens that the device alone knows yet.
        q: what those of drawn rows were drawn from, [len(tokens), num_tokens] float32 by the row's place.
        on_device: runs the same draft again from what the device decides; None where the host has to.
    """

    tokens: list[list[int]]
    unread: PendingTokens | None = None
    q: dict[int, Tensor] = field(default_factory=dict)
    on_device: DraftOnDevice | None = None


class LM(Protocol):
    """A causal language model.

    Attributes:
        name: as shown in reports and messages.
        vocab_size: V, the width of its logits (padding of the vocabulary included).
        max_context: most tokens of context that it takes.
        num_blocks: blocks of KV cache in all.
        block_size: tokens in a block.
        device: where it runs.
        dtype: what it computes in.
        decoder_obstacle: why our own decoder does not run it; None where it does, or where there is nothing to decode.
        graphs_obstacle: why `auto` records no graphs of a GPU's steps; None where it does, or where it does not apply.
        recording: whether a draft head on it runs in CUDA graphs.
        state_bytes: what recurrent layers carry from a token to the next, beside keys and values; 0 without any.
        num_prefix_states: snapshots of this at the ends of cached prefixes that there is room for.
        taps: the hidden states that `score` gives to rows that want them.
    """

    name: str
    vocab_size: int
    max_context: int
    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    decoder_obstacle: str | None
    graphs_obstacle: str | None
    recording: Recording
    state_bytes: int
    num_prefix_states: int
    taps: tuple[Tap, ...]

    @property
    def origin(self) -> Origin:
        """Where its numbers come from."""
        ...

    @property
    def decoder(self) -> str:
        """Whose forward runs, for people and documents: `own`, `transformers` with what is done to it, or `table`."""
        ...

    @property
    def num_parameters(self) -> int | None:
        """Its weights, each counted once; None without weights."""
        ...

    @property
    def num_bytes(self) -> int | None:
        """Memory for its weights and its cache; None without weights."""
        ...

    @property
    def traffic(self) -> Traffic | None:
        """Sizes from which a forward's cost follows; None without weights."""
        ...

    @property
    def scores_trees(self) -> bool:
        """Whether it scores drafted nodes that are no chain."""
        ...

    def score(self, rows: Sequence[Row]) -> Tensor:
        """Logits [sum of num_logits, V] float32, rows one after another, in each row context before drafted nodes.

        Rows with a `tapped` get hidden states of all that is fed of them, wanted logits or not. Logits have the same
        bits with and without.
        """
        ...

    def tap(self, taps: Sequence[Tap]) -> None:
        """Add hidden states to those that `score` gives.

        Raises:
            UsageError: there is no such layer, or the model cannot give hidden states.
        """
        ...

    def self_draft(self, draft: SelfDraft) -> LM:
        """A draft made of this model's weights; its cache, which has no room yet, is its own.

        Raises:
            UsageError: it cannot be made of this model.
        """
        ...

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] in the model's dtype, of tokens on the host or [n] int64 on any device."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of hidden states behind the final norm [n, hidden], as `score` computes them."""
        ...

    def guess(self, rows: Sequence[Row], num_tokens: int, form: DraftForm = CHAIN) -> Continuations | None:
        """Continuations: each token is the likeliest after all before it, or drawn as its row's `draw` says.

        Args:
            rows: sequences; `num_logits` of each, at least 1, says how many tokens are to follow its context, or how
                deep the tree is; all are equally deep.
            num_tokens: V, the real vocabulary; no token is beyond it.
            form: of all of them.

        Returns:
            A continuation for each row, shorter where its next largest logit is no finite number, unless it is unread;
            None from an LM that knows no quicker way to them than `score`, round by round, or not to drawn ones.
        """
        ...

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a new sequence with the longest prefix of its context that the cache still holds under a salt.

        From here on its own whole blocks can be found under the salt too; a sequence that is scored without having
        adopted shares nothing.

        Returns:
            How many tokens need not be fed: whole blocks, and fewer than the context.
        """
        ...

    def release(self, handle: int) -> None:
        """Forget a sequence and give its blocks back; unknown handles are fine."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those of cached prefixes among them."""
        ...


@runtime_checkable
class ScoresOnDevice(Protocol):
    """An LM that can go on to score on its device, without the host (`lm.forward.device_rounds`)."""

    def scored_on_device(self, taps: Sequence[Tap]) -> TargetOnDevice | None:
        """The graph that has scored rows of the latest call, of each its last token and as many drafted nodes.

        Args:
            taps: the hidden states that the draft reads.

        Returns:
            None where rows in the graph had other tokens, or where this LM records no graphs.
        """
        ...
