"""Models that carry a state, as target and as draft: transformers' greedy text, whatever drafts, however many run."""

from pathlib import Path

import pytest
from shortened import mostly_slow
from tiny_engine import PROMPTS, decode, ngram, preempted, tiny_engine, tiny_lm, tokens, transformers_greedy
from tiny_hybrids import HYBRIDS, save_hybrid

from specdec_cli.engine.caveats import not_sharing
from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.sampling.params import SamplingParams

DEFAULT = ["falcon_h1", "qwen3_5_text"]
REST = [pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS if family not in DEFAULT]


@pytest.fixture(scope="module", params=[*DEFAULT, *REST])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    """A draft that is hardly ever right."""
    return tiny_lm(tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid("granitemoehybrid", tmp_path_factory.mktemp("granite"))


def load(folder: Path, dtype: str = "float32") -> TransformersLM:
    # Random checkpoints may amplify the roundings of bfloat16 beyond what the check at load allows (Zamba2).
    return load_lm(str(folder), dtype=dtype, check=dtype == "float32")


def test_greedy_text_is_that_of_transformers(folder: Path, stranger: TransformersLM) -> None:
    right, target = transformers_greedy(folder, PROMPTS), load(folder)
    assert max(len(set(text)) for text in right) > 4
    for draft in (None, stranger, load(folder), ngram()):
        outputs = decode(target, draft)
        assert tokens(outputs) == right
    assert tokens(decode(stranger, load(folder))) == tokens(decode(stranger, None))


def test_a_draft_changes_no_token_in_bfloat16(folder: Path, stranger: TransformersLM) -> None:
    target = load(folder, "bfloat16")
    plain = tokens(decode(target, None))
    for draft in (stranger, load(folder, "bfloat16"), ngram()):
        assert tokens(decode(target, draft)) == plain


def test_preemption_changes_no_token(hybrid: Path) -> None:
    target, draft = (load_lm(str(hybrid), num_blocks=18, block_size=4) for _ in range(2))
    engine = tiny_engine(target, draft, max_num_seqs=4)
    found, num_preemptions = preempted(engine, SamplingParams(max_new_tokens=24))
    assert num_preemptions > 0
    assert tokens(found) == transformers_greedy(hybrid, PROMPTS)


@pytest.mark.parametrize("tree", mostly_slow(["3,2,1", "dynamic:9"], ["dynamic:9"]))
def test_a_tree_changes_no_token(folder: Path, stranger: TransformersLM, tree: str) -> None:
    target = load(folder)
    plain = tokens(decode(target, None))
    for draft in (load(folder), stranger, ngram()):
        assert tokens(decode(target, draft, tree=tree, prefix_caching=True)) == plain
    assert tokens(decode(stranger, load(folder), tree=tree)) == tokens(decode(stranger, None))


def test_a_tree_changes_no_token_in_bfloat16(folder: Path) -> None:
    target = load(folder, "bfloat16")
    plain = tokens(decode(target, None))
    for draft in (load(folder, "bfloat16"), ngram()):
        assert tokens(decode(target, draft, tree="2,2,1")) == plain


def test_a_request_s_tree_with_more_nodes_than_states_is_refused(hybrid: Path) -> None:
    for target, draft in ((load(hybrid), ngram()), (load(hybrid), load(hybrid))):
        engine = tiny_engine(target, draft)
        engine.add(PROMPTS[0], tree="2,1")
        with pytest.raises(UsageError, match="the tree has `14` nodes, and recurrent states are kept of `4`"):
            engine.add(PROMPTS[0], tree="2,2,2")


def test_prefix_caching_that_has_no_effect_is_said(hybrid: Path) -> None:
    target = load(hybrid)
    assert not_sharing(tiny_engine(target, ngram(), prefix_caching=True)) == []
    target.hold(target.num_blocks, num_prefix_states=0)
    assert not_sharing(tiny_engine(target, ngram())) == []
    (said,) = not_sharing(tiny_engine(target, ngram(), prefix_caching=True))
    assert said.startswith("prefix caching has no effect on the target: the cache has no room for a snapshot")


def test_an_aborted_sequence_gives_its_state_back(hybrid: Path) -> None:
    target = load(hybrid)
    engine = tiny_engine(target, load(hybrid))
    sequence = engine.add(list(PROMPTS[0]), SamplingParams(max_new_tokens=24))
    engine.step()
    engine.abort(sequence)
    target.check_integrity()
    assert not target._contexts.sequences
    assert tokens(engine.generate([list(PROMPTS[1])], SamplingParams(max_new_tokens=24))) == transformers_greedy(
        hybrid, PROMPTS[1:2]
    )
