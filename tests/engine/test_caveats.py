"""What a run says of itself: here, that it is slow for want of a C++ compiler."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from typed import stand_in

from specdec_cli.engine.caveats import slow_forwards
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.library import BuildError

GONE = "no C++ compiler `g++`"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    native._built.cache_clear()
    monkeypatch.setattr(native, "load_library", lambda *_, **__: (_ for _ in ()).throw(BuildError(GONE, "install one")))
    yield
    native._built.cache_clear()


def engine(target: str | None, draft: str | None = None) -> SimpleNamespace:
    models = [SimpleNamespace(decoder_obstacle=obstacle, graphs_obstacle=None) for obstacle in (target, draft)]
    return SimpleNamespace(target=models[0], drafter=SimpleNamespace(lm=models[1], graphs_obstacle=None))


def test_a_missing_compiler_is_one_sentence_with_its_remedy(without_compiler) -> None:
    assert native.missing() == GONE
    (sentence,) = slow_forwards(stand_in(engine(GONE, GONE)))
    assert sentence.startswith(f"{GONE}: transformers' forward runs for target and draft, several times slower")
    assert sentence.endswith("; install one")
    (sentence,) = slow_forwards(stand_in(engine(GONE, "architecture `GPT2LMHeadModel`")))
    assert "runs for target, several" in sentence


def test_other_obstacles_have_none(without_compiler) -> None:
    assert slow_forwards(stand_in(engine(GONE))) == [], "nobody has asked for the decoder"
    native.missing()
    assert slow_forwards(stand_in(engine("architecture `GPT2LMHeadModel`", "it is disabled"))) == []
    assert slow_forwards(stand_in(engine(None, None))) == []
