"""A cache too small for all that run: the youngest gives its blocks back, and its text is what it would have been."""

import pytest
from tiny_engine import PROMPTS, Checked, check_books, drafter, ngram, preempted, step_of, tokens
from tiny_models import make_tiny
from typed import stand_in

from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.requests import spread
from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

BLOCK, FEW, MANY = 4, 18, 200


@pytest.fixture(scope="module")
def checkpoint(folder):
    return str(make_tiny("llama", folder / "preempted", 1))


def lm_of(checkpoint: str, num_blocks: int):
    lm = load_lm(checkpoint, max_num_seqs=4, block_size=BLOCK, kv_cache_bytes=256 * BLOCK * num_blocks)
    assert lm.num_blocks <= num_blocks
    return lm


def run(checkpoint, num_blocks, draft, params, **options):
    """Outputs of all prompts together, and how many sequences were preempted."""
    target = lm_of(checkpoint, num_blocks)
    made = {"none": lambda: drafter("none"), "ngram": ngram, "model": lambda: drafter(lm_of(checkpoint, num_blocks))}
    engine = Checked(target, made[draft](), None, EngineOptions(max_num_seqs=4, **options))
    return preempted(engine, spread(params, len(PROMPTS)))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_greedy_text_is_the_same(checkpoint, draft: str, prefix_caching: bool) -> None:
    params = SamplingParams(max_new_tokens=24)
    roomy, none = run(checkpoint, MANY, draft, params)
    tight, some = run(checkpoint, FEW, draft, params, prefix_caching=prefix_caching)
    assert none == 0
    assert some > 0
    assert tokens(tight) == tokens(roomy)
    for one, other in zip(tight, roomy, strict=True):
        assert one.speculative.acceptance_histogram == other.speculative.acceptance_histogram


@pytest.mark.parametrize("verify", ["rejection", "block", "gumbel", "exact-match"])
def test_sampled_text_is_the_same(checkpoint, verify: str) -> None:
    """Steps begin at the same positions with as many drafted tokens, so the same noise decides."""
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    roomy, _ = run(checkpoint, MANY, "model", params, verify=verify)
    tight, some = run(checkpoint, FEW, "model", params, verify=verify)
    assert some > 0
    assert tokens(tight) == tokens(roomy)


def test_a_prompt_is_fed_again_in_the_same_chunks(checkpoint) -> None:
    params = SamplingParams(max_new_tokens=24)
    roomy, _ = run(checkpoint, MANY, "model", params, prefill_chunk=8)
    tight, some = run(checkpoint, FEW, "model", params, prefill_chunk=8, max_num_batched_tokens=8)
    assert some > 0
    assert tokens(tight) == tokens(roomy)


def test_what_could_never_run_alone_is_refused(checkpoint) -> None:
    engine = Checked(lm_of(checkpoint, FEW), drafter("none"), None, EngineOptions(max_num_seqs=4))
    with pytest.raises(UsageError, match="tokens of KV cache"):
        engine.add(list(range(1, 40)), SamplingParams(max_new_tokens=60))


def test_an_abort_while_preempted_leaves_nothing(checkpoint) -> None:
    engine = Checked(lm_of(checkpoint, FEW), drafter(lm_of(checkpoint, FEW)), None, EngineOptions(max_num_seqs=4))
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=24)) for prompt in PROMPTS]
    while not step_of(engine).num_preemptions:
        pass
    for sequence_id in reversed(ids):
        engine.abort(sequence_id)
    assert not engine.has_work
    check_books(engine)


def test_a_policy_hears_of_what_its_drafts_have_to_read_anew(checkpoint) -> None:
    engine = Checked(lm_of(checkpoint, FEW), drafter(lm_of(checkpoint, FEW)), None, EngineOptions(max_num_seqs=4))
    forgotten: list[int] = []
    engine.policy.forget = stand_in(forgotten.append)
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=24)) for prompt in PROMPTS]
    num_preemptions = 0
    while engine.has_work:
        num_preemptions += step_of(engine).num_preemptions
    assert num_preemptions > 0
    assert len(forgotten) == len(ids) + num_preemptions
