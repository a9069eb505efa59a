"""Workloads: the built-in sets, files and data sets, an even and repeatable choice, and what does not fit."""

import json
from pathlib import Path
from random import Random

import datasets
import pytest
from toy_engine import LetterTokenizer
from typed import not_none

from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.load import load_tokenizer
from specdec_cli.measure.documents.parts import WorkloadResult
from specdec_cli.measure.workload.dataset import read_dataset as read_prompts
from specdec_cli.measure.workload.workload import read_rows as read_some
from specdec_cli.measure.workload.workload import select, task_of, tokenize
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

PAIRS = [{"question": "How many?", "topic": "sums"}, {"question": "Where?", "topic": "places"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read_dataset(name: str) -> list[PromptRow]:
    return read_prompts(name).rows


def read_rows(*asked) -> list[PromptRow]:
    return read_some(*asked).rows


def counts(rows) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[task_of(row)] = found.get(task_of(row), 0) + 1
    return found


def test_mini_has_its_tasks_and_fits_a_small_context() -> None:
    rows = read_rows("builtin:mini", None, 10_000)
    names = ["chat", "code", "maths", "summarising", "translation", "retrieval", "story", "copy-edit"]
    assert counts(rows) == dict.fromkeys(names, 6)
    assert len({row.prompt for row in rows}) == len({row.id for row in rows}) == 48
    tokenizer = Tokenizer(load_tokenizer("builtin:target"))
    assert max(len(tokenizer.encode(row.prompt)) for row in rows) < 250


def test_the_choice_is_even_and_the_same_every_time() -> None:
    rows = read_rows("builtin:mini", None, 24)
    assert set(counts(rows).values()) == {3}
    assert rows == read_rows("builtin:mini", None, 24)
    assert [row.index for row in rows] == sorted(row.index for row in rows)
    assert counts(read_rows("builtin:mini", ["code", "chat"], 5)) == {"chat": 2, "code": 3}
    assert len(read_rows("builtin:stories", None, 10_000)) == 36


def test_a_small_task_leaves_its_share_to_the_others() -> None:
    rows = [PromptRow(i, f"p{i}", category="a" if i == 0 else "b") for i in range(9)]
    assert counts(select(rows, None, 6)) == {"a": 1, "b": 5}
    assert [row.index for row in select(rows, None, 6)] == [0, 1, 2, 4, 5, 7]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no prompt has the task `codes`"):
        read_rows("builtin:mini", ["codes"], 5)
    with pytest.raises(UsageError, match="no built-in data set `builtin:maxi`"):
        read_rows("builtin:maxi", None, 5)
    with pytest.raises(UsageError, match="no data set `nothing`"):
        read_dataset("nothing")


@pytest.mark.parametrize("name", ["nothing.jsonl", "data/nothing.JSONL", "data/p.txt", "a/b.csv?column=q"])
def test_a_mistyped_file_is_no_hub_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(UsageError) as caught:
        read_dataset(name)
    assert str(caught.value.message) == f"there is no data set `{name}`: no such file"


def test_a_part_of_what_is_one_is_refused(tmp_path: Path) -> None:
    table_files(tmp_path)
    datasets.Dataset.from_list(PAIRS).save_to_disk(tmp_path / "one")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("t.json?split=train", "t.csv?config=x", "p.jsonl?split=test", "one?split=train", "saved?config=x"):
        part = name.partition("?")[2]
        with pytest.raises(UsageError, match=rf"`\?{part}` chooses among several, and `.*` is one"):
            read_dataset(f"{tmp_path}/{name}")
    assert len(read_dataset(f"{tmp_path}/saved?split=train")) == 2


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert [row.prompt for row in read_dataset(str(text))] == ["one", "two"]
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "a", "category": "x", "max_new_tokens": 3}\n{"turns": ["b", "c"]}\n')
    assert [(r.prompt, r.category, r.max_new_tokens) for r in read_dataset(str(rows))] == [
        ("a", "x", 3),
        ("b", None, None),
    ]


def table_files(folder):
    json_file, csv_file, parquet_file = folder / "t.json", folder / "t.csv", folder / "t.parquet"
    json_file.write_text(json.dumps(PAIRS))
    csv_file.write_text("question,topic\nHow many?,sums\nWhere?,places\n")
    datasets.Dataset.from_list(PAIRS).to_parquet(parquet_file)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(PAIRS)}).save_to_disk(folder / "saved")
    return [json_file, csv_file, parquet_file, folder / "saved"]


def test_tables_and_saved_folders(tmp_path: Path) -> None:
    for path in table_files(tmp_path):
        rows = read_dataset(f"{path}?task=topic")
        assert [(row.prompt, row.category) for row in rows] == [("How many?", "sums"), ("Where?", "places")]
        assert [row.prompt for row in read_dataset(f"{path}?column=topic")] == ["sums", "places"]


def test_a_preset_takes_a_file_and_fills_its_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (row,) = read_dataset(f"gsm8k:{path}")
    assert (row.prompt, row.category) == ("Question: 1 + 1?\nAnswer:", "gsm8k")
    path.write_text('{"task_id": 3, "text": "Add.", "test_list": ["assert a", "assert b"]}\n')
    (row,) = read_dataset(f"mbpp:{path}")
    assert "Add. Your code" in row.prompt
    assert "assert a\nassert b" in row.prompt
    assert row.id == 3
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]}\n')
    (row,) = read_dataset(f"spec-bench:{path}")
    assert (row.prompt, row.category, row.id) == ("Compose.", "writing", 81)


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"topic": "sums"}]))
    with pytest.raises(UsageError, match="has no `prompt`, but `topic`"):
        read_dataset(str(path))
    with pytest.raises(UsageError, match="has no column `question`"):
        read_dataset(f"gsm8k:{path}")
    with pytest.raises(UsageError, match="is not understood"):
        read_dataset(f"{path}?colum=topic")
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": " "}]))
    with pytest.raises(UsageError, match=r"row 2 of .*: the prompt is empty"):
        read_dataset(f"{path}?empty=refuse")


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_, **__) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        RunError, match=r"`gsm8k` could not be read: Couldn't reach 'openai/gsm8k' on the Hub$"
    ) as caught:
        read_dataset("gsm8k")
    assert "PRESET:FILE" in not_none(caught.value.hint)


def test_what_does_not_fit_is_left_out_and_said() -> None:
    rows = [PromptRow(0, "abc", category="x"), PromptRow(1, "a" * 40, id="long"), PromptRow(2, "ab", max_new_tokens=50)]
    encode = LetterTokenizer().encode
    workload = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=20), 32)
    assert [request.row.index for request in workload.requests] == [0]
    assert [(one.index, one.id, one.prompt_tokens, one.max_new_tokens) for one in workload.skipped] == [
        (1, "long", 40, 20),
        (2, None, 2, 50),
    ]
    assert "2 prompts were left out" in not_none(workload.notice)
    left_out = {"index": 1, "id": "long", "prompt_tokens": 40, "max_new_tokens": 20}
    assert WorkloadResult.of(workload)["skipped"][0] == left_out
    with pytest.raises(UsageError, match="no prompt of `mine` fits the context of `10` tokens"):
        tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(max_new_tokens=20), 10)


def test_a_row_brings_its_own_seed_and_length() -> None:
    rows = [PromptRow(4, "abc", seed=9, max_new_tokens=3), PromptRow(5, "abc")]
    encode = LetterTokenizer().encode
    found = tokenize(rows, "mine", lambda row: encode(row.prompt), SamplingParams(seed=1), 512).requests
    assert [(r.params.seed, r.params.index, r.params.max_new_tokens) for r in found] == [(9, 0, 3), (1, 5, 128)]


def test_speed_benchs_rows_have_categories_and_its_placeholders_are_refused(tmp_path: Path) -> None:
    """Public files name a source in place of most prompts; prepared ones hold `messages`."""
    file = tmp_path / "qualitative.jsonl"
    rows: list[dict[str, object]] = [
        {"question_id": "a", "category": "coding", "sub_category": "x", "turns": ["Sort a list.", "Now backwards."],
         "source": "s", "src_id": "1", "difficulty": "hard", "multiturn": True},
        {"question_id": "b", "category": "math", "messages": [{"role": "user", "content": "How much is 2 + 3?"}]},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)))
    assert counts(read_dataset(f"speed-bench:{file}")) == {"coding": 1, "math": 1}
    held = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows += [{"question_id": "c", "category": "stem", "turns": ["So far so good.", f"{held} (cais/hle)"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    for name in (f"speed-bench:{file}", str(file)):
        with pytest.raises(UsageError, match=r"1 of 3 rows of .* holds SPEED-Bench's placeholder, no prompt \(stem\)"):
            read_dataset(name)


def test_a_column_groups_the_prompts(tmp_path: Path) -> None:
    file = tmp_path / "maths.jsonl"
    rows = [{"problem": f"How much is {n}?", "level": n % 3, "subject": "sums"} for n in range(9)]
    file.write_text("\n".join(map(json.dumps, rows)))
    name = f"math-500:{file}"
    assert counts(read_rows(name, None, 9)) == {"math-500": 9}
    assert counts(read_rows(name, ["0", "2"], 4, False, "level")) == {"0": 2, "2": 2}
    with pytest.raises(UsageError, match="`--by topic`: no prompt has a topic"):
        read_rows(name, None, 9, False, "topic")
    with pytest.raises(UsageError, match="no prompt has a category"):
        read_rows(str(file) + "?column=problem", None, 9, False, "category")


def test_random_tokens_are_noticed(tmp_path: Path) -> None:
    """Words of real prompts recur; those of random tokens hardly do."""
    tokenizer, chance = Tokenizer(load_tokenizer("builtin:target")), Random(0)
    texts = [tokenizer.decode([chance.randrange(tokenizer.num_tokens) for _ in range(128)]) for _ in range(8)]
    file = tmp_path / "random.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    assert any("look like random tokens" in notice for notice in read_prompts(str(file)).notices)
    for name in ("builtin:mini", "builtin:stories"):
        assert not any("random tokens" in notice for notice in read_some(name, None, 10_000).notices)
