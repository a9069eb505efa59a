"""torch.compile of transformers' forward: the same numbers, one graph for every step, clear sentences without it."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lm_trees import check
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward import compiled
from specdec_cli.lm.forward.packed import PackedForward
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler: no `g++`")
TWO_KINDS_OF_MASK = {"num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
TEXT = [(11 * i * i + 3 * i) % 97 for i in range(60)]


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """A model with layers of two kinds of mask, eager and compiled."""
    folder = str(make_tiny("qwen2", tmp_path_factory.mktemp("pair"), **TWO_KINDS_OF_MASK))
    eager, done = (load_lm(folder, decoder=decoder) for decoder in ("transformers", "compiled"))
    done.compile()
    return eager, done


@needs_compiler
def test_compiled_decodes_the_same_text_and_compiles_once(pair) -> None:
    eager, done = pair
    assert (eager.decoder, done.decoder) == ("transformers", "transformers, compiled")
    assert done.compile_seconds > 0
    before = num_graphs()
    texts = [tokens(decode(lm, "ngram", 3, PROMPTS, SamplingParams(max_new_tokens=30))) for lm in pair]
    assert texts[0] == texts[1]
    found = []
    rows = [Row(0, TEXT[:50], 3), Row(1, TEXT[:9], 2)]
    logits = [lm.score(rows) for lm in pair]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    thread = threading.Thread(target=lambda: found.append(done.score([Row(1, TEXT[:14], 5)])))
    thread.start()
    thread.join()
    assert torch.allclose(found[0], eager.score([Row(1, TEXT[:14], 5)]), atol=1e-4)
    assert num_graphs() == before, "a step waited for another graph"


@needs_compiler
def test_trees_take_no_other_graph(pair) -> None:
    eager, done = pair
    before = num_graphs()
    trees = Drafted((5, 6, 7, 8, 9), (-1, -1, 0, 0, 2)), Drafted.chain([3, 1, 4])
    for lengths in ((20, 30), (21, 31)):
        rows = [
            Row(i, TEXT[:num], len(tree) + 1, tree) for i, (num, tree) in enumerate(zip(lengths, trees, strict=True))
        ]
        assert torch.allclose(eager.score(rows), done.score(rows), atol=1e-4)
    params = SamplingParams(max_new_tokens=12)
    for tree in ("2,2", "dynamic:6"):
        assert tokens(decode(done, "ngram", 3, PROMPTS, params, tree=tree)) == tokens(
            decode(eager, None, 0, PROMPTS, params)
        )
    check(done, num_rows=2, num_steps=2)
    assert num_graphs() == before, "a step waited for another graph"


def test_without_a_compiler_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_tiny("llama", tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(RunError, match=r"needs a C\+\+ compiler, and there is no `no-such-compiler -O3`") as caught:
        load_lm(folder, decoder="compiled").compile()
    assert "--compile" in not_none(caught.value.hint)


def test_what_torch_cannot_compile_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_) -> None:
        raise RuntimeError("a long story\nover many lines")

    monkeypatch.setattr(compiled, "check_compiler", lambda _: None)
    lm = load_lm(str(make_tiny("llama", tmp_path)), decoder="compiled")
    monkeypatch.setattr(PackedForward, "attempt", breaks)
    with pytest.raises(RunError, match=r"does not compile: a long story$"):
        lm.compile()
    assert lm.compile_seconds is None


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [("llama", {"quantize": "int8"}, "`int8` weights"), ("gptj", {}, "its attention is")],
)
def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path, family: str, options, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_lm(str(make_tiny(family, tmp_path)), decoder="compiled", **options)


def test_an_engine_has_both_models_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(
        compiled.CompiledForward,
        "compile",
        lambda forward, name: done.append(forward) or setattr(forward, "compile_seconds", 2.0),
    )
    said: list[Any] = []
    engine = Engine.load("builtin:target", "builtin:draft", compile=True, progress=said.append)
    models = [engine.target, engine.drafter.lm]
    assert done == [stand_in(lm)._forward for lm in models]
    assert {not_none(lm).decoder for lm in models} == {"transformers, compiled"}
    assert "compiled draft builtin:draft in 2.0 s" in said
    Engine.load("builtin:target", None)
    assert len(done) == 2
