"""Texts keep their order, whatever order their pieces come in."""

import io

from specdec_cli.report.pieces import Piece
from specdec_cli.report.texts import Texts, Writer


def pieces(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


def writer(colour: bool = False) -> tuple[io.StringIO, Writer]:
    stream = io.StringIO()
    return stream, Writer(stream, colour)


def test_one_text_streams_without_a_heading_and_ends_its_line():
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.feed(0, pieces("Once"))
    assert stream.getvalue() == "Once"
    texts.feed(0, pieces(" upon"))
    texts.end(0)
    assert stream.getvalue() == "Once upon\n"


def test_a_text_that_ends_its_line_gets_no_second_newline():
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.feed(0, pieces("end.\n"))
    texts.end(0)
    assert stream.getvalue() == "end.\n"


def test_an_empty_text_is_an_empty_line():
    stream, sink = writer()
    texts = Texts([0], sink)
    texts.end(0)
    assert stream.getvalue() == "\n"


def test_later_texts_wait_for_their_turn():
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


def test_without_colour_accepted_tokens_stand_in_brackets():
    stream, sink = writer()
    for piece in (Piece("Once", "own"), Piece(" upon", "accepted"), Piece(" a", "accepted"), Piece("!")):
        sink.put(piece)
    assert stream.getvalue() == "Once[ upon][ a]!"


def test_colour_marks_kinds_and_leaves_plain_text_alone():
    stream, sink = writer(colour=True)
    sink.put(Piece("plain [red]text[/red]"))
    assert stream.getvalue() == "plain [red]text[/red]"
    sink.put(Piece("yes", "accepted"))
    assert stream.getvalue().endswith("\x1b[32myes\x1b[0m")
