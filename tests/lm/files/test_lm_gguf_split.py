"""A GGUF model in several files: the same model as in one, and one sentence where the parts do not belong together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refused import refusal
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files.chat_templates import chat_templates
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.recipe.values import Compute

pytest.importorskip("gguf", reason="needs gguf")

from gguf_parts import SHORT, Parts, split
from tiny_gguf import SIZES, write_gguf

TOKENS = [5, 17, 3, 40, 41, 9]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file."""
    folder = tmp_path_factory.mktemp("split")
    path = folder / "tiny.gguf"
    write_gguf(make_tiny("llama", folder / "llama", **SIZES, num_hidden_layers=2), path, "Q4_1")
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path, 3)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("leads_with_metadata", [False, True])
@pytest.mark.parametrize("compute", ["native", "dequantized"])
def test_51_parts_are_the_model_in_one_file(
    whole: Path, tmp_path: Path, compute: Compute, leads_with_metadata: bool
) -> None:
    first = str(split(whole, tmp_path, 3, leads_with_metadata=leads_with_metadata)[0])
    counts: list[tuple[float, float]] = []
    lms = [load_lm(name, compute=compute) for name in (str(whole), first)]
    logits = [lm.score([Row(0, TOKENS, len(TOKENS))]) for lm in lms]
    assert torch.equal(*logits)
    assert load_tokenizer(first)("the hare")["input_ids"] == load_tokenizer(str(whole))("the hare")["input_ids"]
    assert lms[0].eos_token_ids == lms[1].eos_token_ids != ()
    assert chat_templates(first) == chat_templates(str(whole))
    load_lm(first, compute="dequantized", check=False, progress=lambda *count: counts.append(count))
    assert counts[-1][0] == pytest.approx(counts[-1][1])
    facts, expected = describe(first, compute=compute), describe(str(whole), compute=compute)
    assert facts.stored_as == f"{expected.stored_as} in 3 parts"
    assert facts.stored_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.gguf"))
    assert (facts.weights_bytes, facts.decoder) == (expected.weights_bytes, expected.decoder)


def test_51_every_part_counts_in_the_fingerprint(parts: list[Path]) -> None:
    before = load_lm(str(parts[0]), check=False).origin.weights
    with parts[2].open("r+b") as file:  # the scale of the last block
        file.seek(-20, 2)
        file.write(b"\1\2")
    assert load_lm(str(parts[0]), check=False).origin.weights != before


@pytest.mark.parametrize("place", [1, 2])
def test_51_a_later_part_names_the_first(parts: list[Path], place: int) -> None:
    error = refusal(parts[place])
    assert isinstance(error, UsageError)
    assert error.message == f"`{parts[place]}` is part {place + 1} of 3 of a model"
    assert error.hint == f"give the first part: `{parts[0]}`"


def swap(parts: list[Path], _: Path) -> None:
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(second)


def of_another_split(parts: list[Path], whole: Path) -> None:
    shutil.copy(split(whole, parts[0].parent, 4)[1], parts[1])


def of_another_model(parts: list[Path], whole: Path) -> None:
    """The same split of a model of other layers, whose tensors have other names or shapes."""
    folder = parts[0].parent / "other"
    other = {**SIZES, "intermediate_size": 512}
    write_gguf(make_tiny("llama", folder, **other, num_hidden_layers=2), folder / "tiny.gguf", "Q4_1")
    shutil.copy(split(folder / "tiny.gguf", folder, 3)[1], parts[1])


def with_repeated_tensors(parts: list[Path], _: Path) -> None:
    third = Parts.of(parts[1])
    third.set("split.no", 2, SHORT)
    third.write(parts[2])


def with_fewer_tensors(parts: list[Path], _: Path) -> None:
    third = Parts.of(parts[2])
    third.tensors.pop()
    third.write(parts[2])


FAULTS: dict[str, tuple[Callable[[list[Path], Path], object], str]] = {
    "missing": (lambda parts, _: parts[1].unlink(), "part 2 of 3 of `{0}` is missing: `{1}`"),
    "a broken link": (
        lambda parts, _: (parts[1].unlink(), parts[1].symlink_to("none")),
        "`{1}` is a link to `none`, which does not exist",
    ),
    "a pointer": (
        lambda parts, _: parts[2].write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "`{2}` is a git-lfs pointer",
    ),
    "truncated": (lambda parts, _: parts[2].write_bytes(parts[2].read_bytes()[:-4]), "`{2}` is not a whole GGUF file"),
    "swapped": (swap, "`{1}` says that it is part 3 of 3, and its name part 2 of 3"),
    "repeated": (lambda parts, _: shutil.copy(parts[1], parts[2]), "`{2}` says that it is part 2 of 3, and its name"),
    "of another split": (of_another_split, "`{1}` says that it is part 2 of 4, and its name part 2 of 3"),
    "a whole model": (lambda parts, whole: shutil.copy(whole, parts[1]), "`{1}` says that it is a whole model"),
    "of another model": (of_another_model, "has another shape"),
    "repeated tensors": (with_repeated_tensors, "which an earlier part has: they are of two models"),
    "fewer tensors": (with_fewer_tensors, "the parts of `{0}` have 20 tensors, and the first one says 21"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_51_parts_that_do_not_belong_together_are_one_sentence(whole: Path, parts: list[Path], fault: str) -> None:
    change, message = FAULTS[fault]
    change(parts, whole)
    assert message.format(*parts) in refusal(parts[0]).message


def test_51_a_first_part_by_another_name_is_refused(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    error = refusal(renamed)
    assert "is one of 3 files of a model, and its name does not lead to the others" in error.message
    assert error.hint == "name it as llama.cpp does: `NAME-00001-of-00003.gguf`"


def test_51_commands_take_the_first_part(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "the", "-t", str(parts[0]), "-n", "4", "--quiet"]) == 0
    capsys.readouterr()
    for command in (["generate", "the"], ["doctor"]):
        assert run([*command, "-t", str(parts[1])]) in (1, 2)
        assert "give the first part" in " ".join("".join(capsys.readouterr()).split())
