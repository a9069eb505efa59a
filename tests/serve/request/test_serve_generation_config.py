"""A checkpoint's generation configuration at work: in the server, in generate, in doctor; flags before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from requests_for_tests import completion
from starlette.testclient import TestClient
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli import serve as command
from specdec_cli.cli.main import run
from specdec_cli.cli.shared import Shared, draft_methods
from specdec_cli.recipe import resolve
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.app import create_app
from specdec_cli.serve.http.ready import ready_lines
from specdec_cli.serve.models import Models
from specdec_cli.serve.settings import Settings

FILE = "generation_config.json"
ASKED = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.2, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("generation"), seed=3)
    letter_tokenizer().save_pretrained(folder)
    return folder


def served(folder: Path, *sets: str) -> Models:
    """The folder's model as `serve` loads it."""
    settings = Settings(Serve())
    named = [f"target.model={folder}", "draft.method=ngram", *sets]
    resolved = resolve(sets=named, methods=draft_methods())
    models = command._models({("tiny",): resolved}, settings, Shared())
    models.all[0].load()
    assert models.all[0].state == "ready", models.all[0].failure
    return models


def write(folder: Path, given: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(given))


def prepared(models: Models, **fields):
    return completion(over=models.all[0].info, prompt="the end", **fields).jobs[0].params


def test_point_14_a_silent_request_takes_the_checkpoints_values(model: Path) -> None:
    write(model, ASKED | {"eos_token_id": [5, 7]})
    models = served(model)
    params = prepared(models)
    assert {name: getattr(params, name) for name in ASKED} == ASKED
    own = prepared(models, temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1, max_tokens=20)
    assert (own.temperature, own.top_k, own.top_p, own.min_p, own.max_new_tokens) == (0, None, 1, 0, 20)
    assert models.all[0].bridge.engine.eos_token_ids == (5, 7)
    with TestClient(create_app(models, Settings(Serve())), base_url="http://127.0.0.1") as client:
        body = {"prompt": "the end", "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 9
        chat_free = client.post("/v1/completions", json=body | {"max_tokens": 12}).json()
        assert chat_free["usage"]["completion_tokens"] == 12
    words = next(line for line in ready_lines(models, "http://127.0.0.1:8000") if "generation config" in line)
    assert "generation config: temperature 0.6, top_p 0.9, top_k 7, min_p 0.05" in words
    assert "; end tokens 5 7" in words
    assert models.stop()


def test_what_was_set_for_the_server_goes_before_it(model: Path) -> None:
    write(model, ASKED)
    models = served(model, "sampling.temperature=0.2", "sampling.max_new_tokens=5")
    params = prepared(models)
    assert (params.temperature, params.max_new_tokens, params.top_k) == (0.2, 5, 7)
    assert "temperature" not in models.all[0].suggested
    assert models.stop()
    models = served(model, "sampling.min_tokens=30")
    assert prepared(models).min_tokens == 30
    assert "max_new_tokens" not in models.all[0].suggested
    assert models.stop()


def test_none_and_another_folder(model: Path, tmp_path: Path) -> None:
    write(model, ASKED | {"eos_token_id": 5})
    models = served(model, "target.generation_config=none")
    assert (prepared(models).temperature, prepared(models).top_k) == (1.0, None)
    assert models.all[0].bridge.engine.eos_token_ids == (5,)
    assert models.stop()
    write(tmp_path, {"temperature": 0.3, "eos_token_id": 8})
    models = served(model, f"target.generation_config={tmp_path}")
    assert (prepared(models).temperature, prepared(models).top_k) == (0.3, None)
    assert models.all[0].bridge.engine.eos_token_ids == (8,)
    assert models.stop()


def test_do_not_sample_is_greedy_and_a_greedy_server_stays_so(model: Path) -> None:
    write(model, {"do_sample": False})
    models = served(model)
    assert prepared(models).temperature == 0
    assert models.stop()
    write(model, {"temperature": 0.6})
    models = served(model, "speculation.verify=greedy")
    assert prepared(models).temperature == 0
    assert models.stop()


def test_what_is_not_applied_is_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    write(model, {"num_beams": 4})
    with caplog.at_level(logging.WARNING, "specdec_cli"):
        assert served(model).stop()
    assert "asks for `num_beams: 4`, which is not applied" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [("{", "cannot be read"), ('{"top_p": 7}', "`top_p` must be"), ('{"eos_token_id": "x"}', "`eos_token_id` must be")],
)
def test_a_broken_file_says_so_everywhere(
    model: Path, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    (model / FILE).write_text(given)
    for words in (["generate", "a", "-n", "2", "-d", "none"], ["doctor", "-d", "none"]):
        assert run([*words, "-t", str(model)]) == 1
        assert said in capsys.readouterr().err
    write(model, {})


def test_point_14_generate_ends_at_every_end_token_of_another_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(model, {})
    words = ["generate", "the end", "-t", str(model), "-d", "none", "-n", "30", "--json"]
    assert run(words) == 0
    plain = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
    write(tmp_path, {"eos_token_id": [plain[11], plain[7]]})
    assert run([*words, "--generation-config", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    first = min(plain.index(plain[11]), plain.index(plain[7]))
    assert document["outputs"][0]["token_ids"] == plain[: first + 1]
    assert document["recipe"]["target"]["generation_config"] == str(tmp_path)
    assert run([*words, "--generation-config", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder with a" in capsys.readouterr().err


def test_doctor_shows_what_applies(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(model, ASKED | {"eos_token_id": [5, 7], "num_beams": 2})
    assert run(["doctor", "-t", str(model), "-d", "ngram", "--json"]) == 0
    said = capsys.readouterr()
    pair = json.loads(said.out)["pair"]
    assert pair["generation"]["sampling"] == ASKED
    assert pair["target"]["eos_token_ids"] == [5, 7]
    assert any("num_beams" in problem["message"] for problem in pair["problems"])
    assert "temperature 0.6" in said.err
    assert run(["doctor", "-t", str(model), "-d", "ngram", "--json", "--generation-config", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["pair"]["generation"]["sampling"] == {}
