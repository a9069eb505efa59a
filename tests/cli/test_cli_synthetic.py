"""Random weights and synthetic acceptance from the command line: measured end to end, and labelled everywhere."""

import json
from pathlib import Path

import pytest
from schemas import assert_fits
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.lm.invariance import InvarianceCheck
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.machine import doctor

SYNTHETIC = ("-k", "3", "--synthetic-acceptance-length", "2.5")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Two configurations and nothing else."""
    folder = tmp_path_factory.mktemp("pair")
    for name, shape in (("target", {}), ("draft", {"num_hidden_layers": 1})):
        made = make_tiny("llama", folder / "whole" / name, vocab_size=300, max_position_embeddings=512, **shape)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text((made / "config.json").read_text())
    return ["-t", str(folder / "target"), "-d", str(folder / "draft"), "--load-format", "dummy"]


def test_bench_measures_a_pair_without_weights_at_a_given_acceptance(pair, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompts", "4", "-n", "60", "--repeats", "1", "--json", "--quiet", *SYNTHETIC]
    assert run(["bench", *pair, *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, BenchDocument)
    assert document["lossless"]["promised"] is False
    assert document["lossless"]["verify"] == "synthetic"
    assert document["recipe"]["target"]["load_format"] == document["recipe"]["draft"]["load_format"] == "dummy"
    assert document["draft"]["speculative"]["acceptance_length"] == pytest.approx(2.5, abs=0.4)
    for words in ("random weights", "no tokenizer", "synthetic acceptance"):
        assert any(words in notice for notice in document["notices"])


def test_the_report_and_its_files_say_synthetic(pair, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--num-prompts", "2", "-n", "8", "--repeats", "1", "--markdown", str(tmp_path / "m.md"), *SYNTHETIC]
    assert run(["bench", *pair, *arguments, "--csv", str(tmp_path / "c.csv")]) == 0
    out = capsys.readouterr().out
    assert "(synthetic)" in out  # a cell wraps between words
    for name in ("m.md", "c.csv"):
        assert "draft (synthetic)" in (tmp_path / name).read_text()
    assert "--verify synthetic does not follow the target's distribution" in out


def test_generate_says_what_its_text_is(pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "Hello", *pair, *SYNTHETIC, "-n", "20", "--compare"]) == 0
    err = capsys.readouterr().err
    for words in ("random weights", "a dummy reads text as its bytes", "(synthetic)", "lossless: false"):
        assert words in err
    assert "DIFFER" not in err


def test_what_stands_by_chance_though_it_cannot_occur_has_a_logprob(pair, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ["--temperature", "1", "--top-k", "1", "--logprobs", "1", "-n", "60", "--json", "--quiet"]
    assert run(["generate", "Hello", *pair, "-k", "3", "--synthetic-acceptance-length", "3.5", *cut]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert min(one["logprob"] for one in output["logprobs"]) == -9999


def test_a_sweep_measures_every_depth_or_refuses(pair, capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["sweep-k", *pair, "--synthetic-acceptance-length", "2.5", "--k-max", "2", "--num-prompts", "2", "-n", "40"]
    assert run([*swept, "--quiet"]) == 2
    assert "a trace cannot replay the rule `synthetic`" in capsys.readouterr().err
    assert run([*swept, "--exhaustive", "--repeats", "1", "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_fits(document, SweepDocument)
    lengths = [row["measured"]["acceptance_length"] for row in document["rows"]]
    assert lengths[0] == pytest.approx(1.65, abs=0.25)  # α of length 2.5 at the recipe's own k = 4
    assert lengths[0] < lengths[1]


def test_compare_drafts_refuses_without_exhaustive(pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare-drafts", *pair, "--synthetic-acceptance-length", "2.5", "--quiet"]) == 2
    assert "a trace cannot replay the rule `synthetic`" in capsys.readouterr().err


def test_audit_refuses_acceptance_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--set", "speculation.synthetic_acceptance_length=2"]) == 2
    assert "is lossy by design" in capsys.readouterr().err


def test_doctor_prints_what_a_claim_implies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = InvarianceCheck("linear", "bfloat16", (2, 64), (), True)
    monkeypatch.setattr(doctor, "row_invariance", lambda _: [passed])
    run(["doctor", "-r", "published-llama2-70b-tinyllama"])
    out = capsys.readouterr().out
    assert "2.40×         0.65            2.54   the recipe's gate" in out
    assert "shape:llama-2-70b (random weights)" in out


def test_transformers_is_no_arm_beside_random_weights(pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *pair, "--against", "transformers"]) == 2
    assert "reads weights and verifies" in capsys.readouterr().err


def test_rates_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--synthetic-acceptance-rates", "0.5,x"]) == 2
    assert "`--synthetic-acceptance-rates 0.5,x` is not numbers with commas" in capsys.readouterr().err
