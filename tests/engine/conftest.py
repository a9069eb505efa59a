"""Tiny models that the engine's tests share; none is changed by decoding."""

from collections.abc import Callable

import pytest
from tiny_engine import ngram, tiny_lm

from specdec_cli.drafters.contract import Drafter
from specdec_cli.lm.transformers_lm import TransformersLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def target(folder) -> TransformersLM:
    return tiny_lm(folder, "llama", seed=1)


@pytest.fixture(scope="session")
def itself(folder, target) -> TransformersLM:
    """The target once more, with a cache of its own: everything that it drafts is accepted in greedy decoding."""
    return tiny_lm(folder, "llama", seed=1)


@pytest.fixture(scope="session")
def stranger(folder) -> TransformersLM:
    """Another random model: hardly anything that it drafts is accepted."""
    return tiny_lm(folder, "llama", seed=2, num_hidden_layers=1)


DRAFTS = ("stranger", "itself", "ngram")


@pytest.fixture
def draft_of(stranger, itself) -> Callable[[str], TransformersLM | Drafter]:
    """A draft by its name."""
    made = {"stranger": lambda: stranger, "itself": lambda: itself, "ngram": ngram}
    return lambda name: made[name]()
