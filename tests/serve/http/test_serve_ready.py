"""The lines of a server that is ready."""

import json
import shlex
from typing import Any

import pytest
from toy_engine import toy_engine
from toy_server import served_engine, toy_models

from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.ready import curl_line, ready_lines
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.settings import Settings

SETTINGS = Settings(Serve())


def model(name: str = "toy", **given: Any) -> Model:
    return Model(name, lambda: served_engine(toy_engine()), SETTINGS.serve, **given)


@pytest.fixture
def ready():
    models = Models([model(root="big", draft="small (int8)", num_speculative_tokens=5)])
    models.all[0].load()
    yield models
    assert models.stop()


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:9", "http://127.0.0.1:9"),
        ("http://[::]:9", "http://[::1]:9"),
    ],
)
def test_it_names_target_draft_k_page_and_a_request(ready, url: str, near: str) -> None:
    first, what, page = ready_lines(ready, url)
    assert first == f"serving toy at {url}"
    assert what == "target big, draft small (int8), k = 5"
    assert page == f"page {near}/, API reference {near}/docs"
    words = shlex.split(curl_line(ready, url, None))
    assert words[:2] == ["curl", f"{near}/v1/chat/completions"]
    assert json.loads(words[-1])["messages"]


def test_tools_and_grammars_are_read_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    one, states = model(), list[str]()
    monkeypatch.setattr("specdec_cli.serve.models.read_tokenizer", lambda _: states.append(one.state))
    one.load()
    assert Models([one]).stop()
    assert states == ["loading"]


def test_with_keys_the_request_brings_one(ready) -> None:
    assert '-H "Authorization: Bearer $MY_KEYS"' in curl_line(ready, "http://h:1", "MY_KEYS")


def test_without_a_template_the_request_is_a_completion(ready) -> None:
    ready.all[0].info.tokenizer.hf.chat_template = None
    curl = curl_line(ready, "http://h:1", None)
    assert "/v1/completions" in curl
    assert '"prompt"' in curl


@pytest.mark.parametrize("given", [{}, {"draft": "small", "num_speculative_tokens": 0}])
def test_without_a_draft_it_says_so(given: dict[str, Any]) -> None:
    models = toy_models(SETTINGS, load=False)
    models.all[0] = model(**given)
    assert list(ready_lines(models, "http://h:1"))[1] == "target toy, no draft"


def test_of_several_models_each_is_named() -> None:
    models = Models([model("one's"), model("two")])
    lines = list(ready_lines(models, "http://h:1"))
    assert lines[1:3] == ["one's: target one's, no draft", "two: target two, no draft"]
    assert json.loads(shlex.split(curl_line(models, "http://h:1", None))[-1])["model"] == "one's"


def test_49_26_the_sample_request_asks_for_the_likeliest_tokens(ready) -> None:
    assert json.loads(shlex.split(curl_line(ready, "http://h:1", None))[-1])["temperature"] == 0
