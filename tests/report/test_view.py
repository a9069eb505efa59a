"""The view on a terminal: text above, table below, and everything said once."""

import io
from dataclasses import replace
from itertools import permutations

import pytest
from rich.console import Console
from toy_engine import LetterTokenizer, toy_engine

from specdec_cli.engine.comparison import Comparison
from specdec_cli.engine.decoding import Decoding, Request, decode
from specdec_cli.engine.promise import Promise
from specdec_cli.engine.prompts import rows_of
from specdec_cli.events import Noticed, Stepped
from specdec_cli.report.page import open_page
from specdec_cli.report.pieces import TokenPieces
from specdec_cli.report.view import RunView, Screen
from specdec_cli.sampling.params import SamplingParams

GREEDY = Promise("greedy", True)


def terminal(stream: io.StringIO, is_live: bool = True, is_quiet: bool = False) -> Screen:
    console = Console(file=stream, force_terminal=is_live, width=80, height=30, color_system=None)
    return Screen(stream, False, console, is_live, is_shared=True, is_quiet=is_quiet)


def requests(*prompts: str) -> list[Request]:
    return [Request(row, LetterTokenizer().encode(row.prompt), SamplingParams(30)) for row in rows_of(prompts)]


def test_a_run_without_a_draft_has_no_rows_that_only_a_draft_fills() -> None:
    stream, arm = io.StringIO(), Decoding("without")
    view = RunView(terminal(stream, is_live=False), [arm], [0], [0], streams_text=False)
    with view:
        decode(toy_engine(k=0), arm, requests("ab"), view.watch, lambda: False)
    view.summary(GREEDY)
    assert [line.split()[0] for line in stream.getvalue().splitlines() if line.strip()] == ["tokens", "tokens/s"]


def test_a_live_run_leaves_the_whole_text_and_one_table() -> None:
    stream, out, arm = io.StringIO(), io.StringIO(), Decoding("with ngram")
    view = RunView(replace(terminal(stream), stdout=out), [arm], [4], [0, 1], streams_text=True)
    with view:
        decode(toy_engine(), arm, requests("ab", "cd"), view.watch, lambda: False)
    first, second = (output.text.removesuffix("\n") for output in arm.outputs())
    assert out.getvalue() == f"### 1\n{first}\n\n### 2\n{second}\n"
    assert "acceptance rate" in stream.getvalue()
    stream.truncate(0)
    view.summary(GREEDY)
    assert stream.getvalue().count("acceptance rate") == 1
    assert "2 of 2 finished" not in stream.getvalue()


@pytest.mark.parametrize("lengths", sorted(permutations((1, 4, 30))), ids=str)
@pytest.mark.parametrize(("is_live", "is_shared"), [(True, True), (True, False), (False, False)])
def test_prompts_that_end_in_any_order_leave_their_texts(lengths, is_live: bool, is_shared: bool) -> None:
    stream, out, arm = io.StringIO(), io.StringIO(), Decoding("with ngram")
    screen = replace(terminal(stream, is_live=is_live), stdout=out, is_shared=is_shared)
    given = [
        replace(request, params=SamplingParams(num))
        for request, num in zip(requests("ab", "cd", "ab ab"), lengths, strict=True)
    ]
    view = RunView(screen, [arm], [4], [0, 1, 2], streams_text=True)
    with view:
        decode(toy_engine(), arm, given, view.watch, lambda: False)
    texts = [output.text.removesuffix("\n") for output in arm.outputs()]
    assert out.getvalue() == "\n".join(f"### {place}\n{text}\n" for place, text in enumerate(texts, start=1))


def test_an_interrupted_run_leaves_the_texts_that_there_are() -> None:
    stream, out, arm = io.StringIO(), io.StringIO(), Decoding("with ngram")
    given = [replace(one, params=SamplingParams(num)) for one, num in zip(requests("ab", "cd"), (60, 3), strict=True)]
    view = RunView(replace(terminal(stream), stdout=out), [arm], [4], [0, 1], streams_text=True)
    with view:
        decode(toy_engine(), arm, given, view.watch, lambda: bool(arm.meter.num_finished))
    first, second = (output.text.removesuffix("\n") for output in arm.outputs())
    assert out.getvalue() == f"### 1\n{first}\n\n### 2\n{second}\n"


def test_json_streams_no_text() -> None:
    stream, arm = io.StringIO(), Decoding("with ngram")
    view = RunView(terminal(stream), [arm], [4], [0], streams_text=False)
    with view:
        decode(toy_engine(), arm, requests("ab"), view.watch, lambda: False)
    assert arm.outputs()[0].text not in stream.getvalue()
    assert "tokens/s" in stream.getvalue()


def test_a_notice_waits_for_the_live_area_to_go() -> None:
    stream, arm = io.StringIO(), Decoding("with ngram")
    view = RunView(terminal(stream), [arm], [4], [0], streams_text=False)
    with view:
        for _ in range(3):
            view.watch(arm, Noticed(0, "the draft's [limit] was passed"))
        assert "limit" not in stream.getvalue()
    assert stream.getvalue().count("note: the draft's [limit] was passed") == 1


def test_quiet_says_nothing() -> None:
    stream, out, arm = io.StringIO(), io.StringIO(), Decoding("with ngram")
    quiet = terminal(stream, is_live=False, is_quiet=True)
    screen, tokenizer = Screen(out, False, quiet.console, False, False, True), LetterTokenizer()
    view = RunView(screen, [arm], [4], [0], True, token_pieces=lambda: TokenPieces(tokenizer.detokenizer()))
    with view:
        view.watch(arm, Noticed(0, "hush"))
        decode(toy_engine(), arm, requests("ab"), view.watch, lambda: False)
    view.summary(Promise("typical", False))
    assert stream.getvalue() == ""
    assert out.getvalue()


def test_a_difference_between_arms_is_said_in_words() -> None:
    stream, comparison = io.StringIO(), Comparison(Decoding("with ngram"))
    view = RunView(terminal(stream, is_live=False), [comparison.draft, comparison.plain], [4, 0], [0], True)

    def spoil(arm, event) -> None:
        if arm is comparison.plain and isinstance(event, Stepped) and len(arm.outputs()[0].token_ids) == 10:
            arm.outputs()[0].token_ids[9] += 1
        view.watch(arm, event)

    with view:
        comparison.run(toy_engine(), requests("ab"), spoil, lambda: False)
    view.summary(GREEDY, comparison)
    assert "tokens DIFFER in 1 output, first in prompt 1 at token 10" in stream.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_a_line_to_be_copied_has_no_line_break(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream, line = io.StringIO(), f"try it: curl http://127.0.0.1:8000/v1/completions -d '{{{'x' * 99} \"a\": 1}}'"
    screen = replace(terminal(stream), console=open_page(stream, colour=False))
    screen.say_whole(line)
    assert stream.getvalue() == f"{line}\n"
    replace(screen, is_quiet=True).say_whole(line)
    assert stream.getvalue() == f"{line}\n"
