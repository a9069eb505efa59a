"""Conversations of `bench --endpoint`: each turn's answer goes into the next turn's messages."""

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from endpoint_runs import bench, chunk, counted, document, reply, without_environment
from fake_server import Fake, serving

from specdec_cli.report.live_table import LiveTable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


def conversations(tmp_path: Path, *rows: dict[str, Any]) -> tuple[str, ...]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ("--dataset", str(path), "--chat", "--repeats", "1", "--json")


def test_15_each_turns_answer_goes_into_the_next_turns_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = {"turns": ["one", "two", "three"], "category": "talk"}, {"prompt": "alone", "category": "short"}
    with serving(Fake(script=reply, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--fail-if", "by_turn.2.timing.ttft_s.median > 9") == 0
        found = document(capsys)
        assert bench(fake, *conversations(tmp_path, *rows), "--fail-if", "by_turn.4.timing.ttft_s.median > 9") == 2
    sent = {len(body["messages"]): body["messages"] for body in fake.requests[1:4]}
    assert sent[5] == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "answer to 1"},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": "answer to 3"},
        {"role": "user", "content": "three"},
    ], "answers without their reasoning"  # fmt: skip
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert counted(found) == {"planned": 4, "answered": 4, "failed": 0, "not_sent": 0, "sent_again": 0}
    assert {turn: part["num_prompts"] for turn, part in found["by_turn"].items()} == {"1": 2, "2": 1, "3": 1}
    assert [part["output_tokens"] for part in found["by_turn"].values()] == [8, 4, 4]
    assert found["by_task"]["talk"]["output_tokens"] == 12
    assert found["timing"]["ttft_s"]["pairs"] == 2, "turns of a conversation are drawn together"


def test_15_answers_that_a_row_brings_stay(tmp_path: Path) -> None:
    said = [("system", "be brief"), ("user", "one"), ("assistant", "given"), ("user", "two")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    with serving(Fake(script=reply)) as fake:
        assert bench(fake, *conversations(tmp_path, row)) == 0
    assert len(fake.requests) == 2
    assert fake.requests[1]["messages"] == row["messages"]


@pytest.mark.parametrize("how", ["error", "tool"])
def test_15_a_turn_that_fails_ends_its_conversation_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str
) -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}

    def script(body):
        if body["messages"][0]["content"] == "bad" and len(body["messages"]) == 3:
            return [{"error": {"message": "too long"}}] if how == "error" else [call, chunk("", "tool_calls"), "[DONE]"]
        return reply(body)

    rows = {"turns": ["bad", "b", "c", "d"]}, {"turns": ["good", "f"]}
    with serving(Fake(script=script, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--concurrency", "2") == 0
    found = document(capsys)
    failed = int(how == "error")
    assert counted(found) == {
        "planned": 6, "answered": 4 - failed, "failed": failed, "not_sent": 2, "sent_again": 0,
    }  # fmt: skip
    assert any("2 turns were not sent, because the turn before" in notice for notice in found["notices"])
    assert [error["turn"] for error in found["errors"]] == [2] * failed
    assert len(fake.requests) == 1 + 4


def test_15_turns_at_a_rate_follow_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b"]}] * 6
    with serving(Fake(script=reply, pause_s=0.05, metrics=None)) as fake:
        assert bench(fake, *conversations(tmp_path, *rows), "--request-rate", "100", "--num-prompts", "6") == 0
    found = document(capsys)
    assert found["requests"]["answered"] == 12
    p99 = found["timing"]["queue_s"]["p99"]
    assert p99 < 0.15, "a turn arrives when the one before it is answered, a quarter of a second after it was sent"


def test_15_an_interrupted_conversation_counts_what_it_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LiveTable, "draw", lambda *_: signal.raise_signal(signal.SIGINT))
    with serving(Fake(script=reply)) as fake:
        assert bench(fake, *conversations(tmp_path, {"turns": ["a", "b", "c"]})) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"]["answered"], found["requests"]["not_sent"]) == (1, 0)


def test_15_turns_are_in_every_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = tmp_path / "r.md", tmp_path / "r.csv"
    rows = {"turns": ["one", "two"]}, {"turns": ["three", "four"]}
    with serving(Fake(script=reply, metrics=None)) as fake:
        files = ("--markdown", str(names[0]), "--csv", str(names[1]))
        assert bench(fake, *conversations(tmp_path, *rows)[:-1], "--details", *files) == 0
    assert " turn   prompts " in capsys.readouterr().out
    assert "### Turns" in names[0].read_text()
    found = list(csv.DictReader(names[1].read_text().splitlines()))
    assert [(row["turn"], row["output_tokens"]) for row in found] == [("", "16"), ("1", "8"), ("2", "8")]
