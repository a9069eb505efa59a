"""vLLM's `--speculative-config`: its keys become the recipe's, and what is not known is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml
from export_recipes import CASES, RECIPES

from specdec_cli.cli.main import run
from specdec_cli.cli.shared import draft_methods
from specdec_cli.cli.speculative_config import read_speculative_config
from specdec_cli.export import export
from specdec_cli.recipe import resolve

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
        ({"method": "ngram_gpu"}, {"method": "ngram"}, 4),
        ({"method": "eagle", "model": "a/b"}, {"method": "eagle", "model": "a/b"}, 4),
        ({"method": "eagle3", "model": "a/b"}, {"method": "eagle3", "model": "a/b"}, 4),
        ({"method": "eagle3", "model": "a/b", "parallel_drafting": True}, {"method": "p-eagle", "model": "a/b"}, 4),
        ({"method": "dflash", "model": "a/b", "num_speculative_tokens": 7}, {"method": "dflash", "model": "a/b"}, 7),
        ({"method": "medusa", "model": "a/b"}, {"method": "medusa", "model": "a/b"}, 4),
        ({"method": "dspark", "model": "a/b"}, {"model": "a/b"}, 4),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"method": "mtp"}, 1),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 2}, {"method": "mtp"}, 2),
        ({"method": "qwen3_next_mtp"}, {"method": "mtp"}, 4),
        ({"method": "suffix"}, {"method": "suffix"}, 4),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.2}, {"method": "suffix", "min_prob": 0.2}, 4),
        ({"model": "a/b", "parallel_drafting": True}, {"method": "pard", "model": "a/b"}, 4),
        ({"model": "a/b", "use_heterogeneous_vocab": True}, {"method": "universal", "model": "a/b"}, 4),
    ],
)
def test_49_9_the_keys_of_vllm_become_the_recipes(
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
        ('{"model": "a", "method": "eagle4"}', "the method `eagle4`, which is not supported"),
        ('{"method": "custom_class", "model": "a"}', "the method `custom_class`, which is not supported"),
        ('{"method": "eagle3"}', "names no draft"),
        ('{"method": "mtp", "model": "a"}', "gives the method `mtp` a model"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "`prompt_lookup_max`, which is for the method `ngram`"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 9}', "use `num_speculative_tokens`"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "min_prob"),
        ('{"method": "dflash", "model": "a", "parallel_drafting": true}', "not for the method `dflash`"),
        ('{"method": "ngram", "parallel_drafting": true}', "`parallel_drafting`, which is for a draft model"),
        ('{"model": "a", "rejection_sample_method": "fly"}', "`rejection_sample_method` to `fly`"),
        ('{"model": "a", "draft_sample_method": "topk"}', "`draft_sample_method` to `topk`"),
        ('{"model": "a", "draft_sample_method": ["topk"]}', "`draft_sample_method` to"),
        ('{"model": "a", "synthetic_acceptance_rate": 0.8}', "`--synthetic-acceptance-rates A,B,...`"),
        ('{"model": "a", "speculative_token_tree": "[(0,)]"}', "use `--tree`"),
        ('{"model": "a", "num_speculative_tokens_per_batch_size": [[1, 2]]}', "must be a list of ranges"),
        ('{"model": "a", "tensor_parallel_size": 2}', "`draft_tensor_parallel_size`"),
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


@pytest.mark.parametrize(
    ("given", "speculation"),
    [
        ({"draft_sample_method": "probabilistic"}, {"verify": "rejection"}),
        ({"draft_sample_method": "greedy"}, {"verify": "exact-match"}),
        ({"rejection_sample_method": "standard"}, {"verify": "auto"}),
        ({"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}, {"verify": "block"}),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
            {"verify": "synthetic", "synthetic_acceptance_length": 2.5},
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.4, 0.2]},
            {"verify": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.4, 0.2]},
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 4], [9, 99, 2]]}, {"k_by_batch": "1:4,9:2"}),
        ({"quantization": None, "enable_adaptive_verification": False}, {"verify": "auto"}),
    ],
)
def test_49_9_rules_and_tables_are_taken(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], speculation: dict[str, Any]
) -> None:
    found = recipe(capsys, {"model": "builtin:draft", **given})["speculation"]
    assert {name: found[name] for name in speculation} == speculation


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("engine", ["vllm", "ray-serve", "dynamo"])
@pytest.mark.parametrize("name", [*RECIPES, *CASES])
def test_49_9_every_speculative_config_that_export_writes_is_read_back(engine: str, name: str) -> None:
    given = RECIPES[name] if name in RECIPES else {**RECIPES[CASES[name][0]], **CASES[name][1]}
    flags = {path: (value, path) for path, value in given.items()}
    made, notes = export(engine, resolve(flags=flags, methods=draft_methods()), "X.Y.Z")
    configs = written_configs(made.files.values())
    if name == "none" or any("the draft is left out" in note for note in notes):
        assert not configs
        return
    assert len(configs) == 1
    ours = ("draft", "speculation.")
    beside = {path: (value, path) for path, value in given.items() if not path.startswith(ours)}
    read = read_speculative_config(json.dumps(configs[0]))
    again, _ = export(engine, resolve(flags=beside | read, methods=draft_methods()), "X.Y.Z")
    assert written_configs(again.files.values()) == configs


def written_configs(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The speculative configurations in exported files: JSON after the option, or a mapping in YAML."""
    decoder, found = json.JSONDecoder(), []
    for text in texts:
        for mark in ("--speculative-config'", "--speculative-config '", "--speculative_config '"):
            for piece in text.split(mark)[1:]:
                found.append(decoder.raw_decode(piece)[0])
        if not found and "speculative" in text and not text.startswith("#!"):
            found += list(configs_in(list(yaml.safe_load_all(text))))
    return found


def configs_in(value: Any) -> Iterator[dict[str, Any]]:
    """The configurations inside a YAML document."""
    if isinstance(value, list):
        for one, after in zip(value, [*value[1:], None], strict=True):
            if one in ("--speculative-config", "--speculative_config"):
                yield json.loads(str(after))
            yield from configs_in(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == "speculative_config":
                yield one
            else:
                yield from configs_in(one)


@pytest.mark.parametrize("words", [["-d", "ngram"], ["--speculative-model", "x"], ["--draft", "none"]])
def test_two_words_about_the_draft_are_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run([*DRY, "--speculative-config", '{"model": "builtin:draft"}', *words]) == 2
    assert "and `--speculative-config` set the same thing" in capsys.readouterr().err
    assert run([*DRY, "--speculative-config", '{"model": "a", "num_speculative_tokens": 3}', "-k", "3"]) == 2


def test_generate_takes_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "Once", "-n", "4", "--quiet", "--speculative-config", '{"method": "ngram"}', "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["draft"]["method"] == "ngram"
