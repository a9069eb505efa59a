"""Conversation rows become chats: the first user message, or the whole with `chat`; what is not text is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typed import not_none

from specdec_cli.engine.prompts import PromptRow, PromptSet
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.chats import whole_chat
from specdec_cli.measure.workload.dataset import read_dataset, read_prompt_file
from specdec_cli.measure.workload.turns import dialogues, turn_ends


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def lines(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def both(name: str, chat: bool | None = False) -> PromptSet:
    """The prompts, which both ways of naming a file must give alike."""
    found = read_dataset(name, chat)
    assert read_prompt_file(name, chat) == found
    return found


def chat_of(row: PromptRow) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in row.chat()]


STORY = [said("user", "Tell me a story")]
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    {"from": "human", "value": "Bye"},
    {"from": "gpt", "value": "Bye-bye"},
]
WHOLE = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]


def test_point_6_a_row_of_messages_is_the_text_of_its_message(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": STORY}]))
    assert [row.prompt for row in both(str(path)).rows] == ["Tell me a story"]
    assert chat_of(both(str(path), chat=True).rows[0]) == [("user", "Tell me a story")]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT},
        {"conversation": [{"from": one["from"].upper(), "value": one["value"]} for one in SHAREGPT]},
        {"messages": [said(role, text) for role, text in WHOLE]},
        {"messages": [said("developer", "Be kind."), *(said(role, text) for role, text in WHOLE[1:])]},
        {"prompt": [said(role, text) for role, text in WHOLE], "chosen": [said("assistant", "x")]},
        {"text": "formatted", "messages": [said(role, text) for role, text in WHOLE]},
        {"system": "Be kind.", "conversations": SHAREGPT[1:]},
        {"messages": [said(role, [{"type": "text", "text": text}]) for role, text in WHOLE]},
    ],
    ids=lambda row: " and ".join(row),
)
def test_the_first_user_message_or_the_whole(tmp_path: Path, row) -> None:
    name = lines(tmp_path, row)
    plain, chat = both(name), both(name, chat=True)
    assert [(one.prompt, one.messages) for one in plain.rows] == [("Hi", ())]
    assert "1 row holds a conversation, of which the first user message is the prompt; --chat reads all of it" in (
        plain.notices
    )
    assert chat_of(chat.rows[0]) == WHOLE
    assert chat.rows[0].prompt == "Hi"


def test_a_list_of_messages_is_a_row_of_them_and_parquet_holds_the_same(tmp_path: Path) -> None:
    name = lines(tmp_path, STORY, [said("user", "b"), said("assistant", "c")])
    assert [row.prompt for row in both(name).rows] == ["Tell me a story", "b"]
    parquet.write_table(pa.Table.from_pylist([{"messages": STORY, "id": 4}]), tmp_path / "p.parquet")
    (row,) = both(str(tmp_path / "p.parquet"), chat=True).rows
    assert (row.prompt, row.id, chat_of(row)) == ("Tell me a story", 4, [("user", "Tell me a story")])


def test_text_parts_are_lines(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert both(lines(tmp_path, {"messages": [said("user", parts)]})).rows[0].prompt == "one\ntwo"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": 3}, "not a number"),
        ({"prompt": 3.5}, "not a number"),
        ({"prompt": True}, "not a boolean"),
        ({"prompt": None}, "not null"),
        ({"prompt": {"role": "user", "content": "a"}}, "not an object"),
        ({"prompt": {"bytes": "x", "path": "a.png"}}, "not an image or audio file"),
        ({"prompt": [1, 2]}, "not a list of numbers"),
        ({"prompt": [[said("user", "a")]]}, "not a list of lists"),
        ({"prompt": ["a", 2]}, "not a list"),
        ({"question": ["a", "b"]}, "not a list of strings"),
        ({"turns": [{"text": "a"}]}, "not an object"),
        ({"turns": [7, "b"]}, "not a number"),
        ({"messages": [said("user", 7)]}, "message 1: `content` must be a string, not a number"),
        ({"messages": [said("user", None)]}, "message 1: `content` must be a string, not null"),
        ({"messages": [said("system", "s"), said("user", {"a": 1})]}, "message 2: `content` must be a string"),
        ({"messages": [{"role": "user"}, said("assistant", "a")]}, "message 1 has neither `content` nor `value`"),
        ({"messages": [said("user", [{"type": "image_url", "image_url": {}}])]}, "a part of type `image_url`"),
        ({"messages": [said("user", [{"type": "text", "text": None}])]}, "must be a string, not null"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "no message is of the user"),
        ({"conversations": [{"from": "human", "value": " "}]}, "message 1: `value` is empty"),
        ({"messages": "hello", "prompt": None}, "not null"),
    ],
)
def test_point_6_what_is_not_text_is_refused_with_its_kind_and_row(tmp_path: Path, row, kind: str) -> None:
    name = lines(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(UsageError) as caught:
        both(f"{name}?empty=refuse")
    assert caught.value.message.startswith(f"{name}:2: ")
    assert kind in caught.value.message


GPT = {"from": "gpt", "value": "Hello"}


@pytest.mark.parametrize("chat", [False, True, None])
@pytest.mark.parametrize(
    "row",
    [
        {"conversations": []},
        {"messages": []},
        {"messages": None},
        {"conversations": "[]"},
        {"conversations": [GPT]},
        {"conversations": [{"from": "system", "value": "Be kind."}]},
        {"messages": [said("system", "Be kind."), said("assistant", "Hello")]},
        {"conversations": [{"from": "human", "value": " \n"}, GPT]},
        {"messages": [said("user", None), said("assistant", "Hello")]},
        {"messages": [said("user", [])]},
        {"messages": [said("user", [{"type": "text", "text": ""}])]},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"value": "x"}]},
        {"conversations": [{"from": None, "value": "x"}, GPT]},
        {"messages": [{"role": "user"}, said("assistant", "Hello")]},
        {"messages": [said("", "a")]},
        {"conversations": [None]},
        {"conversations": [{"from": "human", "value": "a"}, {"value": "x"}]},
        {"id": "x"},
        {},
        [],
        None,
    ],
)
def test_49_8_rows_that_hold_nothing_to_ask_are_left_out(tmp_path: Path, row: Any, chat: bool | None) -> None:
    name = lines(tmp_path, {"conversations": SHAREGPT, "id": "a"}, row, {"messages": STORY}, row)
    found = both(name, chat)
    assert [one.prompt for one in found.rows] == ["Hi", "Tell me a story"]
    assert [one.index for one in found.rows] == [0, 1]
    assert f"2 rows without a prompt left out: {name}:2, {name}:4" in found.notices
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps([row, {"conversations": SHAREGPT}, {"messages": STORY}]))
    assert [one.prompt for one in both(str(whole), chat).rows] == ["Hi", "Tell me a story"]
    inner = tmp_path / "inner.json"
    inner.write_text(json.dumps({"data": [{"conversations": SHAREGPT}, row, {"messages": STORY}]}))
    assert [one.prompt for one in both(str(inner), chat).rows] == ["Hi", "Tell me a story"]
    for asked in (name, str(whole)):
        with pytest.raises(UsageError):
            both(f"{asked}?empty=refuse", chat)
        assert both(f"{asked}?empty=skip", chat) == both(asked, chat)
    with pytest.raises(UsageError, match="has no prompt: every row is empty"):
        both(lines(tmp_path, row, row), chat)


def test_49_8_empty_conversations_in_parquet_are_left_out(tmp_path: Path) -> None:
    rows = [{"messages": STORY}, {"messages": []}, {"messages": None}, {"messages": [said("assistant", "a")]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    found = both(str(tmp_path / "p.parquet"), chat=True)
    assert [one.prompt for one in found.rows] == ["Tell me a story"]
    name = tmp_path / "p.parquet"
    places = ", ".join(f"row {row} of `{name}`" for row in (2, 3, 4))
    assert found.notices == [f"3 rows without a prompt left out: {places}"]


def test_binary_columns_are_refused_and_those_beside_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": {"bytes": b"x", "path": "a.png"}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "image.parquet")
    with pytest.raises(UsageError, match=r"row 1 of .*: the prompt must be a string, not an image or audio file"):
        both(str(tmp_path / "image.parquet"))
    rows = [{"question": "What?", "image": b"x"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "beside.parquet")
    found = both(str(tmp_path / "beside.parquet"))
    assert [row.prompt for row in found.rows] == ["What?"]
    assert "`image` of" in found.notices[0]


def test_what_only_the_whole_reads_is_refused_there_alone(tmp_path: Path) -> None:
    calls = [said("user", "a"), said("assistant", None), said("tool", "3"), said("user", "b")]
    name = lines(tmp_path, {"messages": calls})
    assert both(name).rows[0].prompt == "a"
    with pytest.raises(UsageError, match="message 2: `content` must be a string, not null"):
        both(name, chat=True)
    calls[1] = said("assistant", "calls")
    with pytest.raises(UsageError, match="message 3 is of `tool`, and only user, assistant and system are read"):
        both(lines(tmp_path, {"messages": calls}), chat=True)


def test_a_conversation_printed_into_a_table_is_read_back_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'prompt,id\n"{STORY}",5\n')
    assert [(row.prompt, row.id) for row in both(str(path)).rows] == [("Tell me a story", 5)]
    path.write_text("prompt,id\n\"[{'role': 'user', 'content': 'a'}\n {'role': 'user'}]\",5\n")
    with pytest.raises(UsageError, match="a conversation printed as text, which cannot be read back"):
        both(str(path))
    name = lines(tmp_path, {"prompt": json.dumps(STORY)}, {"prompt": '[{"a": 1}] is JSON'})
    assert [row.prompt for row in both(name).rows] == ["Tell me a story", '[{"a": 1}] is JSON']


def test_columns_that_are_dropped_are_named(tmp_path: Path) -> None:
    found = both(lines(tmp_path, {"instruction": "Add.", "context": "1 and 2", "response": "3"}))
    assert [row.prompt for row in found.rows] == ["Add."]
    assert "`context` of" in found.notices[0]
    assert "is not read: prompts are `instruction`" in found.notices[0]
    found = both(lines(tmp_path, {"system": "Be kind.", "prompt": "a"}))
    assert "`system` of" in found.notices[0]
    found = both(lines(tmp_path, {"prompt": "a", "prompt_id": "x", "messages": STORY}))
    assert found.notices[0].endswith("are `prompt`; --chat reads `messages`")
    assert both(lines(tmp_path, {"question": "a", "answer": "b", "id": 1, "context": ""})).notices == []
    assert "--chat" not in "".join(both(lines(tmp_path, {"turns": ["a", "b"]}), chat=None).notices)


def test_alpaca_rows_are_instruction_and_input(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"instruction": "Say.", "input": ""}]
    found = both(lines(tmp_path, *rows))
    assert [row.prompt for row in found.rows] == ["Add.\n\n1 and 2", "Say."]
    assert found.notices[0].endswith("are `instruction` and, after an empty line, `input`")
    found = both(lines(tmp_path, *rows) + "?column=instruction")
    assert ([row.prompt for row in found.rows], found.notices) == (["Add.", "Say."], [])


def test_hints_never_lead_into_a_wrong_measurement(tmp_path: Path) -> None:
    """What the hint of an unknown column says to type does not name a column that holds no prompts."""
    name = lines(tmp_path, {"meta": [{"a": 1}], "score": 3, "dialog": ["a", "b"]})
    with pytest.raises(UsageError, match="has no `prompt`, but `meta`, `score`, `dialog`") as caught:
        both(name)
    assert not_none(caught.value.hint).endswith("'FILE?column=NAME'")
    for column in ("meta", "score", "dialog"):
        with pytest.raises(UsageError, match="must be a string, not a"):
            both(f"{name}?column={column}")


def test_turns_are_answered_one_after_another(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b", "c"], "category": "x", "id": 1},
        {"conversations": SHAREGPT},
        {"messages": [said("user", "d"), said("user", "e")]},
    ]
    prompts = both(lines(tmp_path, *rows), chat=True).rows
    assert [turn_ends(row) for row in prompts] == [[1, 2, 3], [4], [1, 2]]
    first, whole, last = dialogues(prompts)
    assert [talk.index for talk in (first, whole, last)] == [0, 3, 4]
    turn = first.next()
    assert (turn.index, turn.prompt, turn.turn, turn.category, chat_of(turn)) == (0, "a", 1, "x", [("user", "a")])
    first.answer("A")
    turn = first.next()
    assert (turn.index, turn.turn) == (1, 2)
    assert chat_of(turn) == [("user", "a"), ("assistant", "A"), ("user", "b")]
    first.answer("B")
    assert chat_of(first.next())[3:] == [("assistant", "B"), ("user", "c")]
    assert not first.has_more
    assert (chat_of(whole.next()), whole.has_more) == (WHOLE, False)
    last.next()
    last.answer("D")
    assert chat_of(last.next()) == [("user", "d"), ("assistant", "D"), ("user", "e")]


def test_turns_are_one_prompt_without_chat(tmp_path: Path) -> None:
    found = both(lines(tmp_path, {"turns": ["a", "b"]}, {"prompt": ["c", "d"]}, {"turns": ["e"]}))
    assert [(row.prompt, row.messages) for row in found.rows] == [("a", ()), ("c", ()), ("e", ())]
    assert found.notices[0].startswith("2 rows hold a conversation")
    assert [talk.index for talk in dialogues(found.rows)] == [0, 1, 2]


@pytest.mark.parametrize("content", [None, "", "I look it up."])
@pytest.mark.parametrize("call", [{"tool_calls": [{"id": "1"}]}, {"function_call": {"name": "f", "arguments": "{}"}}])
def test_a_message_that_calls_tools_is_never_read_without_its_calls(content: str | None, call) -> None:
    asked, called = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": content, **call}
    with pytest.raises(UsageError, match="row 1: message 2 calls tools, and only text is read"):
        whole_chat([asked, called, asked], "row 1")
    assert [one.content for one in whole_chat([asked, called], "row 1")] == ["Weather?"], "the model's to say"
