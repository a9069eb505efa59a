"""Drafters with a draft on the target's hidden states: published heads of every format, and what MTP shares with them.

The methods of published drafts have no files of their own here: each is made of a row in `lm/files/draft_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass, replace
from functools import cache
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from specdec_cli.drafted import MOST_DEPTH, Drafted
from specdec_cli.drafters.contract import DraftRow, Guesses, Resources, WithoutFeatures, by_shape, draws_of
from specdec_cli.drafters.growing_draft import GrowingDraft, grow_marginals, grow_whole, rows_at
from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import PublishedKind, kinds_by_method

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.cache.pending_tokens import PendingTokens
    from specdec_cli.lm.door import LM, Tap
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.forward.device_drafts import DraftOnDevice
    from specdec_cli.lm.heads.draft_sequences import DraftSequences
    from specdec_cli.lm.heads.published import PublishedDraft
    from specdec_cli.tree_shape import TreeShape


class HeadDrafter(WithoutFeatures):
    """Guesses with a head on the target's hidden states.

    A head that drafts from its own outputs goes round by round, each depth of all rows in one call, or drafts in one
    CUDA graph where it is recorded. One that drafts all tokens in one pass gives every depth's distribution.

    Attributes:
        confidences: of the latest call, depth by depth: the handles of the rows that a draft with a confidence head
            continued, one for each end, and how sure it was there.
        on_device: as `DraftsOnDevice` has it.
    """

    builds_trees = True
    draws = True

    def __init__(self, name: str) -> None:
        self._name = name
        self.confidences: list[tuple[list[int], Tensor]] = []
        self._sequences: DraftSequences | None = None
        self._num_tokens = 0
        self._max_context: int | None = None
        self._unread: list[PendingTokens] = []
        self.on_device: DraftOnDevice | None = None

    @property
    def sequences(self) -> DraftSequences:
        """The sequences of the loaded draft."""
        assert self._sequences is not None, "a drafter is loaded before it drafts"
        return self._sequences

    def load(self, resources: Resources) -> None:
        """Load the head.

        Raises:
            RunError: its files are missing, broken, or of other shapes.
            UsageError: it was made for another target.
        """
        assert resources.target is not None, "a head is loaded for a target"
        self._sequences = self.load_sequences(resources, resources.target)
        self._num_tokens, self._max_context = resources.num_tokens, resources.target.max_context
        cache = self._sequences.planned_cache
        if cache is not None:
            resources.plan_cache(cache)

    def load_sequences(self, resources: Resources, target: LM) -> DraftSequences:
        """The sequences of the head; see `load`."""
        raise NotImplementedError

    @property
    def max_context(self) -> int | None:
        """As long as the target's: a head's rotary positions go on."""
        return self._max_context

    @property
    def most_depth(self) -> int | None:
        """As many as the draft gives, whatever is wanted; None has no limit."""
        return None if self._sequences is None else self._sequences.most_tokens

    @property
    def graphs_obstacle(self) -> str | None:
        """Why its head records no graphs beside a target that does; None where it does, or the target has none."""
        return None if self._sequences is None else self._sequences.graphs_obstacle

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of the head and of what it holds of sequences now."""
        return (0, 0) if self._sequences is None else self._sequences.sizes

    @property
    def origin(self) -> Origin | None:
        """None: its numbers are the target's."""
        return None

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin with the keys and values of a prefix that another sequence has left; it needs no features of these."""
        return 0 if self._sequences is None else self._sequences.adopt(handle, context, salt)

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        if self._sequences is not None:
            self._sequences.release(handle)

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Up to k tokens per row, or a tree of that depth; fewer where the draft gives fewer.

        Raises:
            RunError: what it guessed before, unread, was no token.
        """
        longest, most = self._max_context, self.most_depth
        assert longest is not None, "a drafter is loaded before it drafts"
        guesses = self._continue_plain(rows, longest)
        drafts = [GrowingDraft(row, place) for place, row in enumerate(rows) if place not in guesses]
        self._feed([draft.row for draft in drafts], [draft.row.k for draft in drafts])
        able = [draft for draft in drafts if self.sequences.can_draft(draft.row.handle)]
        drafting = [draft for draft in able if draft.wants_more(longest)]
        depths = {draft.place: draft.row.most_depth(longest) for draft in drafting}
        depths = {place: min(depth, most or depth) for place, depth in depths.items()}
        if drafting and self.one_pass:
            self._grow_ahead(drafting, depths)
        elif drafting:
            grow_whole(drafting, depths, self._next_logits, self._num_tokens, self._name)
        guesses |= {draft.place: draft.guesses() for draft in drafts}
        return [guesses[place] for place in range(len(rows))]

    def follow(self, contexts: Mapping[int, Sequence[int]], unread: PendingTokens) -> None:
        """Take note of a round that the device has drafted; see `DraftsOnDevice`."""
        if not unread.is_whole:
            self._unread.append(unread)

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [len(path), V] float32 along each path."""
        import torch

        from specdec_cli.lm.heads.draft_sequences import HeadRow

        self._feed(rows, [len(path) for path in paths])
        if self.one_pass:
            ahead = self.sequences.ahead(
                [(row.handle, row.context[-1], len(path)) for row, path in zip(rows, paths, strict=True)]
            )
            if ahead.behind is None:
                return list(ahead.logits)
            found = []
            for its, states, row, path in zip(ahead.logits, ahead.states, rows, paths, strict=True):
                before = [[row.context[-1], *path[:depth]] for depth in range(len(path))]
                found.append(ahead.behind(its, [states[: len(tokens)] for tokens in before], before))
            return found
        logits: list[list[Tensor]] = [[] for _ in rows]
        for depth in range(max(map(len, paths))):
            going = [i for i, path in enumerate(paths) if len(path) > depth]
            asked = [HeadRow(rows[i].handle, Drafted.chain(paths[i][:depth]), [depth - 1]) for i in going]
            for i, row in zip(going, self.sequences.logits(asked), strict=True):
                logits[i].append(row)
        return [torch.stack(row) for row in logits]

    def _feed(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> None:
        """Take the features that rows bring; `depths` tokens are wanted behind each."""
        news = [
            ((row.handle, row.context, row.features), depth)
            for row, depth in zip(rows, depths, strict=True)
            if row.features is not None
        ]
        self.sequences.feed([new for new, _ in news], [depth for _, depth in news])

    def _continue_plain(self, rows: Sequence[DraftRow], longest: int) -> dict[int, Guesses]:
        """Guesses of plain rows by their places in the call, those of each shape in one graph, of a recorded head."""
        for unread in self._unread:
            unread.check(self._name, "try --dtype float32, or another draft if it is float32 already")
        self._unread.clear()
        self.on_device = None
        guesses: dict[int, Guesses] = {}
        if not self.sequences.is_recorded:
            return guesses
        able = {place: row for place, row in enumerate(rows) if self._is_drafted_whole(row) and self._can_begin(row)}
        for shape, depths in by_shape(able, longest, self.most_depth or MOST_DEPTH):
            if shape is None or self.sequences.records_trees:
                guesses |= self._in_a_graph(shape, {place: rows[place] for place in depths}, depths)
        return guesses

    def _in_a_graph(
        self, shape: TreeShape | None, rows: Mapping[int, DraftRow], depths: Mapping[int, int]
    ) -> dict[int, Guesses]:
        """Guesses of plain rows of one shape, by their places; None stands for chains."""
        from specdec_cli.lm.heads.head_graphs import HeadDraftRow

        nums = [depths[place] for place in rows]
        draws = draws_of([*rows.values()], nums, self.sequences.device, self._num_tokens)
        head_rows = [
            HeadDraftRow(row.handle, row.context, row.features, depths[place], draw)
            for (place, row), draw in zip(rows.items(), draws, strict=True)
        ]
        continuations = self.sequences.guess(head_rows, self._num_tokens, shape)
        if continuations.unread is not None:
            self._unread.append(continuations.unread)
        self.on_device = continuations.on_device
        return dict(zip(rows, Guesses.plain([*rows.values()], continuations, shape), strict=True))

    def _is_drafted_whole(self, row: DraftRow) -> bool:
        """Whether a recorded head drafts all of a row's tokens in a graph."""
        return row.is_plain or row.is_plain_but_noise

    def _can_begin(self, row: DraftRow) -> bool:
        """Whether the head has hidden states to draft from, or gets some with the row."""
        return self.sequences.can_draft(row.handle) or (row.features is not None and len(row.features) > 0)

    def _next_logits(self, growing: Sequence[GrowingDraft]) -> Tensor:
        """Logits [ends, V] of the next depth of guesses, from one round of the head."""
        from specdec_cli.lm.heads.draft_sequences import HeadRow

        rows = [HeadRow(draft.row.handle, draft.drafted, draft.ends, draft.is_dynamic) for draft in growing]
        return self.sequences.logits(rows)

    def _grow_ahead(self, drafting: Sequence[GrowingDraft], depths: Mapping[int, int]) -> None:
        """Grow guesses by what one pass gives of all their depths."""
        ends = [(draft.row.handle, draft.row.context[-1], depths[draft.place]) for draft in drafting]
        ahead = self.sequences.ahead(ends)
        logits = {draft.place: its for draft, its in zip(drafting, ahead.logits, strict=True)}
        behind, sure = ahead.behind, ahead.confidence
        self.confidences = []
        if behind is None:
            grow_marginals(drafting, logits, self._num_tokens, self._name)
            return
        states = {draft.place: its for draft, its in zip(drafting, ahead.states, strict=True)}

        def before(growing: Sequence[GrowingDraft]) -> tuple[list[Tensor], list[list[int]]]:
            """The states of every end's block up to its own row, and the tokens before that."""
            its = [(draft, draft.drafted, end) for draft in growing for end in draft.ends]
            tokens = [[draft.row.context[-1], *drafted.tokens_to(end)] for draft, drafted, end in its]
            return [states[draft.place][: draft.depth + 1] for draft, _, _ in its], tokens

        def confidence(growing: Sequence[GrowingDraft]) -> Tensor:
            assert sure is not None, "the draft has a confidence head"
            handles = [draft.row.handle for draft in growing for _ in draft.ends]
            self.confidences.append((handles, sure(*before(growing))))
            return self.confidences[-1][1]

        grow_whole(
            drafting,
            depths,
            lambda growing: behind(rows_at(growing, logits), *before(growing)),
            self._num_tokens,
            self._name,
            None if sure is None else confidence,
        )


class PublishedDrafter(HeadDrafter):
    """Guesses with a published draft; `published_drafter` makes the class of each kind.

    Args:
        model: hub id or folder of the draft.
        layers: hidden states of the target that it reads, joined by dashes: numbers of layers, counted from 0, whose
            outputs they are, such as 1-15-28, or `final`; unset takes those that its configuration names. Methods that
            read the final states alone have no such option.
    """

    kind: ClassVar[PublishedKind]
    model: str
    layers: str | None = None

    def __post_init__(self) -> None:
        """Refuse an empty name, and layers that are no numbers."""
        if not self.model.strip():
            raise UsageError("`model` of the draft is empty", "name the hub id or the folder of a draft head")
        super().__init__(self.model)
        self.source: PublishedDraft | None = None  # what its folder says, where it was read
        words = ("final",) if "final" in self.kind.layers else ()
        if self.layers is not None and not all(layer.isdecimal() or layer in words for layer in self.layers.split("-")):
            message = f"`layers` must be numbers joined by dashes, such as {self.kind.layers}, not `{self.layers}`"
            raise UsageError(message)

    def published(self, revision: str | None = None) -> PublishedDraft:
        """The draft by its folder, which is read once.

        Raises:
            RunError: it cannot be read.
            UsageError: it is of another method.
        """
        from specdec_cli.lm.heads.published import parsed_taps, read_published

        if self.source is None:
            draft = read_published(self.model, revision, method=self.kind.method)
            self.source = draft if self.layers is None else replace(draft, taps=parsed_taps(self.layers))
        return self.source

    @property
    def taps(self) -> Sequence[Tap]:
        """The hidden states.

        Raises:
            UsageError: neither the option nor its configuration names them.
            RunError: its configuration cannot be read.
        """
        taps = self.published().taps
        if taps is None:
            message = f"the draft head `{self.model}` does not say which of the target's layers it reads"
            example = quote(f"{self.kind.method}:model={self.model},layers={self.kind.layers}")
            raise UsageError(message, f"for example `--draft {example}`")
        return taps

    @property
    def origin(self) -> Origin | None:
        """The published folder."""
        from specdec_cli.lm.heads.head_tensors import head_origin

        return None if self.source is None else head_origin(self.source)

    def load_sequences(self, resources: Resources, target: LM) -> DraftSequences:
        """The sequences of the draft; see `load`."""
        from specdec_cli.lm.heads.published import load_sequences

        return load_sequences(self.published(resources.revision), target, resources.num_tokens)


@cache
def published_drafter(method: str) -> Any:
    """The drafter of a method that runs published drafts: a dataclass with its options; None of another method."""
    kind = kinds_by_method().get(method)
    if kind is None:
        return None
    fields: list[Any] = [("model", str), *([("layers", str | None, None)] if kind.layers else [])]
    namespace = {"kind": kind, "one_pass": kind.one_pass, "has_tokenizer": kind.has_tokenizer}
    namespace["__doc__"] = f"Guesses with {kind.what}, as published."
    return make_dataclass("Drafter", fields, bases=(PublishedDrafter,), namespace=namespace)
