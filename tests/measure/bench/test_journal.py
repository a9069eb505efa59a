"""The journal: what is kept comes back and counts the same, torn lines go, and other runs are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy_engine import LETTERS, LetterTokenizer, toy_engine
from typed import not_none

from specdec_cli.document import as_json
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.arms import EngineArm
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.bench.bench import Bench
from specdec_cli.measure.bench.journal import check_journal, journal_path, open_journal, workload_digest
from specdec_cli.measure.workload.workload import read_rows, tokenize
from specdec_cli.sampling.params import SamplingParams

HEAD = {
    "specdec_version": "1", "schema": "s/1", "recipe": {"a": 1}, "plan": {}, "workload": "w", "environment": {},
}  # fmt: skip


def workload(num: int = 3, dataset: str = "builtin:stories"):
    rows = read_rows(dataset, None, num).rows
    params = SamplingParams(max_new_tokens=8)
    return tokenize(rows, dataset, lambda row: LetterTokenizer().encode(row.prompt[:40]), params, 512)


def bench(journal, repeats: int = 2) -> Bench:
    return bench_of(workload(), 1, repeats, journal)


def bench_of(work, batch_size: int, repeats: int, journal) -> Bench:
    engine = toy_engine(3)
    return Bench(
        work, EngineArm("draft", engine, 3), EngineArm("plain", engine, 0), (), batch_size, repeats, journal=journal
    )


def figures(found: Bench) -> list[Any]:
    return [
        found.draft.counts().as_dict(), found.plain.counts().as_dict(), found.draft.num_steps,
        found.draft.timing().as_dict(), as_json(not_none(found.speedup("decode"))),
        found.differences(), found.draft.meter.shares,
    ]  # fmt: skip


def test_a_whole_journal_gives_the_same_figures(tmp_path: Path) -> None:
    first = bench(open_journal(tmp_path / "r.json", HEAD, resume=False))
    list(first.run())
    second = bench(open_journal(tmp_path / "r.json", HEAD, resume=True))
    list(second.run())
    assert not_none(second.journal).num_resumed == 12
    assert figures(second) == figures(first)


def test_a_batch_of_several_tasks_comes_back_with_every_tasks_acceptance(tmp_path: Path) -> None:
    found = []
    for resume in (False, True):
        journal = open_journal(tmp_path / "r.json", HEAD, resume=resume)
        work = workload(6, "builtin:mini")
        found.append(bench_of(work, 4, 1, journal))
        list(found[-1].run())
    assert not_none(found[1].journal).num_resumed == 4
    for task in work.tasks:
        first, second = (one.draft.counts(task).as_dict() for one in found)
        assert first == second
        assert first["num_emitted_tokens"] > 0


def test_nodes_and_ranks_of_trees_come_back(tmp_path: Path) -> None:
    found = []
    for resume in (False, True):
        journal = open_journal(tmp_path / "r.json", HEAD, resume=resume)
        work = workload()
        drafter = create("model", {"model": "draft"})
        drafter.load(Resources(lambda name: TableLM.random(len(LETTERS), seed=1), None, len(LETTERS)))
        engine = Engine(
            TableLM.random(len(LETTERS)), drafter, options=EngineOptions(num_speculative_tokens=2, tree="3,2")
        )
        one = Bench(work, EngineArm("draft", engine, 2), EngineArm("plain", engine, 0), repeats=1, journal=journal)
        list(one.run())
        found.append(one)
    assert not_none(found[1].journal).num_resumed == 6
    first, second = (one.draft.counts().as_dict() for one in found)
    assert first == second
    assert first["num_draft_nodes"] > first["num_draft_tokens"]
    assert len(first["acceptance_by_rank"]) == 3


def test_only_what_is_left_is_decoded_and_turns_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    interrupted = bench(open_journal(path, HEAD, resume=False))
    list(interrupted.run(lambda: len(interrupted.draft.passes) + len(interrupted.plain.passes) >= 5))
    decoded = [*interrupted.draft.passes, *interrupted.plain.passes]
    assert len(decoded) == 5
    again = bench(open_journal(path, HEAD, resume=True))
    assert not_none(again.journal).num_kept == 5
    calls = []
    keep = type(not_none(again.journal)).keep
    monkeypatch.setattr(
        type(again.journal),
        "keep",
        lambda self, arm, one: (calls.append((one.repeat, one.group.place, arm)), keep(self, arm, one)),
    )
    list(again.run())
    assert not_none(again.journal).num_resumed == 4, "the fifth pass has no partner: its turn is decoded anew"
    draft, plain = "draft", "plain"
    assert calls == [
        (0, 2, draft), (0, 2, plain), (1, 0, plain), (1, 0, draft), (1, 1, draft), (1, 1, plain),
        (1, 2, plain), (1, 2, draft),
    ], "A B B A for what is left"  # fmt: skip
    assert len(again.draft.passes) == len(again.plain.passes) == 6
    assert not again.differences().mismatches


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    list(bench(open_journal(path, HEAD, resume=False), repeats=1).run())
    journal = journal_path(path)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-7])
    read = open_journal(path, HEAD, resume=True)
    assert read.num_kept == 5
    assert journal.read_bytes().endswith(b"\n")
    journal.write_bytes(b'{"format": 1}\n[]\n')
    with pytest.raises(UsageError, match="another format"):
        open_journal(path, HEAD, resume=True)
    journal.write_bytes(whole.splitlines(keepends=True)[0] + b'{"pass": "x"}\n')
    with pytest.raises(UsageError, match="cannot be read"):
        open_journal(path, HEAD, resume=True)


def test_a_journal_that_is_cut_in_its_first_line_is_refused_in_words(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "r.json", HEAD, resume=False)
    journal.path.write_text(journal.path.read_text()[:20])
    with pytest.raises(UsageError, match="ends within its first line: it holds no pass"):
        open_journal(tmp_path / "r.json", HEAD, resume=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_pass_that_a_full_disk_does_not_take_says_how_to_go_on(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "r.json", HEAD, resume=False)
    journal.path = Path("/dev/full")
    with pytest.raises(RunError, match="No space left") as caught:
        journal._append(HEAD)
    assert "--resume" in not_none(caught.value.hint)


@pytest.mark.parametrize(
    ("key", "words"),
    [("recipe", "another recipe"), ("workload", "other prompts"), ("specdec_version", "another version of specdec"),
     ("plan", "another plan"), ("environment", "another machine"), ("schema", "another command")],
)  # fmt: skip
def test_another_run_is_refused(tmp_path: Path, key: str, words: str) -> None:
    open_journal(tmp_path / "r.json", HEAD, resume=False)
    with pytest.raises(UsageError, match=words):
        open_journal(tmp_path / "r.json", HEAD | {key: "other"}, resume=True)


def test_an_existing_journal_asks_what_becomes_of_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    check_journal(path, resume=False, force=False)
    open_journal(path, HEAD, resume=False)
    with pytest.raises(UsageError, match="holds the results of an interrupted run"):
        check_journal(path, resume=False, force=False)
    check_journal(path, resume=True, force=False)
    check_journal(path, resume=False, force=True)
    again = open_journal(path, HEAD | {"recipe": {}}, resume=False)
    assert json.loads(again.path.read_text())["recipe"] == {}, "begun anew"
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_workloads_are_told_apart() -> None:
    assert workload_digest(workload(3).requests) == workload_digest(workload(3).requests)
    assert workload_digest(workload(3).requests) != workload_digest(workload(2).requests)
