"""The target of tiny draft heads."""

import pytest
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
