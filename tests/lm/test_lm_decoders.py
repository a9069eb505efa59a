"""The choice of a forward: `auto` takes our own decoder on a CPU, and graphs on a GPU where they can be recorded.

On a CPU nothing can be recorded: there the tests have `auto` take graphs, and what would be recorded runs anew.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_type import save_tiny
from test_lm_graphs import Recorder
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.engine.caveats import slow_forwards
from specdec_cli.errors import RunError
from specdec_cli.lm import decoders
from specdec_cli.lm.decoders import DECODERS, tries_graphs
from specdec_cli.lm.facts import describe
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Has `auto` choose as on a GPU; counts what is recorded."""
    recorder, check = Recorder(), decoders.check_recordable
    monkeypatch.setattr(decoders, "tries_graphs", lambda decoder, _: tries_graphs(decoder, CUDA))
    monkeypatch.setattr(decoders, "check_recordable", lambda name, config, _: check(name, config, CUDA))
    monkeypatch.setattr("specdec_cli.lm.transformers_lm.own_obstacle", lambda *_: "device `cuda`")
    monkeypatch.setattr(graphs, "record", recorder)
    return recorder


def test_auto_records_graphs_on_a_gpu(gpu, tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path))
    lm = load_lm(folder, check=False)
    assert lm.decoder == "transformers, graphs"
    assert (lm.graphs_obstacle, lm.recording) == (None, "tried")
    assert gpu.num_recorded == 1, "one forward is tried"
    params = SamplingParams(max_new_tokens=12)
    plain = load_lm(folder, decoder="transformers")
    assert (plain.decoder, plain.graphs_obstacle, plain.recording) == ("transformers", None, "none")
    texts = [tokens(decode(one, "ngram", 3, PROMPTS, params)) for one in (lm, plain)]
    assert texts[0] == texts[1]
    assert gpu.num_recorded > 1


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text"])
def test_graphs_hold_shared_keys_sinks_chunks_and_head_sizes_by_layer(model_type: str, gpu, tmp_path: Path) -> None:
    folder = str(save_tiny(model_type, tmp_path / "model"))
    lm, plain = load_lm(folder, dtype="float32"), load_lm(folder, dtype="float32", decoder="transformers")
    assert lm.decoder == "transformers, graphs"
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = tokens(decode(plain, None, 0, PROMPTS[:3], params))
    assert tokens(decode(lm, "ngram", 3, PROMPTS[:3], params)) == expected
    assert tokens(decode(lm, "ngram", 3, PROMPTS[:3], params, tree="2,2")) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("family", ["llama", "falcon", "mixtral"])
def test_a_gpu_decodes_the_text_of_the_forward_as_it_is(family: str, tmp_path: Path) -> None:
    """Of llama in graphs, of falcon without; a mixture's experts may be chosen by the host, which the trial finds."""
    folder = str(make_tiny(family, tmp_path))
    lm, plain = (load_lm(folder, device="cuda", decoder=name) for name in ("auto", "transformers"))
    assert (lm.graphs_obstacle is None) == ("graphs" in lm.decoder)
    if family != "mixtral":
        assert ("graphs" in lm.decoder) == (family == "llama")
    params = SamplingParams(max_new_tokens=12)
    expected = tokens(decode(plain, None, 0, PROMPTS, params))
    assert tokens(decode(lm, "ngram", 3, PROMPTS, params)) == expected
    assert tokens(decode(lm, "ngram", 3, PROMPTS, params, tree="2,2")) == expected


def test_a_family_that_no_graph_can_hold_runs_without_and_says_so(gpu, tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("falcon", tmp_path)))
    assert lm.decoder == "transformers"
    assert gpu.num_recorded == 0
    engine = SimpleNamespace(target=lm, drafter=SimpleNamespace(lm=None, graphs_obstacle=None))
    (said,) = slow_forwards(stand_in(engine))
    assert said.startswith("architecture `falcon` of `")
    assert said.endswith("cannot be recorded: its attention is fixed; it runs without CUDA graphs, which is slower")


def test_a_forward_that_cannot_be_recorded_runs_as_it_is(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "record", refuse)
    folder = str(make_tiny("llama", tmp_path))
    lm = load_lm(folder)
    assert lm.decoder == "transformers"
    assert not_none(lm.graphs_obstacle).startswith("a forward of `llama` cannot be recorded: CUDA error: operation not")
    params = SamplingParams(max_new_tokens=12)
    plain = load_lm(folder, decoder="transformers")
    texts = [tokens(decode(one, "ngram", 3, PROMPTS, params)) for one in (lm, plain)]
    assert texts[0] == texts[1]


def test_too_little_memory_for_a_graph_is_no_obstacle(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "record", fail)
    with pytest.raises(RunError, match="does not fit into memory"):
        load_lm(str(make_tiny("llama", tmp_path)))


def test_only_auto_tries_graphs() -> None:
    assert {decoder for decoder in DECODERS if tries_graphs(decoder, CUDA)} == {"auto"}
    assert not tries_graphs("auto", torch.device("cpu"))


def test_doctor_names_the_forward_that_a_gpu_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, falcon = (str(make_tiny(family, tmp_path / family)) for family in ("llama", "falcon"))
    assert describe(llama, device="cuda").decoder == "transformers, graphs"
    assert "graphs" not in describe(llama, device="cuda", decoder="transformers").decoder
    assert describe(falcon, device="cuda").decoder.startswith("transformers (architecture `falcon` of")
    assert describe(llama, device="cpu").decoder == "own"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe(llama).decoder == "transformers, graphs"
