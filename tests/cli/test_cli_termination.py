"""SIGTERM: work ends in order where it can, and everything else at once, with a sentence and the exit code 143."""

from __future__ import annotations

import signal
import sys

import pytest

from specdec_cli.cli import main
from specdec_cli.cli.screen import interruptible
from specdec_cli.cli.termination import terminable
from specdec_cli.errors import ExitCode

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM")


def _terminated_at_once(_: list[str]) -> int:
    signal.raise_signal(signal.SIGTERM)
    return ExitCode.DONE


def _terminated_in_order(_: list[str]) -> int:
    with interruptible() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGTERM)
        assert stopped()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one ends the process"
    return ExitCode.INTERRUPTED


@pytest.mark.parametrize("invoke", [_terminated_at_once, _terminated_in_order])
def test_49_sigterm_is_a_sentence_and_143(
    invoke: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "_invoke", invoke)
    assert main.run([]) == 143
    assert capsys.readouterr().err == "error: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_49_sigterm_ends_work_that_ctrl_c_does_not_end() -> None:
    with terminable(), interruptible(repeatedly=True, ends=False), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_49_a_handler_of_a_server_stays() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with terminable() as termination:
            signal.raise_signal(signal.SIGTERM)
        assert not termination.is_received
    finally:
        signal.signal(signal.SIGTERM, before)
