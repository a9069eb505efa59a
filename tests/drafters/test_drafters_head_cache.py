"""A head's keys and values that outlive their sequence: who may read them, and that guesses stay what they are."""

import pytest
import torch
from head_drafts import GREEDY, LAYERS, TEXT, features_of, loaded, reference, row
from tiny_engine import Checked, decode, preempted, tokens
from tiny_heads import publish, random_weights
from tiny_models import VOCAB
from typed import stand_in

from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import RunError
from specdec_cli.lm.heads import head_cache
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

SHARED = TEXT[:30]
SAMPLED = SamplingParams(temperature=1.0, seed=5)
PROMPTS = [[*SHARED, 7, 9], [*SHARED, 11], SHARED[:18]]


@pytest.fixture(scope="module")
def weights():
    return random_weights(True, seed=3)


@pytest.fixture
def drafter(lm, weights, tmp_path):
    return loaded(lm, publish(tmp_path / "head", weights, "speculators"))


class Noting(Checked):
    """Notes how many tokens each sequence took over from the target's cache, and looks at the head's."""

    def __init__(self, *given):
        self.num_cached = []
        super().__init__(*given)

    def _start(self, sequence):
        self.num_cached.append(super()._start(sequence))
        return self.num_cached[-1]

    def _step(self):
        events, drafter = super()._step(), stand_in(self.drafter)
        cache = drafter._sequences.cache
        cache.check()
        assert self.has_work or cache.pool.num_free == cache.num_blocks, "an idle engine holds blocks"
        return events


def counts(outputs):
    return [(one.speculative.num_draft_tokens, one.speculative.num_accepted_tokens) for one in outputs]


def cached(lm, drafter, **options):
    return Noting(lm, drafter, None, EngineOptions(max_num_seqs=4, prefix_caching=True, **options))


def begin(drafter, states, text, salt="", handle=0):
    """Start a sequence as the engine does: adopt, and bring the features of what was not."""
    num = drafter.adopt(handle, text, salt)
    asked = row(text, states[num : len(text) - 1], params=SAMPLED)
    asked.handle = handle
    return num, drafter.propose([asked])[0]


def right(lm, weights, text, guess):
    """Whether a guess was drawn from what the formulas say."""
    expected, num = reference(weights, lm), len(text) - 1
    forced = torch.tensor(guess.drafted.tokens).expand(num, -1)
    logits, _ = expected.draft(features_of(lm, text, LAYERS)[:num], torch.tensor(text[1:]), len(forced[0]), forced)
    q = torch.zeros(len(forced[0]), VOCAB)
    q[:, expected._ids(torch.arange(40))] = logits[-1].softmax(-1)
    return torch.allclose(guess.q, q, atol=2e-5)


def test_a_sequence_begins_with_what_another_left(lm, weights, drafter) -> None:
    first, second = TEXT[:30], [*TEXT[:22], 5, 6, 7]
    assert begin(drafter, features_of(lm, first, LAYERS), first)[0] == 0
    states = features_of(lm, second, LAYERS)
    num, beside = begin(drafter, states, second, handle=1)
    assert num == 20, "slot 21 has read the first token that differs"
    assert right(lm, weights, second, beside)
    for handle in (0, 1):
        drafter.release(handle)
    num, after = begin(drafter, states, second, handle=2)
    assert num == 20
    assert torch.equal(after.q, beside.q), "whether or not the other sequence still runs"
    drafter.release(2)
    drafter._sequences.cache.check()
    assert drafter._sequences.cache.pool.num_free == drafter._sequences.cache.num_blocks


def test_the_whole_context_is_never_adopted(lm, weights, drafter) -> None:
    for num_tokens, expected in ((13, 8), (14, 12), (15, 12)):
        text = TEXT[:num_tokens]
        states = features_of(lm, text, LAYERS)
        begin(drafter, states, text, "a")
        drafter.release(0)
        num, guess = begin(drafter, states, text, "a")
        assert num == expected, "the last slot's output is needed"
        assert right(lm, weights, text, guess)
        drafter.release(0)


def test_a_salt_and_the_first_token_part_sequences(lm, drafter) -> None:
    states = features_of(lm, TEXT, LAYERS)
    begin(drafter, states, TEXT[:20], "a")
    assert drafter.adopt(1, TEXT[:20], "b") == 0
    assert drafter.adopt(2, [TEXT[0] + 1, *TEXT[1:20]], "a") == 0
    assert drafter.adopt(3, TEXT[:20], "a") == 16
    unsalted = row(TEXT[20:40], states[20:39])
    unsalted.handle = 4
    drafter.propose([unsalted])
    assert drafter.adopt(5, TEXT[20:40], "") == 0, "a sequence that adopted nothing shares nothing"
    for handle in range(6):
        drafter.release(handle)


def test_another_sequences_block_is_caught(lm, weights, drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: keys that say nothing of the tokens."""
    monkeypatch.setattr(head_cache, "block_key", lambda before, _: bytes([before[0], before[1] + 1]) if before else b"")
    monkeypatch.setattr(head_cache, "root_key", lambda _: bytes(2))
    first, second = TEXT[:20], TEXT[20:40]
    begin(drafter, features_of(lm, first, LAYERS), first)
    num, guess = begin(drafter, features_of(lm, second, LAYERS), second, handle=1)
    assert num == 16
    assert not right(lm, weights, second, guess)


def test_features_one_position_off_behind_a_prefix_are_caught(lm, weights, drafter) -> None:
    states = features_of(lm, TEXT, LAYERS)
    begin(drafter, states, TEXT[:20])
    drafter.release(0)
    num = drafter.adopt(0, TEXT[:20], "")
    guess = drafter.propose([row(TEXT[:20], states[num - 1 : 18], params=SAMPLED)])[0]
    assert not right(lm, weights, TEXT[:20], guess)
    drafter.release(0)
    num = drafter.adopt(0, TEXT[:20], "")
    with pytest.raises(AssertionError, match="features come once"):
        drafter.propose([row(TEXT[:20], states[num - 1 : 19])])


def test_slots_that_are_no_numbers_are_never_shared(lm, drafter) -> None:
    states = features_of(lm, TEXT, LAYERS).clone()
    states[3] = torch.nan
    with pytest.raises(LogitsError):
        begin(drafter, states, TEXT[:20])
    drafter.release(0)
    assert drafter.adopt(0, TEXT[:20], "") == 0


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [None, "2,2,1", "dynamic:8"])
def test_texts_and_acceptance_stay_the_same(lm, drafter, tree, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=4)
    verify = "auto" if temperature == 0 else "gumbel"
    plain = decode(lm, drafter, 4, PROMPTS, params, tree=tree, verify=verify)
    engine = cached(lm, drafter, tree=tree, verify=verify)
    for expected in (0, 16):
        found = engine.generate(PROMPTS, params)
        assert tokens(found) == tokens(plain) == tokens(decode(lm, None, 0, PROMPTS, params, verify=verify))
        assert counts(found) == counts(plain)
        assert all(num >= expected for num in engine.num_cached[-len(PROMPTS) :])


def test_a_target_that_has_lost_more_gives_no_feature_twice(lm, drafter) -> None:
    engine, expected = cached(lm, drafter), tokens(decode(lm, None, 0, PROMPTS, GREEDY))
    engine.generate(PROMPTS, GREEDY)
    lm.hold(lm.num_blocks)  # nothing of the target's is found again
    found = engine.generate(PROMPTS, GREEDY)
    assert tokens(found) == expected
    assert engine.num_cached[-3:] == [0, 0, 0]
    drafter._sequences.cache.hold(lm.num_blocks)
    found = engine.generate(PROMPTS, GREEDY)
    assert tokens(found) == expected
    assert engine.num_cached[-3:] == [0, 0, 0], "the target feeds what the head needs"


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("tree", [None, "3,2,1", "dynamic:12"])
def test_preempted_sequences_go_on_from_what_is_cached(lm, weights, tmp_path, tree: str | None) -> None:
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=26, check=False)
    drafter = loaded(tight, publish(tmp_path / "tight", weights, "speculators"))
    prompts = [*PROMPTS, TEXT[30:45]]
    found, num_preemptions = preempted(cached(tight, drafter, tree=tree), GREEDY, prompts)
    assert num_preemptions > 0
    assert tokens(found) == tokens(decode(lm, None, 0, prompts, GREEDY))


def test_a_full_cache_is_one_sentence_and_old_prefixes_make_room(lm, drafter) -> None:
    states, cache = features_of(lm, TEXT, LAYERS), drafter._sequences.cache
    cache.hold(8)
    begin(drafter, states, TEXT[:20], "a")
    with pytest.raises(RunError, match=r"the cache of the draft head is full: 5 blocks wanted, 2 free"):
        begin(drafter, states, TEXT[:19], "b", handle=1)
    for handle in (0, 1):
        drafter.release(handle)
    begin(drafter, states, TEXT[:30], "b")
    drafter.release(0)
    assert drafter.adopt(0, TEXT[:20], "a") == 0, "the older prefix made room"
    assert cache.keys.shape[1] <= 8 * 4 + 16, "there is a slot of no sequence's behind them, in whole grains"


def test_nodes_that_leave_a_tree_give_their_slots_back(lm, drafter) -> None:
    states = features_of(lm, TEXT, LAYERS)
    drafted = drafter.propose([row(TEXT[:20], states[:19], k=6, tree=TreeShape.parse("dynamic:9"))])[0].drafted
    assert len(drafted) == 9
    held = drafter._sequences.cache.of(0)
    assert len(held.nodes) <= 9
    assert len(held.blocks) <= -(-(19 + 9) // 4)
