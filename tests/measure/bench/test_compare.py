"""Drafts against each other: what is known of their size, and who wins where there are enough pairs to tell."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_engine import drafter
from tiny_models import make_tiny
from toy_engine import LetterTokenizer, toy_engine
from typed import not_none, stand_in

from specdec_cli.document import Interval
from specdec_cli.draft_shape import DraftShape
from specdec_cli.engine.arms import ArmRun, EngineArm
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.choice import choose_draft, task_winner
from specdec_cli.measure.bench.compare import Contender, DraftComparison
from specdec_cli.measure.bench.passes import Group, Pass, Track
from specdec_cli.measure.machine.load import Load
from specdec_cli.measure.predict import traced
from specdec_cli.measure.predict.predict import Predicted, Prediction
from specdec_cli.measure.workload.workload import tokenize
from specdec_cli.recipe.values import Quantize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.timing import Timing


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_draft_has_all_its_parameters(tmp_path: Path, dtype: str, quantize: Quantize, tied: bool) -> None:
    folder = str(make_tiny("llama", tmp_path, tie_word_embeddings=tied))
    lm = load_lm(folder, dtype=dtype, quantize=quantize)
    engine = Engine(lm, drafter(lm))
    assert Contender("draft", "model", engine=engine).sizes()[0] == describe(folder).num_parameters


def compared(num_prompts, seconds) -> DraftComparison:
    """Drafts that took known seconds with every prompt, or with each, and plain decoding, which took one."""
    rows = [PromptRow(i, "ab ab", category="code" if i % 2 else "chat") for i in range(num_prompts)]
    encode = LetterTokenizer().encode
    work = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=4), 512)

    def track(name, each):
        made = Track(name)
        for place, request in enumerate(work.requests):
            took = each[place] if isinstance(each, list) else each
            run = ArmRun(((1,) * 4,), Timing(0, took, took, None), 1)
            made.add(Pass(Group(place, not_none(request.row.category), (request,)), 0, run))
        return made

    engine = toy_engine()
    drafts = [Contender(name, "model", engine=engine, tracks={2: track(name, each)}) for name, each in seconds.items()]
    found = DraftComparison(drafts, work, 2)
    arms = [EngineArm(f"{one.draft} k=2", engine, 2) for one in drafts]
    found._bench = bench = Bench(work, arms[0], EngineArm("none", engine, 0), arms[1:])
    bench.draft, bench.plain = drafts[0].tracks[2], track("none", 1.0)
    bench.against = {one.draft: one.tracks[2] for one in drafts[1:]}
    return found


def test_the_best_k_is_the_median_prompt_s_as_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt decides totals, and says little of the others."""
    totals, prompts = (Interval(speedup, None, 3) for speedup in (1.9, 1.2))
    ones = np.ones(3)
    rows = [
        Predicted(DraftShape(k), prompts, total, median, ones, ones, ones, ones, None, stand_in(None))
        for k, total, median in ((2, prompts, totals), (5, totals, prompts))
    ]
    prediction = Prediction(rows, None, None, None, 2.0, 0.1, stand_in(None))
    monkeypatch.setattr(traced, "replay", lambda *_: [])
    monkeypatch.setattr(traced, "predict", lambda *_: prediction)
    found = traced.Traced(stand_in(None), "d").predict(5, stand_in(None))
    contender = Contender("d", "model", engine=toy_engine(), prediction=found)
    assert not_none(contender.predicted_best()).k == 2


def test_a_winner_takes_enough_pairs() -> None:
    many, few = (compared(num, {"good": 0.5, "fair": 0.8, "bad": 2.0}) for num in (12, 10))
    assert not_none(choose_draft(many).winner).draft == not_none(choose_draft(few).winner).draft == "good"
    assert choose_draft(many).recommendation.startswith("Use good with k = 2: it is 2.00× (2.00 to 2.00) as fast as")
    assert [task_winner(many, task)[0] for task in ("chat", "code")] == ["good", "good"]
    winner, speedup = task_winner(few, "chat")
    assert (winner, not_none(speedup).median, not_none(speedup).pairs) == (None, 2.0, 5), (
        "not known, which is not `none`"
    )


@pytest.mark.parametrize("num", [1, 2, 5])
def test_few_pairs_are_inconclusive_unless_a_prediction_says_the_same(num: int) -> None:
    alone = compared(num, {"good": 0.5, "fair": 0.8})
    found = choose_draft(alone)
    assert (found.verdict, found.winner, found.winner_name) == ("inconclusive", None, None)
    assert found.needs == ("6 prompts or more (--num-prompts)",)
    assert found.recommendation.startswith(
        "Inconclusive: too few pairs to be certain. The fastest, good (k = 2), is 2.00×"
    )
    row = SimpleNamespace(k=2, speedup=Interval(1.9, (1.5, 2.3), 24))
    for one in alone.contenders:
        one.prediction = stand_in(SimpleNamespace(rows=[row]))
    found = choose_draft(alone)
    assert (found.verdict, found.winner_name) == (("speculate", "good") if num > 1 else ("inconclusive", None))


def test_slower_drafts_win_nothing_and_that_is_known() -> None:
    slow = compared(12, {"bad": 2.0, "worse": 3.0})
    found = choose_draft(slow)
    assert (found.verdict, found.winner, found.winner_name, found.needs) == ("do-not-speculate", None, "none", ())
    assert task_winner(slow, "code")[0] == "none"
    assert found.recommendation.startswith("Do not speculate: no draft is certainly faster; the best, bad (k = 2)")


def test_an_interval_that_holds_both_answers_is_no_do_not_speculate() -> None:
    found = compared(12, {"odd": [0.7, 0.8, 0.9, 1.1, 1.2, 1.4] * 2})
    choice = choose_draft(found)
    assert (choice.verdict, choice.winner_name) == ("inconclusive", None)
    assert choice.needs == ("more prompts (--num-prompts) or repeats (--repeats)",)
    assert choice.recommendation.startswith(
        "Inconclusive: the interval contains both answers. The fastest, odd (k = 2)"
    )
    assert task_winner(found, "code")[0] is None


def test_a_winner_that_another_draft_may_beat_is_undecided() -> None:
    seconds = [0.5, 0.55, 0.6, 0.5, 0.45, 0.4] * 2
    close = compared(12, {"one": seconds, "other": [*seconds[3:], *seconds[:3]], "slow": 0.9})
    choice = choose_draft(close)
    assert (choice.verdict, choice.winner_name, choice.winner) == ("speculate", None, None)
    assert choice.recommendation.startswith("Speculate; the best draft is undecided: ")
    assert "is not certainly slower" in choice.recommendation
    assert "slow (k" not in choice.recommendation
    assert choice.needs
    as_good = compared(12, {"one": 0.5, "other": 0.505, "slow": 0.9})
    assert choose_draft(as_good).winner_name == "one", "within two per cent they are as good as each other"


def test_a_busy_machine_has_no_winner() -> None:
    busy = compared(12, {"good": 0.5})
    busy.load = Load(6.5, 2)
    choice = choose_draft(busy)
    assert (choice.verdict, choice.winner_name) == ("inconclusive", None)
    assert choice.needs == ("a quiet machine",)
    assert task_winner(busy, "code")[0] is None


def test_drafts_predicted_to_lose_and_measured_to_win_are_inconclusive() -> None:
    odd = compared(12, {"good": 0.5})
    odd.contenders[0].prediction = stand_in(
        SimpleNamespace(rows=[SimpleNamespace(k=2, speedup=Interval(0.8, (0.7, 0.9), 12))])
    )
    choice = choose_draft(odd)
    assert choice.verdict == "inconclusive"
    assert choice.recommendation.startswith("Inconclusive: prediction and measurement exclude each other.")
