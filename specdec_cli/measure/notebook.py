"""Traces and predictions for Python programs and notebooks: `trace(engine, prompts).predict()`.

The functions underneath are those of `sweep-k` and `compare-drafts`, so the figures are the same.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from specdec_cli import drafters
from specdec_cli.call_checks import checked_call
from specdec_cli.drafted import MOST_DEPTH
from specdec_cli.engine.build import another_drafter
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.engine.requests import Prompt, as_many, params_of
from specdec_cli.errors import UsageError
from specdec_cli.measure.audit.equality import variant
from specdec_cli.measure.bench import sweep
from specdec_cli.measure.predict.predict import Predicted, Prediction, choose
from specdec_cli.measure.predict.starts import check_knowable
from specdec_cli.measure.predict.traced import Traced
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.measure.workload.workload import Workload, tokenize
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.drafters.contract import Drafter
    from specdec_cli.measure.predict.cost import Costs
    from specdec_cli.measure.predict.trace import Trace

NO_DRAFT = "no draft"
DraftSpec = str | Mapping[str, Any]
Say = Callable[[str], None]
Row = dict[str, Any]


@checked_call()
def trace(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    progress: Say | None = None,
) -> WorkloadTrace:
    """Decode prompts once without a draft, to predict what drafts would gain on them.

    Examples:
        traced = trace(engine, ["Once upon a time", "The dog"], SamplingParams(max_new_tokens=64))
        traced.predict()  # every k from 1 to 8, with the engine's draft
        traced.predict("ngram", k=[2, 4]).to_pandas()
        traced.compare(["builtin:draft", "ngram"])

    Args:
        engine: decodes the prompts; predictions measure step costs on it, so it must be idle.
        prompts: one prompt or several: text, token ids, or chat messages.
        params: sampling parameters for all of them; greedy, 128 tokens by default.
        progress: called with a short description of each phase, here and in predictions from this trace.

    Raises:
        UsageError: the engine still decodes requests, or no prompt fits the context.
    """
    params = params_of(params)
    if engine.has_work:
        raise UsageError("the engine still decodes requests", "trace when they have finished")
    many, say = as_many(prompts), progress or (lambda _: None)
    tokens = [engine.encode(prompt) for prompt in many]
    rows = [PromptRow(place, prompt if isinstance(prompt, str) else "") for place, prompt in enumerate(many)]
    if not rows:
        raise UsageError("there is no prompt to trace")
    workload = tokenize(rows, "prompts", lambda row: tokens[row.index], params, engine.target.max_context)
    with engine.one_thread:
        made = trace_target(
            engine, workload.requests, lambda done, total: say(f"tracing the target: {done} of {total} prompts")
        )
    return WorkloadTrace(engine, workload, made, say)


class ResultTable(Sequence[Row]):
    """Rows of figures that notebooks show as a table.

    Examples:
        table[0]["speedup"]
        table.to_pandas().plot(x="k", y="speedup")

    Args:
        rows: one dictionary per row, all with the same keys.
        caption: the conclusion, in one sentence.
    """

    def __init__(self, rows: Sequence[Row], caption: str = "") -> None:
        self.rows = list(rows)
        self.caption = caption

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return self.rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise UsageError("pandas is not installed", "`pip install pandas`, or use the attribute `rows`") from None
        return pandas.DataFrame(self.rows)

    def __repr__(self) -> str:
        """The table as text, with the caption below it."""
        if not self.rows:
            return self.caption or "no rows"
        cells = [[str(name) for name in self.rows[0]], *([_cell(value) for value in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([*lines, self.caption]).rstrip()

    def _repr_html_(self) -> str:
        """The table as notebooks show it."""
        heads = "".join(f"<th>{html.escape(str(name))}</th>" for name in (self.rows[0] if self.rows else ()))
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(value))}</td>' for value in row.values())}</tr>"
            for row in self.rows
        )
        caption = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{caption}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(slots=True, repr=False)
class WorkloadTrace:
    """The target's own output for some prompts, from which the speed-up of drafts is predicted.

    Args:
        engine: made the trace; predictions measure step costs on it, so it must be idle.
        workload: the prompts that fit the context.
        trace: the target's tokens and their probabilities, and each draft's along them.
        say: called with a short description of each phase.
    """

    engine: Engine
    workload: Workload
    trace: Trace
    say: Say
    _drafters: dict[str, Drafter] = field(default_factory=dict, init=False)
    _costs: dict[tuple[str, int], Costs] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        """Target, number of prompts and tokens, and the drafts traced so far."""
        return (
            f"WorkloadTrace(target={self.trace.target!r}, num_prompts={len(self.trace.prompts)}, "
            f"num_output_tokens={self.trace.num_output_tokens}, drafts={list(self.trace.drafts)})"
        )

    @property
    def notices(self) -> list[str]:
        """Notes about the figures, such as prompts that do not fit the context."""
        return [*([self.workload.notice] if self.workload.notice else []), *self.trace.notices]

    @checked_call()
    def predict(
        self, draft: DraftSpec | None = None, k: Iterable[int] = range(1, 9), *, settings: LoadSettings | None = None
    ) -> ResultTable:
        """Predict the speed-up over plain decoding for every k, as `specdec sweep-k` does.

        Step costs are measured on this machine, which takes up to 15 seconds per draft; they are kept for later calls.

        Examples:
            traced.predict(k=range(1, 5))
            traced.predict("ngram")

        Args:
            draft: a model or method, as for `Engine.load`; None is the engine's own draft.
            k: numbers of drafted tokens.
            settings: how a model that is not loaded yet is loaded.

        Returns:
            A row per k: acceptance, speed-up with the ends of its 95 % interval, shares of a step's time, and the
            speed-up by the i.i.d. formula.

        Raises:
            UsageError: no draft, an unknown one, or a verification mode whose acceptance a trace does not tell.
        """
        depths = _depths(k)
        name, drafter = self._drafter(draft, settings)
        prediction = self._predict(name, drafter, depths[-1])
        rows = [row for row in prediction.rows if row.k in depths]
        return ResultTable([_row(row) for row in rows], f"{name}: {choose(rows).why}")

    @checked_call()
    def compare(
        self, drafts: Sequence[DraftSpec], k: Iterable[int] = range(1, 9), *, settings: LoadSettings | None = None
    ) -> ResultTable:
        """Predict each draft's speed-up at its own best k; `specdec compare-drafts` also measures it.

        Examples:
            traced.compare(["builtin:draft", "ngram"])

        Args:
            drafts: models or methods, as for `Engine.load`.
            k: numbers of drafted tokens to choose from.
            settings: how models that are not loaded yet are loaded.

        Returns:
            A row per draft, the largest speed-up first, and one for plain decoding.

        Raises:
            UsageError: no draft, an unknown one, or a verification mode whose acceptance a trace does not tell.
        """
        if not drafts or isinstance(drafts, str | Mapping):
            raise UsageError("compare needs a list of drafts", 'for example ["builtin:draft", "ngram"]')
        depths, rows = _depths(k), []
        for draft in drafts:
            name, drafter = self._drafter(draft, settings)
            prediction = self._predict(name, drafter, depths[-1])
            rows_of_draft = [row for row in prediction.rows if row.k in depths]
            best = max(rows_of_draft, key=lambda row: (np.nan_to_num(row.speedup.median), -row.k))
            verdict = choose(rows_of_draft).verdict
            rows.append({"draft": name, **_row(best), "cost_ratio": prediction.cost_ratio, "verdict": verdict})
        plain = dict.fromkeys(rows[0]) | {"draft": NO_DRAFT, "k": 0, "speedup": 1.0}
        ordered = sorted([*rows, plain], key=lambda row: -(row["speedup"] or 0.0))
        return ResultTable(ordered, "predicted, each draft at its best k; the speed-up is over plain decoding")

    def _drafter(self, draft: DraftSpec | None, settings: LoadSettings | None) -> tuple[str, Drafter]:
        """A draft by its name, loaded once."""
        own = self.engine.drafter
        own_name = self.engine.drafters.own_name if own.lm is None else own.lm.name
        fields = drafters.parse_spec(draft) if isinstance(draft, str) else draft
        if fields is None or (own.lm is not None and fields == {"model": own_name}):
            name, loaded = own_name, own
        else:
            name = draft if isinstance(draft, str) else ",".join(f"{key}={fields[key]}" for key in fields)
            if name not in self._drafters:
                self._drafters[name] = another_drafter(self.engine, fields, settings, self.say)
            loaded = self._drafters[name]
        if type(loaded).__module__ == drafters.get("none").__module__:
            raise UsageError("there is no draft to predict", 'name one: `predict("ngram")`')
        return name, loaded

    def _predict(self, name: str, drafter: Drafter, k_max: int) -> Prediction:
        options = self.engine.options
        check_knowable(options.verify, options.p_min)
        if self.engine.has_work:
            raise UsageError("the engine still decodes requests", "predict when they have finished")
        fixed = replace(options.at_depth(k_max), tree=None)  # chains are predicted
        if (name, k_max) not in self._costs:
            with self.engine.one_thread:
                self.say(f"tracing {name}")
                self.trace.drafts[name] = trace_draft(self.trace, drafter, k_max, target=self.engine.target)
                self.say(f"measuring the cost of steps with {name}")
                made = variant(self.engine, drafter, fixed)
                self._costs[name, k_max] = sweep.profile_workload(made, self.workload, k_max, 1)
        return Traced(self.trace, name, options.verify).predict(k_max, self._costs[name, k_max])


def _depths(k: Iterable[int]) -> list[int]:
    """Ascending depths, each once."""
    hint = "for example `k=range(1, 9)`"
    try:
        depths = sorted({index(depth) for depth in ([k] if isinstance(k, int) else k)})
    except TypeError:
        raise UsageError(f"k must be whole numbers, not `{k}`", hint) from None
    if not depths or depths[0] < 1 or depths[-1] > MOST_DEPTH:
        raise UsageError(f"k must be numbers from 1 to {MOST_DEPTH}, not `{depths}`", hint)
    return depths


def _row(row: Predicted) -> Row:
    """One k as a flat row."""
    low, high = row.speedup.ci95 or (None, None)
    rate, shares = row.replayed.acceptance_rate(), row.shares() or {}
    return {
        "k": row.k,
        "acceptance_length": _known(row.acceptance_length.median),
        "acceptance_rate": _known(rate.median),
        "speedup": _known(row.speedup.median),
        "speedup_low": low,
        "speedup_high": high,
        **{f"{part}_share": shares.get(part) for part in ("draft", "verify", "overhead")},
        "iid_speedup": row.iid_speedup,
    }


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
