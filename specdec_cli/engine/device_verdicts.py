"""Verdicts of rounds that a GPU goes on with by itself: the rules of `verify`, as tensor programs that a graph holds.

The host sends random numbers ahead. They are keyed by a text's length before the round, of which it knows then what it
is at least, and by how much it may be more; so it sends those of every such length, and the device takes its own.

Letters: B sequences, N drafted nodes of each, D their depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.engine.drafted_forest import Forest
from specdec_cli.engine.residual import Residuals
from specdec_cli.engine.verify import TYPICAL_DELTA, TYPICAL_EPSILON
from specdec_cli.lm.door import Draw
from specdec_cli.lm.forward.device_judge import DeviceJudge, ScoredNodes, last_place
from specdec_cli.lm.forward.graph_draws import LIKELIEST, NUM_SETTINGS, ChoiceKind, probabilities, settings_of
from specdec_cli.lm.forward.graph_inputs import fill
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import Rule


@dataclass(frozen=True, slots=True)
class RoundForm:
    """The likeness of all rounds that one graph decides; hashable.

    Args:
        rule: of every sequence that is not greedy.
        kind: how the target's distribution follows from its logits: whether any sequence samples, any token may be cut
            off, and noise chooses.
        parents: of the drafted nodes, in the shape that they were drawn in where chance decides which are there; of
            dynamic trees, which the device chooses, as many that all follow the context.
        depth: D.
        is_drawn: whether the draft draws nodes by chance.
        has_q: whether the rule knows distributions that nodes were drawn from.
        rates: for a rule that needs them, the chance of a node of each depth when all before it stand.
        num_tokens: V.
    """

    rule: Rule
    kind: ChoiceKind
    parents: Sequence[int]
    depth: int
    is_drawn: bool
    has_q: bool
    rates: Sequence[float]
    num_tokens: int


def kind_of(params: Sequence[SamplingParams], rule: Rule, num_tokens: int) -> ChoiceKind:
    """The kind of choice that serves the target of these requests, with `RoundForm.rule`."""
    its = ChoiceKind.of([_draw_of(each) for each in params], num_tokens)
    return ChoiceKind(its.is_drawn, its.is_cut, its.is_drawn and rule.shares_noise)


class ChanceJudge(DeviceJudge):
    """Decides by a rule that may take chance, or settings of requests.

    Args:
        form: of the rounds.
        num_rows: B.
        noise: as `DeviceJudge` has it, on the target's device.

    Attributes:
        accept_uniforms: to try each node by [B, N] float64; [B, 0] where the rule tries none.
        own_uniforms: to draw the target's own token by, behind each depth [B, D + 1] float64; [B, 0] where none is.
        settings: of each sequence, as `settings_of` has them [B, 5] float64.
    """

    def __init__(self, form: RoundForm, num_rows: int, noise: Tensor) -> None:
        super().__init__(num_rows, noise.device)
        num, self.form, self.noise, self.needs_q = len(form.parents), form, noise, form.has_q
        by_numbers = form.kind.is_drawn and not form.kind.has_noise
        self._nums = {
            Purpose.DRAFT: num * (by_numbers and form.is_drawn),
            Purpose.ACCEPT: num * (form.rule.needs_q or form.rule.needs_rates),
            Purpose.OWN: (form.depth + 1) * by_numbers,
        }
        zeros = self.draft_uniforms.new_zeros
        self.settings = zeros(num_rows, NUM_SETTINGS)
        self._table = zeros(num_rows, form.depth + 1, sum(self._nums.values()))
        self._numbers = zeros(num_rows, sum(self._nums.values()))
        parts = torch.split(self._numbers, [*self._nums.values()], 1)
        self.draft_uniforms, self.accept_uniforms, self.own_uniforms = parts
        # Of each sequence its seed, its index, and the least length that the table has numbers of.
        self._keys = torch.zeros(3, num_rows, dtype=torch.int64, device=noise.device)
        # By depth; a node deeper than there are rates never stands.
        rates = [0.0, *form.rates, *[0.0] * form.depth][: form.depth + 1]
        self.rates = torch.tensor(rates, dtype=torch.float64, device=noise.device)
        self._forests: dict[bool, Forest] = {}
        self.take([])

    def take(self, params: Sequence[SamplingParams]) -> None:
        """Take other sequences."""
        self._params: list[SamplingParams] = [*params]
        self._is_new = True
        draws = [_draw_of(each) for each in params]
        values = [LIKELIEST if draw is None else settings_of(draw, self.form.num_tokens) for draw in draws]
        values += [LIKELIEST] * (len(self.settings) - len(values))
        fill(self.settings.view(-1), [value for row in values for value in row])

    def prepare(self, begins: Sequence[int], lengths: Tensor) -> None:
        """Send the random numbers of every length, and choose among them."""
        if not any(self._nums.values()) and not self.form.kind.has_noise:
            return
        missing = [0] * (len(self.settings) - len(begins))
        seeds, indices = [each.seed for each in self._params], [each.index for each in self._params]
        keys = [*noise.words(seeds), *missing, *noise.words(indices), *missing, *begins, *missing]
        fill(self._keys.view(-1), keys)
        each = self._table.shape[1]
        positions = [begin + more for begin in begins for more in range(each)]
        of_seeds, of_indices = ([value for value in values for _ in range(each)] for values in (seeds, indices))
        drawn = [
            noise.uniforms_many(of_seeds, of_indices, positions, purpose, num) for purpose, num in self._nums.items()
        ]
        fill(self._table[: len(begins)].view(-1), np.concatenate(drawn, axis=1).ravel())
        at = (lengths - self._keys[2]).clamp(0, each - 1)[:, None, None].expand(-1, 1, self._table.shape[2])
        self._numbers.copy_(self._table.gather(1, at)[:, 0])
        if self._is_new:  # later rounds' noise is made by the rounds before them
            self._is_new = False
            self.go_on(lengths)

    def go_on(self, lengths: Tensor) -> None:
        """Make the noise of the positions behind texts of these lengths [B]."""
        if self.form.kind.has_noise:
            num_rows, each = self.noise.shape[:2]
            positions = lengths[:, None] + torch.arange(each, device=lengths.device)
            seeds, indices = (words[:, None].expand(-1, each).flatten() for words in self._keys[:2])
            made = noise.gumbel_of(seeds, indices, positions.flatten(), self.form.num_tokens)
            self.noise.copy_(made.view(num_rows, each, -1))

    def decide(self, scored: ScoredNodes) -> tuple[Tensor, Tensor, Tensor]:
        """Verdicts, as `DeviceJudge.decide` gives them; sequences at temperature 0 are decided without chance."""
        stands, own, is_right = decider_of(self.form.rule.on_device)(scored, self)
        if self.form.rule.needs_rates or not self.form.kind.is_drawn:
            return stands, own, is_right
        is_greedy = self.settings[:, 0] == 0
        likely, likeliest, _ = greedy(scored, self)
        return (
            torch.where(is_greedy[:, None], likely, stands),
            torch.where(is_greedy, likeliest, own),
            is_right | is_greedy,
        )

    def p(self, scores: Tensor, largest: Tensor) -> Tensor:
        """The target's distributions [B, n, V] float32 at n places; of a sequence at temperature 0 those at 1.

        Args:
            scores: of the places [B, n, V].
            largest: of each place [B, n, 1].
        """
        settings = self.settings.repeat_interleave(scores.shape[1], 0)
        is_cut = self.form.kind.is_cut
        return probabilities(scores.flatten(0, 1), largest.flatten(0, 1), settings, is_cut=is_cut).view(scores.shape)

    def forest(self, is_joint: bool) -> Forest:
        """All sequences' nodes."""
        if is_joint not in self._forests:
            forms = ((self.form.parents, self.form.has_q),) * len(self.settings)
            self._forests[is_joint] = Forest(forms, is_joint, self.settings.device, is_recorded=True)
        return self._forests[is_joint]

    def by_depth(self, values: Tensor, scored: ScoredNodes) -> Tensor:
        """Values [B, D + 1, …] of depths at each place [B, N + 1, …]."""
        return values[_rows_of(scored), scored.trees.depths]


Decider = Callable[[ScoredNodes, ChanceJudge], tuple[Tensor, Tensor, Tensor]]


@cache
def decider_of(path: str) -> Decider:
    """The function that a rule names."""
    module, name = path.split(":")
    decider: Decider = getattr(import_module(f"specdec_cli.{module}"), name)
    return decider


def _draw_of(params: SamplingParams) -> Draw | None:
    """How the target draws; None takes the likeliest."""
    its = params
    return Draw(its.temperature, its.top_k, its.top_p, its.min_p) if its.temperature > 0 else None


def _walked(scored: ScoredNodes, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stands, own = scored.walk(chosen)
    return stands, own, torch.ones_like(own, dtype=torch.bool)


def _rows_of(scored: ScoredNodes) -> Tensor:
    """The number of each sequence [B, 1]."""
    return torch.arange(len(scored.tokens), device=scored.tokens.device)[:, None]


def _own_uniforms(stands: Tensor, judge: ChanceJudge) -> Tensor:
    """Numbers [B] to draw the target's own tokens by, behind the nodes that stand [B, N]."""
    return judge.own_uniforms.gather(1, stands.sum(1)[:, None])[:, 0]


def greedy(scored: ScoredNodes, _: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify.greedy`."""
    return _walked(scored, scored.likeliest)


def gumbel(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify.gumbel`."""
    return _walked(
        scored, judge.by_depth(judge.noise, scored).add_(judge.p(scored.scores, scored.largest).log()).argmax(-1)
    )


def exact_match(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify.exact_match`."""
    p, uniforms = judge.p(scored.scores, scored.largest), judge.by_depth(judge.own_uniforms, scored)
    return _walked(scored, inverse_cdf(p.flatten(0, 1), uniforms.flatten()).view(uniforms.shape))


def typical(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify.typical`."""
    p, rows = judge.p(scored.scores, scored.largest), _rows_of(scored)
    entropy = torch.special.entr(p).sum(dim=-1, dtype=torch.float64)
    bound = (TYPICAL_DELTA * (-entropy).exp()).clamp(max=TYPICAL_EPSILON)
    places = scored.trees.places
    stands = scored.trees.whole_paths(p[rows, places, scored.tokens] > bound.gather(1, places))
    place = last_place(stands)
    own = inverse_cdf(p[rows[:, 0], place[:, 0]], _own_uniforms(stands, judge))
    return stands, own, torch.ones_like(own, dtype=torch.bool)


def synthetic(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify.synthetic`."""
    trees, rows = scored.trees, _rows_of(scored)
    can_be = scored.scores[rows, trees.places, scored.tokens].isfinite()
    # At each depth the first child that can occur.
    is_first = can_be & ~(trees.elders & can_be[:, None]).any(2)
    stands = trees.whole_paths(is_first & (judge.accept_uniforms < judge.rates[trees.depths[:, 1:]]))
    place = last_place(stands)
    own = scored.likeliest.gather(1, place)[:, 0]
    if judge.form.kind.is_drawn:
        p = judge.p(scored.scores[rows, place], scored.largest[rows, place])[:, 0]
        own = torch.where(judge.settings[:, 0] > 0, inverse_cdf(p, _own_uniforms(stands, judge)), own)
    return stands, own, torch.ones_like(own, dtype=torch.bool)


def rejection(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `residual.rejection`."""
    return _by_residuals(scored, judge, is_joint=False)


def traversal(scored: ScoredNodes, judge: ChanceJudge) -> tuple[Tensor, Tensor, Tensor]:
    """As `residual.traversal`."""
    return _by_residuals(scored, judge, is_joint=True)


def _by_residuals(scored: ScoredNodes, judge: ChanceJudge, is_joint: bool) -> tuple[Tensor, Tensor, Tensor]:
    p, (num_rows, num) = judge.p(scored.scores, scored.largest), scored.tokens.shape
    rows = _rows_of(scored)
    if not num:
        own = inverse_cdf(p[:, 0], judge.own_uniforms[:, 0])
        return scored.tokens.bool(), own, torch.ones_like(own, dtype=torch.bool)
    nodes = [scored.tokens, p[rows, scored.trees.places, scored.tokens], judge.accept_uniforms]
    numbers, q, is_there = torch.arange(num, device=p.device).expand(num_rows, -1), scored.q, None
    if scored.order is not None and q is not None:
        # By their numbers in the shape, as the forest has them: `numbers` are those they have otherwise.
        numbers = torch.zeros_like(scored.order).scatter(1, scored.order, numbers)
        nodes, is_there = (
            [each.gather(1, numbers) for each in nodes],
            scored.trees.is_there.gather(1, numbers).flatten(),
        )
        q, behind = (torch.take_along_dim(each, numbers[:, :, None], 1) for each in (q, p[:, 1:]))
        p = torch.cat((p[:, :1], behind), 1)
    tokens, p_drafted, uniforms = (each.flatten() for each in nodes)
    begins = range(0, num_rows * (num + 1), num + 1)
    residuals = Residuals(
        judge.forest(is_joint),
        p.flatten(0, 1),
        [*(begin + 1 + node for begin in begins for node in range(num)), *begins],
        tokens,
        p_drafted,
        None if q is None else q.flatten(0, 1),
        uniforms,
        is_joint,
        is_there,
    )
    last = residuals.last()
    at_depth = judge.own_uniforms.gather(1, residuals.forest.depths[last][:, None])[:, 0]
    own = inverse_cdf(residuals.own_weights(last), at_depth)
    end = (last - rows[:, 0] * num).clamp(max=num)  # of a context's end, N
    end = functional.pad(numbers, (0, 1), value=num).gather(1, end[:, None])[:, 0]
    on_path = functional.pad(scored.trees.paths, (0, 0, 0, 1))
    return on_path[rows[:, 0], end], own, (residuals.q.view(num_rows, num) > 0).all(1)
