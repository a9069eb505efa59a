"""Drafts that are no draft for this target end with one sentence and exit 2; files that cannot be read with exit 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_draft import FOLDERS, TOKENIZER, publish_draft
from safetensors.torch import load_file, save_file
from shortened import mostly_slow
from tiny_heads import publish, random_weights
from tiny_mtp import make_target
from torch import Tensor

from specdec_cli.cli.main import run

Damage = Callable[[Path], Any]
FORMATS = [name for name in FOLDERS if name != "universal"]
MODELS = ("model", "pard")
COMMANDS = {
    "generate": ["generate", "-n", "2", "abc"],
    "doctor": ["doctor"],
    "bench": ["bench", "-n", "2", "--num-prompts", "1"],
    "compare-drafts": ["compare-drafts", "-d", "ngram", "-n", "2", "--num-prompts", "1"],
    "sweep-k": ["sweep-k", "-n", "2", "--num-prompts", "1"],
    "serve": ["serve", "--port", "0"],
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and a sound draft of every format."""
    folder = tmp_path_factory.mktemp("sound")
    make_target("llama", folder / "target", 2, num_hidden_layers=6)
    TOKENIZER.save_pretrained(folder / "target")
    for name in FORMATS:
        publish_draft(name, folder / name)
    publish(folder / "reduced", random_weights(True, drafted=40), "speculators")
    return folder


@pytest.fixture
def bad(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Damage], None]:
    """Copies a sound draft to `./bad` and damages it."""

    def made(name: str, damage: Damage) -> None:
        shutil.copytree(sound / "target", tmp_path / "target")
        shutil.copytree(sound / name, tmp_path / "bad")
        damage(tmp_path / "bad")

    monkeypatch.chdir(tmp_path)
    return made


def weights_of(folder: Path) -> Path:
    """The file of a draft's weights."""
    files = [*folder.glob("*.safetensors"), *folder.glob("medusa*.pt"), *folder.glob("pytorch_model.bin")]
    return files[0]


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = weights_of(folder)
    is_pickled = path.suffix != ".safetensors"
    tensors = torch.load(path) if is_pickled else load_file(path)
    change(tensors)
    torch.save(tensors, path) if is_pickled else save_file(tensors, path)


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def matrix(tensors: dict[str, Tensor]) -> str:
    """A matrix of a layer."""
    return sorted(key for key, one in tensors.items() if one.dim() == 2 and ("layers" in key or "linear" in key))[0]


def stored_as(folder: Path, dtype: torch.dtype) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[matrix(tensors)] = tensors[matrix(tensors)].to(dtype)

    change_weights(folder, quantize)


def without_a_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop(matrix(tensors)))


def of_another_shape(folder: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[matrix(tensors)] = tensors[matrix(tensors)][:-1].clone()

    change_weights(folder, cut)


def with_a_nan(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        one = tensors[matrix(tensors)].clone()
        one.view(-1)[3] = torch.nan
        tensors[matrix(tensors)] = one

    change_weights(folder, spoil)


def of_an_unknown_kind(folder: Path) -> None:
    change_config(folder, speculators_model_type="unheard")


def for_another_width(folder: Path) -> None:
    change_config(folder, target_hidden_size=96)


def without_layer_ids(folder: Path) -> None:
    change_config(folder, aux_hidden_state_layer_ids=None)


def with_wrong_ids(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors["d2t"].add_(10**6))


def truncated(folder: Path) -> None:
    path = weights_of(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_weights(folder: Path) -> None:
    weights_of(folder).unlink()


def without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":')


WRONG = [
    (without_a_tensor, "lacks the tensor", "is missing"),
    (of_another_shape, "has the shape", "has another shape"),
    (with_a_nan, "holds numbers that are not finite", "holds numbers that are not finite"),
    (of_an_unknown_kind, "`speculators_model_type: unheard`", "`speculators_model_type: unheard`"),
]
"""What is wrong, and the words for a head and for a model."""
UNREADABLE = [truncated, without_weights, without_configuration, of_broken_json]
OF_ONE_FORMAT = [
    ("eagle3", for_another_width, "reads hidden states of width 96, and `./target` has 32"),
    ("dflash", for_another_width, "reads hidden states of width 96, and `./target` has 32"),
    ("dspark", without_layer_ids, "`aux_hidden_state_layer_ids` of `./bad` is no list of layers"),
    ("reduced", with_wrong_ids, "drafts tokens that `./target` does not have, or has twice, by its tensor `d2t`"),
]


def refused(command: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and nothing on stdout but doctor's report."""
    first, *rest = COMMANDS[command]
    assert run([first, "-t", "./target", "-d", "./bad", *rest]) == code
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert words in said[0]
    assert "unexpected" not in said[0]
    assert command == "doctor" or not out


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize(("damage", "of_head", "of_model"), WRONG)
@pytest.mark.parametrize("name", FORMATS)
def test_a_draft_that_is_wrong_is_refused(
    name: str,
    damage: Damage,
    of_head: str,
    of_model: str,
    bad: Callable[[str, Damage], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad(name, damage)
    refused("generate", 2, of_model if name in MODELS else of_head, capsys)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("dtype", mostly_slow(["int8", "float8_e4m3fn"], ["int8"]))
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in MODELS])
def test_a_quantized_head_is_refused(
    name: str, dtype: str, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad(name, lambda folder: stored_as(folder, getattr(torch, dtype)))
    for command in ("generate", "doctor"):
        refused(command, 2, f"holds numbers in `{dtype}`, which is not supported", capsys)


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "pard", "model"])
def test_files_that_cannot_be_read_did_not_run(
    name: str, damage: Damage, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad(name, damage)
    refused("generate", 1, "bad", capsys)


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("medusa", "medusa_num_heads"),
        ("medusa", "medusa_num_layers"),
        ("dflash", "num_hidden_layers"),
        ("pard", "num_hidden_layers"),
        ("pard2", "num_hidden_layers"),
        ("model", "num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_count_that_would_take_all_memory_is_refused(
    command: str, name: str, key: str, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad(name, lambda folder: change_config(folder, **{key: 10**9}))
    refused(command, 1, f"`{key}` is `1000000000`", capsys)


@pytest.mark.parametrize("name", ["dspark", "p-eagle"])
def test_counts_are_read_within_a_configuration_of_layers(
    name: str, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad(name, lambda folder: change_config(folder, transformer_layer_config={"num_hidden_layers": 10**9}))
    refused("generate", 1, "`num_hidden_layers` is `1000000000`", capsys)


@pytest.mark.parametrize(
    ("name", "keys", "code", "words"),
    [
        ("eagle", {"model_type": ["llama"]}, 2, "is built of `['llama']` layers"),
        ("pard2", {"model_type": {}}, 2, "is built of `{}` layers"),
        ("eagle3", {"draft_vocab_size": float("inf")}, 1, "is not a valid configuration"),
        ("eagle3", {"eagle_config": {"parallel_draft_step": "x"}}, 1, "is not a valid configuration"),
        ("dflash", {"dflash_config": {"target_hidden_size": float("inf")}}, 1, "is not a valid configuration"),
        ("medusa", {"hidden_size": float("inf")}, 1, "is not a valid configuration"),
        ("dspark", {"markov_rank": 6.5}, 1, "`markov_rank` is `6.5`, and must be a whole number of at least 0"),
        ("eagle3", {"target_hidden_size": "32"}, 1, "`target_hidden_size` is `32`, and must be a whole number"),
        (
            "dflash",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            1,
            "`sliding_window` is `0`, and must be a whole number of at least 1",
        ),
        (
            "eagle3",
            {"norm_before_residual": "false"},
            1,
            "`norm_before_residual` is `false`, and must be true or false",
        ),
        ("dflash", {"dflash_config": {"causal": "no"}}, 1, "`causal` is `no`, and must be true or false"),
        ("pard2", {"pard2_target_dim": float("inf")}, 1, "`pard2_target_dim` is `inf`, and must be a whole number"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    name: str,
    keys: dict[str, Any],
    code: int,
    words: str,
    bad: Callable[[str, Damage], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad(name, lambda folder: change_config(folder, **keys))
    refused("generate", code, words, capsys)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(("name", "damage", "words"), OF_ONE_FORMAT)
@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_draft_for_another_target_is_refused(
    command: str,
    name: str,
    damage: Damage,
    words: str,
    bad: Callable[[str, Damage], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad(name, damage)
    refused(command, 2, words, capsys)


@pytest.mark.in_turn(1, every=8)
@pytest.mark.parametrize("damage", [*(one[0] for one in WRONG), *UNREADABLE])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "generate"])
def test_every_command_refuses_it_alike(
    command: str, damage: Damage, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad("eagle3", damage)
    refused(command, 1 if damage in UNREADABLE else 2, "bad", capsys)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("damage", [one[0] for one in WRONG])
@pytest.mark.parametrize("name", ["model", "medusa"])
def test_doctor_sees_what_loading_refuses(
    name: str, damage: Damage, bad: Callable[[str, Damage], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bad(name, damage)
    refused("doctor", 2, "bad", capsys)
