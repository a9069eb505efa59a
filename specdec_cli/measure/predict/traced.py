"""A workload's trace with one draft: made or read from a file that fits, and what is predicted from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import ScoresPaths
from specdec_cli.lm.files.origin import Origin
from specdec_cli.measure.predict.draft_trace import DepthTrace, DraftTrace, GuessTrace, ModelTrace
from specdec_cli.measure.predict.predict import Prediction, choose, predict
from specdec_cli.measure.predict.replay import Replay, replay, replay_table
from specdec_cli.measure.predict.trace import Trace, load
from specdec_cli.measure.predict.tracing import Tell, draft_origin, in_phase, trace_draft, trace_target, untold
from specdec_cli.measure.predict.tree_costs import TreeCosts
from specdec_cli.measure.predict.tree_replay import replay_tree
from specdec_cli.measure.predict.tree_search import choose_trees
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter
    from specdec_cli.engine.decoding import Request
    from specdec_cli.engine.engine import Engine
    from specdec_cli.measure.predict.cost import Costs
    from specdec_cli.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace with the draft and the rule of verification to read it for."""

    trace: Trace
    draft: str
    verify: str = "auto"

    def predict(self, k_max: int, costs: Costs, trees: Sequence[TreeShape] = ()) -> Prediction:
        """Every k up to k_max and some static trees, with `speedup` the median prompt's, as a benchmark reports it.

        Raises:
            UsageError: the trace predicts no trees.
        """
        counts = {tree: replay_tree(self.trace, self.draft, tree.parents) for tree in trees}
        made = predict(replay(self.trace, self.draft, self.verify, k_max), costs, counts)
        rows = [replace(row, speedup=row.median_speedup) for row in made.rows]
        return replace(made, rows=rows, recommended=choose(rows))

    def best_trees(self, costs: Costs, num: int) -> list[TreeShape]:
        """The static trees with siblings that are predicted fastest, each of another depth, the fastest first.

        Raises:
            UsageError: the trace predicts no trees.
        """
        planned = choose_trees(self.trace, self.draft, TreeCosts.of(costs, costs.middle_context), num)
        return [plan.tree for plan in planned if plan.tree is not None]

    def table(self, k_by_batch: Mapping[int, int], max_num_seqs: int) -> Replay:
        """Predicted acceptance of a table of k for prompts that arrive in turn, up to `max_num_seqs` at a time."""
        return replay_table(self.trace, self.draft, self.verify, k_by_batch, max_num_seqs)


def draft_name(recipe: Recipe) -> str:
    """The name of a draft in a trace: its model, or its method with its options."""
    fields = recipe.draft_fields()
    first = f"{fields.pop('first')}+" if "first" in fields else ""
    if "model" in fields:
        return f"{first}{fields['model']}"
    options = ",".join(f"{key}={value}" for key, value in sorted(fields.items()) if key != "method")
    return f"{first}{fields['method']}:{options}" if options else f"{first}{fields['method']}"


def obtain_trace(
    engine: Engine,
    requests: Sequence[Request],
    name: str,
    k_max: int,
    path: Path | None = None,
    tell: Tell = untold,
    *,
    needs_ranks: bool = False,
) -> Trace:
    """The trace of a workload with the engine's draft, made now or read from a file that fits it.

    A draft is read from the file if weights, dtype and quantization are those of the loaded one; else traced again.

    Args:
        engine: idle.
        requests: the workload.
        name: the draft's, in the trace.
        k_max: largest k.
        path: read where it exists, else written; None for neither.
        tell: called with the progress.
        needs_ranks: whether a draft model is traced again where the file lacks the ranks that predict trees.

    Raises:
        UsageError: a file of other prompts, other sampling or another target, or a draft that no trace can hold.
        RunError: the file cannot be written.
    """
    trace, is_new = target_trace(engine, requests, path, tell)
    if not _holds(trace, name, engine.drafter, needs_ranks):
        trace.drafts[name] = trace_draft(
            trace, engine.drafter, k_max, in_phase(tell, "tracing the draft"), engine.target
        )
    if path is not None and is_new:
        trace.save(path)
    return trace


def trace_further(traced: Traced, engine: Engine, k_max: int, tell: Tell = untold) -> None:
    """Trace the draft again, up to a larger k; a teacher-forced model's trace serves every k and stays."""
    most = traced.trace.drafts[traced.draft].most_depth
    if most is not None and most < k_max:
        watch = in_phase(tell, "tracing the draft further")
        traced.trace.drafts[traced.draft] = trace_draft(traced.trace, engine.drafter, k_max, watch, engine.target)


def target_trace(
    engine: Engine, requests: Sequence[Request], path: Path | None = None, tell: Tell = untold
) -> tuple[Trace, bool]:
    """The trace of a workload without a draft, and whether it was made now; read where the file exists.

    Raises:
        UsageError: a file of other prompts, other sampling or another target.
    """
    if path is None or not path.exists():
        return trace_target(engine, requests, in_phase(tell, "tracing the target")), True
    trace = load(path)
    trace.check_target(engine.target.origin)
    trace.check(engine.tokenizer, requests)
    return trace, False


def _holds(trace: Trace, name: str, drafter: Drafter, needs_ranks: bool) -> bool:
    """Whether a trace holds the loaded draft; adds a notice where it holds another of that name."""
    held = trace.drafts.get(name)
    kind, now = _wanted(trace, drafter)
    if held is not None and isinstance(held, kind) and _is_same(held.origin, now):
        if isinstance(held, GuessTrace) or held.rank is not None or not needs_ranks:
            return True
        trace.notices.append(
            f"the trace of the draft `{name}` has no ranks, which predict trees, because an earlier version wrote it: "
            "it was traced again"
        )
        return False
    if held is not None and (isinstance(held, kind) or kind is not GuessTrace):
        trace.notices.append(
            f"the trace's draft `{name}` has other weights, another dtype or quantization: it was traced again"
        )
    return False


def _wanted(trace: Trace, drafter: Drafter) -> tuple[type[DraftTrace], Origin | None]:
    """The kind of trace that a draft has, and where the draft comes from."""
    if isinstance(drafter, ScoresPaths):
        return DepthTrace, drafter.origin
    lm = drafter.forced_lm(trace.temperature)
    return (GuessTrace, draft_origin(drafter)) if lm is None else (ModelTrace, lm.origin)


def _is_same(was: Origin | None, now: Origin | None) -> bool:
    """Whether both are one draft, or both the target's own."""
    if was is None or now is None:
        return was is now
    return was.computes_as(now)
