"""The target of training, and a model that training begins with."""

import pytest
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny
from training_cases import training_lm

from specdec_cli.lm.transformers_lm import TransformersLM


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    return training_lm(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny("llama", tmp_path_factory.mktemp("start"), 5)
    letter_tokenizer().save_pretrained(folder)
    return str(folder)
