"""`sweep-k --tree`: trees beside the chains, on toys whose steps cost what a test says they do."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schemas import assert_fits
from toy_clock import Clock, toy_clock
from toy_engine import LETTERS, LetterTokenizer
from typed import not_none, stand_in

from specdec_cli.cli.main import run
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.build import engine_options
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.bench import sweep
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.predict import trace as traces
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.recipe import resolve

V = len(LETTERS)


def target_seconds(rows: int, each: float = 0.0, limit: int = V) -> float:
    """Seconds of the target's forward: 20 ms, so many for each row, and five times as many beyond a limit."""
    return 0.02 * (5 if rows > limit else 1) + each * rows


CHEAP_ROWS = partial(target_seconds, each=0.0008, limit=99)
DEAR_ROWS = partial(target_seconds, each=0.3)
TWO_ROWS = partial(target_seconds, limit=2)
WORDS = ["sweep-k", "-d", "tiny", "-n", "24", "--num-prompts", "6", "--k-max", "3"]


class TimedLM(TableLM):
    """A table whose calls take seconds by the rows of logits."""

    clock: Clock
    seconds: Callable[[int], float]

    def score(self, rows):
        self.clock.sleep(self.seconds(sum(row.num_logits for row in rows)))
        return super().score(rows)


def timed_pair(clock: Clock, seconds: Callable[[int], float]) -> tuple[TimedLM, TimedLM]:
    """A target, and a draft that often has the target's token second or third."""
    rng = np.random.default_rng(5)
    base = rng.normal(0, 1.0, (V, V, V))
    other = base + rng.normal(0, 0.9, base.shape)
    for table in (base, other):
        table[..., 0] -= 50.0
    pair = [
        TimedLM(stand_in(lambda c, t=table: t[c[-2] if len(c) > 1 else 0, c[-1]]), V, order=2, name=name)
        for table, name in ((base, "target"), (other, "tiny"))
    ]
    for lm, its in zip(pair, (seconds, lambda rows: 0.001 + 0.00002 * rows), strict=True):
        lm.clock, lm.seconds = clock, its
    return pair[0], pair[1]


@pytest.fixture
def costs() -> list[Callable[[int], float]]:
    """Seconds of the target's calls, of the engines that the command loads from then on."""
    return [CHEAP_ROWS]


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, costs) -> list[Engine]:
    clock, engines = toy_clock(monkeypatch), list[Engine]()

    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        target, draft = timed_pair(clock, costs[0])
        drafter = create("model", {"model": "tiny"})
        drafter.load(Resources(lambda _: stand_in(draft), None, V))
        speculation = recipe.speculation
        options = EngineOptions(speculation.num_speculative_tokens, tree=speculation.tree, verify=speculation.verify)
        engines.append(Engine(stand_in(target), drafter, stand_in(LetterTokenizer()), options, eos_token_ids=(0,)))
        return engines[-1]

    monkeypatch.setattr(Engine, "from_recipe", load)
    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))
    return engines


def swept(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([*WORDS, "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, SweepDocument)
    return document


def measured(document) -> dict[tuple[int, str | None], float]:
    rows = [*document["rows"], *document["trees"]]
    return {(r.get("k", r.get("depth")), r.get("tree")): r["measured"]["speedup"] for r in rows if r["measured"]}


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "tree_pays"), [(CHEAP_ROWS, True), (DEAR_ROWS, False)])
def test_what_is_recommended_is_as_fast_as_the_best(
    capsys: pytest.CaptureFixture[str], costs, seconds, tree_pays: bool
) -> None:
    costs[0] = seconds
    words = ("--tree", "auto", "--tree", "2,2", "--tree", "4,2+1,1")
    every, few = swept(capsys, "--exhaustive", *words), swept(capsys, *words)
    speedups, recommended = measured(every), few["recommended"]
    assert every["plan"]["trees"] == ["auto", "2,2", "4,2+1,1"]
    assert len(speedups) == 3 + len(every["trees"])
    assert (recommended["tree"] is not None) is tree_pays
    best = max([1.0, *speedups.values()])
    assert recommended["verdict"] != "inconclusive", recommended
    assert recommended["verdict"] == ("speculate" if tree_pays else "do-not-speculate")
    found = speedups[recommended["k"], recommended["tree"]] if recommended["k"] else 1.0
    assert found >= 0.97 * best
    if tree_pays:
        assert f"tree {recommended['tree']} decodes" in recommended["why"]
        assert "; the best chain (k = " in recommended["why"]
    for row in every["trees"]:
        assert row["acceptance_length"] == pytest.approx(row["measured"]["acceptance_length"]), "replay is exact"
        assert row["predicted"]["speedup"] == pytest.approx(row["measured"]["speedup"], rel=0.03)
        assert row["predicted"]["tokens_per_second"] == pytest.approx(row["measured"]["tokens_per_second"], rel=0.03)
    assert every["lossless"]["mismatches"] == 0
    assert few["plan"]["measured_trees"], "the best tree is measured whether it pays or not"
    assert set(few["plan"]["measured_trees"]) <= set(few["costs"]["by_tree"]), "its own steps were measured, too"
    assert few["plan"]["measured_k"], "and the best chain"


def test_where_no_tree_pays_it_says_so(capsys: pytest.CaptureFixture[str], costs) -> None:
    costs[0] = TWO_ROWS
    why = swept(capsys, "--tree", "auto")["recommended"]["why"]
    assert "no tree pays: the best (" in why


def test_the_report_and_the_files_show_trees(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = {name: tmp_path / f"r.{name}" for name in ("markdown", "csv", "html", "output")}
    files = [f"--{name}={path}" for name, path in names.items()]
    assert run([*WORDS, "--tree", "auto", "--details", *files]) == 0
    out = capsys.readouterr().out
    document = json.loads(names["output"].read_text())
    trees = {row["tree"]: row for row in document["trees"]}
    assert 1 <= len(trees) <= sweep.MAX_TREES
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 80
    assert "here: the tree " in out
    for text in (out, names["markdown"].read_text(), names["html"].read_text()):
        assert all(tree in text for tree in trees)
    rows = list(csv.DictReader(names["csv"].read_text().splitlines()))
    assert [row["nodes"] for row in rows[:3]] == ["1", "2", "3"]
    assert {row["tree"]: row["nodes"] for row in rows[3:]} == {t: str(row["nodes"]) for t, row in trees.items()}
    assert [row["tree"] for row in rows if row["recommended"] == "1"] == [document["recommended"]["tree"]]


def test_the_tuned_recipe_drafts_the_tree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    document = swept(capsys, "--tree", "auto", "--write-recipe", str(path))
    tree = document["recommended"]["tree"]
    recipe = resolve(str(path)).recipe
    assert recipe.speculation.tree == tree
    assert recipe.speculation.num_speculative_tokens == document["recommended"]["k"]
    assert not_none(engine_options(recipe).shape_of(tree)).depth == document["recommended"]["k"]
    again = swept(capsys, "--recipe", str(path))
    assert again["plan"]["trees"] == [tree], "the recipe's own tree is considered"
    assert again["recommended"]["tree"] == tree


def test_a_recipe_that_a_chain_beats_loses_its_tree(capsys: pytest.CaptureFixture[str], costs, tmp_path: Path) -> None:
    costs[0], path = TWO_ROWS, tmp_path / "tuned.yaml"
    document = swept(capsys, "--set", "speculation.tree=2,1", "--write-recipe", str(path))
    assert document["recommended"]["verdict"] == "speculate"
    speculation = resolve(str(path)).recipe.speculation
    assert (speculation.tree, speculation.num_speculative_tokens) == (None, document["recommended"]["k"])


def test_a_trace_without_ranks_is_made_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    swept(capsys, "--trace", str(path))
    held = traces.load(path)
    held.drafts = {
        name: replace(draft, rank=None) for name, draft in held.drafts.items() if isinstance(draft, ModelTrace)
    }
    held.save(path)
    assert not any("ranks" in one for one in swept(capsys, "--trace", str(path))["notices"])
    document = swept(capsys, "--trace", str(path), "--tree", "2,1")
    assert [one for one in document["notices"] if "has no ranks" in one]
    assert document["trees"][0]["predicted"]["speedup"] > 0


def test_an_interrupted_sweep_goes_on_with_its_trees(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["--output", str(tmp_path / "r.json"), "--tree", "auto", "--tree", "2,1"]
    with monkeypatch.context() as patched:
        patched.setattr(sweep.Sweep, "recommended", lambda _: 1 / 0)
        assert run([*WORDS, *kept]) != 0
    capsys.readouterr()
    document = swept(capsys, *kept, "--resume")
    assert document["plan"]["resumed"] == document["plan"]["passes"]
    assert document["lossless"]["mismatches"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tree", "4,2,1,1"], "the tree `4,2,1,1` is `4` deep, and --k-max is `3`"),
        (["--tree", "1,1"], "the tree `1,1` is the chain k = 2"),
        (["--tree", "dynamic:8"], "depend on the draft's probabilities"),
        (["--set", "speculation.tree=dynamic:8"], "depend on the draft's probabilities"),
        (["--tree", "4x2"], "the tree `4x2` is not a shape"),
        (["--tree", "auto", "--temperature", "0.8"], "trees are predicted at temperature 0, not at `0.8`"),
        (["--tree", "auto", "-d", "ngram:min=1"], "the draft `ngram` has no ranks of tokens"),
        (["--tree", "auto", "--verify", "block"], "`block` judges chains alone"),
        (["--tree", "auto", "--verify", "typical", "--exhaustive"], "cannot replay the rule `typical`"),
        (["--tree", "auto", "--batch-sizes", "1,2"], "a recipe has one tree for all batch sizes"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    capsys: pytest.CaptureFixture[str], loaded, words: list[str], said: str
) -> None:
    assert run([*WORDS, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not loaded, "before anything is loaded"


def test_a_dry_run_says_which_trees(capsys: pytest.CaptureFixture[str], loaded) -> None:
    assert run([*WORDS, "--tree", "auto", "--tree", "2, 2", "--dry-run"]) == 0
    assert "k = 1 to 3 and trees (auto 2,2) over 6 prompts" in capsys.readouterr().out
    assert not loaded
