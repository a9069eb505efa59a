"""`generation_config.json`: what is read, what holds by default, and what is wrong with a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.generation import Generation, read_generation
from specdec_cli.lm.files.names import GENERATION_FILE as FILE

LLAMA2 = {"do_sample": True, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6, "max_length": 4096, "top_p": 0.9}
QWEN3 = {"do_sample": True, "eos_token_id": [5, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def read(folder: Path, given: Any, wanted: str = "auto") -> Generation:
    (folder / FILE).write_text(given if isinstance(given, str) else json.dumps(given))
    return read_generation(folder, wanted)


def test_published_files_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA2)
    assert found == Generation({"temperature": 0.6, "top_p": 0.9}, (2,), {"max_length": 4096}, str(tmp_path / FILE))
    assert read(tmp_path, QWEN3).eos_token_ids == (5, 3)
    assert read(tmp_path, QWEN3).sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert read(tmp_path, QWEN3).words == "temperature 0.6, top_p 0.95, top_k 20"


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"top_k": 50, "min_p": 0.1}, {"top_k": 50, "min_p": 0.1}),
        ({"top_k": 0}, {"top_k": None}),
        ({"top_k": -1}, {"top_k": None}),
        ({"repetition_penalty": 1.05, "max_new_tokens": 2048}, {"repetition_penalty": 1.05, "max_new_tokens": 2048}),
        ({"stop_strings": "###"}, {"stop": ("###",)}),
        ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": None, "top_p": None}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}),
        ({"do_sample": False, "_from_model_config": True}, {}),
        ({"do_sample": None}, {}),
        ({}, {}),
    ],
)
def test_sampling_by_the_names_of_transformers(tmp_path: Path, given: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert read(tmp_path, given).sampling == sampling
    assert read(tmp_path, given, "none").sampling == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("temperature", value) for value in (-1, "hot", True, [0.5], float("inf"), float("nan"))],
        *[("top_p", value) for value in (0, 1.5, "x")],
        *[("top_k", value) for value in (1.5, "x", True)],
        *[("min_p", value) for value in (-0.1, 2)],
        *[("repetition_penalty", value) for value in (0, -1, {})],
        *[("max_new_tokens", value) for value in (0, -1, 1.5, "x")],
        *[("do_sample", value) for value in ("yes", 1, 0)],
        *[("stop_strings", value) for value in (3, [""], [3])],
        *[("eos_token_id", value) for value in ("</s>", -1, [1, "x"], [None], 1.5, True, [[1]])],
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(RunError, match=f"{FILE}`: `{key}` must be") as refused:
        read(tmp_path, {key: value})
    assert ("--generation-config none" in str(refused.value.hint)) == (key != "eos_token_id")
    if key != "eos_token_id":
        assert read(tmp_path, {key: value}, "none").sampling == {}


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"', "", "\x00"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    for wanted in ("auto", "none"):
        with pytest.raises(RunError, match=f"{FILE}` cannot be read"):
            read(tmp_path, text, wanted)


def test_another_folder(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    read(own, QWEN3)
    with pytest.raises(UsageError, match="is not a folder with a `generation_config"):
        read_generation(own, str(other))
    read(other, {"temperature": 0.2})
    found = read_generation(own, str(other))
    assert (found.sampling, found.eos_token_ids) == ({"temperature": 0.2}, (5, 3)), "the model's own end tokens hold"
    read(other, {"eos_token_id": 9})
    assert read_generation(own, str(other)) == Generation({}, (9,), {}, str(other / FILE))
    (own / FILE).unlink()
    assert read_generation(own) == Generation()


def test_what_is_not_applied_is_listed(tmp_path: Path) -> None:
    given = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [1], "min_new_tokens": 5}
    neutral = {
        "length_penalty": 1.0,
        "num_return_sequences": 1,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "use_cache": True,
    }
    assert read(tmp_path, given | neutral).unused == given


@pytest.mark.parametrize("wanted", ["auto", "none"])
def test_end_tokens_of_a_wrong_kind_are_shown_as_written_and_never_left_unread(tmp_path: Path, wanted: str) -> None:
    for given, said in (("2", '`"2"`'), ([[1]], "`[[1]]`"), (True, "`true`")):
        with pytest.raises(RunError) as caught:
            read(tmp_path, {"eos_token_id": given}, wanted)
        assert caught.value.message.endswith(f"not {said}")
        assert "--generation-config none" not in str(caught.value.hint)
