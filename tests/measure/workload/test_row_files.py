"""Files of rows in every form that people have: read, or refused with a sentence that says what to type."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from typed import not_none

from specdec_cli import files
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.measure.workload import tables
from specdec_cli.measure.workload.dataset import is_at_hand, read_dataset, read_prompt_file

ROWS = [{"prompt": "Où est-il ?", "category": 7, "id": 1}, {"prompt": 'A "cat", or;\tnot', "category": 8, "id": 2}]
AS_READ = [("Où est-il ?", "7", 1), ('A "cat", or;\tnot', "8", 2)]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
QUOTED = ['"Où est-il ?"', '"A ""cat"", or;\tnot"']


def table(delimiter: str, newline: str = "\n") -> str:
    head = [["prompt", "category", "id"], *([text, str(7 + i), str(1 + i)] for i, text in enumerate(QUOTED))]
    return "".join(delimiter.join(cells) + newline for cells in head)


def parquet_of(rows: list[dict[str, Any]], folder: Path) -> bytes:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "made")
    return (folder / "made").read_bytes()


def arrow_of(rows: list[dict[str, Any]], is_file: bool) -> bytes:
    sink, made = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, made.schema) as writer:
        writer.write_table(made)
    return sink.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def put(folder: Path, name: str, data: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def both(name: str) -> list[tuple[str, str | None, Any]]:
    """The rows, which both ways of naming a file must give alike."""
    found = read_dataset(name)
    assert read_prompt_file(name) == found
    return [(row.prompt, row.category, row.id) for row in found.rows]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


FORMS: dict[str, Any] = {
    "rows.jsonl": JSONL,
    "rows.ndjson": JSONL.replace("\n", "\r\n"),
    "rows.json": json.dumps(ROWS, indent=1),
    "lines.json": JSONL,
    "list.jsonl": json.dumps(ROWS),
    "list.txt": json.dumps(ROWS),
    "data.json": json.dumps({"version": "1.1", "data": ROWS}),
    "no_suffix": JSONL,
    "rows.csv": table(","),
    "semicolon.csv": table(";"),
    "tab.csv": table("\t"),
    "bar.csv": table("|"),
    "excel.csv": "sep=;\r\n" + table(";", "\r\n"),
    "marked.csv": "\ufeff" + table(";"),
    "rows.tsv": table("\t"),
    "rows.TSV": table("\t"),
    "macintosh.csv": table(";", "\r"),
    "mixed_ends.csv": table(",", "\r") + "\n",
    "macintosh.jsonl": JSONL.replace("\n", "\r"),
    "blank.csv": table(",").replace("\n", "\n\n,,\n"),
    "marked.jsonl": "\ufeff" + JSONL,
    "utf16.jsonl": JSONL.encode("utf-16"),
    "utf16_big.csv": b"\xfe\xff" + table(";").encode("utf-16-be"),
    "utf32.json": json.dumps(ROWS).encode("utf-32"),
    "rows.jsonl.gz": gzip.compress(JSONL.encode()),
    "two.jsonl.gz": b"".join(gzip.compress(line.encode()) for line in JSONL.splitlines(keepends=True)),
    "rows.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "rows.csv.gz": gzip.compress(table(";").encode()),
    "rows.tsv.bz2": bz2.compress(table("\t").encode()),
    "rows.jsonl.xz": lzma.compress(JSONL.encode()),
    "rows.jsonl.zst": zstd(JSONL.encode()),
    "two.jsonl.zst": b"".join(zstd(line.encode()) for line in JSONL.splitlines(keepends=True)),
    "rows.csv.zst": zstd(table(",").encode()),
    "misnamed.jsonl": gzip.compress(JSONL.encode()),
}


@pytest.mark.parametrize("name", FORMS)
def test_point_7_a_file_in_every_form_gives_the_same_rows(tmp_path: Path, name) -> None:
    assert both(put(tmp_path, name, FORMS[name])) == AS_READ


def test_tables_of_arrow_give_the_same_rows(tmp_path: Path) -> None:
    for name, data in {
        "rows.parquet": parquet_of(ROWS, tmp_path),
        "misnamed.bin": parquet_of(ROWS, tmp_path),
        "file.arrow": arrow_of(ROWS, is_file=True),
        "stream.arrow": arrow_of(ROWS, is_file=False),
    }.items():
        assert both(put(tmp_path, name, data)) == AS_READ


def test_lines_packed_and_not(tmp_path: Path) -> None:
    text = "one\n\n[INST] two [/INST]\n"
    texts: dict[str, Any] = {
        "p.txt": text,
        "p.txt.gz": gzip.compress(text.encode()),
        "u.txt": text.encode("utf-16"),
        "m.txt": text.replace("\n", "\r"),
    }
    for name, data in texts.items():
        assert [prompt for prompt, _, _ in both(put(tmp_path, name, data))] == ["one", "[INST] two [/INST]"]
    assert [prompt for prompt, _, _ in both(put(tmp_path, "strings.json", '["a", "b"]'))] == ["a", "b"]
    assert [prompt for prompt, _, _ in both(put(tmp_path, "one.json", '{\n "prompt": "a"\n}'))] == ["a"]


def test_a_question_without_a_preset_and_other_values_of_ids(tmp_path: Path) -> None:
    rows = '{"question": "Q", "category": 3, "question_id": 81}\n{"question": "R", "category": 2.5, "id": 1.5}\n'
    assert both(put(tmp_path, "q.jsonl", rows)) == [("Q", "3", 81), ("R", "2.5", "1.5")]
    found = put(tmp_path, "q.csv", "question,category,id\nQ,3,81\nR,,007\nS,x,\n")
    assert both(found) == [("Q", "3", 81), ("R", None, "007"), ("S", "x", None)]
    numbered = read_dataset(put(tmp_path, "n.csv", "prompt,max_new_tokens,seed\na,5,\nb,,3\n")).rows
    assert [(row.max_new_tokens, row.seed) for row in numbered] == [(5, None), (None, 3)]
    seeded = read_dataset(put(tmp_path, "s.jsonl", '{"prompt": "a", "seed": "a task to begin with"}'))
    assert seeded.rows[0].seed is None
    assert "`seed` of" in seeded.notices[0]


def test_long_cells_are_read(tmp_path: Path) -> None:
    assert len(both(put(tmp_path, "long.csv", f"prompt\n{'a ' * 200_000}\n"))[0][0]) == 400_000


REFUSED: dict[str, Any] = {
    "cut.jsonl.gz": (gzip.compress(JSONL.encode() * 9)[:-9], "cannot be unpacked", "download it again"),
    "bad.jsonl.gz": (gzip.compress(os.urandom(3000))[:500] + b"junk" * 9, "cannot be unpacked", "download it again"),
    "plain.jsonl.gz": (JSONL, "is not packed as `.gz` says", "rename it"),
    "cut.jsonl.zst": (zstd(JSONL.encode())[:-5], "cannot be unpacked", "download it again"),
    "plain.jsonl.zst": (JSONL, "is not packed as `.zst` says", "rename it"),
    "bad.xz": (lzma.compress(JSONL.encode())[:-9], "cannot be unpacked", "download it again"),
    "rows.zip": (b"PK\x03\x04rest", "is a zip archive", "unpack it"),
    "rows.tar.gz": (gzip.compress(b"a" * 257 + b"ustar"), "is a tar archive", "unpack it"),
    "latin.csv": ("question\ncafé\n".encode("latin-1"), "is not valid UTF-8: byte `12`, in line 2", "> utf8.csv"),
    "latin.jsonl": ('{"prompt": "é"}'.encode("cp1252"), "is not valid UTF-8", "> utf8.jsonl"),
    "latin.csv.gz": (gzip.compress("q\né\n".encode("latin-1")), "is not valid UTF-8", "gzip -dc"),
    "utf16.txt": ("ab".encode("utf-16-le"), "holds a NUL byte at `1`", "byte-order mark"),
    "cells.csv": ("question,id\nA, or B,1\n", "line 2 has 3 cells, and the header names 2", "double quotes"),
    "quote.csv": ('question,id\n"A,1\nB,2\n', "is not in order", "double the quotes"),
    "twice.csv": ("prompt,prompt\na,b\n", "two columns `prompt`", "name of its own"),
    "headless.csv": ("Once upon a time\nA dog\n", "has no `prompt`, but `Once upon a time`", "CSV file's first line"),
    "header.csv": ("prompt,id\n", "has no prompt", "one prompt per line"),
    "empty.csv?empty=refuse": ("question,id\nA,1\n,2\n", "row 2 of", "leave out `empty=refuse`"),
    "null.jsonl?empty=refuse": (
        '{"prompt": "a"}\n{"prompt": null}\n',
        "null.jsonl:2: the prompt must be a string, not null",
        "leave out `empty=refuse`",
    ),
    "columns.json": (json.dumps({"prompt": {"0": "a"}}), "holds columns, not rows: prompt", 'orient="records"'),
    "lists.json": (json.dumps({"prompt": ["a"], "id": [1]}), "holds columns, not rows", 'orient="records"'),
    "several.json": (
        json.dumps({"a": [{"prompt": "x"}], "b": [{"prompt": "y"}]}),
        "several lists of rows: a, b",
        "own",
    ),
    "broken.json": ('[{"prompt": "a"},\n {"prompt"\n', "broken.json:3: not JSON", "a list of rows"),
    "page.jsonl": ("<!DOCTYPE html><p>404", "is a web page", "raw file"),
    "page.parquet": ("<html>", "is a web page", "raw file"),
    "cut.parquet": (b"PAR1" + b"x" * 40, "is not a whole Parquet file", "download it again"),
    "cut.arrow": (b"ARROW1" + b"x" * 40, "is not a whole Arrow file", "download it again"),
    "pointer.parquet": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "git-lfs pointer",
        "git lfs pull",
    ),
    "picture": (b"\x89PNG\r\n\x1a\n\0\0\0", "is no text but binary data", "file of text"),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0", "is a `.png` file, from which no prompts are read", "JSONL"),
    "recipe.yaml": ("target: {model: x}\n", "is a `.yaml` file, from which no prompts are read", "JSONL"),
    "weights.safetensors": (b"\0" * 9, "is a `.safetensors` file", "JSONL"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_in_the_same_words(tmp_path: Path, name) -> None:
    data, message, hint = REFUSED[name]
    name, _, choice = name.partition("?")
    path = put(tmp_path, name, data)
    for read in (read_dataset, read_prompt_file):
        with pytest.raises(UsageError) as caught:
            read(f"{path}?{choice}" if choice else path)
        assert message in caught.value.message
        assert hint in not_none(caught.value.hint)
        assert "\n" not in caught.value.message


def test_the_conversion_that_a_hint_names_makes_rows_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "latin one.csv", "question;id\ncafé;1\n".encode("cp1252"))
    with pytest.raises(UsageError) as caught:
        read_dataset("latin one.csv")
    command = not_none(caught.value.hint).rpartition(": ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert both("utf8.csv") == [("café", None, 1)]


@pytest.mark.parametrize("choice", ["", "?empty=skip"])
def test_rows_without_a_prompt_are_left_out(tmp_path: Path, choice: str) -> None:
    name = put(tmp_path, "t.csv", "question,text\nA,x\n,y\n  ,z\nB,\n") + choice
    assert [prompt for prompt, _, _ in both(name)] == ["A", "B"], "no row falls back to another column"
    assert "2 rows without a prompt left out: row 2 of" in read_dataset(name).notices[0]
    rows = '{"prompt": null}\n{}\n{"turns": []}\n[]\n{"id": 3}\n{"prompt": "a"}\n{"turns": [" "]}\n'
    name = put(tmp_path, "t.jsonl", rows) + choice
    assert [prompt for prompt, _, _ in both(name)] == ["a"]
    assert "6 rows without a prompt left out: " in read_dataset(name).notices[0]
    with pytest.raises(UsageError, match="every row is empty"):
        both(put(tmp_path, "none.jsonl", '{"prompt": ""}\n') + choice)


@pytest.mark.parametrize("row", ['{"prompt": null}', "{}", '{"turns": []}', "[]", '{"prompt": " "}'])
def test_rows_without_a_prompt_are_refused_where_that_is_asked_for(tmp_path: Path, row: str) -> None:
    name = put(tmp_path, "t.jsonl", f'{{"prompt": "a"}}\n{row}\n')
    with pytest.raises(UsageError, match=r"t\.jsonl:2: "):
        both(f"{name}?empty=refuse")
    with pytest.raises(UsageError, match=r"`\?empty=yes` is not understood"):
        both(f"{name}?empty=yes")


def test_a_row_that_lacks_a_value_of_a_presets_template_is_left_out(tmp_path: Path) -> None:
    path = put(tmp_path, "g.jsonl", '{"question": "1 + 1?"}\n{"question": null}\n{"question": " "}\n')
    found = read_dataset(f"gsm8k:{path}")
    assert [row.prompt for row in found.rows] == ["Question: 1 + 1?\nAnswer:"]
    assert "2 rows without a prompt left out" in found.notices[0]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path, "rows.jsonl", JSONL)
    assert both("~/rows.jsonl") == AS_READ
    assert [task for _, task, _ in both("~/rows.jsonl?task=id")] == ["1", "2"]
    assert is_at_hand("~/rows.jsonl")
    put(tmp_path, "gsm8k.jsonl", '{"question": "1 + 1?"}\n')
    assert read_dataset("gsm8k:~/gsm8k.jsonl").rows[0].prompt == "Question: 1 + 1?\nAnswer:"
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "~odd", "one\n")
    assert files.given_path("~odd") == Path("~odd"), "a file of that very name comes first"
    with pytest.raises(UsageError, match="begins with a home folder that does not exist"):
        files.given_path("~nobody-at-all/x")


def test_pipes_are_read_and_what_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_SECONDS", 0.3)
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe without a writer"):
        read_dataset(str(pipe))
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(JSONL.encode() * 5000)))
    writer.start()
    assert len(read_prompt_file(str(pipe)).rows) == 10_000
    writer.join()
    with pytest.raises(UsageError, match="is a device or a socket"):
        read_dataset("/dev/zero")
    with pytest.raises(UsageError, match="has no prompt"):
        read_dataset("/dev/null")
    for address in ("https://example.com/rows.jsonl", "hf://datasets/openai/gsm8k", "s3://bucket/rows"):
        with pytest.raises(UsageError, match="is an address, and files are read from this disk"):
            read_dataset(address)
    with pytest.raises(UsageError, match="`-` is not a data set"):
        read_dataset("-")
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompt_file(str(tmp_path))


BOMB = b"a\n" * (1 << 19)


@pytest.mark.parametrize(
    ("pack", "name"),
    [
        (gzip.compress, "b.txt.gz"),
        (zstd, "b.txt.zst"),
        (bz2.compress, "b.txt.bz2"),
        (lzma.compress, "b.txt.xz"),
        (lambda data: gzip.compress(data) * 4, "members.txt.gz"),
    ],
)
def test_49_22_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack, name: str
) -> None:
    """Reading stops within a chunk of the limit: 32 times the file, and never less than a floor for small ones."""
    monkeypatch.setattr(files, "_MIN_UNPACKED_BYTES", 1 << 10)
    monkeypatch.setattr(files, "_CHUNK", 1 << 10)
    path = put(tmp_path, name, pack(BOMB))
    limit, read = max(32 * Path(path).stat().st_size, 1 << 10), []
    until = files._read_until
    monkeypatch.setattr(files, "_read_until", lambda read_some, *rest: until(_counted(read_some, read), *rest))
    for reader in (read_dataset, read_prompt_file):
        read.clear()
        with pytest.raises(UsageError, match=r"unpacks to more than \d+ MiB"):
            reader(path)
        packed, unpacked = Path(path).stat().st_size, sum(read)
        assert unpacked <= packed + limit + (1 << 10)


def _counted(read, counts: list[int]):
    def counted(size: int) -> bytes:
        part = read(size)
        counts.append(len(part))
        return part

    return counted


def test_49_22_repeated_prompts_pack_well_and_are_no_bomb(tmp_path: Path) -> None:
    """A load test's one prompt many times: 1000 times its packed size, and small."""
    assert len(read_dataset(put(tmp_path, "same.txt.gz", gzip.compress(b"Once upon a time\n" * 20_000))).rows) == 20_000


def test_49_22_a_file_or_a_pipe_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    path = Path(put(tmp_path, "rows.jsonl", ""))
    os.truncate(path, 1 << 40)  # takes no room on disk
    with pytest.raises(UsageError, match="holds more than 1 MiB"):
        read_dataset(str(path))
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"yes > '{tmp_path}/pipe'"]) as writer:
        with pytest.raises(UsageError, match="holds more than 1 MiB"):
            read_dataset(str(tmp_path / "pipe"))
        writer.terminate()
    assert writer.returncode


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("r.txt", "a\n" * 40, "has more than 32 rows"),
        ("r.csv", "prompt\n" + "a\n" * 40, "has more than 32 rows"),
        ("r.jsonl", '{"prompt": "a"}\n' * 40, "has more than 32 rows"),
        ("r.json", json.dumps(["a"] * 40), "has more than 32 rows"),
        ("deep.json", json.dumps([{"prompt": "a", "other": [[]] * 140}]), "at most 130 are read"),
        ("deep.txt", json.dumps([[]] * 140), "at most 130 are read"),
    ],
)
def test_49_22_small_values_that_would_take_much_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.setattr(tables, "_MOST_ROWS", 32)
    monkeypatch.setattr(tables, "_MOST_VALUES", 130)
    with pytest.raises(UsageError, match=said):
        read_dataset(put(tmp_path, name, text))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_49_22_a_table_that_unpacks_to_very_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A dictionary holds a long text once, and every row has it."""
    text, path = "a" * 10_000, str(tmp_path / f"r.{kind}")
    column = pa.DictionaryArray.from_arrays([0] * 3000, [text])
    table = pa.table({"prompt": column.cast("string") if kind == "parquet" else pa.array([text] * 3000)})
    if kind == "parquet":
        parquet.write_table(table, path)
        assert Path(path).stat().st_size < 10_000
    else:
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert len(read_dataset(path).rows) == 3000
    monkeypatch.setattr(tables, "MAX_BYTES", 10 << 20)
    with pytest.raises(UsageError, match="unpacks to more than 10 MiB"):
        read_dataset(path)


README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
  - {split: test, path: socratic/test-*}
---
"""


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """The hub's own folder: two configs of two splits."""
    folder = tmp_path / "gsm8k"
    for config in ("main", "socratic"):
        for split in ("train", "test"):
            rows = [{"question": f"{config} {split}?", "answer": "4"}]
            put(folder, f"{config}/{split}-00000-of-00001.parquet", parquet_of(rows, tmp_path))
    put(folder, "README.md", README)
    return folder


def prompts(name: str) -> list[str]:
    return [row.prompt for row in read_dataset(name).rows]


def test_point_7_a_preset_takes_the_hubs_own_folder(gsm8k, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ["Question: main test?\nAnswer:"]
    assert prompts(f"gsm8k:{gsm8k}") == want
    assert read_dataset(f"gsm8k:{gsm8k}").notices == []
    monkeypatch.chdir(gsm8k.parent)
    assert prompts("gsm8k:./gsm8k") == want
    assert prompts("gsm8k:./gsm8k/main") == want
    assert prompts("gsm8k:gsm8k?config=socratic&split=train") == ["Question: socratic train?\nAnswer:"]
    (gsm8k / "README.md").unlink()
    assert prompts("gsm8k:./gsm8k") == want, "folders tell the configs apart where the README was not downloaded"
    with pytest.raises(UsageError, match="has no effect on a preset"):
        read_dataset("gsm8k:./gsm8k?column=answer")
    with pytest.raises(UsageError, match="no such file or folder"):
        read_dataset("gsm8k:./nothing")


def test_a_folder_of_several_configs_or_splits_says_what_to_type(gsm8k, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(gsm8k.parent)
    with pytest.raises(UsageError, match="has several configs") as caught:
        read_dataset("./gsm8k")
    hint = caught.value.hint
    assert prompts(not_none(hint).rpartition("--dataset ")[2].strip("'")) == ["main test?"]
    found = read_dataset("./gsm8k?config=socratic")
    assert [row.prompt for row in found.rows] == ["socratic test?"]
    assert "split `test` of `./gsm8k` is read, which has train, test" in found.notices
    assert prompts("./gsm8k?config=main&split=train") == ["main train?"]
    for choice, said in (("config=other", "has no config `other`"), ("config=main&split=dev", "has no split `dev`")):
        with pytest.raises(UsageError, match=said):
            read_dataset(f"./gsm8k?{choice}")
    (gsm8k / "README.md").unlink()
    with pytest.raises(UsageError, match="files in several folders, `main`, `socratic`") as caught:
        read_dataset("./gsm8k")
    assert prompts(not_none(caught.value.hint).rpartition("--dataset ")[2]) == ["main test?"]


def test_a_folder_of_loose_files_is_their_rows(tmp_path: Path) -> None:
    put(tmp_path, "loose/a.jsonl", '{"prompt": "a"}\n')
    put(tmp_path, "loose/b.jsonl.gz", gzip.compress(b'{"turns": ["b", "c"]}\n'))
    assert sorted(prompts(str(tmp_path / "loose"))) == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no files of rows"):
        read_dataset(str(tmp_path / "empty"))


def test_a_hub_with_several_configs_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def several(*_, **__) -> None:
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']\n")

    monkeypatch.setattr(datasets, "load_dataset", several)
    with pytest.raises(SpecdecError, match="has several configs") as caught:
        read_dataset("openai/gsm8k")
    assert caught.value.hint == "choose one of main, socratic: --dataset 'openai/gsm8k?config=main'"


@pytest.mark.slow
def test_49_22_a_folder_is_read_where_nothing_can_be_written_at_home(tmp_path: Path) -> None:
    """No folder can be made below a device, not even by root: the stand-in for a read-only home."""
    put(tmp_path, "train.jsonl", JSONL)
    program = (
        "import sys; from specdec_cli.measure.workload.dataset import read_dataset\n"
        "from specdec_cli.report.plot import check_available\n"
        "check_available('--plot'); import matplotlib.pyplot\n"
        "print(len(read_dataset(sys.argv[1]).rows))"
    )
    home = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/home/.cache", "XDG_CONFIG_HOME": "/dev/null/config"}
    known = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "MPL"))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=known | home, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
