"""Bases of drafters that guess with a published draft on the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources
from specdec_cli.drafters.growth import Growth
from specdec_cli.drafters.rounds import grow_deeper
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.heads.head import Head
    from specdec_cli.lm.heads.head_sequences import HeadSequences
    from specdec_cli.lm.heads.published import PublishedDraft
    from specdec_cli.lm.self_draft import SelfDraft


class KeptStates(Protocol):
    """A draft's sequences, by handle."""

    @property
    def most_tokens(self) -> int | None:
        """Tokens that it drafts one after another at most; None has no limit."""
        ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of the draft, and bytes of these and of what it holds."""
        ...

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a sequence; how many first positions need no features."""
        ...

    def can_draft(self, handle: int) -> bool:
        """Whether there is what a first guess follows from."""
        ...

    def release(self, handle: int) -> None:
        """Forget a sequence; unknown ones are fine."""
        ...


S = TypeVar("S", bound=KeptStates)
H = TypeVar("H", bound="HeadSequences")


class FeatureDrafter(Generic[S]):
    """Base of drafters with a published draft on hidden states: its folder, and the sequences that it holds.

    Args:
        model: hub id or folder of the draft.
    """

    lm = None
    shared_vocabulary = None
    builds_trees = True
    draws = True
    one_pass = False

    def __init__(self, model: str) -> None:
        if not model.strip():
            raise UsageError("`model` of the draft is empty", "name the hub id or the folder of a draft head")
        self._name = model
        self._published: PublishedDraft | None = None
        self._sequences: S | None = None
        self._num_tokens = 0
        self._max_context: int | None = None

    @property
    def held(self) -> S:
        """The sequences of the loaded draft."""
        assert self._sequences is not None, "a drafter is loaded before it drafts"
        return self._sequences

    def hold(self, sequences: S, resources: Resources) -> None:
        """Keep the sequences of a draft that was loaded."""
        assert resources.target is not None, "it is loaded for a target"
        self._sequences = sequences
        self._num_tokens, self._max_context = resources.num_tokens, resources.target.max_context

    def forced_lm(self, temperature: float) -> LM | None:
        """None: it reads the target's features, so it has to be asked."""

    @property
    def max_context(self) -> int | None:
        """As long as the target's: a head's rotary positions go on."""
        return self._max_context

    @property
    def taps(self) -> Sequence[Tap]:
        """The target's hidden states that the draft reads."""
        raise NotImplementedError

    @property
    def self_drafts(self) -> Sequence[SelfDraft]:
        """None."""
        return ()

    @property
    def graphs_obstacle(self) -> str | None:
        """None: nothing of it is recorded."""
        return None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of the head and of what it holds of sequences now."""
        return (0, 0) if self._sequences is None else self._sequences.sizes

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin with the keys and values of a prefix that another sequence has left; it needs no features of these."""
        return 0 if self._sequences is None else self._sequences.adopt(handle, context, salt)

    def clear(self) -> None:
        """It keeps nothing of sequences that ended."""

    def published(self, revision: str | None = None) -> PublishedDraft:
        """The configuration of its folder, which is read once.

        Raises:
            RunError: it cannot be read.
            UsageError: it is of another method.
        """
        from specdec_cli.lm.heads.formats import read_published

        if self._published is None:
            self._published = read_published(self._name, revision, method=self.method)
        return self._published

    @property
    def most_depth(self) -> int | None:
        """As many as the draft gives, whatever is wanted; None has no limit."""
        return None if self._sequences is None else self._sequences.most_tokens

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth; fewer where the draft gives fewer."""
        longest, most = self._max_context, self.most_depth
        assert longest is not None, "a drafter is loaded before it drafts"
        drafts = [Growth(row, place) for place, row in enumerate(rows)]
        self._guess([draft for draft in drafts if draft.wants_more(longest)], longest)
        others = [draft for draft in drafts if not draft.depth]
        self._feed([draft.row for draft in others], [draft.row.k for draft in others])
        able = [draft for draft in others if self.held.can_draft(draft.row.handle)]
        drafting = [draft for draft in able if draft.wants_more(longest)]
        depths = {draft.place: draft.most_depth(longest) for draft in drafting}
        if drafting:
            self._grow(drafting, {place: min(depth, most or depth) for place, depth in depths.items()})
        return [draft.guesses() for draft in drafts]

    def _guess(self, drafts: Sequence[Growth], longest: int) -> None:
        """Guess chains in one call where the draft has one for it; their features are taken with it.

        Args:
            drafts: that want more.
            longest: context that is read.
        """

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        """Take the features that rows bring; `depths` tokens are wanted behind each."""
        raise NotImplementedError

    def _grow(self, drafting: Sequence[Growth], depths: Mapping[int, int]) -> None:
        """Grow guesses, each by its place to a depth of at least 1."""
        raise NotImplementedError

    @property
    def origin(self) -> Origin | None:
        """The published folder; None for modules in the target's checkpoint."""
        from specdec_cli.lm.heads.head_tensors import head_origin

        return None if self._published is None else head_origin(self._published)

    @property
    def method(self) -> str:
        """Its name in recipes."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        if self._sequences is not None:
            self._sequences.release(handle)


class HeadDrafter(FeatureDrafter[H]):
    """Guesses round by round, each depth of all rows in one call of the head.

    Args:
        model: hub id or folder of the head.
    """

    def load(self, resources: Resources) -> None:
        """Load the head.

        Raises:
            RunError: its files are missing, broken, or of other shapes.
            UsageError: it was made for another target.
        """
        self.hold(self.load_sequences(resources), resources)
        resources.plan_cache(self.held)

    def load_sequences(self, resources: Resources) -> H:
        """The sequences of the head; see `load`."""
        from specdec_cli.lm.heads.head_sequences import HeadSequences

        assert resources.target is not None, "a head is loaded for a target"
        return cast("H", HeadSequences(self.load_heads(resources), resources.target, self._name))

    def load_heads(self, resources: Resources) -> Sequence[Head]:
        """The modules of this method's head; see `load`."""
        raise NotImplementedError

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits along each path, one depth of all rows after the other: a node reads its parent's output."""
        import torch

        from specdec_cli.lm.heads.head_sequences import HeadRow

        self._feed(rows, [len(path) for path in paths])
        found: list[list[Tensor]] = [[] for _ in rows]
        for depth in range(max(map(len, paths))):
            going = [i for i, path in enumerate(paths) if len(path) > depth]
            asked = [HeadRow(rows[i].handle, Drafted.chain(paths[i][:depth]), [depth - 1]) for i in going]
            for i, its in zip(going, self.held.logits(asked), strict=True):
                found[i].append(its)
        return [torch.stack(its) for its in found]

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        self.held.feed([(row.handle, row.context, row.features) for row in rows if row.features is not None])

    def _grow(self, drafting: Sequence[Growth], depths: Mapping[int, int]) -> None:
        from specdec_cli.lm.heads.head_sequences import HeadRow

        while growing := [draft for draft in drafting if not draft.is_done and draft.depth < depths[draft.place]]:
            rows = [HeadRow(one.row.handle, one.drafted, one.ends, one.is_dynamic) for one in growing]
            grow_deeper(growing, self.held.logits(rows), self._num_tokens, self._name)
