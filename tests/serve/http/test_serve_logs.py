"""The log: one line a record, as text or JSON."""

import json
import logging

import pytest

from specdec_cli.serve.http.logs import configure_logs


def say(message: str, **facts) -> None:
    logging.getLogger("specdec_cli.serve.access").info(message, extra=facts)


def test_json_lines_hold_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json")
    say("GET /v1/models", request_id="r1", status=200, seconds=0.25)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "message": "GET /v1/models", "request_id": "r1", "status": 200, "seconds": 0.25,
    }  # fmt: skip


def test_text_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("text")
    say("GET /a\nERROR forged\x1b[31m", request_id="r1", prompt="two\nlines")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    assert lines[0].endswith('request_id=r1 prompt="two\\nlines"')


def test_quiet_says_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("text", is_quiet=True)
    say("nothing")
    logging.getLogger("specdec_cli.serve").error("something")
    assert "nothing" not in capsys.readouterr().err
