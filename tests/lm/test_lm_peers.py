"""transformers' own generate as an arm: the same tokens as called by hand, alone, padded together, and assisted."""

import pytest
from tiny_engine import PROMPTS, transformers_greedy
from tiny_models import make_tiny

from specdec_cli.errors import RunError
from specdec_cli.lm.peers import load_peer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("peers")
    return make_tiny("llama", root / "target", 0), make_tiny("llama", root / "draft", 1, num_hidden_layers=1)


def test_alone_and_together(folders):
    expected = transformers_greedy(folders[0], PROMPTS)
    peer = load_peer(str(folders[0]))
    alone = [peer.generate([prompt], 24, ()) for prompt in PROMPTS]
    assert [run.token_ids[0] for run in alone] == expected
    assert all(0 < run.first_seconds < run.total_seconds and run.num_first == 1 for run in alone)
    assert peer.generate(PROMPTS, 24, ()).token_ids == expected
    assert peer.version.startswith("transformers 5.")


def test_an_end_token_ends_an_output(folders):
    expected = transformers_greedy(folders[0], PROMPTS)
    end = expected[1][6]
    runs = load_peer(str(folders[0])).generate(PROMPTS, 24, (end,)).token_ids
    assert runs[1] == expected[1][: expected[1].index(end) + 1]


def test_assisted(folders):
    peer = load_peer(str(folders[0]), str(folders[1]), num_assistant_tokens=3)
    run = peer.generate([PROMPTS[2]], 24, ())
    assert run.token_ids == transformers_greedy(folders[0], [PROMPTS[2]])
    assert 1 <= run.num_first <= 4


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match=r"no `config.json`|does not load|does not exist|no weights"):
        load_peer(str(tmp_path))
