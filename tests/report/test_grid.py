"""Tables at 40, 80 and 120 columns: no word is broken, nothing is lost, from made-up results of every report."""

import io
from collections.abc import Sequence

import pytest
from rich.text import Text

from specdec_cli.report import bench, compare_drafts, result, sweep_k
from specdec_cli.report.bench import AGAINST_COLUMNS, ARM_COLUMNS, TASK_COLUMNS
from specdec_cli.report.columns import PageTable, TableColumn
from specdec_cli.report.grid import Grid
from specdec_cli.report.page import open_page, wraps
from specdec_cli.report.result import grid_of
from specdec_cli.report.table import Column, run_table


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Grid:
    return grid_of(PageTable("", heads, rows))


def heads_of(columns: Sequence[TableColumn], num: int | None = None) -> list[str]:
    return [column.head for column in columns[:num]]


HEADS: dict[str, Sequence[str]] = {
    "bench arms": heads_of(ARM_COLUMNS),
    "bench engines": heads_of(AGAINST_COLUMNS),
    "bench tasks": heads_of(TASK_COLUMNS),
    "every k": heads_of(sweep_k.DEPTH_COLUMNS),
    "batch sizes": heads_of(sweep_k.SIZE_COLUMNS),
    "server": ("task", "prompts", "output tokens", "first text ms", "per token ms", "answer ms"),
    "drafts": ("draft", "k", "memory", "cost", "acceptance length", "speed-up (95 %)", "share: draft/verify/rest"),
    "audit": ("mode", "k", "batch", "prompts", "tokens", "mismatches", "near ties"),
    "no head": ("", "", ""),
}
CELLS = ["builtin:draft", "12", "1.52× (1.40 to 1.61)", "with the draft", "–", "123,456.7", "recommended by 2 %"]


def drawn(table, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    open_page(stream, colour=False).print(table)
    return stream.getvalue()


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", HEADS)
def test_a_table_breaks_no_word_and_loses_no_column(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = HEADS[name]
    rows = [[CELLS[(row + i) % len(CELLS)] for i in range(len(heads))] for row in range(4)]
    out = drawn(table_of(heads, rows), width, monkeypatch)
    words = out.replace(":", " ").split()
    assert all(len(line) <= width for line in out.splitlines())
    for text in (*heads, *(cell for row in rows for cell in row)):
        assert all(word in words for word in text.replace(":", " ").split()), text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_of_a_run_fits(width: int, meters, monkeypatch: pytest.MonkeyPatch) -> None:
    out = drawn(
        run_table([Column("with builtin:draft", 4, meters), Column("without a draft", 0, meters)]), width, monkeypatch
    )
    assert all(len(line) <= width for line in out.splitlines())
    for word in ("acceptance", "accepted", "draft", "verify", "overhead", "builtin:draft", "without"):
        assert word in out.split() or f"{word}:" in out.split()


@pytest.fixture
def meters():
    from specdec_cli.engine.meter import Meter

    return Meter(num_tokens=128)


def test_rows_stand_below_each_other_where_columns_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    out = drawn(
        table_of(("draft", "speed-up (95 %)"), [["a-name-of-thirty-five-characters-xx", "1.5×"]]), 40, monkeypatch
    )
    assert out.splitlines() == ["draft:", "  a-name-of-thirty-five-characters-xx", "  speed-up (95 %): 1.5×"]


def test_a_wide_terminal_has_columns_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    out = drawn(table_of(("draft", "speed-up"), [["ngram", "1.5×"]]), 80, monkeypatch)
    assert any("ngram" in line and "1.5×" in line for line in out.splitlines())


def test_a_table_may_be_drawn_at_several_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Grid("one", "two")
    table.add_row(Text("some words of a cell " * 3), "x")
    narrow, wide = drawn(table, 40, monkeypatch), drawn(table, 120, monkeypatch)
    assert len(narrow.splitlines()) > len(wide.splitlines())
    assert drawn(table, 40, monkeypatch) == narrow


def test_a_long_note_wraps_between_words_where_there_is_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "a note of many words that no narrow terminal shows on one line, as reports have them"
    for width, most in ((40, 40), (80, 80)):
        monkeypatch.setenv("COLUMNS", str(width))
        stream = io.StringIO()
        open_page(stream, colour=False).print(sentence, soft_wrap=True)
        lines = stream.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == sentence
        assert max(map(len, lines)) <= most
    monkeypatch.delenv("COLUMNS")
    stream = io.StringIO()
    open_page(stream, colour=False).print(sentence * 3, soft_wrap=True)
    assert len(stream.getvalue().splitlines()) == 1
    assert not wraps(stream)


TERMINAL = {
    "bench": (heads_of(ARM_COLUMNS, 7), ["draft", "12,497.8", "107.7", "51.7%", "13.55", "12.07×", "11.92–12.05"]),
    "every k": (
        heads_of(sweep_k.DEPTH_COLUMNS, 7),
        ["12", "13.55", "12.07×", "1.92–12.05", "12.07×", "1.92–12.05", "recommended"],
    ),
    "trees": (
        heads_of(sweep_k.TREE_COLUMNS, 8),
        ["4,2,1,1", "64", "3.55", "2.07×", "1.92–2.05", "2.07×", "1.92–2.05", "recommended"],
    ),
    "drafts": (
        heads_of(compare_drafts.DRAFT_COLUMNS, 8),
        ["builtin:draft", "12", "2.07×", "1.92–2.05", "51.7%", "3.55", "0.123", "1.2 MB"],
    ),
}


@pytest.mark.parametrize("name", TERMINAL)
def test_49_25_80_columns_have_room_for_the_tables_of_the_core_commands(name: str, monkeypatch) -> None:
    """With cells as long as they get: one table, and no name, figure or interval wraps inside its cell."""
    heads, cells = TERMINAL[name]
    out = drawn(table_of(heads, [cells, ["other", *cells[1:]]]), 80, monkeypatch)
    assert out.count("────") > 0
    assert len([line for line in out.splitlines() if set(line.strip()) == {"─"}]) == 1, "one table"
    [row] = [line for line in out.splitlines() if line.split()[:1] == [cells[0]]]
    assert all(cell in row for cell in cells)


DRAFT_CELLS = ["ngram:max=4,min=2", "12", "1.97×", "1.92–2.05", "51.7%", "3.55", "0.123", "1.2 MB"]


def test_columns_that_do_not_fit_stand_in_a_second_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(
        heads_of(compare_drafts.DRAFT_COLUMNS, 8), [["RedHatAI/Qwen3-8B-speculator", *DRAFT_CELLS[1:]], DRAFT_CELLS]
    )
    lines = [line for line in drawn(table, 80, monkeypatch).splitlines() if line.strip() and "─" not in line]
    names = ["draft", "RedHatAI/Qwen3-8B-speculator", "ngram:max=4,min=2"]
    assert [line.split()[0] for line in lines] == names * 2
    assert all("1.97×" in line and "1.92–2.05" in line for line in lines[1:3]), "the measured speeds are together"
    assert len(drawn(table, 120, monkeypatch).split("accepted")) == 2, "one table where there is room"
    assert "draft: ngram" in drawn(table, 30, monkeypatch), "a list where two tables do not fit"


def test_both_tables_have_the_columns_that_tell_the_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("A", "B", "A over B (95 %)", "P(A is faster)")
    rows = [[a, b, "2.28× (0.94–3.62)", "0.751"] for a, b in (("draft-one", "ngram"), ("draft-one", "other"))]
    lines = [line.split() for line in drawn(table_of(heads, rows), 32, monkeypatch).splitlines()]
    shown = [line[:2] for line in lines if line[:1] == ["draft-one"]]
    assert shown == [["draft-one", "ngram"], ["draft-one", "other"]] * 2
    assert [] in lines, "an empty line between them"


@pytest.mark.parametrize("width", [30, 40])
def test_a_percent_sign_stays_with_its_number(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ("a draft of a long name", "speed-up (95 %)", "more", "and more of it")
    out = drawn(table_of(heads, [["builtin:draft", "1.97× (1.92–2.05)", "x", "y"]]), width, monkeypatch)
    assert "(95 %)" in out


def test_numbers_stand_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a", "706.8", "–", "1.5× (1.4–1.6)"], ["数学 🐶", "1,497.8", "51.7%", "–"]]
    lines = drawn(table_of(("arm", "tokens/s", "accepted", "speed-up"), rows), 80, monkeypatch).splitlines()
    head, first, second = (Text(line) for line in lines if line.strip() and "─" not in line)
    ends = [[line[: line.plain.index(word) + len(word)].cell_len for word in words] for line, words in (
        (head, ("tokens/s", "accepted")), (first, ("706.8", "–")), (second, ("1,497.8", "51.7%")),
    )]  # fmt: skip
    assert ends[0] == ends[1] == ends[2]
    assert first.plain.index("1.5×") == head.plain.index("speed-up"), "intervals begin below each other"


@pytest.mark.parametrize("width", [40, 80])
def test_a_command_between_backticks_stays_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "`specdec bench --recipe /a/long/path/to/tuned.yaml --resume`"
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    open_page(stream, colour=False).print(Text(f"interrupted after nine passes: {command} continues"), soft_wrap=True)
    assert command in stream.getvalue()
    assert len(stream.getvalue().splitlines()) > 1


def test_every_report_draws_with_the_grid() -> None:
    assert {one.grid_of for one in (bench, compare_drafts, sweep_k)} == {grid_of}
    assert result.Grid is Grid
