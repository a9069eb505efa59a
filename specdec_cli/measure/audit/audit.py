"""The audit: is the output what the target alone would have produced? Equality, distributions, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from specdec_cli.errors import GateError
from specdec_cli.measure.audit import toy
from specdec_cli.measure.audit.divergence import DivergenceJudge
from specdec_cli.measure.audit.draws import (
    NUM_JOINT_TOKENS,
    Draws,
    ask_pair,
    check,
    full_power_draws,
)
from specdec_cli.measure.audit.equality import EqualityCheck, variant
from specdec_cli.measure.documents.audit import Compared, DistributionCheck, Mismatch
from specdec_cli.quantities import counted
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import RULES

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter
    from specdec_cli.engine.decoding import Request
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.options import EngineOptions
    from specdec_cli.lm.door import LM

MODES = ("greedy", "sampled", "gumbel")
_SAMPLED = {name: rule for name, rule in RULES.items() if rule.is_lossless and rule.samples}
DRAWN_MODES = tuple({rule.judge: name for name, rule in reversed(_SAMPLED.items())}.values())[::-1]
"""Modes whose distribution is tested on chains; of two that judge alike there, the first."""
TREE_MODES = tuple(name for name, rule in _SAMPLED.items() if rule.judges_trees)
_PAIR_BATCH = 32
_TABLE_BATCH = 256
_MAX_TABLE_DRAWS = 40_000  # of the short form; more would take the time that the pair can use
_WEIGHTS = {"greedy": 3.0, "gumbel": 2.0, "table": 1.0, "pair": 4.0}


Watch = Callable[[str, int, int], None]
"""Takes the name of a stage, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """The subject of an audit.

    Args:
        modes: some of MODES.
        ks: numbers of drafted tokens.
        batch_sizes: how many sequences run together.
        drawn_modes: verification modes whose distribution is tested on chains.
        tree_modes: verification modes whose distribution is tested on trees.
        tree: shape of the trees that the pair drafts, or the table model without a pair; None drafts chains alone.
        num_speculative_tokens: k of the draws.
        time_limit_seconds: of the whole audit; each stage does its first run in any case.
        full: draws on the table model until a shift of 1 % would be found with 99 % power, whatever the time.
    """

    modes: tuple[str, ...] = MODES
    ks: tuple[int, ...] = (1, 2, 4, 8)
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    drawn_modes: tuple[str, ...] = DRAWN_MODES
    tree_modes: tuple[str, ...] = TREE_MODES
    tree: str | None = None
    num_speculative_tokens: int = 4
    time_limit_seconds: float = 60.0
    full: bool = False

    @property
    def num_seqs(self) -> int:
        """Most sequences that the equality checks run together."""
        return max(self.batch_sizes)


@dataclass(frozen=True, slots=True)
class DrawnCase:
    """One way of decoding whose distribution is tested.

    Args:
        mode: the verification mode.
        k: most tokens drafted one after another.
        tree: shape of the drafted trees; None drafts chains.
    """

    mode: str
    k: int
    tree: str | None = None

    def __str__(self) -> str:
        """Name of the configuration in tables and documents."""
        if self.tree is None:
            return f"{self.mode}, k={self.k}"
        depth = f"k={self.k}, " if TreeShape.parse(self.tree).is_dynamic else ""
        return f"{self.mode}, {depth}tree {self.tree}"


@dataclass(frozen=True, slots=True)
class AuditedPair:
    """The user's pair, loaded once.

    Args:
        engine: idle; gives target, tokenizer and options.
        draft: the draft's name in reports.
        dtype: what the target computes in: float32, bfloat16 or float16.
        load_float32: loads the target in float32 for re-checks; None where it runs in float32.
    """

    engine: Engine
    draft: str
    dtype: str = "float32"
    load_float32: Callable[[], LM] | None = None


@dataclass(slots=True)
class Audit:
    """An audit, before, while and after it runs.

    Args:
        pair: None audits the table model alone.
        requests: prompts and how they are continued; greedy takes their temperature as 0, gumbel a 0 as 1.
        plan: what is audited.
        watch: called with the progress.

    Attributes:
        compared: by mode, greedy and gumbel: tokens against plain decoding.
        distribution: draws against exact enumeration.
        num_planned_tests: tests of distributions that the plan has.
        notices: what a reader must know to judge the rest, each a sentence.
        seconds: how long it took.
    """

    pair: AuditedPair | None
    requests: Sequence[Request]
    plan: AuditPlan
    watch: Watch
    compared: dict[str, Compared] = field(init=False, default_factory=dict)
    distribution: list[DistributionCheck] = field(init=False, default_factory=list)
    num_planned_tests: int = field(init=False, default=0)
    notices: list[str] = field(init=False, default_factory=list)
    seconds: float = field(init=False, default=0.0)
    _begin: float = field(init=False, default_factory=perf_counter)

    @property
    def mismatches(self) -> list[Mismatch]:
        """Every output's first difference."""
        return [mismatch for compared in self.compared.values() for mismatch in compared.mismatches]

    @property
    def passed(self) -> bool:
        """Whether no difference was found."""
        return not self.mismatches and all(test.is_fine for test in self.distribution)

    def gate(self) -> None:
        """Raise on any difference.

        Raises:
            GateError: tokens or a distribution differ from the target's own.
        """
        if self.passed:
            return
        differences = []
        ties = sum(mismatch.kind == "near-tie" for mismatch in self.mismatches)
        bugs = len(self.mismatches) - ties
        if self.mismatches:
            differ = f"{counted(ties + bugs, 'output')} {'differs' if ties + bugs == 1 else 'differ'}"
            kinds = f"{counted(ties, 'near-tie')}, {counted(bugs, 'bug')}"
            differences.append(f"{differ} from plain decoding ({kinds})")
        wrong = [test.configuration for test in self.distribution if not test.is_fine]
        if wrong:
            differences.append(f"the distribution of `{'`, `'.join(wrong)}` is not the target's")
        raise GateError(
            f"the audit found a difference: {'; '.join(differences)}",
            "please report it with the JSON document (--json)"
            if wrong or bugs
            else "near-ties come from rounding that depends on the number of rows; `specdec doctor` tests the kernels "
            "for it",
        )

    def verify_modes(self) -> list[str]:
        """The verification modes that were audited."""
        of_trees = self.plan.tree_modes if self.plan.tree is not None else ()
        drawn = list(dict.fromkeys((*self.plan.drawn_modes, *of_trees))) if "sampled" in self.plan.modes else []
        gumbel = ["gumbel"] if "gumbel" in self.plan.modes and "gumbel" not in drawn else []
        return (["greedy"] if "greedy" in self.plan.modes else []) + drawn + gumbel

    def run(self) -> None:
        """Check everything that the plan has, as far as its time limit allows."""
        stages: list[tuple[float, Callable[[_Deadline], None]]] = []
        if self.pair is not None:
            if left_out := _chooses_k(self.pair.engine.options):
                self._say(f"drafts are checked at each k at every batch size: {', '.join(left_out)} is left out")
            compared = {"greedy": self._greedy, "gumbel": self._gumbel}
            stages += [(_WEIGHTS[mode], check) for mode, check in compared.items() if mode in self.plan.modes]
        if "sampled" in self.plan.modes:
            stages.append((_WEIGHTS["table"], self._table))
            stages += [(_WEIGHTS["pair"], self._pair)] if self.pair is not None else []
        for i, (weight, stage) in enumerate(stages):
            now = perf_counter()
            left = max(0.0, self._begin + self.plan.time_limit_seconds - now)
            stage(_Deadline(now + left * weight / sum(weight for weight, _ in stages[i:])))
        self.seconds = perf_counter() - self._begin

    def _greedy(self, deadline: _Deadline) -> None:
        pair = self._loaded
        self._compare("greedy", "auto", {pair.draft: pair.engine.drafter}, lambda _: 0.0, deadline)

    def _gumbel(self, deadline: _Deadline) -> None:
        self._compare("gumbel", "gumbel", _drafters(self._loaded), lambda temperature: temperature or 1.0, deadline)

    @property
    def _loaded(self) -> AuditedPair:
        assert self.pair is not None, "a stage of the pair has one"
        return self.pair

    def _compare(
        self,
        mode: str,
        verify: str,
        drafters: Mapping[str, Drafter],
        temperature_of: Callable[[float], float],
        deadline: _Deadline,
    ) -> None:
        pair = self._loaded
        requests = [
            replace(request, params=replace(request.params, temperature=temperature_of(request.params.temperature)))
            for request in self.requests
        ]
        judge = DivergenceJudge(pair.engine, pair.dtype, pair.load_float32, self._say)
        equality = EqualityCheck(pair.engine, pair.draft, drafters, self.plan.ks, self.plan.batch_sizes, verify, judge)
        compared = equality.run(requests, partial(self.watch, mode), deadline.is_over)
        self.compared[mode] = compared
        if compared.runs < compared.planned_runs:
            left = f"{compared.planned_runs - compared.runs} of {counted(compared.planned_runs, 'run')}"
            self._say(f"{mode}: the time limit left {left} out (one configuration over a few prompts each)")
        if not compared.num_draft_tokens:
            self._say(f"{mode}: nothing was drafted, so equality says little")

    def _table(self, deadline: _Deadline) -> None:
        num_cells = toy.NUM_TOKENS**NUM_JOINT_TOKENS
        num = full_power_draws(num_cells)
        cases = [*self._chains(toy.NUM_SPECULATIVE_TOKENS), *self._trees(toy.NUM_SPECULATIVE_TOKENS)]
        for i, case in self._in_time(cases, "table"):
            engine = toy.engine(case.mode, case.k, _TABLE_BATCH, case.tree)
            draws = Draws(engine, list(toy.PROMPT), toy.PARAMS)
            until = _Deadline(None) if self.plan.full else deadline.part(len(cases) - i)
            name = f"table model, {case}"
            self._draw(name, draws, num if self.plan.full else min(num, _MAX_TABLE_DRAWS), until)
            self.distribution.append(check(name, draws, toy.joint(NUM_JOINT_TOKENS), toy.NUM_TOKENS))

    def _pair(self, deadline: _Deadline) -> None:
        pair = self._loaded
        question = ask_pair(pair.engine, self.requests[0].token_ids, self.requests[0].params)
        num = full_power_draws(max(len(question.joint), 2))
        k = self.plan.num_speculative_tokens
        cases = self._chains(k) if self.plan.tree is None else self._trees(k)
        for i, case in self._in_time(cases, "pair"):
            options = replace(pair.engine.options.at_depth(case.k), verify=case.mode, max_num_seqs=_PAIR_BATCH)
            draws = Draws(variant(pair.engine, pair.engine.drafter, options), question.prompt, question.params)
            name = f"draft {pair.draft}, {case}"
            self._draw(name, draws, num, deadline.part(len(cases) - i))
            self.distribution.append(check(name, draws, question.joint, question.num_choices))

    def _chains(self, k: int) -> list[DrawnCase]:
        """Each mode at k = 1 and at k: prefill gives the first token, so a deep step's bonus token is never drawn."""
        return [DrawnCase(mode, depth) for depth in sorted({1, k}) for mode in self.plan.drawn_modes]

    def _trees(self, k: int) -> list[DrawnCase]:
        """Each mode on trees of the plan's shape at depth 1 and at k; a static tree to its own depth."""
        if self.plan.tree is None:
            return []
        shape = TreeShape.parse(self.plan.tree)
        depths = sorted({1, k if shape.is_dynamic else shape.depth})
        return [DrawnCase(mode, depth, str(shape.cut(depth))) for depth in depths for mode in self.plan.tree_modes]

    def _in_time(self, cases: Sequence[DrawnCase], stage: str) -> Iterator[tuple[int, DrawnCase]]:
        """Cases with their places; after the first, none begins past the audit's time limit."""
        end = _Deadline(None if self.plan.full else self._begin + self.plan.time_limit_seconds)
        self.num_planned_tests += len(cases)
        for i, case in enumerate(cases):
            if i and end.is_over():
                left = f"{len(cases) - i} of {len(cases)}"
                names = "; ".join(map(str, cases[i:]))
                self._say(f"sampled, {stage}: the time limit left {left} tests of distributions out: {names}")
                return
            yield i, case

    def _draw(self, stage: str, draws: Draws, num: int, deadline: _Deadline) -> None:
        draws.run(num, lambda done: self.watch(stage, done, num), deadline.is_over)

    def _say(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)


def _chooses_k(options: EngineOptions) -> list[str]:
    """Options that make an engine draft fewer tokens than it is asked for."""
    chooses = {
        "depth_policy": options.depth_policy != "fixed",
        "k_by_batch": bool(options.k_by_batch),
        "k_by_context": bool(options.k_by_context),
        "disable_by_batch_size": options.disable_by_batch_size is not None,
    }
    return [name for name, is_chosen in chooses.items() if is_chosen]


@dataclass(frozen=True, slots=True)
class _Deadline:
    """A point in time, or None for no end."""

    at: float | None

    def is_over(self) -> bool:
        return self.at is not None and perf_counter() >= self.at

    def part(self, num: int) -> _Deadline:
        """The end of one of `num` equal parts of what is left."""
        if self.at is None:
            return self
        now = perf_counter()
        return _Deadline(now + max(0.0, self.at - now) / num)


def _drafters(pair: AuditedPair) -> dict[str, Drafter]:
    """Prompt lookup, none, and the pair's draft, which may be one of them with other options."""
    from specdec_cli.drafters.contract import Resources
    from specdec_cli.drafters.ngram import Drafter as Ngram
    from specdec_cli.drafters.none import Drafter as NoDraft

    ngram, nothing = Ngram(), NoDraft()
    ngram.load(Resources(_no_model, None, pair.engine.num_tokens))
    return {"ngram": ngram, "none": nothing, pair.draft: pair.engine.drafter}


def _no_model(name: str) -> LM:
    raise AssertionError(f"prompt lookup loads no model, and asked for {name}")
