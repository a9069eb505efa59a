"""A figure that cannot be computed is named, and the result stands: point 18."""

import json
from pathlib import Path
from typing import Any

import pytest
from every_type import save_tiny
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.errors import RunError
from specdec_cli.lm import traffic
from specdec_cli.measure.bench import verdict
from specdec_cli.measure.documents import bench as bench_document
from specdec_cli.measure.machine import doctor as doctor_module
from specdec_cli.measure.machine import preflight
from specdec_cli.measure.machine.figures import figure


def test_what_a_figure_fails_at_is_said() -> None:
    missing: list[Any] = []
    assert figure("the sum", lambda: 1 + 1, missing) == 2
    assert missing == []
    assert figure("the share", lambda: 1 / 0, missing) is None
    assert figure("the roofline", lambda: traffic.Traffic(1, 1, 0, 0, 1.0, 1, None).flops(1, 1), missing) is None
    assert missing == [
        "the share is missing, it could not be computed: ZeroDivisionError: division by zero",
        "the roofline is missing, it could not be computed: the model's configuration does not say how wide its "
        "attention is",
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"))
    letter_tokenizer().save_pretrained(folder)
    return folder


def bench(capsys: pytest.CaptureFixture[str], folder):
    asked = ["-d", "ngram:min=1", "-n", "12", "--num-prompts", "2", "--repeats", "1"]
    assert run(["bench", "-t", str(folder), *asked, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def broken(*_, **__) -> None:
    raise RunError("[broken] for the test")


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    ("room", "name", "key"),
    [
        (verdict, "measure_speed", "roofline"),
        (traffic, "_attention_width", "roofline"),
        (bench_document, "costs_of", "costs"),
    ],
)
def test_point_18_bench_prints_its_result_without_a_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target, room, name: str, key: str
) -> None:
    monkeypatch.setattr(room, name, broken)
    document, err = bench(capsys, target)
    assert document[key] is None
    assert document["speedup"]["decode"]["median"] > 0
    assert any("is missing" in one and "[broken] for the test" in one for one in document["notices"])
    assert "[broken] for the test" in err


def test_point_18_bench_measures_gemma_4_and_its_roofline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_tiny("gemma4_text", tmp_path)
    letter_tokenizer().save_pretrained(folder)
    document, _ = bench(capsys, folder)
    assert document["roofline"]["plain"]["floor_seconds"] > 0
    assert not any("is missing" in one for one in document["notices"])


@pytest.mark.parametrize("name", ["outlook", "_estimate_memory"])
def test_doctor_says_which_figure_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target, name: str
) -> None:
    monkeypatch.setattr(doctor_module, "row_invariance", lambda _: [])
    monkeypatch.setattr(preflight, name, broken)
    assert run(["doctor", "-t", str(target), "-d", str(target), "--json", "--quiet"]) == 0
    problems = json.loads(capsys.readouterr().out)["pair"]["problems"]
    assert any("is missing" in one["message"] and "[broken]" in one["message"] for one in problems)
