"""`specdec train-draft` after an interruption, a wish begun again, and with names that a shell would split."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_heads import publish, random_weights
from tiny_training import tiny_target

from specdec_cli.cli import main


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("a target"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "my prompts.txt"
    path.write_text("".join(f"{letter}kl\n" for letter in "abcd"))
    return path


def train(target: str, data: Path, output: Path, *more: str) -> int:
    words = ["train-draft", "-t", target, "--data", str(data), "--output", str(output), "-n", "8", "--depth", "2"]
    return main.run([*words, "--num-held-out", "1", "--batch-size", "4", "--max-steps", "1", *more])


@pytest.mark.slow
def test_a_drawn_seed_is_that_of_the_whole_run(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, random = tmp_path / "head", ["--seed", "-1", "--temperature", "1"]
    assert train(target, prompts, folder, *random) == 0
    seed = json.loads((folder / "training" / "plan.json").read_text())["sampling"]["seed"]
    assert seed > 0
    answers = (folder / "training" / "answers.jsonl").read_bytes()
    assert train(target, prompts, folder, *random, "--resume") == 0
    assert train(target, prompts, folder, "--seed", str(seed), "--temperature", "1", "--resume") == 0
    assert (folder / "training" / "answers.jsonl").read_bytes() == answers
    assert train(target, prompts, folder, *random[2:], "--resume") == 0  # with the run's own
    assert train(target, prompts, folder, "--seed", str(seed + 1), *random[2:], "--resume") == 2
    assert f"another `sampling.seed`: `{seed}`" in " ".join(capsys.readouterr().err.split())


def test_another_method_leaves_no_file_of_the_one_before(target: str, prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    assert train(target, prompts, folder, "--method", "medusa") == 0
    assert (folder / "medusa_lm_head.safetensors").exists()
    (folder / "notes.md").write_text("mine")
    assert train(target, prompts, folder, "--method", "eagle3", "--force") == 0
    names = {"README.md", "config.json", "model.safetensors", "notes.md", "recipe.yaml", "training"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "notes.md").read_text() == "mine"


def test_another_target_of_the_same_name_is_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = tiny_target(tmp_path / "target"), tmp_path / "head"
    assert train(target, prompts, folder) == 0
    weights = Path(target) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100:] = bytes(100)
    weights.write_bytes(bytes(content))
    assert train(target, prompts, folder, "--resume") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the target's weights are not those that the run in `{folder}` began with" in said


@pytest.mark.slow
def test_pictures_may_lie_in_the_folder_of_the_draft(target: str, prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    pictures = ["--plot", str(folder / "run.svg"), "--html", str(folder / "run.html")]
    assert train(target, prompts, folder, *pictures) == 0
    assert "<svg" in (folder / "run.svg").read_text()
    assert train(target, prompts, folder, *pictures, "--resume") == 0
    assert train(target, prompts, folder, "--force") == 0
    assert not (folder / "run.svg").exists()
    assert not (folder / "run.html").exists()


def test_what_is_not_read_of_the_data_is_told(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{letter}k"}] * 2} for letter in "abcd"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(target, data, tmp_path / "head") == 0
    assert "note: " in capsys.readouterr().err


def test_commands_on_the_screen_and_in_files_can_be_pasted(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my head"
    assert train(target, prompts, folder) == 0
    said = capsys.readouterr().err
    assert "training eagle3: 3 samples of 24 tokens" in said
    assert re.search(r", 1 step\n", said)
    recipe = str(folder / "recipe.yaml")
    lines = [line.removeprefix("try it: ") for line in said.splitlines() if line.startswith("try it: ")]
    lines += [line.removeprefix("$ ") for line in (folder / "README.md").read_text().splitlines() if line[:2] == "$ "]
    lines += [line.partition("# Run it: ")[2] for line in Path(recipe).read_text().splitlines() if "Run it" in line]
    assert [shlex.split(line)[:4] for line in lines] == [
        ["specdec", "bench", "-r", recipe],
        ["specdec", "generate", "-r", recipe, "Hello"][:4],
        ["specdec", "bench", "-r", recipe],
        ["specdec", "bench", "-r", recipe],
    ]
    assert "On 1 held-out prompt, k = 2" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--method", "medusa", "--layers", "0-1-2"], "`train.layers` has no meaning", "leave out --layers"),
        (["--method", "medusa", "--num-anchors", "3"], "`train.num_anchors` has no meaning", "leave out --num-anchors"),
        (["--layers", "0-99-3"], "hidden states of layer `99`: the target has 4 layers", "from 0 to 3 with --layers"),
        (["-n", "1"], "an answer of 1 token is too short to learn from", "raise -n (--max-new-tokens) to 2"),
        (["-n", "1", "--keep-answers"], "an answer of 1 token is too short to measure acceptance on", "raise -n"),
        (["--num-held-out", "4"], "`4` of `4` prompts are to be held out", "lower --num-held-out"),
    ],
)
def test_hints_name_the_option_to_change(
    target: str,
    prompts: Path,
    tmp_path: Path,
    words: Sequence[str],
    said: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(target, prompts, tmp_path / "head", *words) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert said in found
    assert hint in found


def test_an_export_overwrites_a_draft_that_is_alone_in_its_folder(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = publish(tmp_path / "head", random_weights(True), "specforge", (1, 2, 3))
    folder = tmp_path / "new"
    words = ["train-draft", "--export", "speculators", str(head), "-t", target, "--output", str(folder)]
    assert main.run(words) == 0
    (folder / "config.json").write_text("{}")
    assert main.run(words) == 2
    assert "with --force" in " ".join(capsys.readouterr().err.split())
    for dry in (["--dry-run"], []):
        assert main.run([*words, "--force", *dry]) == 0
    assert "speculators_version" in (folder / "config.json").read_text()
    (folder / "notes.md").write_text("mine")
    assert main.run([*words, "--force"]) == 2
    assert "holds `notes.md`, which no conversion writes" in " ".join(capsys.readouterr().err.split())
    assert main.run([*words[:-1], str(head), "--force"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_export_names_what_it_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train:\n  depth: 4\n  epochs: 2\n")
    words = ["train-draft", "--export", "speculators", "head", "--output", str(tmp_path / "new")]
    for more, name in (
        (["-r", str(recipe)], "train.epochs"),
        (["--set", "train.loss=tv"], "train.loss"),
        (["--temperature", "0.5"], "--temperature"),
        (["--trust-remote-code"], "--trust-remote-code"),
    ):
        assert main.run([*words, *more]) == 2
        assert f"`{name}` has no effect with --export" in capsys.readouterr().err
