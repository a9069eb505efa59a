"""The GPU benchmark tried on a CPU: every part of it runs, nothing is kept, and it says so."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny

from specdec_cli.lm.forward import graphs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs a script with these options; its names."""

    def run(*options, name: str = "__main__", script: str = "gpu.py"):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [script, *options])
        return runpy.run_path(str(BENCHMARKS / script), run_name=name)

    return run


def test_every_part_of_it_runs_without_a_gpu_and_nothing_is_kept(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = set((BENCHMARKS / "results").iterdir())
    target = str(make_tiny("llama", tmp_path / "target", max_position_embeddings=2048))
    draft = str(make_tiny("llama", tmp_path / "draft", max_position_embeddings=2048, num_hidden_layers=1))
    options = ["--device", "cpu", "--decoder", "auto", "--dtype", "float32", "--targets", target, "--draft", draft]
    options += ["--quantize", "int8"]
    run(*options, "--rows", "1", "4", "--context", "40", "--tokens", "64", "--repeats", "2", "--acceptance", "0.8")
    said = capsys.readouterr().out
    for word in (
        "none, waiting",
        "greedy, waiting",
        "share_of_bandwidth",
        "over_one_row",
        "rows_with_other_bits",
        "host_waits_per_step",
        "speedup",
    ):
        assert word in said
    assert said.endswith("this is no GPU: nothing is kept\n")
    assert set((BENCHMARKS / "results").iterdir()) == kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "there is no GPU here: nothing was measured\n"


def test_the_graphs_of_a_round_are_those_replayed_most(run, monkeypatch: pytest.MonkeyPatch) -> None:
    names, replayed = run(name="gpu"), []
    monkeypatch.setattr(graphs, "record", lambda run, device, pool: (lambda: replayed.append(run()), None))
    recorder, cpu = names["Recorder"](), torch.device("cpu")
    replays = [recorder(lambda place=place: place, cpu, None)[0] for place in range(3)]
    for replay in [*replays[:2] * 2, replays[2]]:
        replay()
    for num, most in ((2, {0, 1}), (3, {0, 1, 2})):
        replayed.clear()
        assert recorder.seconds(cpu, 1, num) > 0
        assert set(replayed) == most


def test_waits_are_told_from_calls_that_do_not_wait(run) -> None:
    num_waits = run(name="gpu")["num_waits"]
    waits = ["cudaStreamSynchronize", "cudaMemcpy", "cudaEventSynchronize", "cudaDeviceSynchronize"]
    assert num_waits([*waits, "cudaMemcpyAsync", "cudaGraphLaunch", "aten::item", "cudaEventQuery"]) == 4


@pytest.mark.parametrize("is_refused", [False, True])
def test_other_weights_are_judged_by_a_step_of_one_row(
    run, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that a device refuses costs its own figures alone."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("needs another GPU\nwith a trace")

    if is_refused:
        monkeypatch.setattr(torch, "_scaled_mm", refuse)
    target = str(make_tiny("llama", tmp_path / "target", hidden_size=128, intermediate_size=256))
    options = ["--device", "cpu", "--decoder", "transformers", "--target", target, "--context", "20", "--repeats", "1"]
    run(*options, "--output", str(tmp_path / "found.json"), script="gpu_weights.py")
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["refused"] == ({"fp8": "needs another GPU"} if is_refused else {})
    step, products = found["step_ms"], found["products_ms"]
    names = {"int8", "int4"} if is_refused else {"int8", "fp8", "int4"}
    assert found["step_speedup"].keys() == found["pays"].keys() == names == products.keys() - {"bfloat16"}
    for name, its in found["step_speedup"].items():
        for num, speedup in its.items():
            other = step[num] - products["bfloat16"][num] + products[name][num]
            assert speedup == pytest.approx(step[num] / other, rel=0.05)
        assert found["pays"][name] == (its["1"] >= 1.5)
