"""Prompt files: what is a row, and what is refused with its place."""

import os
from pathlib import Path

import pytest
from typed import not_none

from specdec_cli.engine.prompts import PromptRow, rows_of
from specdec_cli.errors import UsageError
from specdec_cli.measure.workload.dataset import read_prompt_file as read_prompts


def read_prompt_file(path: Path) -> list[PromptRow]:
    return read_prompts(str(path)).rows


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_one_prompt_a_line_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts.txt", "one\r\n\n  two \nthree")
    assert [(row.index, row.prompt) for row in read_prompt_file(path)] == [(0, "one"), (1, "  two "), (2, "three")]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    assert read_prompt_file(write(tmp_path, "p.txt", b"\xef\xbb\xbfone"))[0].prompt == "one"
    assert read_prompt_file(write(tmp_path, "p.jsonl", b'\xef\xbb\xbf{"prompt": "one"}'))[0].prompt == "one"


def test_other_line_separators_stay_inside_a_prompt(tmp_path: Path) -> None:
    assert len(read_prompt_file(write(tmp_path, "p.txt", "one\u2028still one\x0cand still"))) == 1


def test_jsonl_rows_bring_their_own_values(tmp_path: Path) -> None:
    rows = read_prompt_file(
        write(
            tmp_path,
            "p.jsonl",
            '{"turns": ["first", "second"], "category": "story", "question_id": 7}\n'
            '{"prompt": "a\\nb", "id": "x", "max_new_tokens": 3, "seed": 0, "unknown": [1]}\n',
        )
    )
    assert rows[0] == PromptRow(0, "first", id=7, category="story")
    assert rows[1] == PromptRow(1, "a\nb", id="x", max_new_tokens=3, seed=0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ("[1]", "but a list"),
        ('"text"', "but a string"),
        ("null", "no `prompt`"),
        ("{}", "no `prompt`"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": " \\n"}', "empty"),
        ('{"prompt": 3}', "must be a string, not a number"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"turns": []}', "`turns` must be"),
        ('{"turns": [null]}', "message 1 is null"),
        ('{"prompt": "a", "max_new_tokens": 0}', "`max_new_tokens` must be an integer of at least 1, not `0`"),
        ('{"prompt": "a", "max_new_tokens": true}', "`max_new_tokens`"),
        ('{"prompt": "a", "seed": -9223372036854775808}', "`seed`"),
        ('{"prompt": "a", "seed": 9223372036854775808}', "`seed`"),
        ('{"prompt": "a", "id": [1]}', "`id`"),
        ('{"prompt": "a", "category": [1]}', "`category` must be a string or a number, not a list of numbers"),
        ("1" * 5000, "not a JSON object"),
        ("[" * 100000, "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, "p.jsonl", f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(UsageError) as caught:
        read_prompt_file(Path(f"{path}?empty=refuse"))
    assert caught.value.message.startswith(f"{path}:3: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "has no prompt"), (b"\n \n", "has no prompt"), (b"ok\n\xff\xfe", "not valid UTF-8")]
)
def test_a_file_without_text_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_prompt_file(write(tmp_path, "p.txt", data))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_prompt_file(tmp_path / "missing.txt")
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompt_file(tmp_path)
    if os.geteuid() != 0:
        path = write(tmp_path, "p.txt", "one")
        path.chmod(0)
        with pytest.raises(UsageError, match="Permission denied"):
            read_prompt_file(path)


def test_prompts_given_one_by_one() -> None:
    assert [row.index for row in rows_of(["a", "b"])] == [0, 1]
    with pytest.raises(UsageError, match="the prompt is empty"):
        rows_of([""])
    with pytest.raises(UsageError, match="prompt 2 of 2 is empty"):
        rows_of(["a", "\n"])
    with pytest.raises(UsageError, match="not valid Unicode"):
        rows_of([os.fsdecode(b"\xff")])
    with pytest.raises(UsageError, match="no prompt"):
        rows_of([])


def test_a_file_of_objects_is_jsonl_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": "Once", "category": "story"}\n')
    assert [(row.prompt, row.category) for row in read_prompt_file(path)] == [("Once", "story")]


def test_a_negative_seed_of_a_row_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "seed": -1}\n' * 3)
    seeds = {not_none(row.seed) for row in read_prompt_file(tmp_path / "p.jsonl")}
    assert len(seeds) == 3
    assert min(seeds) >= 0
