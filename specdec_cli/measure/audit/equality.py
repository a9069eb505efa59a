"""Token for token: outputs with a draft against plain decoding, over prompts × drafts × k × batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from specdec_cli.drafters.contract import Drafter
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.depth.draft_limit import depths_within
from specdec_cli.engine.engine import Engine
from specdec_cli.measure.audit.divergence import DivergenceJudge
from specdec_cli.measure.documents.audit import Compared
from specdec_cli.verification import rule_of

if TYPE_CHECKING:
    from specdec_cli.events import SpeculativeCounts


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way of decoding that must give plain decoding's tokens."""

    draft: str
    k: int
    batch_size: int

    def __str__(self) -> str:
        """Name of the configuration in tables and documents."""
        return f"draft {self.draft}, k={self.k}, batch {self.batch_size}"


Watch = Callable[[int, int], None]


@dataclass(slots=True)
class EqualityCheck:
    """Compares decoding with drafts to plain decoding, k = 0 and one sequence at a time.

    Args:
        engine: the loaded pair; every configuration is another engine on its models.
        draft: the audited draft's name.
        drafters: it and others by the names that reports give them.
        ks: k of every draft.
        batch_sizes: how many sequences run together.
        verify: the verification mode; greedy and gumbel promise equal tokens, and every mode does at temperature 0.
        judge: says what a difference was.
    """

    engine: Engine
    draft: str
    drafters: Mapping[str, Drafter]
    ks: Sequence[int]
    batch_sizes: Sequence[int]
    verify: str
    judge: DivergenceJudge

    def configurations(self) -> list[Configuration]:
        """Every k and batch size with the draft; the other drafters run in the largest batch, none in every one.

        The extremes come first, because a time limit cuts at the end.
        """
        ways = [Configuration(*each) for each in product([self.draft], self._ks(self.draft), self.batch_sizes)]
        for name in self.drafters.keys() - {self.draft, "none"}:
            ways += [Configuration(name, k, max(self.batch_sizes)) for k in self._ks(name)]
        if "none" in self.drafters:
            ways += [Configuration("none", 0, size) for size in self.batch_sizes if size > 1]
        return [ways[-1 - i // 2] if i % 2 else ways[i // 2] for i in range(len(ways))]

    def _ks(self, draft: str) -> list[int]:
        """Every k that a draft can reach; the largest of them stands for those beyond."""
        return list(dict.fromkeys(depths_within(self.drafters[draft], k)[0] for k in self.ks))

    def run(self, requests: Sequence[Request], watch: Watch, is_late: Callable[[], bool]) -> Compared:
        """Compare group by group, as many prompts together as the largest batch has room for.

        Args:
            requests: what is decoded.
            watch: called with the runs done and in all; a run is one configuration over one group.
            is_late: asked before each run but the first.
        """
        configurations = self.configurations()
        size = max(self.batch_sizes)
        groups = [requests[begin : begin + size] for begin in range(0, len(requests), size)]
        mode: Literal["greedy", "gumbel"] = "gumbel" if self.verify == "gumbel" else "greedy"
        compared = Compared(mode=mode, planned_runs=len(groups) * len(configurations))
        for group in groups:
            if compared.runs and is_late():
                break
            expected, _ = self._decode(Configuration("none", 0, 1), group)
            compared.prompts += len(group)
            for number, configuration in enumerate(configurations, start=1):
                if compared.runs and is_late():
                    break
                got, counts = self._decode(configuration, group)
                compared.add_run(number, counts)
                self._compare(compared, configuration, group, expected, got)
                watch(compared.runs, compared.planned_runs)
        return compared

    def _decode(self, how: Configuration, group: Sequence[Request]) -> tuple[list[list[int]], SpeculativeCounts]:
        """Each request's output tokens."""
        from specdec_cli.drafters.none import Drafter as NoDraft

        drafter = self.drafters[how.draft] if how.k else NoDraft()
        options = replace(self.engine.options.at_depth(how.k), max_num_seqs=how.batch_size, verify=self.verify)
        if not drafter.builds_trees:
            options = replace(options, tree=None)
        engine = variant(self.engine, drafter, options)
        arm = Decoding(str(how), how.k)
        decode(engine, arm, group)
        return [output.token_ids for output in arm.outputs()], arm.counts()

    def _compare(
        self,
        compared: Compared,
        configuration: Configuration,
        group: Sequence[Request],
        expected: Sequence[list[int]],
        got: Sequence[list[int]],
    ) -> None:
        for request, want, have in zip(group, expected, got, strict=True):
            rule = rule_of(self.verify, request.params.temperature)
            assert rule.keeps_tokens, "tokens are compared where a draft has to keep them"
            compared.tokens += len(want)
            mismatch = self.judge.judge(
                request.row.index,
                str(configuration),
                request.token_ids,
                request.params,
                want,
                have,
                gumbel=rule.shares_noise,
            )
            if mismatch is not None:
                compared.mismatches.append(mismatch)


def variant(engine: Engine, drafter: Drafter, options: object) -> Engine:
    """An engine on the same models with another drafter and other options; the first must be idle."""
    assert not engine.has_work, "engines that share models take turns: handles count from 0 in each"
    made: Engine = type(engine)(engine.target, drafter, engine.tokenizer, options, engine.eos_token_ids)  # type: ignore[arg-type]
    return made
