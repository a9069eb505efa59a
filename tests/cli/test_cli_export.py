import json
import os
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_fits
from shortened import mostly_slow

from specdec_cli.cli.main import run
from specdec_cli.export import ENGINES
from specdec_cli.measure.documents.recipes import ExportDocument

BENCH: dict[str, Any] = {
    "schema": "specdec.bench/1",
    "specdec_version": "1.0",
    "created": "2026-11-26T17:24:26Z",
    "environment": {"gpu": None, "cpu": "A CPU", "device": "cpu", "dtype": "float32"},
    "recipe": {
        "target": {"model": "a/b"},
        "draft": {"model": "c/d"},
        "speculation": {"num_speculative_tokens": 3},
        "sampling": {"temperature": 0.0, "max_new_tokens": 64},
    },
    "workload": {"dataset": "builtin:mini", "num_prompts": 12},
    "plan": {"batch_size": 1},
    "machine": {"busy": None},
    "speedup": {"decode": {"median": 1.5, "ci95": [1.25, 1.75], "pairs": 12}},
    "draft": {"speculative": {"num_drafts": 10, "acceptance_length": 2.0, "acceptance_histogram": [4, 3, 2, 1]}},
    "lossless": {"verify": "greedy"},
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_file_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "vllm", "-t", "a/b", "-d", "c/d", "--tensor-parallel-size", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/usr/bin/env bash\n")
    assert "--tensor-parallel-size 2" in out
    assert "next, once it runs: specdec bench --endpoint" in err


def test_a_folder_that_is_not_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "vllm", "-t", "./nowhere", "-d", "/models/draft"]) == 0
    out, err = capsys.readouterr()
    assert "# Warning: target.model = ./nowhere is no folder of this machine" in out
    assert "draft.model = /models/draft is no folder of this machine" in " ".join(err.split())


def test_files_go_into_a_folder_and_scripts_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "llamacpp", "-t", "a/b", "-d", "c/d", "--output", "new/folder"]) == 0
    assert capsys.readouterr().out == ""
    assert os.access("new/folder/llamacpp.sh", os.X_OK)
    assert run(["export", "llamacpp", "-t", "a/b", "-d", "c/d", "--output", "new/folder"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(["export", "llamacpp", "-t", "a/b", "-d", "c/d", "--output", "new/folder", "--force"]) == 0
    Path("file").write_text("")
    assert run(["export", "vllm", "-t", "a/b", "--output", "file"]) == 2


def test_the_document_fits_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "triton", "-t", "a/b", "-d", "ngram", "--top-k", "5", "--temperature", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert_fits(found, ExportDocument)
    assert any("sampling.top_k" in one for one in found["warnings"])


def test_figures_of_a_measurement_stand_in_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bench.json").write_text(json.dumps(BENCH))
    assert run(["export", "vllm", "-t", "a/b", "-d", "c/d", "-k", "3", "--measured", "bench.json"]) == 0
    assert "1.50 times (1.25 to 1.75) as fast as without a draft" in capsys.readouterr().out
    assert run(["export", "vllm", "-t", "another/one", "--measured", "bench.json"]) == 2
    assert "measured the target `a/b`" in capsys.readouterr().err


def test_a_draft_that_was_measured_to_draft_by_text_is_exported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    export = ["-t", "a/b", "-d", "c/d", "-k", "3", "--measured", "bench.json"]
    for found in (None, {"num_shared_by_text": 50}):
        environment = BENCH["environment"] | {"draft_vocabulary": found}
        Path("bench.json").write_text(json.dumps(BENCH | {"environment": environment}))
        assert run(["export", "vllm", *export]) == 0
        assert ("use_heterogeneous_vocab" in capsys.readouterr().out) == (found is not None)
    assert run(["export", "sglang", *export]) == 0
    out, err = capsys.readouterr()
    assert "STANDALONE" not in out
    assert "no counterpart of a draft model with another tokenizer" in " ".join(err.split())


def test_a_measured_k_is_taken_or_its_difference_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bench.json").write_text(json.dumps(BENCH))
    export = ["export", "vllm", "-t", "a/b", "-d", "c/d", "--measured", "bench.json"]
    for own, k, is_said in (([], 3, False), (["-k", "3"], 3, False), (["-k", "2"], 2, True)):
        assert run([*export, *own]) == 0
        out, err = capsys.readouterr()
        assert f'"num_speculative_tokens": {k}' in out
        assert ("the figures were measured at k = 3, and the recipe sets another" in err) == is_said
    for unknown in ({"tree": "3"}, {"k_by_batch": "1:3,8:2"}):  # a measurement at no single k has none to compare
        found = json.loads(json.dumps(BENCH))
        found["recipe"]["speculation"] |= unknown
        Path("bench.json").write_text(json.dumps(found))
        assert run([*export, "--k-by-batch", "1:3,8:2"]) == 0
        assert "the figures were measured" not in capsys.readouterr().err


def test_a_profile_holds_both_kinds_of_rates(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bench.json").write_text(json.dumps(BENCH))
    assert run(["export", "profile", "-t", "a/b", "-k", "2", "--measured", "bench.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["marginal_accept_rates"] == [0.6, 0.3, 0.1]
    assert found["conditional_accept_rates"] == [0.6, 0.5, pytest.approx(1 / 3, abs=1e-6)]
    assert found["mean_accept_length"] == 2.0
    assert (found["num_speculative_tokens"], found["draft_checkpoint"]) == (3, {"name": "c/d"}), "those of the run"
    assert found["validation"]["mean_consistency"]["passed"]
    assert run(["export", "profile", "-t", "a/b", "-d", "c/d"]) == 2
    assert "made of a measurement" in capsys.readouterr().err


def test_a_profile_is_as_deep_as_the_steps_were(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(json.dumps(BENCH))
    found["recipe"]["speculation"] = {"num_speculative_tokens": 2, "k_by_batch": "1:3,8:2"}
    Path("bench.json").write_text(json.dumps(found))
    assert run(["export", "profile", "-t", "a/b", "--measured", "bench.json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert (profile["num_speculative_tokens"], profile["marginal_accept_rates"]) == (3, [0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": "specdec.bench/1"}', '{"schema": "specdec.generate/1"}']
)
def test_other_files_are_no_measurement(capsys: pytest.CaptureFixture[str], content: str) -> None:
    Path("x.json").write_text(content)
    assert run(["export", "vllm", "-t", "a/b", "--measured", "x.json"]) == 2
    assert capsys.readouterr().out == ""
    assert run(["export", "vllm", "-t", "a/b", "--measured", "nowhere.json"]) == 2


@pytest.mark.parametrize("engine", mostly_slow(["vllm", "profile"], ["vllm"]))
def test_a_damaged_measurement_is_refused(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    for path in _paths(BENCH):
        for wrong in (None, [], {}, 10**400, float("nan"), "x"):
            _write_damaged(path, wrong)
            asked = ["export", engine, "-t", "a/b", "-d", "c/d", "--measured", "bench.json"]
            code, (out, err) = run(asked), capsys.readouterr()
            assert code in (0, 2), (path, wrong, err)
            assert "Traceback" not in err
            assert "nan" not in out


def _paths(found: dict[str, Any]) -> list[list[str]]:
    below = ([[key], *([key, *more] for more in _paths(one))] for key, one in found.items() if isinstance(one, dict))
    return [
        *([key] for key, one in found.items() if not isinstance(one, dict)),
        *(one for many in below for one in many),
    ]


def _write_damaged(path: list[str], value: object) -> None:
    found = json.loads(json.dumps(BENCH))
    section = found
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    Path("bench.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("draft", "named"), [("ngram", "ngram"), ("e/f", "e/f"), ("suffix+c/d", "suffix+c/d")])
def test_figures_of_another_draft_are_refused(capsys: pytest.CaptureFixture[str], draft: str, named: str) -> None:
    Path("bench.json").write_text(json.dumps(BENCH))
    assert run(["export", "vllm", "-t", "a/b", "-d", draft, "--measured", "bench.json"]) == 2
    assert f"measured the draft `c/d`, and the recipe's is `{named}`" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_engine_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "vlm"]) == 2
    assert "did you mean `vllm`?" in capsys.readouterr().err


def test_what_is_wrong_with_a_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ENGINES:
        assert run(["export", engine, "-t", "a/b", "-k", "-1"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("name", ["generate", "bench", "serve", "sweep-k", "compare-drafts", "audit", "doctor"])
def test_other_commands_have_one_device(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = ["a prompt"] if name == "generate" else []
    assert run([name, *words, "-t", "a/b", "-d", "c/d", "--tensor-parallel-size", "2"]) == 2
    assert "`target.tensor_parallel_size` is `2`" in capsys.readouterr().err
    capsys.readouterr()
