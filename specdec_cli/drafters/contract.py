"""The interface of drafters: what they see and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_cli.lm.cache.budget import DraftCache
    from specdec_cli.lm.cache.pending_tokens import PendingTokens
    from specdec_cli.lm.door import LM, Continuations, Draw, Tap
    from specdec_cli.lm.files.origin import Origin
    from specdec_cli.lm.forward.device_drafts import DraftOnDevice
    from specdec_cli.lm.self_draft import SelfDraft
    from specdec_cli.sampling.params import SamplingParams
    from specdec_cli.text.shared_vocabulary import SharedVocabulary
    from specdec_cli.text.tokenizer import Tokenizer


@dataclass(slots=True)
class DraftRow:
    """One sequence that wants guesses.

    Args:
        handle: names the sequence; the same for all its steps.
        context: prompt and output so far; the sequence's own list, which grows until the handle is released.
        num_prompt_tokens: how many of them are the prompt.
        k: most tokens to guess one after another, at least 1; with a tree, how deep it may be.
        params: the request's sampling parameters (the draft samples as the target will).
        stop_ids: tokens that end this request (banned while fewer than min_tokens are emitted).
        needs_q: whether tokens drawn by chance have to come with the q that they were drawn from.
        shares_noise: whether the target chooses by noise keyed by position (`Purpose.GUMBEL`), which the draft is to
            choose by as well; otherwise it draws by noise of its own (`Purpose.DRAFT`).
        p_min: stop before a position whose largest q is below this; 0 never stops.
        prediction: tokens that the output is expected to follow, where the request brought them.
        cache_salt: a drafter may share what it keeps (cached tokens, earlier outputs) with sequences of the same salt;
            None shares nothing.
        tree: shape of the guess; None wants a chain. Only drafters that build trees are asked for one.
        features: [n, len(taps), hidden] in the target's dtype: its hidden states at positions len(context) - 1 - n to
            len(context) - 2, those that were kept since this sequence's last row (for its first: all from where `adopt`
            let it begin). The last token is still to be read by the target. None where none are new, or without taps. A
            row that is asked again in the same step, after another one's LogitsError, brings them again.
    """

    handle: int
    context: list[int]
    num_prompt_tokens: int
    k: int
    params: SamplingParams
    stop_ids: frozenset[int]
    needs_q: bool
    shares_noise: bool
    p_min: float
    prediction: Sequence[int] | None = None
    cache_salt: str | None = None
    tree: TreeShape | None = None
    features: Tensor | None = None

    @property
    def most_nodes(self) -> int:
        """Most drafted nodes."""
        return self.k if self.tree is None else self.tree.num_nodes(self.k)

    def most_depth(self, max_context: int) -> int:
        """How deep its guess may be with a draft that reads so many tokens; 0 or less where it has no room."""
        most = min(self.k, max_context + 1 - len(self.context))
        return most if self.tree is None else min(most, self.tree.depth)

    @property
    def is_edited(self) -> bool:
        """Whether bias, penalties or bans change a draft's logits at its first place."""
        from specdec_cli.sampling.chain import ChainRow, is_edited

        return is_edited(ChainRow(self.params, self.context, self.num_prompt_tokens, NOTHING, self.stop_ids))

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn by chance.

        In a tree chance pays only where the rule knows q or shares the noise: without that, more likely nodes stand
        more often.
        """
        has_use = self.tree is None or (not self.tree.is_dynamic and (self.needs_q or self.shares_noise))
        return self.params.temperature > 0 and has_use

    @property
    def is_plain(self) -> bool:
        """Whether the draft's own scores alone say what is drafted: the likeliest tokens, or each by a draw."""
        return self.p_min == 0 and not (self.shares_noise and self.is_drawn) and not self.is_edited

    @property
    def is_plain_but_noise(self) -> bool:
        """Whether it would be plain if the target's noise did not choose its tokens."""
        return self.shares_noise and self.is_drawn and self.p_min == 0 and not self.is_edited

    def draw(self, num: int, by_noise: Tensor | None = None) -> Draw | None:
        """How its next `num` depths are drawn if it is plain but for noise [num, V]; None takes the likeliest.

        Of a dynamic tree it says how probabilities follow from logits, at temperature 0 as they are at 1.
        """
        from specdec_cli.lm.door import Draw
        from specdec_cli.sampling import noise

        params = self.params
        if self.tree is not None and self.tree.is_dynamic:
            cut = (params.top_k, params.top_p, params.min_p) if params.temperature > 0 else (None, 1.0, 0.0)
            return Draw(params.temperature or 1.0, *cut)
        if params.temperature == 0 or not self.is_drawn:
            return None
        if by_noise is not None:
            return Draw(params.temperature, params.top_k, params.top_p, params.min_p, noise=by_noise)
        num_nodes = num if self.tree is None else self.tree.num_nodes(num)
        uniforms = noise.uniforms(params.seed, params.index, len(self.context), noise.Purpose.DRAFT, num_nodes)
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniforms.tolist())

    def noise_keys(self, num: int) -> list[tuple[int, int, int]]:
        """Seed, index and position of the target's noise for its next `num` tokens."""
        begin = len(self.context)
        return [(self.params.seed, self.params.index, position) for position in range(begin, begin + num)]


@dataclass(slots=True)
class Guesses:
    """Drafted tokens of one sequence; `q` [len(drafted), V] float32 is what each node was sampled from.

    In a tree, `q[i]` is the draft's distribution after node i's parent, the same for all siblings: they were drawn from
    it without replacement, in the order of their numbers. Whether a node exists never depends on its own token.
    `q` is None for a draft without chance (n-gram, the best of q): one-hot, or where the row does not need it.
    Of `unread` tokens the device alone knows which they are: stand-ins are in their places. In a dynamic tree, and in
    one that was drawn by chance, the nodes' parents are unread, too, and how many nodes there are: all that there may
    be follow the context's end.
    """

    drafted: Drafted = NOTHING
    q: Tensor | None = None
    unread: PendingTokens | None = None

    @classmethod
    def plain(
        cls, rows: Sequence[DraftRow], continuations: Continuations, tree: TreeShape | None = None
    ) -> list[Guesses]:
        """Guesses of plain rows, which the draft has continued in one call, with their q where a row needs it.

        Args:
            rows: that are plain.
            continuations: of these.
            tree: the shape of them all; None makes chains.
        """
        qs = (continuations.q.get(i) if row.needs_q else None for i, row in enumerate(rows))
        unread = continuations.unread
        is_known = tree is not None and not tree.is_dynamic and (unread is None or unread.paths is None)
        drafts = (
            Drafted.chain(tokens)
            if tree is None
            else Drafted(tuple(tokens), tree.parents if is_known else (CONTEXT_END,) * len(tokens))
            for tokens in continuations.tokens
        )
        return [cls(drafted, q, unread) for drafted, q in zip(drafts, qs, strict=True)]

    def read(self) -> Guesses:
        """The same with the tokens themselves; the host may wait for them."""
        if self.unread is None:
            return self
        nodes = self.unread.known_nodes(self.drafted).first(self.unread.num_found(self.drafted))
        return Guesses(nodes, None if self.q is None else self.q[: len(nodes)])


@dataclass(slots=True)
class Resources:
    """Everything that a drafter may use when it is loaded.

    Args:
        load_lm: loads a draft model by name or folder with the recipe's draft settings.
        encode: text to token ids with the target's tokenizer, or None where there is no tokenizer.
        num_tokens: V, the size of the real vocabulary; guesses and q never go beyond it.
        target: the loaded target, whose `embed` and `head` a drafter with taps may call; None without one.
        revision: branch, tag or commit of a hub id that the draft is named by.
        plan_cache: takes a cache that the drafter holds itself, or a loaded draft model as it is to be planned. It is
            given its blocks with the models' once all are loaded, and what it held before is lost.
        trust_remote_code: run Python code that comes with a model.
        tokenizer: the target's; None where there is none.
        load_tokenizer: loads the tokenizer of a draft model; None where there is no tokenizer to compare it with.
    """

    load_lm: Callable[[str], LM]
    encode: Callable[[str], list[int]] | None
    num_tokens: int
    target: LM | None = None
    revision: str | None = None
    plan_cache: Callable[[DraftCache], None] = lambda _: None
    trust_remote_code: bool = False
    tokenizer: Tokenizer | None = None
    load_tokenizer: Callable[[str], Tokenizer] | None = None


class Drafter(Protocol):
    """One drafting method. Its file's name is its name in recipes, its dataclass fields are its options there."""

    @property
    def lm(self) -> LM | None:
        """The language model whose distribution its guesses come from, once it is loaded; None without one."""
        ...

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """The tokens that a draft model with another tokenizer shares with the target; None for every other drafter."""
        ...

    def forced_lm(self, temperature: float) -> LM | None:
        """The language model whose distribution along a text tells what is accepted in requests of a temperature.

        None where a trace has to ask for guesses: without a language model, or where they are not drawn from its
        distribution over the target's tokens.
        """
        ...

    @property
    def max_context(self) -> int | None:
        """Longest context (guesses included) that it can read; None has no limit."""
        ...

    @property
    def most_depth(self) -> int | None:
        """Most tokens that it drafts one after another, however many are wanted; None has no limit."""
        ...

    @property
    def builds_trees(self) -> bool:
        """Whether it guesses in the shape of a tree where a row wants one; known once it is loaded."""
        ...

    @property
    def draws(self) -> bool:
        """Whether it draws tokens by chance where a row samples; a draft without chance has no q."""
        ...

    @property
    def one_pass(self) -> bool:
        """Whether a longer guess takes no further pass of the draft: each depth's distribution is known at once."""
        ...

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Parameters, and bytes of weights and caches; 0 without any, None where they are not known."""
        ...

    @property
    def graphs_obstacle(self) -> str | None:
        """Why a head records no CUDA graphs beside a target that does; None where it does, or where it does not apply.

        A draft model says so itself (`LM.graphs_obstacle`).
        """
        ...

    @property
    def taps(self) -> Sequence[Tap]:
        """The target's hidden states that it reads (`DraftRow.features`); known before it is loaded."""
        ...

    @property
    def self_drafts(self) -> Sequence[SelfDraft]:
        """The language models that it has made of the target (`LM.self_draft`); known before it is loaded."""
        ...

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """Begin a new sequence that may reuse cached prefixes, for a drafter with taps.

        Returns:
            How many first tokens of the context it can do without the features of, and gets none of. The target feeds
            all others, though it may have cached them; 0 has it feed everything.
        """
        ...

    def load(self, resources: Resources) -> None:
        """Make ready; called once before the first `propose`."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Guesses for every row, at most `row.k` deep and in the row's shape; an empty guess is fine."""
        ...

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        ...

    def clear(self) -> None:
        """Forget what it keeps of sequences that ended, so that a measurement is not one of the last pass's answers."""
        ...


@runtime_checkable
class DraftsOnDevice(Protocol):
    """A drafter that can go on to draft on its device, without the host (`lm.forward.device_rounds`).

    Attributes:
        on_device: runs the draft of the latest `propose` again, from what the device decides; None where the host has
            to.
    """

    on_device: DraftOnDevice | None

    def follow(self, contexts: Mapping[int, Sequence[int]], unread: PendingTokens) -> None:
        """Take note of a round that the device has drafted, and the host has read.

        Args:
            contexts: of each sequence that goes on, before the round, by its handle.
            unread: what was drafted; the next `propose` refuses it where it is no token.
        """
        ...


@runtime_checkable
class ScoresPaths(Protocol):
    """A drafter that gives its distributions along a text, for traces."""

    @property
    def origin(self) -> Origin | None:
        """Where its own numbers come from; None where they are the target's."""
        ...

    @property
    def most_depth(self) -> int | None:
        """Most tokens that it drafts one after another, however many are wanted; None has no limit."""
        ...

    def path_logits(self, rows: Sequence[DraftRow], paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [len(path), V] float32 of each row's path: what its tokens would be drawn from if they were drafted.

        Args:
            rows: as for `propose`, whose features they bring as well.
            paths: of each row, at least one token and at most as many as it may draft.
        """
        ...


class WithoutFeatures:
    """Base of drafters, as one is that has no language model and reads no hidden states of the target."""

    one_pass = False

    @property
    def most_depth(self) -> int | None:
        """None: it drafts as many tokens as are wanted."""
        return None

    @property
    def graphs_obstacle(self) -> str | None:
        """None: it has no head."""
        return None

    @property
    def self_drafts(self) -> Sequence[SelfDraft]:
        """None."""
        return ()

    @property
    def lm(self) -> LM | None:
        """None, unless it has a language model."""
        return None

    @property
    def shared_vocabulary(self) -> SharedVocabulary | None:
        """None: it has the target's tokenizer, or needs none."""
        return None

    def forced_lm(self, temperature: float) -> LM | None:
        """Its language model, if any."""
        return self.lm

    @property
    def taps(self) -> Sequence[Tap]:
        """None."""
        return ()

    def adopt(self, handle: int, context: Sequence[int], salt: str) -> int:
        """It needs no features at all."""
        return len(context)

    def clear(self) -> None:
        """It keeps nothing of sequences that ended."""


class WithoutModel(WithoutFeatures):
    """Base of drafters without a language model: they read contexts of any length, and guess chains without chance."""

    lm = None
    max_context = None
    builds_trees = False
    draws = False
    sizes = (0, 0)


def draws_of(rows: Sequence[DraftRow], nums: Sequence[int], device: torch.device, num_tokens: int) -> list[Draw | None]:
    """How so many next depths of each row are drawn; None takes the likeliest. The noise is computed together.

    Args:
        rows: that are plain, or would be but for the target's noise.
        nums: depths of each.
        device: where the noise is needed.
        num_tokens: V.
    """
    import torch

    from specdec_cli.sampling import noise

    shared = [num if row.is_plain_but_noise else 0 for row, num in zip(rows, nums, strict=True)]
    keys = [key for row, num in zip(rows, shared, strict=True) for key in row.noise_keys(num)]
    if not keys:
        return [row.draw(num) for row, num in zip(rows, nums, strict=True)]
    seeds, indices, positions = zip(*keys, strict=True)
    parts = torch.split(noise.gumbel_on(device, seeds, indices, positions, num_tokens), shared)
    return [row.draw(num, its if len(its) else None) for row, num, its in zip(rows, nums, parts, strict=True)]


def by_shape(
    rows: Mapping[int, DraftRow], max_context: int, most_depth: int | None = None
) -> list[tuple[TreeShape | None, dict[int, int]]]:
    """Depths of rows by their places, by the shape that they want: chains (None) of any length, or trees of one depth.

    Args:
        rows: by their places in the call; left out where there is no room.
        max_context: tokens that the draft reads.
        most_depth: of the draft, if that is limited.
    """
    alike: dict[tuple[TreeShape | None, int], dict[int, int]] = {}
    for place, row in rows.items():
        depth = row.most_depth(max_context)
        if most_depth is not None:
            depth = min(depth, most_depth)
        if depth > 0:
            key = (None, 0) if row.tree is None else (row.tree.cut(depth), depth)
            alike.setdefault(key, {})[place] = depth
    return [(shape, depths) for (shape, _), depths in alike.items()]
