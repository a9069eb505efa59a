import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from specdec_cli import __version__
from specdec_cli.__main__ import main as program
from specdec_cli.cli import main
from specdec_cli.errors import ExitCode, GateError, RunError

SPECDEC = [sys.executable, "-m", "specdec_cli.cli.main"]
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}


def run_as(command, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a program whose one command is this function."""
    app = typer.Typer()
    app.callback()(main._globals)
    app.command("do")(command)
    monkeypatch.setattr(main, "_app", lambda: app)
    return main.run(["do", *arguments])


def test_version_names_torch_and_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    others = f"torch {version('torch')}, transformers {version('transformers')}"
    assert main.run(["--version"]) == 0
    assert capsys.readouterr() == (f"specdec {__version__} ({others})\n", "")


def test_version_says_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "version_of", lambda name: None if name == "torch" else "5.0")
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec {__version__} (torch not installed, transformers 5.0)\n"


def test_help_has_no_colour_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "recipe" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["recpie"], "error: there is no command `recpie` of `specdec`; did you mean `recipe`?"),
        (["sweep_k"], "error: there is no command `sweep_k` of `specdec`; did you mean `sweep-k`?"),
        (["recipe", "shwo"], "error: there is no command `shwo` of `specdec recipe`; did you mean `show`?"),
        (["xyz"], "error: there is no command `xyz` of `specdec`"),
        (["--hepl"], "error: there is no option `--hepl` of `specdec`; did you mean `--help`?"),
        (
            ["recipe", "show", "--tempratur", "1"],
            "error: there is no option `--tempratur` of `specdec recipe show`; did you mean `--temperature`?",
        ),
        (["recipe", "show", "-k", "four"], "error: `--num-speculative-tokens` must be a valid integer"),
        (["recipe", "show", "--temperature", "hot"], "error: `--temperature` must be a valid number"),
        (["recipe", "show", "--temperature"], "error: option `--temperature` requires an argument"),
        (["recipe", "show", "--temperature", "nan"], "error: `--temperature` must be a finite number, not `NaN`"),
        (["recipe", "show", "-k", "-1"], "error: `--num-speculative-tokens` must be at least 0, not `-1`"),
        (["recipe", "show", "-k", "1000"], "error: `--num-speculative-tokens` must be at most 64, not `1000`"),
        (["recipe", "show", "a", "b"], "error: got unexpected extra argument (b)"),
        (["recipe", "copy"], "error: missing argument `NAME`"),
    ],
)
def test_usage_errors_are_one_sentence_and_a_hint(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == error
    assert lines[1] == ""
    assert lines[2].startswith("hint: ")
    assert len(lines) == 3


def test_nothing_asked_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 2
    out, err = capsys.readouterr()
    assert "Usage: specdec" in out + err


def raises(error: BaseException):
    def command() -> None:
        raise error

    return command


MEMORY = "decode fewer sequences at a time, or lower kv_cache_memory or max_model_len"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunError("no model `x`", "name one"), 1, "error: no model `x`\n\nhint: name one\n"),
        (GateError("a gate"), 3, "error: a gate\n"),
        (RunError("evil \x1b[31m"), 1, "error: evil �[31m\n"),
        (
            ValueError("boom\nmore"),
            1,
            "error: unexpected ValueError: boom\n\nhint: --debug shows the traceback; please report it as an issue\n",
        ),
        (OSError(28, "No space left on device"), 1, "error: the system refused: No space left on device\n"),
        (MemoryError(), 1, f"error: not enough memory\n\nhint: {MEMORY}\n"),
        (
            RuntimeError("can't allocate memory: 9 bytes"),
            1,
            f"error: not enough memory: can't allocate memory: 9 bytes\n\nhint: {MEMORY}\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Exit(3), 3, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_become_words_and_codes(
    error, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_as(raises(error), monkeypatch=monkeypatch) == code
    assert capsys.readouterr() == ("", text)


def test_a_command_may_return_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_as(lambda: 3, monkeypatch=monkeypatch) == 3


@pytest.mark.parametrize("way", ["flag", "late flag", "variable"])
def test_debug_shows_the_traceback(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "variable":
        monkeypatch.setenv("SPECDEC_DEBUG", "1")
    run_as(raises(ValueError("boom")), *(["--debug"] if "flag" in way else []), monkeypatch=monkeypatch)
    assert "Traceback" in capsys.readouterr().err


def test_debug_after_two_dashes_is_a_word() -> None:
    assert main._take_debug(["do", "--", "--debug"]) == (["do", "--", "--debug"], False)


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["recipe", "validate", "bad.yaml"], ["recipe", "list"]]
)
def test_quick_commands_load_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("sampling: {temperatur: 1}\n")
    code = (
        "import sys; from specdec_cli.cli.main import run; code = run(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'fastapi', 'scipy', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, env=PLAIN, check=False
    )
    assert done.returncode == (2 if "bad.yaml" in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a POSIX shell")
@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("redirect", ["| head -n 1", "| true", "2>&1 | true", ">/dev/null 2>&1"])
def test_a_reader_that_goes_away_makes_no_noise(redirect: str) -> None:
    command = f"({sys.executable} -m specdec_cli.cli.main recipe schema; echo $? >&3) 3>&2 {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=PLAIN, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.strip() == "0"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SPECDEC, "recipe", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_49_a_full_disk_in_the_middle_of_the_output_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        sys.stdout.write("some text")
        sys.stdout.flush()

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_as(command, monkeypatch=monkeypatch) == 1
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_closed_standard_stream_is_no_error_of_its_own(closed: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m specdec_cli.cli.main recipe list {closed}", shell=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["generate", "--max_new_tokens", "3"], "--max-new-tokens"),
        (["generate", "--MAX-NEW-TOKENS", "3"], "--max-new-tokens"),
        (["generate", "--max-tokens", "3"], "--max-new-tokens"),
        (["generate", "--num_spec_tokens", "3"], "--num-speculative-tokens"),
        (["generate", "--k", "3"], "-k"),
        (["bench", "--num_prompt", "3"], "--num-prompts"),
        (["bench", "--batch", "3"], "--batch-size"),
        (["generate", "--no_ignore_eos"], "--no-ignore-eos"),
        (["generate", "--ctx-size", "9"], "--max-model-len"),  # llama.cpp's
        (["generate", "--model-draft", "x"], "--draft"),
        (["doctor", "--n-predict", "9"], None),
        (["serve", "--api_key_env", "X"], "--api-key-env"),
        (["bench", "--help_all"], "--help-all"),
        (["generate", "--tree", "4"], None),
        (["generate", "--beam", "4"], None),
        (["generate", "--host", "x"], None),
        (["bench", "--endpoint-key", "x"], None),
        (["generate", "--style", "x"], None),
        (["doctor", "--verbose"], None),
        (["recipe", "list", "--nope"], None),
    ],
)
def test_did_you_mean_takes_underscores_for_dashes_and_never_guesses_far(
    arguments: list[str], meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.partition("did you mean ")[2] == (f"`{meant}`?" if meant else "")


@pytest.mark.parametrize("option", ["--compile", "--no-compile"])
def test_a_removed_option_is_explained(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["generate", "x", option]) == 2
    assert "`specdec generate`; it was removed in 0.3.0, because it was slower than" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--mlock", "--mmap", "--no-mmap"])
def test_an_option_of_llama_cpp_without_a_purpose_here_is_explained(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["generate", "x", option]) == 2
    assert f"there is no option `{option}` of `specdec generate`; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--served-model-name", "x"],
        ["doctor", "--served-model-name", "x"],
        ["doctor", "--regex", "x"],
        ["doctor", "--verify", "block"],
        ["doctor", "--stop", "x"],
        ["audit", "--depth-policy", "adaptive"],
        ["audit", "--synthetic-acceptance-length", "2"],
        ["recipe", "list", "--force"],
        ["recipe", "validate", "builtin", "--force"],
        ["generate", "x", "--chat-template", "{{ messages }}"],
        ["generate", "x", "--default-chat-template-kwargs", "{}"],
    ],
)
def test_an_option_that_means_nothing_for_a_command_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert "there is no option" in (err := capsys.readouterr().err) or "has no effect" in err


@pytest.mark.parametrize("width", [40, 80, 120])
def test_an_error_breaks_no_word_on_a_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    assert main.run(["generate", "--temprature", "3", "狗狗 🐶"]) == 2
    whole = capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main.run(["generate", "--temprature", "3", "狗狗 🐶"]) == 2
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().err)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.split() == whole.split()


@pytest.mark.parametrize("width", [40, 80])
def test_a_command_in_a_hint_can_be_copied(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "`pip install 'specdec-cli[structured]' --no-cache-dir`"
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main._complain(
        "structured output needs llguidance", f"it is not installed here: {command} brings it", ExitCode.USAGE
    )
    assert command in capsys.readouterr().err


def test_an_interrupt_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "specdec_cli.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "specdec_cli.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    assert program() == 130
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert scripts["scripts"] == {"specdec": "specdec_cli.__main__:main"}
