"""A draft that reads the target's hidden states: it is given each kept position's once, and pays."""

import pytest
import torch
from feature_drafter import feature_drafter, tapped
from tiny_engine import PROMPTS, Checked, decode, preempted, tiny_engine, tokens
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.engine.features import FeatureBook
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import UsageError
from specdec_cli.events import Stepped
from specdec_cli.lm.door import Tapped
from specdec_cli.lm.hidden_states import HiddenRoom, HiddenStates
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling.params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=24)
TREES = [None, "3,2,1", "dynamic:12"]
SHARED = [(5 * i * i + 3 * i) % 89 + 2 for i in range(50)]


@pytest.fixture(scope="module", params=["own", "transformers"])
def lm(request: pytest.FixtureRequest, folder):
    name = str(make_tiny("llama", folder / f"features-{request.param}", 1))
    decoder = "auto" if request.param == "own" else "transformers"
    made = load_lm(name, block_size=4, max_num_seqs=4, decoder=decoder, check=False)
    assert made.decoder == request.param
    return made


@pytest.fixture(scope="module")
def texts(lm):
    """Prompts with what the target says to them."""
    plain = tokens(decode(lm, None, 0, params=GREEDY))
    return [[*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=True)]


def check_lives(lm, drafter) -> None:
    """What each sequence was given is what the target has of its text."""
    assert drafter.lives
    assert not drafter.seen, "an ended sequence is released"
    for begin, context, features in drafter.lives:
        assert len(features) == len(context) - 1 - begin
        assert torch.allclose(features, tapped(lm, context)[begin:-1], atol=1e-4)


def rate(outputs):
    counts = [output.speculative for output in outputs]
    return sum(one.num_accepted_tokens for one in counts) / sum(one.num_draft_tokens for one in counts)


def test_a_trained_head_beats_a_random_draft(lm, texts) -> None:
    trained, chance = feature_drafter(lm, texts), feature_drafter(lm)
    found = [decode(lm, draft, params=GREEDY) for draft in (trained, chance)]
    expected = decode(lm, None, 0, params=GREEDY)
    assert tokens(found[0]) == tokens(found[1]) == tokens(expected)
    assert rate(found[0]) > 0.5
    assert rate(found[1]) < 0.1
    check_lives(lm, trained)
    check_lives(lm, chance)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("tree", TREES[1:])
def test_the_accepted_paths_features_reach_it(lm, texts, tree: str) -> None:
    expected = tokens(decode(lm, None, 0, params=GREEDY))
    for drafter, least in ((feature_drafter(lm, texts), 0.5), (feature_drafter(lm), 0.0)):
        found = decode(lm, drafter, params=GREEDY, tree=tree)
        assert tokens(found) == expected
        assert rate(found) > least
        check_lives(lm, drafter)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("prefill_chunk", [4, 7, 512])
@pytest.mark.parametrize("k", [1, 3])
def test_features_are_whole_in_any_chunks_and_company(lm, texts, k: int, prefill_chunk: int) -> None:
    prompts = [*PROMPTS, SHARED, PROMPTS[1]]
    params = [SamplingParams(max_new_tokens=5 + 6 * i) for i in range(len(prompts))]
    options = {"prefill_chunk": prefill_chunk, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    drafter = feature_drafter(lm, texts, k)
    found = decode(lm, drafter, k, prompts, params, **options)
    assert tokens(found) == tokens(decode(lm, None, 0, prompts, params, **options))
    check_lives(lm, drafter)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("prefill_chunk", [4, 512])
@pytest.mark.parametrize("tree", TREES[1:])
def test_features_of_trees_are_whole_in_any_chunks_and_company(lm, texts, tree: str, prefill_chunk: int) -> None:
    prompts = [*PROMPTS, SHARED, PROMPTS[1]]
    params = [SamplingParams(max_new_tokens=5 + 6 * i) for i in range(len(prompts))]
    options = {"prefill_chunk": prefill_chunk, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    drafter = feature_drafter(lm, texts)
    found = decode(lm, drafter, 4, prompts, params, tree=tree, **options)
    assert tokens(found) == tokens(decode(lm, None, 0, prompts, params, **options))
    check_lives(lm, drafter)


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("tree", TREES)
def test_sampled_text_has_features_too(lm, texts, tree: str | None) -> None:
    drafter = feature_drafter(lm, texts)
    decode(lm, drafter, params=SamplingParams(max_new_tokens=24, temperature=1.0, seed=3), tree=tree)
    check_lives(lm, drafter)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_preempted_sequences_are_given_their_features_anew(lm, texts, prefix_caching: bool, tree: str | None) -> None:
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=18, check=False)
    drafter = feature_drafter(tight, texts)
    engine = Checked(tight, drafter, None, EngineOptions(max_num_seqs=4, prefix_caching=prefix_caching, tree=tree))
    found, num_preemptions = preempted(engine, GREEDY)
    assert num_preemptions > 0
    assert tokens(found) == [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert len(drafter.lives) > len(PROMPTS), "a preempted one lives twice"
    check_lives(tight, drafter)


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("needs_all", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_a_cached_prefix_is_adopted_as_far_as_the_draft_can_do_without(
    lm, texts, needs_all: bool, tree: str | None
) -> None:
    prompts = [SHARED, [*SHARED, 7, 9], SHARED[:30]]
    expected = tokens(decode(lm, None, 0, prompts, GREEDY))
    drafter = feature_drafter(lm, texts, needs_all=needs_all)
    engine = tiny_engine(lm, drafter, prefix_caching=True, tree=tree)
    for _ in range(2):
        drafter.lives.clear()
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        begins = [begin for begin, *_ in drafter.lives]
        check_lives(lm, drafter)
    assert begins == [0, 0, 0] if needs_all else min(begins) >= 28
    without = tiny_engine(lm, None, prefix_caching=True)
    assert tokens(without.generate(prompts, GREEDY)) == expected, "a request without the draft adopts as ever"


def test_events_stream_the_same_text(lm, texts) -> None:
    engine = tiny_engine(lm, feature_drafter(lm, texts))
    found = {}
    for event in engine.stream(PROMPTS, GREEDY):
        for emitted in event.emitted if isinstance(event, Stepped) else ():
            found.setdefault(emitted.sequence_id, []).extend(emitted.tokens)
    assert [found[i] for i in sorted(found)] == [t[len(p) :] for t, p in zip(texts, PROMPTS, strict=True)]


def test_a_forward_that_breaks_gives_no_feature_twice(lm, texts, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = feature_drafter(lm, texts)
    engine = tiny_engine(lm, drafter, prefix_caching=True)
    sequence_ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    score, num_calls = lm.score, 0

    def breaks(rows):
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 5):
            raise RuntimeError("a broken forward")
        return score(rows)

    monkeypatch.setattr(lm, "score", breaks)
    found = {one: [] for one in sequence_ids}
    while engine.has_work:
        try:
            events = engine.step()
        except RuntimeError:
            continue
        for event in events:
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                found[emitted.sequence_id] += emitted.tokens
    monkeypatch.undo()
    assert list(found.values()) == [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    check_lives(lm, drafter)


def test_a_draft_that_fails_is_left_out_of_its_sequences(lm, texts) -> None:
    drafter, num_asked = feature_drafter(lm, texts), 0
    propose = drafter.propose

    def fails_once(rows):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            raise RuntimeError("a broken draft")
        return propose(rows)

    drafter.propose = fails_once
    engine = tiny_engine(lm, drafter)
    expected = [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    assert num_asked == 2, "its features are lost, so these sequences decode plain"
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    assert num_asked > 3


def test_rows_of_other_drafts_have_no_features(lm, texts) -> None:
    drafter = feature_drafter(lm, texts)
    engine = tiny_engine(lm, drafter)
    given, score = [], lm.score
    lm.score = lambda rows: given.extend(rows) or score(rows)
    try:
        engine.add(PROMPTS[0], GREEDY, draft="none")
        engine.add(PROMPTS[1], GREEDY, 0)
        while engine.has_work:
            engine.step()
    finally:
        del lm.score
    assert given
    assert all(row.tapped is None for row in given)


def test_a_target_without_hidden_states_refuses_the_draft(lm) -> None:
    with pytest.raises(UsageError, match="has none"):
        tiny_engine(stand_in(TableLM.random(8)), feature_drafter(lm))


def test_the_book_keeps_the_accepted_path_alone() -> None:
    book = FeatureBook()
    states = torch.arange(6.0)[:, None, None].expand(6, 2, 3)
    book.add(0, Tapped(0, HiddenStates.of(states)), 3)  # three context tokens and three nodes
    book.accept(0, (0, 2))
    assert not_none(book.take(0, 6, (1,)))[:, 0, 0].tolist() == [0, 1, 2, 3, 5]
    assert book.take(0, 6, (1,)) is None
    book.add(0, Tapped(4, HiddenStates.of(states[:3])), 6)  # the last of the kept ones again, and one more
    book.accept(0, (0,))
    assert not_none(book.take(0, 7, (0, 1)))[:, 0, 0].tolist() == [1], "the drafted one was cut from the text"
    book.drop(0)
    book.drop(0)
    assert book.take(0, 7, (0,)) is None


def test_states_of_steps_that_draft_nothing_are_cut_and_joined_once_they_are_taken(monkeypatch) -> None:
    book, room = FeatureBook(), HiddenRoom(2, 3)
    with monkeypatch.context() as patched:
        patched.setattr(HiddenStates, "tensor", lambda _: pytest.fail("nothing reads it yet"))
        for i in range(40):
            states, _ = room.take(1)
            states.whole[states.begin] = i
            book.add(0, Tapped(i, states), i + 1)
            book.accept(0, ())
    assert len(book._pending[0].kept) == 2, "as many as there were allocations"
    assert not_none(book.take(0, 41, (0, 1)))[:, 1, 2].tolist() == list(range(40))


class Shifted(FeatureBook):
    """A planted fault: features one position off."""

    def take(self, sequence_id, num_tokens, columns):
        states = super().take(sequence_id, num_tokens, columns)
        return None if states is None else states.roll(1, 0)


class Stale(FeatureBook):
    """A planted fault: features of refused nodes stay in the place of those that were accepted."""

    def accept(self, sequence_id, path) -> None:
        super().accept(sequence_id, range(len(path)))


class Refused(FeatureBook):
    """A planted fault: features of refused nodes stay behind those that were accepted."""

    def accept(self, sequence_id, path) -> None:
        super().accept(sequence_id, range(len(not_none(self._pending[sequence_id].nodes))))

    def take(self, sequence_id, num_tokens, columns):
        return super().take(sequence_id, 10**9, columns)


FAULTS = [*((fault, tree) for fault in (Shifted, Refused) for tree in TREES), *((Stale, tree) for tree in TREES[1:])]


@pytest.mark.in_turn(4, every=5)
@pytest.mark.parametrize(("fault", "tree"), FAULTS)
def test_planted_faults_of_features_are_caught(lm, fault, tree: str | None) -> None:
    drafter = feature_drafter(lm)
    engine = tiny_engine(lm, drafter, tree=tree)
    engine._stepper.features = fault()
    with pytest.raises(AssertionError):  # of the drafter, or here
        run_and_check(engine, lm, drafter)
    correct = feature_drafter(lm)
    run_and_check(tiny_engine(lm, correct, tree=tree), lm, correct)


def run_and_check(engine, lm, drafter) -> None:
    outputs = engine.generate(PROMPTS, GREEDY)
    assert not engine.drafters.num_failures[engine.drafters.own_name]
    assert all(len(output.token_ids) == GREEDY.max_new_tokens for output in outputs)
    check_lives(lm, drafter)
