"""Drafts against each other: what is known of their size, and who wins where there are enough pairs to tell."""

from types import SimpleNamespace

import pytest
from tiny_engine import drafter
from tiny_models import make_tiny
from toy_engine import LetterTokenizer, toy_engine

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.outputs import Timing
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.bench import Bench, Plan
from specdec_cli.measure.compare import Comparison, Contender
from specdec_cli.measure.passes import Group, Pass, Track
from specdec_cli.measure.prompts import PromptRow
from specdec_cli.measure.stats import Interval
from specdec_cli.measure.workload import tokenize
from specdec_cli.report.compare_drafts import _winner
from specdec_cli.sampling.params import SamplingParams


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_draft_has_all_its_parameters(tmp_path, dtype, quantize, tied):
    folder = str(make_tiny("llama", tmp_path, tie_word_embeddings=tied))
    lm = load_lm(folder, dtype=dtype, quantize=quantize)
    engine = Engine(lm, drafter(lm))
    assert Contender("draft", "model", engine).sizes()[0] == describe(folder).num_parameters


def compared(num_prompts, seconds) -> Comparison:
    """Drafts that took known seconds with every prompt, and plain decoding, which took one."""
    rows = [PromptRow(i, "ab ab", category="code" if i % 2 else "chat") for i in range(num_prompts)]
    encode = LetterTokenizer().encode
    work = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=4), 512)

    def track(name, each):
        made = Track(name)
        for place, request in enumerate(work.requests):
            made.add(
                Pass(Group(place, request.row.category, (request,)), 0, ((1,) * 4,), Timing(0, each, each, None), 1)
            )
        return made

    engine = toy_engine()
    drafts = [Contender(name, "model", engine, tracks={2: track(name, each)}) for name, each in seconds.items()]
    found = Comparison(drafts, work, 2)
    found._bench = Bench(engine, work, Plan(2), draft=drafts[0].tracks[2], plain=track("none", 1.0))
    return found


def test_the_best_k_is_the_median_prompt_s_as_it_is_reported():
    """One long prompt decides totals, and says little of the others."""
    totals, prompts = (Interval(speedup, None, 3) for speedup in (1.9, 1.2))
    rows = [
        SimpleNamespace(k=k, speedup=total, median_speedup=median)
        for k, total, median in ((2, prompts, totals), (5, totals, prompts))
    ]
    contender = Contender("d", "model", toy_engine(), prediction=SimpleNamespace(rows=rows))
    assert contender.predicted_best().k == 2


def test_a_winner_takes_enough_pairs():
    many, few = (compared(num, {"good": 0.5, "fair": 0.8, "bad": 2.0}) for num in (12, 10))
    assert many.winner().draft == few.winner().draft == "good"
    assert [many.task_winner(task)[0].draft for task in ("chat", "code")] == ["good", "good"]
    winner, speedup = few.task_winner("chat")
    assert (winner, speedup.median, speedup.pairs) == (None, 2.0, 5)
    assert _winner(winner, speedup) is None, "not known, which is not `none`"
    alone = compared(1, {"good": 0.5, "fair": 0.8})
    assert alone.winner() is None
    assert alone.recommendation() == (
        "Not known: a single pair has no interval: raise --num-prompts. "
        "The fastest, good (k = 2), is 2.00× as fast as plain decoding."
    )


def test_slower_drafts_win_nothing_and_that_is_known():
    slow = compared(12, {"bad": 2.0, "worse": 3.0})
    assert slow.winner() is None
    assert _winner(slow.winner(), slow.speedup(slow.ranking()[0])) == "none"
    assert _winner(*slow.task_winner("code")) == "none"
    assert slow.recommendation().startswith("Do not speculate: no draft is surely faster; the best, bad (k = 2)")
