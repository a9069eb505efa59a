"""Folders with GGUF files: the only model, one that is chosen behind a colon, or one sentence with the choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refused import refusal
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.errors import UsageError
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files.chat_templates import chat_templates
from specdec_cli.lm.files.gguf_choice import choose_gguf

pytest.importorskip("gguf", reason="needs gguf")

from gguf_parts import split
from tiny_gguf import CHAT, SIZES, write_gguf

REPOSITORY = [
    "README.md",
    "imatrix.gguf",
    "mmproj-F16.gguf",
    "mtp-tiny-Q8_0.gguf",
    "tiny-IQ4_XS.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-MTP-Q5_K_M.gguf",
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf",
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as Q4_0 and, in two parts and a folder of their own, as Q8_0, with a projector beside it."""
    source, made = make_tiny("llama", tmp_path / "source", **SIZES, num_hidden_layers=1), tmp_path / "tiny-GGUF"
    (made / "Q8_0").mkdir(parents=True)
    write_gguf(source, made / "tiny-Q4_0.gguf", "Q4_0")
    write_gguf(source, tmp_path / "tiny-Q8_0.gguf", "Q8_0")
    split(tmp_path / "tiny-Q8_0.gguf", made / "Q8_0", 2)
    (made / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return made


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K_M", REPOSITORY[5:6]),
        ("q4_k_m", REPOSITORY[5:6]),
        ("tiny-Q4_K_M.gguf", REPOSITORY[5:6]),
        ("IQ4_XS", REPOSITORY[4:5]),
        ("MTP", REPOSITORY[6:7]),
        ("Q8_0", REPOSITORY[7:]),
        ("tiny-Q8_0-00001-of-00002.gguf", REPOSITORY[7:]),
        (REPOSITORY[7], REPOSITORY[7:]),
        ("mmproj-F16.gguf", REPOSITORY[2:3]),
    ],
)
def test_51_a_model_is_chosen_by_letters_of_its_name(wanted: str, expected: list[str]) -> None:
    assert choose_gguf("org/repo", wanted, REPOSITORY, "has {} GGUF files") == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "",
            "`org/repo` has 4 GGUF files: `tiny-IQ4_XS.gguf`, `tiny-Q4_K_M.gguf`, `tiny-MTP-Q5_K_M.gguf`, "
            "`Q8_0/tiny-Q8_0-00001-of-00002.gguf`",
        ),
        ("Q4_K", "`org/repo` has no GGUF file `Q4_K`"),
        ("tiny-Q8_0-00002-of-00002.gguf", f"`{REPOSITORY[8]}` of `org/repo` is a later part of a model"),
    ],
)
def test_51_without_one_choice_the_models_are_listed(wanted: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_gguf("org/repo", wanted, REPOSITORY, "has {} GGUF files")
    assert caught.value.message == message
    assert (caught.value.hint or "").count("org/repo:") == 1


def test_a_part_of_a_word_chooses_nothing_and_the_hint_names_the_nearest() -> None:
    for names in (["small-Q4_1.gguf", "small-Q8_0.gguf"], ["small-Q4_K_S.gguf", "small-Q8_0.gguf"]):
        with pytest.raises(UsageError) as caught:
            choose_gguf("repo", "Q8", names, "has {} files")
        assert (caught.value.message, caught.value.hint) == (
            "`repo` has no GGUF file `Q8`",
            "name one of them, such as `repo:small-Q8_0.gguf`",
        )


def test_51_a_long_list_is_cut() -> None:
    with pytest.raises(UsageError, match=r"`11.gguf` and 8 more$"):
        choose_gguf("repo", "", [f"{number}.gguf" for number in range(20)], "has {} files")


def test_51_a_folders_model_is_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(f"{folder}:Q4_0").stored_as == "GGUF (Q4_0)"
    assert describe(f"{folder}:Q8_0").stored_as == "GGUF (Q8_0) in 2 parts"
    assert chat_templates(f"{folder}:Q8_0") == [CHAT]
    assert run(["generate", "the", "-t", f"{folder}:Q4_0", "-d", f"{folder}:Q8_0", "-n", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["target"]["model"] == f"{folder}:Q4_0"


def test_51_a_folder_in_this_place_needs_no_dot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["generate", "the", "-t", "tiny-GGUF:Q4_0", "-d", "tiny-GGUF:Q8_0", "-n", "2", "--quiet"]) == 0
    assert run(["generate", "the", "-t", "tiny-GGUF:Q3_K", "-n", "2", "--quiet"]) == 2
    assert "`tiny-GGUF` has no GGUF file `Q3_K`" in capsys.readouterr().err


def test_51_a_folder_lists_its_models(folder: Path) -> None:
    error = refusal(folder)
    listed = "`Q8_0/tiny-Q8_0-00001-of-00002.gguf`, `tiny-Q4_0.gguf`"
    assert error.message == f"`{folder}` is a folder of GGUF files with 2 models: {listed}"
    assert error.hint == f"name one of them, such as `{folder}:Q8_0/tiny-Q8_0-00001-of-00002.gguf`"


def test_51_a_folders_only_model_needs_no_choice(folder: Path) -> None:
    (folder / "tiny-Q4_0.gguf").unlink()
    assert describe(str(folder), compute="native").decoder == "own, native"


def test_51_a_choice_is_for_gguf_files_alone(folder: Path) -> None:
    source = folder.parent / "source"
    assert refusal(f"{source}:Q4_0").message == f"`{source}` has no GGUF file `Q4_0`"
    assert describe(str(source)).stored_as == "safetensors"
