"""What a sweep keeps: its trace's file, and costs and passes of a run that was interrupted."""

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from toy_clock import toy_clock
from toy_engine import TableLM
from toy_sweeps import checked, count_profiles, sweep_k, toy_engines

from specdec_cli.measure.bench import sweep
from specdec_cli.measure.predict import traced


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys."""
    return toy_engines(monkeypatch)


def test_a_trace_is_written_read_and_predicts_the_same(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiled: list[Any] = []
    profile = sweep.profile

    def once(*arguments, **named):
        profiled[:] = profiled or [profile(*arguments, **named)]
        return profiled[0]

    monkeypatch.setattr(sweep, "profile", once)
    path = tmp_path / "t.safetensors"
    documents = []
    for read in (False, True):
        assert sweep_k("--json", "--trace", str(path)) == 0
        documents.append(checked(capsys.readouterr().out))
        assert documents[-1]["trace"]["read"] is read
    first, second = ([row["predicted"] for row in document["rows"]] for document in documents)
    assert first == second
    assert documents[0]["iid"] == documents[1]["iid"]
    for other, said in (
        (("--num-prompts", "5"), "the trace has `6` prompts, the workload `5`"),
        (("-n", "13"), "the trace was sampled with max_new_tokens `12`, not `13`"),
        (("--k-max", "6"), "was traced for at most `4` tokens, not `6`"),
    ):
        assert sweep_k("--trace", str(path), *other) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(TableLM, "name", "another")
    assert sweep_k("--trace", str(path)) == 2
    assert "is of target `table`, not `another`" in capsys.readouterr().err


def test_an_interruption_leaves_what_is_whole_and_exit_code_130(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.cli import measured_run

    path = tmp_path / "tuned.yaml"
    for after, is_measured in ((3, False), (300, True)):

        @contextmanager
        def interrupted(after=after):
            asked = iter(range(10**9))
            yield lambda: next(asked) > after

        monkeypatch.setattr(measured_run, "interruptible", interrupted)
        assert sweep_k("--json", "--repeats", "2", "--exhaustive", "--write-recipe", str(path)) == 130
        out, err = capsys.readouterr()
        document = checked(out)
        assert document["plan"]["interrupted"]
        assert bool(document["plan"]["measured_k"]) is is_measured
        assert len(document["by_batch_size"]) == 1
        assert "interrupted: these are the results so far" in err
        assert not path.exists()


def test_prediction_and_measurement_are_of_the_same_minutes(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine changes its pace when the first profile is done: the target takes four times as long by the row."""
    clock, score, pace = toy_clock(monkeypatch), TableLM.score, [0.0]
    slower = lambda rows: 0.002 + pace[0] * sum(row.num_logits for row in rows)  # noqa: E731
    monkeypatch.setattr(TableLM, "score", lambda self, rows: clock.sleep(slower(rows)) or score(self, rows))
    profile, in_turn = sweep.profile, []

    def then_slower(*arguments, **named):
        found = profile(*arguments, **named)
        in_turn.append(named["is_warm"])
        pace[0] = 0.002
        return found

    monkeypatch.setattr(sweep, "profile", then_slower)
    assert sweep_k("--json", "--exhaustive", "-n", "24") == 0
    document = checked(capsys.readouterr().out)
    assert in_turn == [False] + [True] * 13
    assert document["costs"]["target_seconds_by_rows"][3] == pytest.approx(0.010, rel=0.02)
    for row in document["rows"]:
        measured, predicted = row["measured"]["speedup"], row["predicted"]["speedup"]
        assert predicted == pytest.approx(measured, rel=0.05)
    assert document["recommended"]["verdict"] == "do-not-speculate", "which the first profile would have contradicted"


def test_an_interrupted_sweep_keeps_its_costs_and_its_trace(
    loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.measure.bench.journal import Journal

    path, keep, num = tmp_path / "r.json", Journal.keep, [0]

    def interrupting(journal, arm, one) -> None:
        keep(journal, arm, one)
        num[0] += 1
        if num[0] == 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "keep", interrupting)
    assert sweep_k("--output", str(path), "--exhaustive") == 130
    first = checked(path.read_text())
    monkeypatch.setattr(traced, "trace_target", None)
    profiled = count_profiles(monkeypatch)
    assert sweep_k("--output", str(path), "--exhaustive", "--resume") == 0
    document = checked(path.read_text())
    assert (document["plan"]["resumed"], document["plan"]["passes"]) == (5, 60)
    assert first["costs"]["rounds_in_turn"] == 2
    assert document["costs"]["rounds_in_turn"] == 13, "twelve turns and the end"
    assert len(profiled) == 11, "of the journal's three none is taken again"
    assert document["trace"] == first["trace"] | {"read": True}
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]
