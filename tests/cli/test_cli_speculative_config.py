"""vLLM's `--speculative-config`: its keys become the recipe's, and what is not known is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec_cli.cli.main import run

DRY = ["serve", "builtin:target", "--dry-run", "--json"]


def recipe(capsys: pytest.CaptureFixture[str], given: dict[str, Any], *words: str) -> dict[str, Any]:
    assert run([*DRY, "--speculative-config", json.dumps(given), *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["models"][0]["recipe"]


@pytest.mark.parametrize(
    ("given", "draft", "k"),
    [
        ({"model": "builtin:draft", "num_speculative_tokens": 3}, {"model": "builtin:draft"}, 3),
        ({"model": "builtin:draft", "method": "draft_model", "quantization": None}, {"model": "builtin:draft"}, 4),
        (
            {"model": "a/b", "draft_tensor_parallel_size": 1, "revision": "main", "enforce_eager": False},
            {"model": "a/b", "revision": "main", "tensor_parallel_size": 1},
            4,
        ),
        ({"method": "ngram", "num_speculative_tokens": 5}, {"method": "ngram"}, 5),
        (
            {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3},
            {"method": "ngram", "max": 5, "min": 3},
            4,
        ),
        ({"model": "ngram", "prompt_lookup_max": 3}, {"method": "ngram", "max": 3, "min": 3}, 4),
        ({"model": "[ngram]", "prompt_lookup_min": 2}, {"method": "ngram", "max": 2, "min": 2}, 4),
    ],
)
def test_the_keys_of_vllm_become_the_recipes(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], draft: dict[str, Any], k: int
) -> None:
    found = recipe(capsys, given)
    assert draft.items() <= found["draft"].items()
    assert found["speculation"]["num_speculative_tokens"] == k


def test_a_batch_size_and_other_flags_stand_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = recipe(capsys, {"method": "ngram", "disable_by_batch_size": 4}, "-k", "2", "--verify", "gumbel")
    speculation = found["speculation"]
    beside = recipe(capsys, {"model": "builtin:draft"}, "--draft-dtype", "float32")
    assert beside["draft"]["dtype"] == "float32"
    assert (speculation["disable_by_batch_size"], speculation["num_speculative_tokens"]) == (4, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "`--speculative-config` is not JSON"),
        ("[1]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('{"model": "a", "model": "b"}', "has `model` twice"),
        ('{"model": "a", "num_speculative_token": 3}', "did you mean `num_speculative_tokens`?"),
        ('{"model": "a", "max_model_len": 512}', "`max_model_len`, which is not supported"),
        ('{"model": "a", "quantization": "fp8"}', "`quantization`, which is not supported"),
        ('{"model": "a", "method": "eagle3"}', "the method `eagle3`, which is not supported"),
        ('{"model": "a", "method": ["ngram"]}', "which is not supported"),
        ('{"method": "ngram", "model": "a"}', "gives the method `ngram` a model"),
        ('{"method": "ngram", "revision": "a"}', "`revision`, which is for a draft model"),
        ('{"model": "a", "prompt_lookup_max": 4}', "`prompt_lookup_max`, which is for the method `ngram`"),
        ('{"num_speculative_tokens": 3}', "names no draft"),
        ('{"method": "draft_model"}', "names no draft"),
        ('{"model": 3}', "`--speculative-config`"),
        ('{"model": "a", "num_speculative_tokens": "3"}', "`--speculative-config num_speculative_tokens` must be"),
        ('{"model": "a", "num_speculative_tokens": -1}', "`--speculative-config num_speculative_tokens` must be"),
        ('{"method": "ngram", "prompt_lookup_max": "3"}', "max"),
        ('{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "min"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(capsys: pytest.CaptureFixture[str], given: str, said: str) -> None:
    assert run([*DRY, "--speculative-config", given]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-d", "ngram"], ["--speculative-model", "x"], ["--draft", "none"]])
def test_two_words_about_the_draft_are_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run([*DRY, "--speculative-config", '{"model": "builtin:draft"}', *words]) == 2
    assert "and `--speculative-config` set the same thing" in capsys.readouterr().err
    assert run([*DRY, "--speculative-config", '{"model": "a", "num_speculative_tokens": 3}', "-k", "3"]) == 2


def test_generate_takes_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "Once", "-n", "4", "--quiet", "--speculative-config", '{"method": "ngram"}', "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["draft"]["method"] == "ngram"
