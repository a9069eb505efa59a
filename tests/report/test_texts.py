"""Texts keep their order, whatever order their pieces come in."""

import io
import re
from collections.abc import Iterator

import pytest

from specdec_cli.report.pieces import Piece
from specdec_cli.report.texts import Texts, Writer


def pieces(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


def writer(colour: bool = False) -> tuple[io.StringIO, Writer]:
    stream = io.StringIO()
    return stream, Writer(stream, colour)


def test_one_text_streams_without_a_heading_and_ends_its_line() -> None:
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.feed(0, pieces("Once"))
    assert stream.getvalue() == "Once"
    texts.feed(0, pieces(" upon"))
    texts.end(0)
    assert stream.getvalue() == "Once upon\n"


def test_a_text_that_ends_its_line_gets_no_second_newline() -> None:
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.feed(0, pieces("end.\n"))
    texts.end(0)
    assert stream.getvalue() == "end.\n"


def test_an_empty_text_is_an_empty_line() -> None:
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.end(0)
    assert stream.getvalue() == "\n"


def test_later_texts_wait_for_their_turn() -> None:
    stream, sink = writer()
    texts = Texts([0, 1, 2], sink)
    texts.feed(2, pieces("c"))
    texts.feed(1, pieces("b"))
    texts.end(2)
    texts.feed(0, pieces("a"))
    assert stream.getvalue() == "### 1\na"
    texts.end(0)
    assert stream.getvalue() == "### 1\na\n\n### 2\nb"
    texts.feed(1, pieces("B"))
    texts.end(1)
    assert stream.getvalue() == "### 1\na\n\n### 2\nbB\n\n### 3\nc\n"


def orders(num_events: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """Every order in which places with so many events each can have them."""
    if not any(num_events.values()):
        yield ()
    for place, num in num_events.items():
        if num:
            for rest in orders(num_events | {place: num - 1}):
                yield (place, *rest)


@pytest.mark.parametrize(
    "chunks",
    [
        (["a", "A"], ["b", "B"], ["c", "C"]),
        (["a", ""], [], ["c\n"]),
        ([], [], []),
        ([""], ["b\n", ""], []),
        (["a"], ["b"], ["c"], ["d"]),
    ],
    ids=["of two steps", "one ends at once", "all end at once", "empty steps", "four"],
)
def test_point_1_texts_may_end_in_any_order(chunks) -> None:
    """`generate "A dog" "A cat"` where the cat's text ends while the dog's is on display, and every other order."""
    places = [3 * place for place in range(len(chunks))]
    ends = ["".join(some) if some and "".join(some).endswith("\n") else "".join(some) + "\n" for some in chunks]
    whole = "\n".join(f"### {place + 1}\n{text}" for place, text in zip(places, ends, strict=True))
    for order in orders({place: len(some) + 1 for place, some in enumerate(chunks)}):
        stream, sink = writer()
        texts, left = Texts(places, sink), [list(some) for some in chunks]
        ended: set[int] = set()
        for place in order:
            if left[place]:
                texts.feed(places[place], pieces(left[place].pop(0)))
            else:
                texts.end(places[place])
                ended.add(place)
            assert whole.startswith(stream.getvalue()), order
            first = next((place for place in range(len(chunks)) if place not in ended), None)
            if first is not None:
                given = "".join(chunks[first][: len(chunks[first]) - len(left[first])])
                assert stream.getvalue().endswith(given), f"{order}: text waits although its turn has come"
        assert stream.getvalue() == whole, order


def test_without_colour_accepted_tokens_stand_in_brackets() -> None:
    stream, sink = writer()
    for piece in (Piece("Once", "own"), Piece(" upon", "accepted"), Piece(" a", "accepted"), Piece("!")):
        sink.put(piece)
    assert stream.getvalue() == "Once[ upon][ a]!"


def test_colour_marks_kinds_and_leaves_plain_text_alone() -> None:
    stream, sink = writer(colour=True)
    sink.put(Piece("plain [red]text[/red]"))
    assert stream.getvalue() == "plain [red]text[/red]"
    sink.put(Piece("yes", "accepted"))
    assert stream.getvalue().endswith("\x1b[32myes\x1b[0m")


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def wrapped(text: list[str], monkeypatch: pytest.MonkeyPatch, width: int = 20, kind="text", colour=False) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    sink = Writer(stream, colour)
    for part in text:
        sink.put(Piece(part, kind))
        sink.flush()
    sink.end()
    return stream.getvalue()


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        (["Once upon a time, there was a little rabbit."], ["Once upon a time,", "there was a little", "rabbit."]),
        (["Once upon a ti", "me, the", "re was"], ["Once upon a time,", "there was"]),
        (["exactly twenty chars end"], ["exactly twenty chars", "end"]),
        (["one\n\n  two three four five six"], ["one", "", "  two three four", "five six"]),
        (["a word_that_is_longer_than_the_terminal here"], ["a word_that_is_longer_than_the_terminal", "here"]),
        (["数学" * 6], ["数学" * 5, "数学"]),
        (["tabs\tand\tmore words"], ["tabs\tand\tmore", "words"]),
        ([""], [""]),
    ],
)
def test_49_27_text_on_a_terminal_breaks_between_words(
    parts: list[str], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrapped(parts, monkeypatch).split("\n") == lines


def test_49_27_a_pipe_gets_the_text_byte_for_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream, sink = writer()
    for part in ("Once upon a time, there was", " a  \n\tlittle rab", "bit.  "):
        sink.put(Piece(part))
    sink.end()
    assert stream.getvalue() == "Once upon a time, there was a  \n\tlittle rabbit.  "


def test_49_27_colours_and_marks_stay_with_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = wrapped(["Once upon a time,", " there"], monkeypatch, kind="accepted")
    assert marked == "[Once upon a time,][\nthere]"
    coloured = wrapped(["Once upon a time,", " there"], monkeypatch, kind="accepted", colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == "Once upon a time,\nthere"
    assert coloured.count("\x1b[32m") == 5
