"""Rounds that a GPU is given before the host has read those before them ("asynchronous scheduling").

While a round runs, the host does its own work on the round before: verdicts, stop strings, events, the next schedule.
What the host alone finds out is applied one round late: what a sequence that has ended was given beyond its end is
dropped with it, and the others go on without it. Where others are scheduled, no further round is launched and the last
one is still delivered. Then steps go on as always, until all rows have the same k again, and none needs the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specdec_cli.drafted import NOTHING, Drafted
from specdec_cli.drafters.contract import DraftsOnDevice, Guesses
from specdec_cli.engine.features import FeatureBook
from specdec_cli.engine.scheduler import StepRow
from specdec_cli.errors import RunError
from specdec_cli.events import Noticed
from specdec_cli.lm.door import ScoresOnDevice, Tapped
from specdec_cli.sampling.chain import ChainRow, LargestLogits, is_edited
from specdec_cli.verification import GREEDY, RULES

if TYPE_CHECKING:
    from specdec_cli.engine.device_verdicts import ChanceJudge, RoundForm
    from specdec_cli.engine.sequence import Sequence as EngineSequence
    from specdec_cli.lm.forward.device_drafts import DraftOnDevice
    from specdec_cli.lm.forward.device_rounds import (
        DecidedRound,
        DecisionGraph,
        RoundEnd,
        RoundsOnDevice,
        TargetOnDevice,
    )
    from specdec_cli.lm.forward.graphs import GraphPool
    from specdec_cli.sampling.params import SamplingParams


class _StepClock(Protocol):
    """Marks moments of the device's work, as `stepper.Clock` does."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another."""
        ...


class RoundsAhead:
    """The rounds that were launched ahead, and what was read of them.

    Args:
        target: scores.
        drafter: the one of a name, if it can go on without the host.
        num_tokens: V, the real vocabulary.
        features: of all sequences.
        clock: of the target's device.
        rates: as `stepper.Stepper` has them.
        judge: gives rows their verdicts by their largest logits and by `DecidedRound.ends`.
        notices: takes those to report.
    """

    def __init__(
        self,
        target: ScoresOnDevice,
        drafter: Callable[[str], DraftsOnDevice | None],
        num_tokens: int,
        features: FeatureBook,
        clock: _StepClock,
        rates: Sequence[float],
        judge: Callable[[Sequence[StepRow], LargestLogits, Sequence[RoundEnd]], None],
        notices: list[Noticed],
    ) -> None:
        self._target, self._drafter, self._num_tokens = target, drafter, num_tokens
        self._features, self._clock, self._rates, self._judge = features, clock, tuple(rates), judge
        self._decisions: dict[tuple[Any, ...], tuple[DecisionGraph, ChanceJudge]] = {}
        self._pool: GraphPool | None = None
        self._noise: dict[tuple[int, ...], Tensor] = {}  # one round at a time is decided, whichever graph does it
        self._refused = set[tuple[Any, ...]]()
        self._told = set[str]()
        self._notices = notices
        self._clear()

    @property
    def is_under_way(self) -> bool:
        """Whether a round was launched that has not been read."""
        return self._rounds is not None

    def forget(self) -> list[EngineSequence]:
        """Drop all rounds; returns the sequences in them, whose caches are to be computed again."""
        lost = [one for one in self._sequences if one is not None and self._rounds is not None]
        lost += [row.sequence for row in self._decided.values()]
        self._clear()
        return lost

    def _clear(self) -> None:
        self._rounds: RoundsOnDevice | None = None
        self._sequences: list[EngineSequence | None] = []  # of the rounds; None for one that was released
        self._decided: dict[int, StepRow] = {}  # rows that were read and not taken, by their sequences
        self._drafted, self._k, self._is_broken, self._is_last = NOTHING, 0, False, False

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence that was released."""
        self._decided.pop(sequence_id, None)
        self._sequences = [one if one is not None and one.id != sequence_id else None for one in self._sequences]
        if not any(self._sequences):
            self._rounds = None

    def begin(self, rows: Sequence[StepRow]) -> bool:
        """Take over the decided rows of a step that was just drafted and scored, if they can go on without the host.

        Returns:
            Whether they can; then they are verified.
        """
        can_begin = len(rows) > 0 and self._rounds is None and all(map(_is_plain, rows))
        draft = self._draft_of(rows) if can_begin else None
        form = None if draft is None else self._form_of(rows, draft[1])
        if draft is None or form is None:
            return False
        drafted, on_device = draft
        target = self._target.scored_on_device(rows[0].taps)
        if target is None or target.handles != [row.sequence.id for row in rows]:
            return False
        if on_device is not None and on_device.inputs.device != target.scored.graph.inputs.device:
            return False
        rounds = self._made(target, on_device, drafted, form, [row.sequence.params for row in rows])
        if rounds is None:
            return False
        self._rounds, self._sequences = rounds, [row.sequence for row in rows]
        self._drafted, self._k, self._is_broken = drafted, rows[0].k, False
        if not self._launch():
            self._rounds = None
            return False
        self._read(is_last=False)
        self._deliver(rows)
        return True

    def go_on(self, rows: Sequence[StepRow], *, goes_on: bool) -> set[int]:
        """Launch the next round if it has the rows of this step that decode.

        Args:
            rows: of this step.
            goes_on: the next step has the same, unless some end.

        Returns:
            The sequences whose rows `take` will verify.
        """
        ahead = {one.id for one in self._sequences if one is not None} if self._rounds is not None else set[int]()
        decoding = [row for row in rows if row.is_decided]
        is_same = ahead == {row.sequence.id for row in decoding} and {row.k for row in decoding} == {self._k}
        self._is_last = not (goes_on and is_same and not self._is_broken and self._launch())
        return (ahead | {*self._decided}) & {row.sequence.id for row in rows}

    def take(self, rows: Sequence[StepRow]) -> tuple[float, float]:
        """Read the round that is under way, and give rows what was decided ahead of them.

        Returns:
            Seconds of drafting and of the target's forward.
        """
        seconds = (0.0, 0.0) if self._rounds is None else self._read(is_last=self._is_last)
        self._deliver(rows)
        return seconds

    def _draft_of(self, rows: Sequence[StepRow]) -> tuple[Drafted, DraftOnDevice | None] | None:
        """The nodes that each row has alike, and the draft they come from; None where the host has to draft again."""
        first, guesses = rows[0], rows[0].guesses
        if not first.k:
            return None if any(row.taps for row in rows) else (NOTHING, None)
        drafter = self._drafter(first.sequence.draft)
        on_device = None if drafter is None else drafter.on_device
        if on_device is None or guesses.unread is not on_device.first.unread:
            return None
        for i, row in enumerate(rows):
            stand_ins = tuple(guesses.unread.stand_ins(i, len(guesses.drafted)))
            its = row.guesses.drafted
            is_alike = row.guesses.unread is guesses.unread and its.parents == guesses.drafted.parents
            if not is_alike or its.tokens != stand_ins or (row.k, row.taps) != (first.k, first.taps):
                return None
        return guesses.drafted, on_device

    def _form_of(self, rows: Sequence[StepRow], draft: DraftOnDevice | None) -> RoundForm | None:
        """How rows are decided alike; None where the host has to decide."""
        rules = {row.sequence.rule for row in rows}
        others = rules - {RULES[GREEDY]}
        rule, guesses, tree = next(iter(others or rules)), rows[0].guesses, rows[0].sequence.tree
        have_q = {row.guesses.q is not None for row in rows if row.sequence.rule is rule}
        is_mixed = len(others) > 1 or len(have_q) > 1 or (rule.needs_rates and len(rules) > 1)
        if is_mixed or not rule.on_device:
            return None
        parents = guesses.drafted.parents
        if rule.needs_q and guesses.unread is not None and guesses.unread.paths is not None:
            # The device has chosen these trees: by chance alone, or there is no telling what they look like.
            if tree is None or tree.is_dynamic or len(tree.parents) != len(parents):
                return None
            parents = tree.parents
        from specdec_cli.engine.device_verdicts import RoundForm, kind_of

        depth, is_drawn = (0, False) if draft is None else (draft.depth, draft.is_drawn)
        kind = kind_of([row.sequence.params for row in rows], rule, self._num_tokens)
        rates = self._rates if rule.needs_rates else ()
        return RoundForm(rule, kind, parents, depth, is_drawn, have_q == {True}, rates, self._num_tokens)

    def _made(
        self,
        target: TargetOnDevice,
        draft: DraftOnDevice | None,
        drafted: Drafted,
        form: RoundForm,
        params: Sequence[SamplingParams],
    ) -> RoundsOnDevice | None:
        """Rounds of two graphs; what decides them is recorded once. None where that fails, which is noticed."""
        from specdec_cli.lm.forward.device_rounds import RoundsOnDevice

        graph = target.scored.graph
        key = id(graph), None if draft is None else id(draft.graph), form, *target.taps
        if key in self._refused:
            return None
        try:
            with torch.inference_mode():
                if key not in self._decisions:
                    self._decisions[key] = self._recorded(target, draft, drafted, form)
                decision, judge = self._decisions[key]
                judge.take(params)
        except (RunError, torch.OutOfMemoryError) as error:
            self._refused.add(key)
            reason = error.message if isinstance(error, RunError) else "the GPU's memory is full"
            if reason not in self._told:
                self._notices.append(Noticed(None, f"some steps wait for the ones before them: {reason}"))
            self._told.add(reason)
            return None
        return RoundsOnDevice(target, draft, decision, self._clock.mark)

    def _recorded(
        self, target: TargetOnDevice, draft: DraftOnDevice | None, drafted: Drafted, form: RoundForm
    ) -> tuple[DecisionGraph, ChanceJudge]:
        from specdec_cli.engine.device_verdicts import ChanceJudge
        from specdec_cli.lm.forward.device_rounds import DecisionGraph
        from specdec_cli.lm.forward.graphs import GraphPool

        device, num_rows = target.scored.graph.inputs.device, target.scored.graph.bucket.num_rows
        self._pool = self._pool or GraphPool(device)
        shape = num_rows, form.depth + 1, self._num_tokens * form.kind.has_noise
        if shape not in self._noise:
            self._noise[shape] = torch.zeros(shape, dtype=torch.float64, device=device)
        judge = ChanceJudge(form, num_rows, self._noise[shape])
        return DecisionGraph(target, draft, drafted, form.depth, self._num_tokens, self._pool, judge), judge

    def _launch(self) -> bool:
        assert self._rounds is not None, "rounds go on once they have begun"
        return self._rounds.launch([None if one is None else len(one.tokens) + 1 for one in self._sequences])

    def _read(self, *, is_last: bool) -> tuple[float, float]:
        """Read a round, judge its rows, and bring the books to what the device holds; its seconds."""
        rounds = self._rounds
        assert rounds is not None, "a round is read after it was launched"
        decided = rounds.read()
        rows = {i: StepRow(one, len(one.tokens), self._k) for i, one in enumerate(self._sequences) if one is not None}
        for i, row in rows.items():
            if decided.drafted is not None:
                unread = decided.drafted.unread
                nodes = self._drafted.with_tokens(unread.stand_ins(i, len(self._drafted)))
                row.guesses = Guesses(nodes, None, unread)
        tokens = [token for i in rows for token in decided.likeliest[i]]
        values = [value for i in rows for value in decided.largest[i]]
        self._judge([*rows.values()], LargestLogits(tokens, values), [decided.ends[i] for i in rows])
        self._decided |= {row.sequence.id: row for row in rows.values()}
        self._follow(rounds, decided, rows, is_last=is_last)
        if is_last:
            self._rounds = None
        if not decided.marks:
            return 0.0, 0.0
        begin, middle, end = decided.marks
        return self._clock.seconds(begin, middle), self._clock.seconds(middle, end)

    def _follow(
        self, rounds: RoundsOnDevice, decided: DecidedRound, rows: Mapping[int, StepRow], *, is_last: bool
    ) -> None:
        places = range(len(self._sequences))
        before = [rows[i].sequence.tokens if i in rows else None for i in places]
        after = [None if i not in rows else [*rows[i].sequence.tokens, *_accepted(rows[i])] for i in places]
        rounds.target.follow(after, is_last=is_last)
        if rounds.draft is None or decided.drafted is None:
            return
        rounds.draft.follow(decided.drafted, before, is_last=is_last)
        decided.drafted.unread.leave_out(i for i in places if i not in rows)
        self._is_broken = self._is_broken or not decided.drafted.unread.is_whole
        for drafter in {row.sequence.draft for row in rows.values()}:
            contexts = {row.sequence.id: row.sequence.tokens for row in rows.values()}
            its = self._drafter(drafter)
            assert its is not None, "the drafter has drafted on the device"
            its.follow(contexts, decided.drafted.unread)
        for i, row in rows.items() if rounds.target.taps else ():
            sequence, num = row.sequence, len(row.sequence.tokens)
            # Of a round that is not the last, the device has given the states to the draft.
            self._features.begin(sequence.id, num - 1)
            if is_last and decided.states is not None:
                self._features.add(sequence.id, Tapped(num - 1, decided.states[i]), num)

    def _deliver(self, rows: Sequence[StepRow]) -> None:
        """Give rows what was decided of them."""
        for row in rows:
            decided = self._decided.pop(row.sequence.id, None)
            if decided is not None:
                row.guesses, row.p, row.first_place = decided.guesses, decided.p, decided.first_place
                row.verdict, row.error = decided.verdict, decided.error


def _is_plain(row: StepRow) -> bool:
    """Whether the device can decide a row: nothing edits its logits, and nothing more is wanted of them."""
    sequence, params = row.sequence, row.sequence.params
    chain_row = ChainRow(params, sequence.tokens, sequence.num_prompt_tokens, NOTHING, sequence.stop_ids)
    has_grammar = sequence.matcher is not None
    wants_more = params.logprobs is not None or has_grammar or is_edited(chain_row)
    return not wants_more and row.is_decided and row.error is None


def _accepted(row: StepRow) -> list[int]:
    """The tokens of a verified row's nodes that stand."""
    path = () if row.verdict is None else row.verdict.path
    return [row.guesses.drafted.tokens[node] for node in path]
