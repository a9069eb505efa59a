"""Runs of `bench --endpoint` against a small server in this process, and what it sends."""

import json
from typing import Any

import pytest
from fake_server import Fake
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.measure.documents.endpoint import EndpointDocument


def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "SPECDEC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(fake: Fake, *more: str) -> int:
    return int(run(["bench", "--endpoint", fake.url, "--num-prompts", "8", "-n", "15", "--repeats", "2", *more]))


def counted(found: dict[str, Any]) -> dict[str, Any]:
    """What became of the requests, without how many were open at a time."""
    return {key: num for key, num in found["requests"].items() if not key.startswith("most_")}


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    assert_fits(found, EndpointDocument)
    return found


def chunk(text: str = " a", reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason}]}


def usage(tokens: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def reply(body: dict[str, Any]) -> list[Any]:
    """An answer that names how many messages it answers; reasoning comes before it."""
    said = {"choices": [{"delta": {"content": f"answer to {len(body['messages'])}"}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    return [thought, said, chunk("", "stop"), usage(4), "[DONE]"]
