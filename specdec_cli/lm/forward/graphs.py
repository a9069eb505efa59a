"""Forwards of fixed shape, recorded once as CUDA graphs and replayed: a GPU's step then waits for no launch.

A step's rows are padded to a `Bucket`: so many sequences, so many tokens of each, so many blocks of each one's cache.
All that differs between two steps of a bucket is a vector of integers (`graph_inputs`), which goes to the device in one
copy that nothing waits for; slots and masks follow from it on the device, those of drafted trees too. The forward is
the model's own, with our attention and our cache. A draft's whole guess, token by token, is one graph, too, and the
target's graph takes all guesses of a step from where they are (`unread`): a greedy step needs one wait for the device.
What fits no bucket (a prompt's chunk, hundreds of tokens) runs as always, beside the graph of the rows that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_cli.drafted import MOST_NODES
from specdec_cli.errors import RunError
from specdec_cli.lm.cache.cache import BlockCache, cache_parameter
from specdec_cli.lm.cache.contexts import ForwardInput, Moves
from specdec_cli.lm.cache.layout import DraftedNodes, Layout, Span
from specdec_cli.lm.cache.pending_tokens import PendingTokens, put_in, stood_for
from specdec_cli.lm.door import CHAIN, Continuations, DraftForm, Draw
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.forward.graph_draws import ChoiceInputs, ChoiceKind, Choices, drawn_q
from specdec_cli.lm.forward.graph_inputs import MOST_READ, MOST_TOKENS, NOTHING, Bucket, GraphInputs, fill, values
from specdec_cli.lm.forward.recorded_rounds import NO_PLACE, RecordedShape, chain_of, nodes_of, shape_to_record
from specdec_cli.lm.forward.taps import TapHooks
from specdec_cli.lm.hidden_states import HiddenStates
from specdec_cli.lm.kernels.kinds import has_triton
from specdec_cli.tree_shape import TreeShape

_WARM_UPS = 2  # runs before the recorded one: libraries make their workspaces in them

Replay = Callable[[], None]
Outputs = tuple[Tensor, ...]


@dataclass(slots=True)
class ForwardGraph:
    """A recorded forward with its inputs and outputs, which stay where they are.

    Args:
        bucket: its shape.
        inputs: as `graph_inputs.values` fills it.
        drafted: [2, B·R] int64, tokens that the host has not read, and their paths where it does not know these.
        replay: runs it.
        outputs: overwritten by each replay, and by those of other graphs that share its memory.
        num_filled: how often the host has given it inputs.
    """

    bucket: Bucket
    inputs: Tensor
    drafted: Tensor
    replay: Replay
    outputs: Outputs
    num_filled: int = 0

    def takes(self, unread: Sequence[PendingTokens]) -> bool:
        """Whether there is room for these tokens."""
        return sum(guess.tokens.numel() for guess in unread) <= self.drafted.shape[1]

    def run(self, values: list[int], unread: Sequence[PendingTokens] = ()) -> Outputs:
        """Replay it on other inputs and on guesses one behind another; the outputs are overwritten by the next run."""
        rest = self.drafted
        for guess in unread:
            tokens, paths = rest[:, : guess.tokens.numel()].view(2, *guess.tokens.shape)
            rest = rest[:, guess.tokens.numel() :]
            tokens.copy_(guess.tokens)
            if guess.paths is None:
                paths.zero_()
            else:
                paths.copy_(guess.paths)
        fill(self.inputs, values)
        self.num_filled += 1
        self.replay()
        return self.outputs


@dataclass(frozen=True, slots=True)
class ScoredGraph:
    """The graph that has scored rows of a call, and where its keys are.

    Args:
        graph: of the target.
        feeds: these rows.
        cache: that it reads and writes.
        block_size: tokens in a block.
        nowhere: the slot that takes what only fills the shape.
    """

    graph: ForwardGraph
    feeds: Sequence[ForwardInput]
    cache: BlockCache
    block_size: int
    nowhere: int


@dataclass(frozen=True, slots=True)
class GuessedGraph:
    """The graph that has guessed for all rows of a call, in the shape that their further guesses have.

    Args:
        graph: of the draft.
        form: of the guesses.
        depth: of each.
        choice: how its tokens are chosen.
    """

    graph: ForwardGraph
    form: DraftForm
    depth: int
    choice: ChoiceInputs


def most_fed(form: DraftForm, depth: int) -> int:
    """Tokens of a sequence that are fed to guess behind a step: one shape for all steps, however much they accept.

    The cache lacks two tokens of a chain at most, and of a tree or of masks nothing stays in it.
    """
    return min(2 if form == CHAIN else depth + 1 if form.mask is None else 2 * depth, MOST_TOKENS)


class Graphs:
    """The graphs of one model, each recorded when it is first needed.

    Args:
        model: a transformers model on a GPU, its attention ours.
        cache: the block cache, with room for one token beyond its blocks.
        num_blocks: blocks of the cache.
        block_size: tokens in a block.
        max_context: most tokens of a context.
        hooks: copy hidden states; a graph is recorded with those that are installed then.

    Attributes:
        scored: the graph of the latest call of `score`.
        guessed: the graph of the latest call of `guess`; None where further guesses have another shape.
    """

    def __init__(
        self,
        model: Any,
        cache: BlockCache,
        num_blocks: int,
        block_size: int,
        max_context: int,
        hooks: TapHooks,
    ) -> None:
        self._model = model
        self._hooks = hooks
        self._cache = cache
        self._given_cache = {cache_parameter(model.forward) or "past_key_values": cache}
        self._block_size = block_size
        self._nowhere = num_blocks * block_size  # the slot that takes what only fills the shape
        self._max_context = max_context
        self._device: torch.device = model.device
        self._kernels = kernels_for(self._device)
        self._pool = GraphPool(self._device)
        self._scores: dict[tuple[Bucket, bool], ForwardGraph] = {}
        self._guesses: dict[
            tuple[Bucket, TreeShape, int, bool, int, ChoiceKind], tuple[ForwardGraph, ChoiceInputs]
        ] = {}
        self._moves: dict[int, tuple[Tensor, Replay]] = {}
        self.scored: ScoredGraph | None = None
        self.guessed: GuessedGraph | None = None

    def try_out(self) -> None:
        """Record the smallest forward.

        Raises:
            RunError: the model's forward cannot be recorded.
        """
        bucket = Bucket.around(1, 1, 1)
        self._recorded(partial(self._score, bucket, False), bucket)

    def takes(self, feed: ForwardInput) -> bool:
        """Whether a graph is made for so much of a sequence."""
        return 0 < feed.num_logits >= feed.num_tokens - MOST_READ and feed.num_tokens <= MOST_TOKENS

    def score(self, feeds: Sequence[ForwardInput]) -> Tensor:
        """Logits [sum of num_logits, V] float32, as `LM.score` gives them, of feeds that it takes.

        Raises:
            RunError: the model's forward cannot be recorded.
        """
        lengths = [len(feed.context) - feed.keep for feed in feeds]
        bucket = Bucket.around(len(feeds), max(lengths), max(len(feed.sequence.blocks) for feed in feeds))
        key = bucket, any(feed.is_tapped for feed in feeds)
        graph = self._scores.get(key)
        if graph is None:
            graph = self._scores[key] = self._recorded(partial(self._score, *key), bucket)
        unread = list(dict.fromkeys(feed.unread for feed in feeds if feed.unread is not None))
        if not graph.takes(unread):
            unread = []
            for feed in feeds:
                feed.settle()
        behind = dict(zip(unread, accumulate((guess.tokens.numel() for guess in unread), initial=0), strict=False))
        shifts = [0 if feed.unread is None else behind[feed.unread] for feed in feeds]
        row_tokens = bucket.num_tokens
        wanted = [
            row * row_tokens + place
            for row, (feed, length) in enumerate(zip(feeds, lengths, strict=True))
            for place in range(length - feed.num_logits, length)
        ]
        logits, *states = graph.run(values(bucket, feeds, lengths, wanted, shifts), unread)
        self.scored = ScoredGraph(graph, feeds, self._cache, self._block_size, self._nowhere)
        for row, (feed, length) in enumerate(zip(feeds, lengths, strict=True)):
            if feed.is_tapped:
                feed.states = HiddenStates.of(states[0][row * row_tokens : row * row_tokens + length].clone())
        return logits[: len(wanted)].clone()

    def guess(
        self,
        feeds: Sequence[ForwardInput],
        counts: Sequence[int],
        draws: Sequence[Draw | None],
        num_tokens: int,
        form: DraftForm,
    ) -> Continuations:
        """Continuations, as `Forward.guess` gives them, of feeds with at most `most_fed` or `MOST_READ` known tokens.

        Raises:
            RunError: the model's forward cannot be recorded.
        """
        depth, tree, is_one_pass = max(counts), form.tree, form.mask is not None
        lengths = [form.num_known(feed.num_tokens, feed.num_logits) for feed in feeds]
        most = most_fed(form, depth)
        num_fed = max(*lengths, most)
        bucket = Bucket.around(len(feeds), num_fed, max(len(feed.sequence.blocks) for feed in feeds))
        key = bucket, tree or chain_of(depth), depth, is_one_pass, num_tokens, ChoiceKind.of(draws, num_tokens)
        if key not in self._guesses:
            self._guesses[key] = self._recorded_guess(*key)
        graph, choice = self._guesses[key]
        choice.fill(draws)
        lasts = [feed.num_tokens - feed.num_logits for feed in feeds]
        nodes, *q = graph.run(values(bucket, feeds, lengths, lasts))
        unread = PendingTokens(*nodes[:, : len(feeds)].clone())
        is_lasting = num_fed == most and min(counts) == depth
        self.guessed = GuessedGraph(graph, form, depth, choice) if is_lasting else None
        nums = [num if tree is None else tree.num_nodes(depth) for num in counts]
        tokens = [unread.stand_ins(row, num) for row, num in enumerate(nums)]
        return Continuations(tokens, unread, drawn_q(draws, nums, q))

    def _recorded_guess(
        self, bucket: Bucket, shape: TreeShape, depth: int, is_one_pass: bool, num_tokens: int, kind: ChoiceKind
    ) -> tuple[ForwardGraph, ChoiceInputs]:
        choice = ChoiceInputs.sized(kind, num_tokens, bucket.num_rows, shape, depth, self._device)
        to_record = shape_to_record(shape, depth, 1, is_one_pass, self._device)
        return self._recorded(partial(self._guess, bucket, to_record, is_one_pass, choice), bucket), choice

    def move(self, moves: Moves) -> None:
        """Copy keys and values from slots to others, in one graph that the host does not wait for."""
        size = 1 << (len(moves) - 1).bit_length()
        if size not in self._moves:
            slots = torch.full((2, size), self._nowhere, device=self._device)
            self._moves[size] = (
                slots,
                recorded(partial(self._move, slots), self._device, self._pool, "a move of keys")[0],
            )
        slots, replay = self._moves[size]
        nowhere = [self._nowhere] * (size - len(moves))
        before, after = zip(*moves, strict=True)
        fill(slots.view(-1), [*before, *nowhere, *after, *nowhere])
        replay()

    def _move(self, slots: Tensor) -> Outputs:
        self._cache.move(*slots)
        return ()

    def _recorded(self, forward: Callable[[Tensor, Tensor], Outputs], bucket: Bucket) -> ForwardGraph:
        """Record a forward that reads a vector of a bucket's inputs and one more number for each of its tokens.

        Beside it stand drafted tokens that the host has not read, and their paths, at most as many as the bucket's.
        """
        inputs = torch.tensor(values(bucket, (), (), ()), device=self._device)
        drafted = torch.zeros(2, bucket.num_fed, dtype=torch.int64, device=self._device)
        name = f"a forward of `{self._model.config.model_type}`"
        replay, outputs = recorded(lambda: forward(inputs, drafted), self._device, self._pool, name)
        return ForwardGraph(bucket, inputs, drafted, replay, outputs)

    def _score(self, bucket: Bucket, is_tapped: bool, inputs: Tensor, drafted: Tensor) -> Outputs:
        """The logits [B·R, V] float32 that are wanted, and behind them any; hidden states [B·R, taps, hidden]."""
        step = GraphInputs.views(bucket, inputs)
        slots = slots_of(step.tables, self._block_size, self._nowhere)
        paths = stood_for(step.tokens, drafted[1])
        # The host takes a node whose path it does not know for a child of the context's end.
        depths = (paths[:, :, None] >> torch.arange(MOST_NODES, device=self._device) & 1).sum(2)
        ancestors, positions = step.ancestors | paths, step.positions + (depths - 1).clamp(min=0)
        nodes = DraftedNodes.among(step.places, positions, ancestors, step.num_text, slots.shape[1])
        forward = partial(self._forward, put_in(step.tokens, drafted[0]), positions, slots, nodes)
        if not is_tapped:
            return (forward()[step.more].float(),)
        with self._hooks.copying() as states:
            logits = forward()[step.more].float()
        return logits, states()

    def _guess(
        self,
        bucket: Bucket,
        shape: RecordedShape,
        is_one_pass: bool,
        choice: ChoiceInputs,
        inputs: Tensor,
        _drafted: Tensor,
    ) -> Outputs:
        """The nodes, as `RecordedDraft` has them, and the q of drawn ones."""
        step = GraphInputs.views(bucket, inputs)
        slots = slots_of(step.tables, self._block_size, self._nowhere)
        last = step.more[: bucket.num_rows, None]
        logits = self._forward(step.tokens, step.positions, slots).view(*step.tokens.shape, -1)
        choices = Choices(choice)
        draft = shape.begin(choices, bucket.num_rows)
        for depth in range(shape.depth if is_one_pass else 1):
            column = (last + depth).clamp(max=bucket.num_tokens - 1)[:, :, None]  # of a shorter row it is not read
            draft.take(depth, logits.gather(1, column.expand(-1, -1, logits.shape[2]))[:, 0])
        if is_one_pass:
            return draft.nodes, *draft.q
        before = step.positions.gather(1, last)
        begin = torch.where(before == NOTHING, NO_PLACE, before + 1)[:, 0]
        for depth in range(1, shape.depth):
            new = draft.to_run(depth, is_all=False)
            places = torch.where(new.slots < shape.num_slots, begin[:, None] + new.slots, NO_PLACE)
            nodes = None if new.sees is None else nodes_of(begin, new.sees, new.depths, places, slots)
            positions = torch.where(places < 0, NOTHING, (begin + depth - 1)[:, None])
            draft.take(depth, self._forward(new.tokens.clamp(min=0), positions, slots, nodes))
        return draft.nodes, *draft.q

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, nodes: DraftedNodes | None = None) -> Tensor:
        """Logits [B·R, V] of tokens [B, R] at their positions, over caches at slots [B, T]; all text without nodes."""
        (num_rows, row_tokens), num_keys = tokens.shape, slots.shape[1]
        places = positions if nodes is None else nodes.places
        last = min(num_keys, self._max_context) - 1
        is_written = (places >= 0) & (places < num_keys) & (positions <= last)
        places, positions = places.clamp(0, num_keys - 1), positions.clamp(0, last)
        spans = [Span(row * row_tokens, (row + 1) * row_tokens, num_keys, 0, slots[row]) for row in range(num_rows)]
        layout = Layout([], [], spans, [], wanted=[], num_written=num_rows * row_tokens, device=self._device)
        layout.position_ids = positions.view(1, -1)
        layout.kernels, layout.slots, layout.nodes = self._kernels, slots, nodes
        layout.write_slots = torch.where(is_written, slots.gather(1, places), self._nowhere).view(-1)
        with self._cache.running(layout):
            logits: Tensor = self._model(
                input_ids=tokens.view(1, -1),
                position_ids=layout.position_ids,
                use_cache=True,
                **self._given_cache,
            ).logits[0]
        return logits


def kernels_for(device: torch.device) -> Any:
    """Attention for all sequences at once (`lm.split_attention`); None where there is no GPU or no Triton."""
    if device.type != "cuda" or not has_triton():
        return None
    from specdec_cli.lm.kernels import split_attention

    return split_attention


class GraphPool:
    """Where graphs' own memory comes from. One serves many graphs: an output is read before the next replay.

    Args:
        device: of the graphs.

    Attributes:
        handle: as torch's recording takes it; None but on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.renew()

    def renew(self) -> None:
        """Take another pool: one that a recording failed in takes no further one."""
        cuda: Any = torch.cuda
        self.handle = cuda.graph_pool_handle() if self._device.type == "cuda" else None


def slots_of(tables: Tensor, block_size: int, nowhere: int) -> Tensor:
    """The slot of every position [B, T] int64.

    Args:
        tables: blocks of each sequence [B, N]; `NOTHING` where it has no more.
        block_size: tokens in a block.
        nowhere: the slot of positions without a block.
    """
    inside = torch.arange(block_size, device=tables.device)
    slots = tables[:, :, None] * block_size + inside
    return torch.where(tables[:, :, None] == NOTHING, nowhere, slots).flatten(1)


def recorded(run: Callable[[], Outputs], device: torch.device, pool: GraphPool, what: str) -> tuple[Replay, Outputs]:
    """`record`, with an error of one sentence where that fails.

    Raises:
        RunError: `what` waits for the device, or does something else that a graph cannot hold.
    """
    try:
        return record(run, device, pool)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # What a graph cannot hold ends the recording with another error, whose context says what it was.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        message = f"{what} cannot be recorded: {first_line(cause)}"
        raise RunError(message, "use --decoder transformers") from error


@lru_cache
def _recording_stream(device: torch.device) -> Any:
    """The stream that everything on a GPU is recorded on; torch's own is the first GPU's for all of them."""
    cuda: Any = torch.cuda
    return cuda.Stream(device)


def record(run: Callable[[], Outputs], device: torch.device, pool: GraphPool) -> tuple[Replay, Outputs]:
    """Record a function's work on a GPU; returns its replay, and the tensors that each replay overwrites.

    Args:
        run: reads and writes the same tensors every time.
        device: the GPU.
        pool: where the graph's own memory comes from.

    Raises:
        RuntimeError: it waits for the device, or does something else that a graph cannot hold.
    """
    cuda: Any = torch.cuda
    now, aside = cuda.current_stream(device), cuda.Stream(device)
    aside.wait_stream(now)
    with torch.inference_mode(), cuda.device(device):
        with cuda.stream(aside):
            for _ in range(_WARM_UPS):
                run()
        now.wait_stream(aside)
        graph = cuda.CUDAGraph()
        try:
            # One that fails leaves its stream the current one: the outer block brings back the one before.
            with cuda.stream(now), cuda.graph(graph, pool=pool.handle, stream=_recording_stream(device)):
                outputs = run()
        except BaseException:
            pool.renew()
            raise
    replay: Replay = graph.replay
    return replay, outputs
