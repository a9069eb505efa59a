"""What a sweep measured, in the files of other engines; each file is read as its engine documents the format."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_dflash import publish_dflash, random_block_weights

from specdec_cli.cli.main import run

SWEEP: dict[str, Any] = {
    "schema": "specdec.sweep-k/1",
    "created": "2026-11-28T17:24:26Z",
    "environment": {"gpu": None, "cpu": "A CPU", "device": "cpu", "dtype": "float32"},
    "recipe": {"target": {"model": "a/b"}, "draft": {"model": "c/d"}, "speculation": {"num_speculative_tokens": 4}},
    "workload": {"dataset": "builtin:mini", "num_prompts": 12},
    "machine": {"busy": None},
    "by_batch_size": [
        {
            "batch_size": size,
            "recommended": {
                "verdict": "speculate" if k else "do-not-speculate",
                "k": k,
                "tree": None,
                "speedup": {"median": 1.5, "ci95": [1.25, 1.75], "pairs": 12},
            },
            "costs": {
                "target_seconds_by_rows": [0.010 * size, 0.011 * size, 0.009 * size],
                "draft_seconds_by_k": [0.0, 0.001, 0.002],
                "overhead_seconds_by_k": [0.0005, 0.0005, 0.0005],
            },
        }
        for size, k in ((1, 4), (4, 2), (8, 3), (16, 0))
    ],
}
BEST = {n: next(k for size, k in ((16, 0), (8, 3), (4, 2), (1, 4)) if n >= size) for n in range(1, 100)}
"""The recommended k by the number of running sequences."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exported(
    capsys: pytest.CaptureFixture[str], engine: str, draft: str, document: Mapping[str, Any], *words: str
) -> tuple[dict[str, str], str]:
    """The files of an export of a measurement, and its warnings."""
    document = deepcopy(dict(document))
    document["recipe"]["draft"]["model"] = draft
    Path("sweep.json").write_text(json.dumps(document))
    assert run(["export", engine, "-t", "a/b", "-d", draft, "--measured", "sweep.json", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["files"], " / ".join(found["warnings"])


def k_of_vllm(ranges: Sequence[Sequence[int]], num_running: int) -> int:
    """Inclusive ranges from 1 on; a gap and the tail keep the k before them."""
    assert ranges[0][0] == 1
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    return [k for first, _, k in ranges if first <= num_running][-1]


def k_of_sglang(table: Mapping[str, Any], num_running: int) -> int:
    """Lower bounds as digits; with one candidate there is nothing to adapt."""
    [k] = table[str(max(int(size) for size in table if int(size) <= num_running))]["candidate_steps"]
    return int(k)


def k_of_tensorrt_llm(schedule: Mapping[int, int], num_running: int) -> int:
    """The first upper bound that is no smaller; 0 beyond them all."""
    return next((k for bound, k in sorted(schedule.items()) if bound >= num_running), 0)


def test_every_engine_drafts_what_the_sweep_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    files, warnings = exported(capsys, "vllm", "c/d", SWEEP)
    config = json.loads(re.findall(r"--speculative-config '(.*?)'", files["vllm.sh"])[0])
    assert {n: k_of_vllm(config["num_speculative_tokens_per_batch_size"], n) for n in BEST} == BEST
    assert config["num_speculative_tokens"] == 4, "which would cut the others"
    assert "k is the measured one of specdec's own engine on A CPU; another engine's may differ" in warnings
    files, _ = exported(capsys, "sglang", "x/eagle3-head", SWEEP)
    assert {n: k_of_sglang(json.loads(files["adaptive.json"]), n) for n in BEST} == BEST
    files, warnings = exported(capsys, "trtllm", "c/d", SWEEP)
    config = yaml.safe_load(files["trtllm.yaml"])["speculative_config"]
    assert {n: k_of_tensorrt_llm(config["draft_len_schedule"], n) for n in BEST} == BEST
    assert "upper bounds as keys, as TensorRT-LLM 1.4 reads them" in warnings
    files, _ = exported(capsys, "trtllm", "c/d", SWEEP, "-k", "2")
    assert "draft_len_schedule" not in files["trtllm.yaml"], "the command line says otherwise"


def test_the_last_k_holds_for_larger_batches_in_tensorrt_llm_too(capsys: pytest.CaptureFixture[str]) -> None:
    files, _ = exported(capsys, "trtllm", "c/d", SWEEP | {"by_batch_size": SWEEP["by_batch_size"][:3]})
    schedule = yaml.safe_load(files["trtllm.yaml"])["speculative_config"]["draft_len_schedule"]
    assert k_of_tensorrt_llm(schedule, 500) == 3


TIMES = {1: 12.5, 2: 13.5, 3: 13.5, 4: 42.5, 8: 82.5, 12: 82.5, 16: 162.5, 24: 162.5, 32: 178.5, 48: 178.5}
"""Milliseconds by verified tokens: of the target, two drafted tokens and the engine; the slower of two batch sizes
with as many, and no less than for fewer tokens."""


def test_step_times_of_a_dspark_draft(capsys: pytest.CaptureFixture[str]) -> None:
    files, warnings = exported(capsys, "sglang", "x/dspark-head", SWEEP)
    table = json.loads(files["steps.json"])
    assert table.keys() == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert (table["sample_batch_tokens"], table["max_batch_tokens"]) == (sorted(TIMES), 48)
    assert 1e3 / np.array(table["sample_steps_per_sec"]) == pytest.approx([*TIMES.values()])
    assert '--speculative-dspark-sps-table-path "$HERE/steps.json"' in files["sglang.sh"]
    assert "SGLANG_RAGGED_VERIFY_MODE=compact" in warnings
    files, warnings = exported(capsys, "trtllm", "x/dspark-head", SWEEP)
    table, config = json.loads(files["steps.json"]), yaml.safe_load(files["trtllm.yaml"])["speculative_config"]
    assert table.keys() == {"token_counts", "step_time_ms"}
    milliseconds = np.interp([1, 6, 48, 60], table["token_counts"], table["step_time_ms"])
    assert milliseconds == pytest.approx([12.5, (42.5 + 82.5) / 2, 178.5, 178.5])
    assert (config["enable_confidence_scheduling"], config["confidence_cost_table_path"]) == (True, "steps.json")
    assert 'cd "$HERE"' in files["trtllm.sh"]
    assert "the step times are those of specdec's own engine on A CPU" in warnings


@pytest.mark.parametrize("is_calibrated", [False, True])
@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_the_temperatures_of_a_draft_s_confidences_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str, is_calibrated: bool
) -> None:
    publish_dflash(tmp_path / "draft", random_block_weights(dspark="vanilla"), "dspark")
    path = tmp_path / "draft" / "dspark_sts.json"
    if is_calibrated:
        path.write_text(json.dumps({"temperatures": [1.0] * 5}))
    files, warnings = exported(capsys, engine, str(tmp_path / "draft"), SWEEP)
    option = {"sglang": "--speculative-dspark-confidence-sts-path", "trtllm": "confidence_calibration_path:"}[engine]
    assert (f"{option} {path}" in "".join(files.values())) == is_calibrated
    assert ("confidences are not calibrated" in warnings) != is_calibrated


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_what_a_sweep_lacks_is_one_sentence(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    files, warnings = exported(capsys, engine, "x/dspark-head", SWEEP | {"engine_sweep": {"costs": []}})
    assert "steps.json" not in files
    assert "table of step times is left out: step times are those of `specdec sweep-k` on its own engine" in warnings
    assert "own engine on A CPU;" not in warnings, "k is the other engine's"
    inconclusive, with_tree = deepcopy(SWEEP), deepcopy(SWEEP)
    for at_size in inconclusive["by_batch_size"][1:3]:
        at_size["recommended"] |= {"verdict": "inconclusive", "why": "k = 7 was measured 9.99×"}
    files, warnings = exported(capsys, engine, "c/d", inconclusive)
    said = rf"inconclusive: k = 7 was measured 9\.99×; k = {BEST[4]} stays in use\."
    assert re.search(said, "".join(files.values())), "the speed-up of another k is not said of this one"
    assert "the sweep is inconclusive at batch size 4, 8, so k is not taken from it" in warnings
    with_tree["by_batch_size"][0]["recommended"]["tree"] = "2,1"
    _, warnings = exported(capsys, engine, "c/d", with_tree)
    assert "the sweep recommends a tree, so k is not taken from it" in warnings


def test_costs_that_are_no_seconds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (None, [], [-1.0, 0.0, 0.0], ["x", 1, 2], [0.1]):
        document = deepcopy(SWEEP)
        document["by_batch_size"][1]["costs"]["target_seconds_by_rows"] = wrong
        Path("sweep.json").write_text(json.dumps(document))
        assert run(["export", "vllm", "-t", "a/b", "-d", "c/d", "--measured", "sweep.json"]) == 2, wrong
        assert "lacks what a result of `specdec.sweep-k` has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draft", "words", "is_trimmed"),
    [("x/dspark-head", [], True), ("c/d", [], False), ("x/dspark-head", ["--pipeline-parallel-size", "2"], False)],
)
def test_vllm_trims_drafts_for_the_adaptive_policy(
    capsys: pytest.CaptureFixture[str], draft: str, words: list[str], is_trimmed: bool
) -> None:
    assert run(["export", "vllm", "-t", "a/b", "-d", draft, "--depth-policy", "adaptive", *words]) == 0
    out = capsys.readouterr().out
    assert ('"enable_adaptive_verification": true' in out) == is_trimmed
    assert ("speculation.depth_policy = adaptive is left out" in out) != is_trimmed
