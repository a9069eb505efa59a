"""A sweep over an engine's starts, with servers of toys as the engine and seconds written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from live_server import live
from toy_engine import END, LETTERS, LetterTokenizer, TableLM
from typed import stand_in

from specdec_cli.draft_shape import PLAIN, DraftShape
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError
from specdec_cli.measure.elsewhere import engine_sweep
from specdec_cli.measure.elsewhere.engine_sweep import EngineSweep, decode_totals, measured_pass
from specdec_cli.measure.endpoint import counters
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.endpoint_plan import EndpointPlan
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.engine_costs import PassTotals
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.recipe.schema import Sampling

PROMPTS = ["abc abc ab", "head.\nbad", "a bag, a cab", "fed a hag", "dab a bead", "egg and ham"]
PLAIN_STEP, BASE, SLOPE = 0.010, 0.001, 0.0005
SAMPLING = Sampling(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _counts_at_once() -> Iterator[None]:
    """The toy server counts before it answers, so nothing is waited for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(counters, "_SETTLE_SECONDS", 0.0)
        yield


def rows() -> list[PromptRow]:
    return [PromptRow(place, text) for place, text in enumerate(PROMPTS)]


@contextmanager
def engine(shape: DraftShape) -> Iterator[str]:
    """A draft that is the target itself: every drafted token is accepted."""
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: TableLM(), LetterTokenizer().encode, len(LETTERS)))
    options = EngineOptions(num_speculative_tokens=shape.k, max_num_seqs=4)
    tokenizer = stand_in(LetterTokenizer())
    with live(Engine(TableLM(), drafter, tokenizer, options, eos_token_ids=(END,))) as server:
        host, port = server.listener.getsockname()[:2]
        yield f"http://{host}:{port}"


def trace_as_itself(trace: Trace) -> str:
    num = trace.num_output_tokens
    trace.drafts["draft"] = ModelTrace(np.zeros(num, np.float32), np.ones(num, bool), np.zeros(num, bool), None)
    return "draft"


def timed(plan: EndpointPlan, sampling: Sampling, asked: Any, **more: bool) -> PassTotals:
    """What the server counts, with seconds by the hand-written costs; two at a time cost half as much again."""
    found = measured_pass(plan, sampling, asked, **more)
    slower = 1.0 if plan.concurrency == 1 else 1.5
    seconds = (
        found.num_steps * PLAIN_STEP + (found.num_drafts * BASE + found.num_draft_tokens * SLOPE) * slower * slower
    )
    return replace(found, seconds=seconds * slower)


def sweep_of(k_max: int, sizes: tuple[int, ...], num_measured: int = 0, **more: Any) -> EngineSweep:
    """A sweep that has run."""
    made = EngineSweep(
        start=engine,
        rows=rows(),
        sampling=SAMPLING,
        k_max=k_max,
        batch_sizes=sizes,
        num_measured=num_measured,
        rule="rejection",
        trace_draft=trace_as_itself,
        **more,
    )
    made.run()
    return made


@pytest.fixture(scope="module")
def swept() -> EngineSweep:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
        patched.setattr(engine_sweep, "measured_pass", timed)
        made = sweep_of(5, (1, 2), num_measured=1, tell=said.append)
    assert "measuring k = 5, 2 at a time" in said
    return made


def test_three_starts_predict_every_k_and_the_best_is_measured(swept: EngineSweep) -> None:
    assert [shape.k for shape in swept.starts] == [0, 1, 5, 4]
    assert swept.num_requests == len(PROMPTS)
    alone, by_two = swept.by_size
    fitted = alone.fitted
    assert (fitted.plain_seconds, fitted.base_seconds, fitted.seconds_per_token) == pytest.approx(
        (PLAIN_STEP, BASE, SLOPE), rel=0.02
    )
    assert [shape.k for shape in fitted.fitted_on] == [1, 5]
    assert [row.k for row in alone.prediction.rows] == [1, 2, 3, 4, 5]
    assert swept.median_error() < 0.01
    assert len(alone.runs[DraftShape(4)].rounds) == 6
    assert len(by_two.runs[DraftShape(4)].rounds) == 3
    assert (len(alone.passes()), len(by_two.passes())) == (24, 12)


def test_the_recommendation_is_the_fastest_that_was_measured(swept: EngineSweep) -> None:
    found = swept.by_size[0].recommended()
    assert found.verdict == "speculate"
    assert found.k == 5
    assert found.speedup is not None
    assert found.speedup.median > 3
    assert set(swept.k_by_batch()) == {1, 2}


def measured_rounds(monkeypatch: pytest.MonkeyPatch, repeats: int) -> tuple[PassTotals, ...]:
    monkeypatch.setattr(engine_sweep, "measured_pass", timed)
    return sweep_of(1, (1,), repeats=repeats, cpu_seconds=lambda: 0.0).by_size[0].runs[DraftShape(1)].rounds


@pytest.mark.slow
def test_a_draft_that_costs_more_than_it_gives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(plan: EndpointPlan, sampling: Sampling, asked: Any, **more: bool) -> PassTotals:
        found = measured_pass(plan, sampling, asked, **more)
        return replace(found, seconds=found.num_steps * 0.01 + found.num_draft_tokens * 0.02)

    monkeypatch.setattr(engine_sweep, "measured_pass", dear)
    made = sweep_of(2, (1,))
    assert [shape.k for shape in made.starts] == [0, 1, 2]
    assert made.by_size[0].recommended().verdict == "do-not-speculate"
    assert made.k_by_batch() == {1: 0}


@pytest.mark.slow
def test_times_that_fall_with_k_are_told_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def faster_later(plan: EndpointPlan, sampling: Sampling, asked: Any, **more: bool) -> PassTotals:
        found = measured_pass(plan, sampling, asked, **more)
        k = found.num_draft_tokens / max(found.num_drafts, 1)
        seconds = found.num_steps * (0.0 if not k else 0.004 if k == 1 else 0.001) + found.num_steps * PLAIN_STEP
        return replace(found, seconds=seconds)

    monkeypatch.setattr(engine_sweep, "measured_pass", faster_later)
    one, two = [notice for notice in sweep_of(4, (1, 2)).notices() if "fitted costs" in notice]
    assert one.startswith("by the fitted costs a step takes ")
    assert "at k = 1 and 11." in one
    assert two.startswith("with 2 requests at a time, by the fitted costs a step takes ")


def test_a_stop_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep_of(2, (1,), stopped=lambda: True)


@pytest.mark.slow
def test_repeats_send_every_prompt_again_and_other_programs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    once, twice = (measured_rounds(monkeypatch, repeats) for repeats in (1, 2))
    assert [2 * one.num_tokens for one in once] == [one.num_tokens for one in twice]
    assert all(one.lost_share is not None for one in twice)


def test_an_engine_that_does_not_draft_is_named() -> None:
    with engine(PLAIN) as url, pytest.raises(RunError, match="no drafted tokens"):
        measured_pass(EndpointPlan(parse_address(url)), SAMPLING, rows()[:1], drafts=True)


def test_decode_time_runs_from_first_to_last_token() -> None:
    first = Answer(0.0, [0.5, 0.7, 1.1], 1.2, 1.1, "length", 5)
    one = Answer(0.0, [0.5], 0.5, 0.5, "length", 1)
    assert decode_totals([first, one]) == pytest.approx((0.6, 4))
    with pytest.raises(RunError, match="no answer has two tokens"):
        decode_totals([one])
    with pytest.raises(RunError, match="no usage"):
        decode_totals([Answer(0.0, [0.5, 0.6], 0.6)])
