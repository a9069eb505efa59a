"""A k or a tree beyond what a draft gives: every command says so once, and no k is measured twice."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from every_draft import TOKENIZER
from tiny_dflash import BLOCK, publish_dflash, random_block_weights
from tiny_medusa import NUM_HEADS, publish_medusa, random_medusa_weights
from tiny_mtp import make_target

from specdec_cli.cli.main import run
from specdec_cli.measure.predict.profiling import profile

SAYS = f"the draft `medusa` drafts at most {NUM_HEADS} tokens in a row"
ENDS = f"k ends at {NUM_HEADS}, not at 8, because {SAYS}"
FEW = ["-n", "4", "--num-prompts", "1", "--repeats", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("limited")
    make_target("llama", found / "target", 2, num_hidden_layers=6)
    TOKENIZER.save_pretrained(found / "target")
    publish_medusa(found / "medusa", random_medusa_weights())
    publish_dflash(found / "dflash", random_block_weights(), "z-lab")
    return found


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("_PROFILE_SECONDS", "_MIN_PROFILE_SECONDS"):
        monkeypatch.setattr(f"specdec_cli.measure.bench.compare.{name}", 0.0)
    monkeypatch.setattr("specdec_cli.measure.bench.sweep.profile", partial(timed, profile))


def timed(measure: Any, *given: Any, **options: Any) -> Any:
    """A profile that ends after its fewest rounds."""
    return measure(*given, **options | {"time_limit_seconds": 0.0})


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr about a draft's limit."""
    return [line for line in capsys.readouterr().err.splitlines() if "in a row" in line]


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    ("words", "cut"),
    [
        (["-d", "./medusa", "-k", "9"], f"{SAYS}, and k is 9: its drafts are cut to 4"),
        (["-d", "./medusa", "-k", "4"], None),
        (["-d", "suffix+./medusa", "-k", "9"], f"{SAYS}, and k is 9: its drafts are cut to 4"),
        (["-d", "./medusa", "-k", "9", "--depth-policy", "adaptive"], f"{SAYS}, and k is 9: its drafts are cut to 4"),
        (["-d", "./medusa", "-k", "4", "--depth-policy", "adaptive"], None),
        (
            ["-d", "./medusa", "--tree", "2,2,2,2,2"],
            f"{SAYS}, and the tree `2,2,2,2,2` is 5 deep: its drafts are cut to 4",
        ),
        (["-d", "./medusa", "--tree", "2,2"], None),
        (["-d", "./dflash", "-k", "12"], f"`dflash` drafts at most {BLOCK - 1} tokens in a row, and k is 12"),
        (["-d", "ngram", "-k", "9"], None),
    ],
)
def test_generate_says_where_a_draft_is_cut(
    words: list[str], cut: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-t", "./target", *words, "-n", "2", "abc"]) == 0
    found = told(capsys)
    assert len(found) == (cut is not None)
    assert cut is None or cut in found[0]


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([words[0], "-t", "./target", *words[1:], *FEW, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def limits(found: dict[str, Any]) -> list[str]:
    return [said for said in found["notices"] if "in a row" in said]


def test_bench_says_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert limits(document(capsys, "bench", "-d", "./medusa", "-k", "9")) == [
        f"{SAYS}, and k is 9: its drafts are cut to 4"
    ]


def test_sweep_k_measures_no_k_twice(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "sweep-k", "-d", "./medusa", "--exhaustive")
    assert [row["k"] for row in found["rows"]] == [1, 2, 3, 4]
    assert limits(found) == [ENDS]
    deep = ["sweep-k", "-t", "./target", "-d", "./medusa", "--tree", "2,2,2,2,2", *FEW]
    assert run(deep) == 2
    assert "and the tree `2,2,2,2,2` is `5` deep" in told(capsys)[0]


def test_compare_drafts_measures_each_draft_as_deep_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "compare-drafts", "-d", "ngram", "-d", "./medusa", "--exhaustive", "--k-max", "8")
    by_draft = {row["draft"]: [one["k"] for one in row["measured"]] for row in found["rows"]}
    assert by_draft == {"ngram": [*range(1, 9)], "./medusa": [1, 2, 3, 4]}
    assert limits(found) == [f"./medusa: {ENDS}"]


def test_compare_drafts_says_where_a_tree_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "compare-drafts", "-d", "./medusa", "-d", "./dflash", "--tree", "2,1,1,1,1")
    assert [said.partition(":")[0] for said in limits(found)] == ["./medusa", "./dflash"]
    assert all("the tree `2,1,1,1,1` is 5 deep: its drafts are cut to 4" in said for said in limits(found))


def test_audit_checks_no_k_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mode", "greedy", "--num-prompts", "1", "-n", "2", "--batch-sizes", "1"]
    assert run(["audit", "-t", "./target", "-d", "./medusa", *words, "--k-values", "1,4,8"]) == 0
    assert told(capsys) == [f"note: {SAYS}, and k is 8: its drafts are cut to 4"]
