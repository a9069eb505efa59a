"""`chat` as a user meets it: messages in a pipe and in a terminal, commands, Ctrl-C, a server, the saved files."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_server import Fake, serving
from schemas import assert_fits
from toy_engine import TableLM, toy_engine
from typed import not_none

from specdec_cli.cli import chat_input
from specdec_cli.cli.chat_input import read_typed
from specdec_cli.cli.main import run
from specdec_cli.cli.screen import interruptible
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import UsageError
from specdec_cli.measure.chat.chat import ChatDocument

TESTS = Path(__file__).parents[1]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """The recipes that engines of toys were made from; the real loader is not called."""
    recipes = []

    def load(recipe, *, trust_remote_code: bool = False, others=(), progress=None):
        recipes.append(recipe)
        target = TableLM()
        target.max_context = recipe.engine.max_model_len or 512
        engine = toy_engine(recipe.speculation.num_speculative_tokens, target=target)
        engine.encode([{"role": "user", "content": "a"}])
        return engine

    monkeypatch.setattr(Engine, "from_recipe", load)
    return recipes


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    """Runs `chat` with lines on standard input; gives the exit code."""

    def go(lines: str | bytes, *arguments: str) -> int:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return int(run(["chat", *arguments]))

    return go


def toys(*arguments: str) -> tuple[str, ...]:
    return ("-t", "toys", "-d", "ngram:min=1", "-n", "12", *arguments)


def as_lines(lines: list[str]):
    rest = iter(lines)

    def read(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return read


# Input


@pytest.mark.parametrize(
    ("lines", "text", "is_command"),
    [
        (["hello"], "hello", False),
        (["  hello  "], "hello", False),
        (["one\\", "two\\", "three"], "one\ntwo\nthree", False),
        (["one\\"], "one", False),
        (['"""one', "", '  two"""'], "one\n\n  two", False),
        (['"""', "/k 3", '"""'], "/k 3", False),
        (['"""one line"""'], "one line", False),
        (['"""open', "to the end"], "open\nto the end", False),
        (["/k 6"], "/k 6", True),
        (["/k\\", "6"], "/k\n6", False),
        ([""], "", False),
    ],
)
def test_a_message_of_one_line_or_several(lines: list[str], text: str, is_command: bool) -> None:
    found = read_typed(as_lines(lines))
    assert found is not None
    assert (found.text, found.is_command) == (text, is_command)


def test_the_end_of_the_input_is_no_message() -> None:
    assert read_typed(as_lines([])) is None


def test_standard_input_that_is_closed_or_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, loaded, typed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(b"\xff\xfe\xff\n", *toys()) == 2
    assert "not valid UTF-8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="closed"):
        chat_input.open_input()


# A conversation on our engine


def test_answers_go_to_stdout_and_the_rest_to_stderr(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("abc\n\nbad\n", *toys()) == 0
    out, err = capsys.readouterr()
    engine = toy_engine()
    first = engine.generate([[{"role": "user", "content": "abc"}]], params(12))[0].text
    talk = [("user", "abc"), ("assistant", first), ("user", "bad")]
    second = engine.generate([[{"role": role, "content": text} for role, text in talk]], params(12))[0].text
    assert out == "".join(text if text.endswith("\n") else f"{text}\n" for text in (first, second))
    assert len(re.findall(r"12 tokens · .*acceptance rate .*acceptance length .*draft ngram:min=1 · k 4", err)) == 2


def params(num: int):
    from specdec_cli.sampling.params import SamplingParams

    return SamplingParams(max_new_tokens=num)


def test_one_document_with_the_turns(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("abc\n/k 2\n/draft none\nbad\n", *toys("--json", "--system", "be a cab")) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, ChatDocument)
    assert (document["schema"], document["system"]) == ("specdec.chat/1", "be a cab")
    first, second = document["turns"]
    assert (first["draft"], first["num_speculative_tokens"]) == ("ngram:min=1", 4)
    assert (second["draft"], second["num_speculative_tokens"]) == ("none", 0)
    assert first["completion_tokens"] == second["completion_tokens"] == 12
    assert first["speculative"]["num_drafts"] > 0 == second["speculative"]["num_drafts"]


def test_k_and_draft_hold_from_the_next_answer(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("/k 6\nabc\n/draft none\nabc\n/draft own\nabc\n/k\n", *toys()) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " tokens · " in line]
    assert [not_none(re.search(r"draft (\S+) · k (\d+)", line)).groups() for line in lines] == [
        ("ngram:min=1", "6"),
        ("none", "0"),
        ("ngram:min=1", "6"),
    ]


def test_prefix_caching_is_on_unless_somebody_says_otherwise(loaded, typed) -> None:
    typed("abc\n", *toys())
    typed("abc\n", *toys("--no-prefix-caching"))
    assert [recipe.engine.enable_prefix_caching for recipe in loaded] == [True, False]


def test_49_26_the_oldest_turns_leave_a_full_context(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "-t", "toys", "-d", "ngram", "--max-model-len", "64"
    assert typed("abc\nabc\nabc\n", *arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert err.count("note: the answer fills the context") == 3
    assert err.count("note: the oldest turn is no longer sent: the conversation fills the context") == 2
    first, second, third = json.loads(out)["turns"]  # each of which is answered as if it were the first
    assert first["text"] == second["text"] == third["text"]
    assert typed("a" * 80, "-t", "toys", "-d", "ngram", "--max-model-len", "64") == 2
    assert "hint: shorten the message" in capsys.readouterr().err
    assert typed("abc\n/clear\nabc\n", "-t", "toys", "-d", "ngram", "--max-model-len", "64") == 0


def test_an_error_in_a_pipe_ends_the_run_with_what_there_was(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("abc\n/k many\nabc\n", *toys("--json")) == 2
    out, err = capsys.readouterr()
    assert len(json.loads(out)["turns"]) == 1
    assert "`/k many` is not a whole number" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/k -1", "between 0 and 32"),
        ("/k 33", "between 0 and 32"),
        ("/draft ngarm", "no draft `ngarm`"),
        ("/draf none", "did you mean `/draft`"),
        ("/", "no command `/`"),
        ("/usr/bin is a folder", "no command `/usr/bin`"),
        ("/clear all", "takes no value"),
        ("/save", "needs the name of a file"),
        ("/save talk.txt", "neither a JSON nor a Markdown file"),
        ("/save talk.md", "the conversation is empty"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_by_name(
    loaded, typed, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    assert typed(f"{line}\n", *toys()) == 2
    assert words in capsys.readouterr().err


def test_system_history_and_help(loaded, typed, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "/history\n/system be bad\nabc\n/history\n/system\n/help\n/quit\nabc\n"
    assert typed(lines, *toys("--json")) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["turns"]) == 1, "nothing is read after /quit"
    assert "no messages yet" in err
    assert "1 user: abc" in err
    assert json.loads(out)["system"] is None
    for name in ("/k", "/draft", "/system", "/clear", "/save", "/help", "/quit"):
        assert f"\n{name}" in err


def test_save_writes_json_and_markdown_and_overwrites_nothing_unasked(
    loaded, typed, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.md").write_text("old")
    saves = "/save a talk.json\n/save talk.md\n/save talk.md\n/save --force old.md\n"
    assert typed(f"abc\n{saves}/save --force none/talk.md\n", *toys()) == 2
    assert "the folder of `/save none/talk.md` does not exist" in capsys.readouterr().err
    document = json.loads((tmp_path / "a talk.json").read_text())
    assert_fits(document, ChatDocument)
    page = (tmp_path / "talk.md").read_text()
    assert page.startswith("# Conversation with table\n\n## User\n\nabc\n\n## Assistant\n\n")
    assert (tmp_path / "old.md").read_text() == page
    assert typed("abc\n/save talk.md\n", *toys()) == 2
    assert "hint: `/save --force talk.md` overwrites it" in capsys.readouterr().err


def test_what_makes_no_conversation_is_refused_before_it_begins(
    loaded, typed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("", *toys("--system", " ")) == 2
    assert typed("", "-t", "toys", "-d", "prediction") == 2
    assert typed("", *toys("--api-key", "x")) == 2
    err = capsys.readouterr().err
    assert "`--system` is empty" in err
    assert "no text for the draft `prediction`" in err
    assert "`--api-key` has no effect without --endpoint" in err


# A server


def test_a_server_answers_and_its_counters_give_the_acceptance(typed, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake()) as fake:
        assert typed("one\ntwo\n", "--endpoint", fake.url, "--json", "--system", "short") == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, ChatDocument)
    assert [message["role"] for message in fake.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "max_tokens" not in fake.requests[0], "the server decides, as with any client that sends none"
    assert [turn["text"] for turn in document["turns"]] == [" word" * 5] * 2
    assert [turn["speculative"]["acceptance_rate"] for turn in document["turns"]] == [0.875, 0.875]


def test_a_servers_own_words_give_the_acceptance(typed, capsys: pytest.CaptureFixture[str]) -> None:
    details = {"completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}}
    script = [
        {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7} | details},
        "[DONE]",
    ]
    with serving(Fake(script=script)) as fake:
        assert typed("one\n", "--endpoint", fake.url, "-n", "9") == 0
    assert fake.requests[0]["max_tokens"] == 9
    out, err = capsys.readouterr()
    assert out == "Hi\n"
    assert "7 tokens" in err
    assert "acceptance rate 75.0%" in err


def test_k_and_draft_go_to_our_own_server_alone(typed, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(owner="specdec")) as fake:
        assert typed("/k 6\n/draft ngram\none\n/draft none\none\n", "--endpoint", fake.url) == 0
    asked = [request["speculative"] for request in fake.requests]
    assert asked == [{"num_speculative_tokens": 6, "draft": "ngram"}, {"draft": "none"}]
    with serving(Fake()) as fake:
        assert typed("/k 6\n", "--endpoint", fake.url) == 2
    assert "`/k` has no effect on this server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "words"),
    [(400, "refused the request (400)"), (429, "(429)"), ("dies", "broke"), ("error", "the engine died")],
)
def test_a_failed_answer_is_one_sentence_and_no_turn(
    typed, capsys: pytest.CaptureFixture[str], fault, words: str
) -> None:
    refusal = "the context length is 512 tokens" if fault == 400 else None
    with serving(Fake(fault=fault, faulty_from=1, refusal=refusal)) as fake:
        assert typed("one\ntwo\n", "--endpoint", fake.url, "--json") in (1, 2)
    out, err = capsys.readouterr()
    assert len(json.loads(out)["turns"]) == 1
    assert words in err
    assert ("/clear starts a new one" in err) == (fault == 400)


def test_options_that_say_nothing_to_a_server_are_refused(typed, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["-k", "3"], ["-d", "ngram"], ["--dtype", "float32"], ["--max-model-len", "9"]):
        assert typed("", "--endpoint", "http://127.0.0.1:1", *option) == 2
        assert "has no effect with --endpoint" in capsys.readouterr().err
    assert typed("one\n", "--endpoint", "http://127.0.0.1:1") == 1
    assert "no server at" in capsys.readouterr().err


# A terminal

ENGINE = """
import sys, time
sys.path.insert(0, {tests!r})
from toy_engine import TableLM, toy_engine
from specdec_cli.engine.engine import Engine
class Slow(TableLM):
    max_context = 4096
    def score(self, rows):
        time.sleep(0.02)
        return super().score(rows)
Engine.from_recipe = lambda recipe, **_: toy_engine(target=Slow())
from specdec_cli.cli.main import run
words = ["chat", "-t", "toys", "-d", "ngram:min=1", "--set", "target.dtype=float32"]
sys.exit(run([*words, "-n", "4000"]))  # too many to end before an interruption
"""
SERVER = """
import sys
from specdec_cli.cli.main import run
code = run(["chat", "--endpoint", {url!r}])
assert not {{"torch", "transformers"}} & sys.modules.keys()
sys.exit(code)
"""


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, script: str, columns: int = 160) -> None:
        pty, fcntl, struct, termios = (__import__(name) for name in ("pty", "fcntl", "struct", "termios"))
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
        for name in ("NO_COLOR", "CI"):
            environment.pop(name, None)
        # The plain reader: what the editor of the extra `chat` draws is another program's.
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        command = [sys.executable, "-c", f"import sys; sys.modules['prompt_toolkit'] = None\n{script}"]
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        os.close(slave)
        self.shown, self.seen = "", 0

    def wait_for(self, pattern: str, seconds: float = 90.0) -> None:
        """Read until a pattern is shown after what was waited for before."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown[self.seen :])) is None:
            assert time.monotonic() < end, f"{pattern!r} is not in {self.shown[self.seen :]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended: {self.shown!r}") from None
        self.seen += found.end()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def interrupt_until(self, pattern: str) -> None:
        """Interrupt until a pattern is shown: a signal between the prompt and the reading of it is lost."""
        for _ in range(30):
            self.interrupt()
            try:
                return self.wait_for(pattern, 3)
            except AssertionError:
                continue
        raise AssertionError(f"{pattern!r} is not in {self.shown[self.seen :]!r}")

    def end(self) -> int:
        """End the input at the prompt, as often as it takes: a terminal drops what it is sent while its mode changes.

        Returns:
            The exit code.
        """
        end = time.monotonic() + 90
        try:
            while self.process.poll() is None:
                assert time.monotonic() < end, f"it does not end: {self.shown[self.seen :]!r}"
                if select.select([self.master], [], [], 1)[0]:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                else:
                    self.type("\x04")
        except OSError:
            pass  # the other side is closed
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def start(script: str) -> Terminal:
        opened.append(Terminal(script))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal) -> None:
    chat = terminal(ENGINE.format(tests=str(TESTS)))
    chat.wait_for("/help lists the commands")
    chat.wait_for("> ")
    chat.type("abc\r")
    chat.wait_for(r"acceptance length \d")
    chat.interrupt()
    chat.wait_for("stopped")
    chat.type("/history\r")
    chat.wait_for(r"1 assistant: [a-h .]+")
    chat.wait_for("> ")
    chat.interrupt_until("Ctrl-D or /quit ends the conversation")
    chat.type("/k nine\r")
    chat.wait_for("hint: for example `/k 6`")
    assert chat.end() == 0


def test_a_second_ctrl_c_stops_nothing_else() -> None:
    with interruptible(repeatedly=True) as stopped:
        assert not stopped()
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stopped()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_ctrl_c_stops_a_servers_answer_even_while_it_is_silent(terminal) -> None:
    def script(body):
        first = [{"choices": [{"delta": {"content": "Hello"}}]}, 20]
        return first if len(body["messages"]) == 1 else [{"choices": [{"delta": {"content": "Bye"}}]}, "[DONE]"]

    with serving(Fake(script=script)) as fake:
        chat = terminal(SERVER.format(url=fake.url))
        chat.wait_for("> ")
        chat.type("abc\r")
        chat.wait_for("Hello")
        chat.interrupt()
        chat.wait_for("stopped", 15)
        chat.type("/quit\r")
        assert chat.end() == 0


def test_alt_enter_adds_a_line_in_the_editor() -> None:
    pytest.importorskip("prompt_toolkit", reason="the extra `chat` is not installed")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("one\x1b\rtwo\r")
        assert not_none(chat_input._prompt_toolkit())("> ") == "one\ntwo"
