"""The cached context of one sequence, and what a row feeds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.cache.unread import Unread

if TYPE_CHECKING:
    from specdec_cli.lm.hidden_states import HiddenStates


@dataclass(slots=True)
class Held:
    """The cached context of one sequence.

    Args:
        tokens: whose keys and values are cached; those of a drafted tree's nodes stand at the end, in the nodes' order.
        blocks: where, in order.
        in_one_piece: whether these are neighbours.
        is_long: whether keys were turned by long rope's long frequencies.
        salt: shares blocks with sequences of the same salt; None shares none.
        keys: of its first whole blocks, those that were published.
        unread: tokens that stand-ins among them stand for.
        tree: the nodes at the end, each of which has read its own path alone; a chain's are text like any other.
        snapshots: of the state that recurrent layers carry; None without such layers.
    """

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    in_one_piece: bool = True
    is_long: bool = False
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)
    unread: Unread | None = None
    tree: Drafted = NOTHING
    snapshots: Snapshots | None = None

    @property
    def num_text(self) -> int:
        """How many of the tokens are text, one after the other."""
        return len(self.tokens) - len(self.tree)

    def hold(self, tokens: list[int], unread: Unread | None, tree: Drafted = NOTHING) -> None:
        """Take note of what is cached now."""
        self.tokens, self.unread, self.tree = tokens, unread, tree

    def take_path(self, context: Sequence[int]) -> tuple[int, ...]:
        """Keep of the tree the path that the context takes, as text behind the text; its nodes."""
        tree, start = self.tree, self.num_text
        path: tuple[int, ...] = ()
        if len(tree) and self.tokens[:start] == context[:start]:
            path = tree.follow(context[start:])
        self.tokens[start:] = [tree.tokens[node] for node in path]
        self.tree = NOTHING
        return path

    def settle(self) -> None:
        """Put the tokens themselves in the place of what stands for them."""
        if self.unread is not None:
            self.tokens, self.unread = self.unread.known(self.tokens), None

    def common_prefix(self, context: list[int], limit: int) -> int:
        """How many first tokens of the context are cached, at most `limit`."""
        length = min(len(self.tokens), limit)
        if self.tokens[:length] == context[:length]:
            return length
        return next(i for i in range(length) if self.tokens[i] != context[i])


@dataclass(slots=True)
class Feed:
    """One row's part of a forward.

    Args:
        held: its sequence's books.
        context: text and drafted tokens, in the order of their places in the cache.
        keep: how many of them are cached; the others are fed.
        num_logits: logits are wanted after the last so many.
        unread: tokens that stand-ins among them stand for.
        tree: the nodes at the end of the context where they are no chain; a chain's are text like any other.
        num_text: places before the tree.
        is_tapped: hidden states of the fed tokens are wanted.
        states: these [fed tokens, taps, hidden], once a forward has run.
    """

    held: Held
    context: list[int]
    keep: int
    num_logits: int
    unread: Unread | None = None
    tree: Drafted = NOTHING
    num_text: int = 0
    is_tapped: bool = False
    states: HiddenStates | None = None

    def position(self, place: int) -> int:
        """The position in its text of what stands at a place: a node's is its depth behind the context."""
        if not len(self.tree) or place < self.num_text:
            return place
        return self.num_text + self.tree.depth(place - self.num_text) - 1

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the fed tokens."""
        fed = range(self.keep, len(self.context))
        return [self.position(place) for place in fed] if len(self.tree) else fed

    @property
    def ancestors(self) -> Sequence[int]:
        """Ancestors of the fed tokens as 64-bit masks (`Drafted.ancestors`), a node itself included; 0 for text."""
        nodes = range(self.keep - self.num_text, len(self.context) - self.num_text)
        return [self.tree.ancestors(node) if node >= 0 else 0 for node in nodes]

    @property
    def num_tokens(self) -> int:
        """How many are fed."""
        return len(self.context) - self.keep

    def cut(self, num_tokens: int) -> list[Feed]:
        """So many tokens and, if there are more, the rest."""
        if self.num_tokens <= num_tokens:
            return [self]
        stop = self.keep + num_tokens
        later = min(self.num_logits, len(self.context) - stop)
        first = replace(self, context=self.context[:stop], num_logits=self.num_logits - later)
        return [first, replace(self, keep=stop, num_logits=later)]

    def settle(self) -> None:
        """Put the tokens themselves in the place of what stands for them."""
        if self.unread is not None:
            self.context, self.unread = self.unread.known(self.context), None
