"""Rounds that are launched before the host has read those before them: the same events as with a wait for each.

As in test_lm_graphs, on a CPU what would be recorded runs anew at each replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_drafts import loaded as loaded_head
from shortened import mostly_slow
from test_lm_graph_guesses import loaded as loaded_model
from test_lm_head_graphs import device, loaded_mtp, publish_head, recorder  # noqa: F401  # two are fixtures
from tiny_engine import PROMPTS, Checked, drafter, letter_tokenizer
from tiny_models import VOCAB, make_tiny
from tiny_mtp import make_target
from tiny_pard import publish_pard
from typed import not_none

from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine import device_verdicts, stepper
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.stepper import Clock
from specdec_cli.events import Event, Failed, Finished, Noticed, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward.device_rounds import DecisionGraph, RoundsOnDevice
from specdec_cli.lm.forward.graph_inputs import NOTHING, Bucket, GraphInputs
from specdec_cli.lm.heads.head_rounds import HeadOnDevice
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

# Of these tokens one is the target's likeliest, so that random drafts are often right.
FIRST, LAST = 3, 7
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
DRAFTS: dict[str, tuple[str, str | None]] = {
    "plain": ("none", None),
    "chain of a head": ("official", None),
    "tree of a head": ("official", "2,2,1"),
    "chain of a model": ("model", None),
    "tree of a model": ("model", "2,2,1"),
    "masks of a model": ("pard", None),
    "tree by masks of a model": ("pard", "2,2,1"),
    "block": ("dflash", None),
    "tree of a block": ("dflash", "2,2,1"),
    "heads side by side": ("medusa", None),
    "masks of a model on states": ("pard2", None),
    "states before tokens": ("eagle", None),
    "modules": ("llama 2", None),
    "masks of a head": ("p-eagle", None),
    "tree by masks of a head": ("p-eagle", "2,2,1"),
    "block with a selector": ("dflash2", None),
    "block with a Markov head": ("dspark", None),
    "chain of the target itself": ("twin", None),
    "tree of the target itself": ("twin", "2,2,1"),
    "dynamic tree of a head": ("official", "dynamic:6"),
    "dynamic tree of a model": ("model", "dynamic:6"),
    "dynamic tree of heads side by side": ("medusa", "dynamic:6"),
    "dynamic tree by masks": ("p-eagle", "dynamic:5"),
    "dynamic tree of a block": ("dflash", "dynamic:6"),
}
SOME = ["plain", "chain of a head", "tree of a head", "chain of a model"]
Action = Callable[[Engine], Any]
Actions = Mapping[int, Action]


def drafter_of(name: str, lm: Any, folder: Path, how: dict[str, Any]) -> Any:
    """A drafter of a new draft, or of the one that is there already."""
    path = folder / "draft"
    if name == "none":
        return drafter(None)
    if name == "model":
        make_tiny("llama", path, 2)
    elif name == "twin":
        make_tiny("llama", path, 1, num_hidden_layers=6)
    elif not path.exists():
        publish_pard(path) if name == "pard" else publish_head(path, name)
    if name not in ("model", "twin", "pard"):
        return loaded_head(lm, path)
    return loaded_model("pard" if name == "pard" else "model", load_lm(str(path), check=False, **how))


@pytest.fixture
def engine_of(tmp_path, device, recorder):  # noqa: F811
    """Makes an engine of a new target and draft."""

    def made(draft: str, *, goes_ahead=True, num_blocks=0, last: int | None = LAST, k=3, **options: Any) -> Checked:
        how: dict[str, Any] = {"decoder": "graphs", "device": device, "block_size": 4, "max_num_seqs": 4}
        name, tree = DRAFTS[draft]
        kind, _, num = name.partition(" ")
        folder = tmp_path / "target"
        if num:
            make_target(kind, folder, int(num))
        else:
            make_tiny("llama", folder, 1, num_hidden_layers=6)
        lm = load_lm(str(folder), check=False, **how)
        if last is not None:
            with torch.no_grad():
                weight = lm.model.get_output_embeddings().weight
                weight[:FIRST], weight[last:] = 0, 0
        if num_blocks:
            lm.hold(num_blocks)
        own = loaded_mtp(lm) if num else drafter_of(name, lm, tmp_path, how)
        tokenizer = Tokenizer(letter_tokenizer())
        if name != "none":
            own._num_tokens = last or tokenizer.num_tokens
        if name == "dflash2":  # or all that it selects from may be beyond these tokens
            head = own.sequences.modules[0].head
            head.draft = replace(head.draft, num_candidates=VOCAB)
        spec = EngineOptions(num_speculative_tokens=k, max_num_seqs=4, tree=tree, **options)
        return Checked(lm, own, tokenizer, spec, (), goes_ahead=goes_ahead)

    return made


def steps_of(engine: Checked, actions: Actions | None = None) -> list[list[Event]]:
    """The events of all steps; before some of them something is done."""
    steps: list[list[Event]] = []
    while engine.has_work:
        if actions and len(steps) in actions:
            actions[len(steps)](engine)
        steps.append(engine.step() if engine.has_work else [])
        check_heads(engine)
    return steps


def check_heads(engine: Checked) -> None:
    """Look at the books of a head, too."""
    sequences = getattr(engine.drafter, "_sequences", None)
    for module in () if sequences is None else sequences.modules:
        module.cache.check()
        assert engine.has_work or module.cache.pool.num_free == module.cache.num_blocks, "an idle engine holds blocks"


def told(steps: list[list[Event]]) -> list[Any]:
    """What was emitted in each step, and how requests ended."""
    found: list[Any] = []
    for events in steps:
        emitted = [event.emitted for event in events if isinstance(event, Stepped)]
        ends = [
            event if isinstance(event, Finished) else (event.sequence_id, str(event.error))
            for event in events
            if isinstance(event, Finished | Failed)
        ]
        found.append((emitted, ends))
    return found


def by_sequence(steps: list[list[Event]]) -> tuple[dict[int, list[int]], dict[int, Any]]:
    """The tokens of each sequence, and how it ended."""
    texts: dict[int, list[int]] = {}
    for one in (one for each, _ in told(steps) for emitted in each for one in emitted):
        texts.setdefault(one.sequence_id, []).extend(one.tokens)
    ends = [end for _, ends in told(steps) for end in ends]
    return texts, {end[0] if isinstance(end, tuple) else end.sequence_id: end for end in ends}


def both(engine_of: Any, draft: str, prepare: Action, actions: Actions | None = None, **options: Any) -> list[Any]:
    """What an engine that goes ahead tells, which is what one tells that waits for each round."""
    found = []
    for goes_ahead in (False, True):
        engine = engine_of(draft, goes_ahead=goes_ahead, **options)
        prepare(engine)
        found.append(told(steps_of(engine, actions)))
        assert not any(engine.drafters.num_failures.values())
    assert found[0] == found[1]
    return found[0]


def add(num: int, params: SamplingParams = PARAMS, first: int = 0) -> Action:
    """Adds prompts of different lengths, which end one after the other."""

    def added(engine: Engine) -> None:
        for i in range(first, first + num):
            engine.add(PROMPTS[i], replace(params, max_new_tokens=params.max_new_tokens + 5 * i, index=i))

    return added


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rounds do: each that is launched and each that is read."""
    told: list[str] = []
    launch, read = RoundsOnDevice.launch, RoundsOnDevice.read

    def launched(self, begins):
        found = launch(self, begins)
        told.append("launched" if found else "refused")
        return found

    def has_read(self):
        told.append("read")
        return read(self)

    monkeypatch.setattr(RoundsOnDevice, "launch", launched)
    monkeypatch.setattr(RoundsOnDevice, "read", has_read)
    return told


@pytest.mark.in_turn(13, every=20)
@pytest.mark.parametrize(("draft", "num"), [*((draft, 3) for draft in DRAFTS), ("tree of a head", 1), ("plain", 1)])
def test_events_are_those_of_an_engine_that_waits(draft: str, num: int, engine_of, log) -> None:
    steps = both(engine_of, draft, add(num))
    accepted = [one.num_accepted for emitted, _ in steps for one in emitted[0]]
    assert draft == "plain" or len(set(accepted)) > 1, "some drafted tokens stand, and some do not"
    assert log.count("launched") > len(steps) / 5


SAMPLED = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=2.0)
CUT = replace(SAMPLED, top_k=40, top_p=0.9, min_p=0.01)
RULES = ["rejection", "block", "gumbel", "exact-match", "typical", "synthetic"]
TREE_RULES = ["rejection", "traversal", "gumbel", "exact-match", "synthetic"]
WALKED = ["gumbel", "exact-match", "synthetic"]


def rules_of(tree: str | None) -> list[str]:
    """The rules that judge drafts of this shape without the host."""
    return RULES if tree is None else WALKED if "dynamic" in tree else TREE_RULES


RULED = [(draft, rule) for draft, (_, tree) in DRAFTS.items() for rule in rules_of(tree)]


def rates_of(rule: str) -> dict[str, Any]:
    """The options of a rule."""
    rates = {"synthetic_acceptance_rates": (0.8, 0.6, 0.3)} if rule == "synthetic" else {}
    return {"verify": rule, "last": None, **rates}


def sampled(params: SamplingParams = SAMPLED) -> Action:
    """Adds three requests: the second is greedy, the third has another seed."""

    def added(engine: Engine) -> None:
        engine.add(PROMPTS[0], replace(params, index=2))
        engine.add(PROMPTS[1], replace(params, temperature=0, max_new_tokens=26))
        engine.add(PROMPTS[2], replace(params, seed=2**63 - 5, temperature=3.0, max_new_tokens=30))

    return added


@pytest.mark.in_turn(67, every=108)
@pytest.mark.parametrize(("draft", "rule", "params"), [(*its, params) for its in RULED for params in (SAMPLED, CUT)])
def test_events_of_sampled_requests_are_those_of_an_engine_that_waits(
    draft: str, rule: str, params: SamplingParams, engine_of, log
) -> None:
    steps = both(engine_of, draft, sampled(params), **rates_of(rule))
    accepted = {one.num_accepted for each, _ in steps for emitted in each for one in emitted}
    # Equal draws of unequal models are rare.
    assert draft == "plain" or rule in ("gumbel", "exact-match") or len(accepted) > 1
    assert log.count("launched") > len(steps) / 5


FEW = replace(SAMPLED, temperature=1.0, min_p=0.6, max_new_tokens=50)
"""Often fewer tokens have a probability than a tree has siblings."""


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("rule", ["rejection", "traversal", "gumbel"])
@pytest.mark.parametrize("draft", ["tree of the target itself", *mostly_slow(["tree by masks of a head"], [])])
def test_events_of_drawn_trees_that_lack_nodes(draft: str, rule: str, engine_of, log) -> None:
    steps = both(engine_of, draft, sampled(FEW), **rates_of(rule))
    emitted = [one for each, _ in steps for emitted in each for one in emitted if one.sequence_id != 1]
    assert len({one.num_nodes for one in emitted}) > 4
    assert len({one.num_accepted for one in emitted}) > 1
    assert log.count("launched") > len(steps) / 5


@pytest.mark.in_turn(1, every=5)
@pytest.mark.parametrize(("draft", "rule"), [
    ("tree of a head", "traversal"),
    ("tree of a model", "gumbel"),
    ("heads side by side", "block"),
    ("dynamic tree of heads side by side", "greedy"),
    ("dynamic tree of heads side by side", "exact-match"),
])  # fmt: skip
def test_more_tokens_are_wanted_than_a_draft_is_deep(draft: str, rule: str, engine_of, log) -> None:
    params, options = (PARAMS, {}) if rule == "greedy" else (SAMPLED, rates_of(rule))
    steps = both(engine_of, draft, add(2, replace(params, max_new_tokens=50)), k=7, **options)
    assert log.count("launched") > len(steps) / 5


def test_greedy_requests_beside_forced_ones_stay_greedy(engine_of, log) -> None:
    def mixed(engine: Engine) -> None:
        engine.add(PROMPTS[0], PARAMS)
        engine.add(PROMPTS[1], PARAMS, verify="greedy")
        engine.add(PROMPTS[2], SAMPLED)

    both(engine_of, "chain of a head", mixed, verify="synthetic", last=None, synthetic_acceptance_rates=(1.0, 1.0, 1.0))


def test_a_token_without_a_probability_ends_its_request_alone(engine_of, log, monkeypatch) -> None:
    right, _ = by_sequence(steps_of(prepared(engine_of("chain of a head", **rates_of("block")), sampled())))
    traversal = device_verdicts.traversal

    def faulty(*given: Any) -> Any:
        stands, own, is_right = traversal(*given)
        return stands, own, is_right & (torch.arange(len(own), device=own.device) > 0)

    monkeypatch.setattr(device_verdicts, "decider_of", lambda _: faulty)
    log.clear()
    texts, ends = by_sequence(steps_of(prepared(engine_of("chain of a head", **rates_of("block")), sampled())))
    assert "launched" in log
    assert "has a probability" in str(ends[0])
    assert texts[1] == right[1], "it is greedy, and decided without chance"


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("rule", ["gumbel", "exact-match"])
def test_draws_of_equal_models_are_often_equal(rule: str, engine_of, log) -> None:
    params = replace(SAMPLED, temperature=0.5, top_k=3)
    steps = both(engine_of, "chain of the target itself", sampled(params), **rates_of(rule))
    accepted = [one.num_accepted for each, _ in steps for emitted in each for one in emitted]
    assert sum(accepted) > len(accepted) / 2
    assert log.count("launched") > len(steps) / 5


def stale_outputs(head, decided):
    """A head goes on from the states of the round before."""
    before = head._graph.states.clone()
    take(head, decided)
    head._graph.states.copy_(before)


take = HeadOnDevice.take


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(("place", "name", "fault"), [
    (DecisionGraph, "_keep_path", lambda *_: None),
    (DecisionGraph, "_go_on", lambda *_: None),
    (HeadOnDevice, "take", stale_outputs),
])  # fmt: skip
def test_planted_faults_are_caught(place, name: str, fault, engine_of, log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        test_events_are_those_of_an_engine_that_waits("tree of a head", 1, engine_of, log)


@pytest.mark.parametrize("draft", SOME)
def test_a_round_is_launched_before_the_one_before_it_is_read(draft: str, engine_of, log) -> None:
    engine = engine_of(draft)
    add(2)(engine)
    for _ in range(3):
        engine.step()
    for _ in range(4):
        log.clear()
        engine.step()
        assert log == ["launched", "read"]
    assert len(engine._stepper._ahead._rounds._unread) == 1


def test_a_round_that_waits_is_caught(engine_of, log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundsOnDevice, "launch", lambda *_: False)
    with pytest.raises(AssertionError):
        test_a_round_is_launched_before_the_one_before_it_is_read("chain of a head", engine_of, log)


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("draft", SOME)
def test_stops_are_applied_one_round_late(draft: str, engine_of, log) -> None:
    """Token stops, and stop strings that come within a round, while others go on."""
    plain = told(steps_of(prepared(engine_of(draft), add(3))))
    emitted = [token for each, _ in plain for one in each[0] if one.sequence_id == 0 for token in one.tokens]
    stop = emitted[len(emitted) // 2]
    text = "".join(one.text for each, _ in plain for one in each[0] if one.sequence_id == 1)
    log.clear()

    def prepare(engine: Engine) -> None:
        engine.add(PROMPTS[0], replace(PARAMS, max_new_tokens=40, stop_token_ids=(stop,), min_tokens=0))
        engine.add(PROMPTS[1], replace(PARAMS, max_new_tokens=40, stop=(text[9:12],)))
        engine.add(PROMPTS[2], replace(PARAMS, max_new_tokens=40))

    steps = both(engine_of, draft, prepare)
    reasons = [end.finish_reason for _, ends in steps for end in ends]
    assert sorted(reasons) == ["length", "stop", "stop"]
    assert log.count("launched") > 4


@pytest.mark.in_turn(3, every=6)
@pytest.mark.parametrize("draft", [*SOME, "modules", "dynamic tree of a model"])
def test_rounds_go_on_without_requests_that_end(draft: str, engine_of, log, device) -> None:  # noqa: F811
    """One ends by a token, and nothing is written for it; with another one gone, smaller graphs suffice."""
    params = replace(PARAMS, max_new_tokens=60)
    plain, _ = by_sequence(steps_of(prepared(engine_of(draft), add(4, params))))
    at = max(place for place, token in enumerate(plain[0][:20]) if token not in plain[0][:place])

    def prepare(engine: Engine) -> None:
        engine.add(PROMPTS[0], replace(params, stop_token_ids=(plain[0][at],), min_tokens=0))
        add(3, params, first=1)(engine)

    engine = prepared(engine_of(draft), prepare)
    while 0 in engine._sequences:
        engine.step()
    for _ in range(3):
        log.clear()
        engine.step()
        assert log == ["launched", "read"]
    rounds = not_none(not_none(engine._stepper._ahead)._rounds)
    target = rounds.target.scored.graph
    step = GraphInputs.views(target.bucket, target.inputs)
    assert set(torch.cat((step.places[0], step.positions[0], step.tables[0])).tolist()) == {NOTHING}
    assert (step.tables[1:4, 0] != NOTHING).all()
    engine.abort(2)
    log.clear()
    engine.step()
    assert log == ["refused", "read"]
    both(engine_of, draft, prepare, {30: lambda engine: engine.abort(2)})


def test_what_is_drafted_behind_a_stop_is_no_fault_of_the_draft(engine_of, log) -> None:
    """The round that was launched before the stop was read drafts there, of a request that is gone by then."""
    draft, num = "chain of a model", 3
    many: dict[str, Any] = {"last": 20, "k": 1}
    texts, _ = by_sequence(steps_of(prepared(engine_of(draft, **many), add(num))))
    others = {token for i in range(1, num) for token in [*texts[i], *PROMPTS[i]]}
    stop = next(token for token in texts[0][4:] if token not in others | {*PROMPTS[0], *texts[0][:4]})
    log.clear()

    def prepare(engine: Engine) -> None:
        drafter: Any = engine.drafter
        with torch.no_grad():
            drafter.lm.model.get_input_embeddings().weight[stop] = torch.nan
        engine.add(PROMPTS[0], replace(PARAMS, stop_token_ids=(stop,), min_tokens=0))
        add(num - 1, first=1)(engine)

    steps = both(engine_of, draft, prepare, **many)
    assert sorted(end.finish_reason for _, ends in steps for end in ends) == ["length", "length", "stop"]
    assert "launched" in log


@pytest.mark.in_turn(2, every=6)
@pytest.mark.parametrize("draft", [*SOME, "modules", "dynamic tree of a model"])
def test_rounds_go_on_while_prompts_are_read(draft: str, engine_of, log, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin beside a chunk, too. Behind the last one a round is read, after that chunk was launched."""
    chunks = {"prefill_chunk": 8, "max_num_batched_tokens": 8}
    engine = engine_of(draft, **chunks)
    score = engine.target.score

    def scored(rows):
        log.append("prompt" if len(engine._sequences[1].tokens) == len(PROMPTS[3]) else "step")
        return score(rows)

    for prompt in (PROMPTS[0], PROMPTS[3]):
        engine.add(prompt, replace(PARAMS, max_new_tokens=60))
    engine.step()
    monkeypatch.setattr(engine.target, "score", scored)
    told = []
    while len(told) < 8:
        log.clear()
        engine.step()
        told.append([*log])
    begins, joins = (
        next(i for i, one in enumerate(told) if one[:2] == [what, "launched"]) for what in ("prompt", "step")
    )
    assert begins < 2, "a head or a model reads its prompt first"
    assert told[begins + 1 : 3] == [["launched", "prompt", "read"]] * (2 - begins)
    assert told[3:joins] == [["prompt", "read"], *[["step"]] * (joins - 4)]
    assert joins < 6
    assert told[joins + 1 :] == [["launched", "read"]] * (7 - joins)

    def longer(engine: Engine) -> None:
        engine.add(PROMPTS[3] * 2, PARAMS)

    both(engine_of, draft, add(2, replace(PARAMS, max_new_tokens=40)), {5: longer, 9: longer}, **chunks)


def test_chunks_beside_rounds_are_timed_once_they_have_run(engine_of, log, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a GPU how long they took before that would wait for it."""
    engine, asked, seconds = engine_of("plain", prefill_chunk=8, max_num_batched_tokens=8), list[float](), Clock.seconds
    found = list[tuple[str, int]]()
    monkeypatch.setattr(Clock, "has_passed", lambda *_: len(found) > 2)
    monkeypatch.setattr(Clock, "seconds", lambda *its: asked.append(seconds(*its)) or asked[-1])
    engine.add(PROMPTS[0], replace(PARAMS, max_new_tokens=60))
    for _ in range(4):
        engine.step()
    engine.add(PROMPTS[3], PARAMS)
    for _ in range(5):
        asked.clear()
        stepped = next(event for event in engine.step() if isinstance(event, Stepped))
        assert stepped.draft_seconds + stepped.verify_seconds == pytest.approx(sum(asked))
        found.append((log[-1], len(asked)))
    # Two numbers of each round, and two of each other forward: those of four chunks and of the step before rounds.
    assert found == [("read", 2), ("read", 2), ("read", 2), ("read", 12), ("read", 2)]


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("draft", [*SOME, *mostly_slow(["masks of a model", "modules", "block"], [])])
def test_nothing_is_recorded_for_the_length_of_a_prompt(draft: str, engine_of, monkeypatch) -> None:
    made, around = list[Bucket](), Bucket.around
    monkeypatch.setattr(Bucket, "around", lambda *sizes: made.append(around(*sizes)) or made[-1])
    engine_of(draft).generate(PROMPTS[2:], PARAMS)
    assert max(bucket.num_tokens for bucket in made) <= 12, "the tree has ten nodes"


MODELS = ["chain of a model", "tree of a model", "masks of a model", "tree by masks of a model"]


@pytest.mark.in_turn(2, every=5)
@pytest.mark.parametrize("draft", [*MODELS, "chain of a head"])
def test_rounds_begin_at_once_behind_a_prompt(draft: str, engine_of, log) -> None:
    """What is read before leaves a guess of the shape that all further ones have."""

    def add_prompt(engine: Engine) -> None:
        engine.add(PROMPTS[3], PARAMS)

    engine = prepared(engine_of(draft), add_prompt)
    engine.step()
    engine.step()
    assert log == ["launched", "read"]
    both(engine_of, draft, add_prompt)


def prepared(engine: Checked, prepare: Action) -> Checked:
    prepare(engine)
    return engine


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("draft", SOME)
def test_requests_come_and_go_while_rounds_are_under_way(draft: str, engine_of, log) -> None:
    both(engine_of, draft, add(2), {5: add(1, first=2), 9: lambda engine: engine.abort(0), 12: add(1, first=3)})
    assert log.count("launched") > 8


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("draft", SOME)
def test_all_are_aborted_and_others_follow(draft: str, engine_of, log) -> None:
    def replaced(engine: Engine) -> None:
        for sequence_id in (0, 1):
            engine.abort(sequence_id)
        add(2, first=1)(engine)

    both(engine_of, draft, add(2), {6: replaced})
    assert log.count("launched") > 8


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("prefix_caching", mostly_slow([False, True], [True]))
@pytest.mark.parametrize("draft", SOME)
def test_a_full_cache_preempts(draft: str, prefix_caching: bool, engine_of, log) -> None:
    few = engine_of(draft, num_blocks=22, prefix_caching=prefix_caching)
    many = engine_of(draft, goes_ahead=False, prefix_caching=prefix_caching)
    tight, roomy = (steps_of(prepared(each, add(3))) for each in (few, many))
    assert sum(event.num_preemptions for events in tight for event in events if isinstance(event, Stepped))
    assert by_sequence(tight) == by_sequence(roomy)
    assert "launched" in log


@pytest.mark.in_turn(13, every=40)
@pytest.mark.parametrize(("num_blocks", "draft"), [(num, draft) for num in range(28, 48, 2) for draft in SOME])
def test_a_prompt_finds_the_blocks_that_it_was_admitted_for(num_blocks: int, draft: str, engine_of, log) -> None:
    """However few there are: rounds ahead hold none that others were promised."""
    limits = {"prefill_chunk": 8, "max_num_batched_tokens": 8}

    def longer(engine: Engine) -> None:
        engine.add(PROMPTS[3] + PROMPTS[2], replace(PARAMS, max_new_tokens=8, index=3))

    def texts(**options: Any) -> Any:
        engine = prepared(engine_of(draft, **limits, **options), add(3, replace(PARAMS, max_new_tokens=60)))
        found = by_sequence(steps_of(engine, {6: longer}))
        assert not any(engine.drafters.num_failures.values())
        return found

    right = texts(goes_ahead=False)
    log.clear()
    assert texts(num_blocks=num_blocks) == right
    assert log.count("launched") > 5


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("draft", SOME)
def test_contexts_end(draft: str, engine_of, log) -> None:
    def narrowed(engine: Engine) -> None:
        engine.target.max_context = 40
        engine._scheduler.limits.max_context = 40
        add(3, replace(PARAMS, max_new_tokens=60))(engine)

    steps = both(engine_of, draft, narrowed)
    assert [end.finish_reason for _, ends in steps for end in ends] == ["length"] * 3
    assert log.count("launched") > 8


@pytest.mark.in_turn(0, every=6)
@pytest.mark.parametrize(("draft", "num"), [*((draft, 1) for draft in SOME), ("plain", 3), ("chain of a head", 3)])
def test_a_target_without_numbers_ends_the_requests_at_fault(draft: str, num: int, engine_of, log) -> None:
    """One after another, in the round in which a token is read that has no numbers, drafted or not."""
    many = {"last": 20}
    texts, _ = by_sequence(steps_of(prepared(engine_of(draft, **many), add(1))))
    latest = max(texts[0], key=texts[0].index)
    log.clear()
    found = []
    for goes_ahead in (False, True):
        engine = engine_of(draft, goes_ahead=goes_ahead, **many)
        with torch.no_grad():
            engine.target.model.get_input_embeddings().weight[latest] = torch.nan
        found.append(by_sequence(steps_of(prepared(engine, add(num)))))
    assert found[0] == found[1]
    assert any("gave `nan` as its largest logit" in str(end) for end in found[0][1].values())
    assert num > 1 or "launched" in log


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("draft", ["chain of a head", "chain of a model"])
def test_a_draft_without_numbers_fails_one_round_late(draft: str, engine_of, log) -> None:
    found = []
    for goes_ahead in (False, True):
        engine = prepared(engine_of(draft, goes_ahead=goes_ahead), add(2))
        steps = [engine.step() for _ in range(4)]
        own: Any = engine.drafter
        layers = own.lm.model.parameters() if "model" in draft else own.sequences.modules[0].head.weights.values()
        with torch.no_grad():
            for weight in layers:
                weight[:] = torch.nan if weight.is_floating_point() else weight
        found.append(by_sequence([*steps, *steps_of(engine)]))
        assert engine.drafters.num_failures[engine.drafters.own_name]
    assert found[0] == found[1]
    assert "launched" in log


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("draft", SOME)
def test_an_error_computes_all_again(draft: str, engine_of) -> None:
    right = by_sequence(steps_of(prepared(engine_of(draft, goes_ahead=False), add(2))))
    engine = prepared(engine_of(draft), add(2))
    steps = [engine.step() for _ in range(6)]
    ((decision, _),) = not_none(engine._stepper._ahead)._decisions.values()
    replay = decision.replay

    def failing() -> None:
        decision.replay = replay
        raise RuntimeError("the device is lost")

    decision.replay = failing
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()
    assert by_sequence([*steps, *steps_of(engine)]) == right


def test_an_engine_is_used_again(engine_of, log) -> None:
    engine = engine_of("chain of a head")
    texts = [[output.token_ids for output in engine.generate(PROMPTS[:2], PARAMS)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert log.count("launched") > 8


def test_others_may_use_the_models_in_between(engine_of, log) -> None:
    """A forward or a guess of somebody else fills the same graphs: rounds begin anew."""

    def used(engine: Engine) -> None:
        engine.target.score([Row(-5, PROMPTS[3][:4], 4)])
        engine.target.release(-5)

    both(engine_of, "chain of a model", add(1), {4: used, 7: used})
    assert log.count("refused") == 2


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("draft", ["chain of a head", "chain of a model", "tree of a head"])
def test_of_a_step_in_which_a_request_fails_the_host_verifies_the_others(
    draft: str, num: int, engine_of, log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails behind the draft, which has drafted for it, too; rounds begin with the next step."""

    def stuck(guesses: Guesses, matcher: Any, place: int) -> Any:
        if matcher.num_taken > 3:
            raise LogitsError("the grammar cannot continue", place)
        return guesses, np.ones((len(guesses.drafted) + 1, matcher.num_tokens), dtype=np.bool_)

    class Matcher:
        num_taken, num_tokens, may_end, is_finished = 0, 0, True, False

        def accept(self, tokens: Sequence[int]) -> int:
            self.num_taken += len(tokens)
            return len(tokens)

    def prepare(engine: Engine) -> None:
        add(num)(engine)
        failing: Any = engine._sequences[engine.add(PROMPTS[3], PARAMS)]
        failing.matcher = Matcher()
        failing.matcher.num_tokens = engine.num_tokens

    monkeypatch.setattr(stepper, "fit", stuck)
    steps = both(engine_of, draft, prepare)
    assert "the grammar cannot continue" in str([ends for _, ends in steps])
    assert "launched" in log


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("change", [{"presence_penalty": 0.1}, {"logprobs": 2}], ids=str)
def test_what_needs_the_host_waits(change: dict[str, Any], engine_of, log) -> None:
    steps_of(prepared(engine_of("chain of a head"), add(2, replace(PARAMS, **change))))
    assert not log


def test_decisions_that_find_no_memory_are_taken_for_fewer_sequences(engine_of, log, monkeypatch) -> None:
    made = DecisionGraph.__init__

    def limited(graph: DecisionGraph, target: Any, *rest: Any) -> None:
        if len(target.handles) > 1:
            raise torch.OutOfMemoryError
        made(graph, target, *rest)

    monkeypatch.setattr(DecisionGraph, "__init__", limited)
    engine = prepared(engine_of("chain of a head"), add(2))
    steps = steps_of(engine)
    (notice,) = (event for events in steps for event in events if isinstance(event, Noticed))
    assert notice.message == "some steps wait for the ones before them: the GPU's memory is full"
    assert "launched" in log, "the last sequence is alone for a while"
    right = by_sequence(steps_of(prepared(engine_of("chain of a head", goes_ahead=False), add(2))))
    assert by_sequence(steps) == right


def test_a_decision_that_cannot_be_recorded_is_noticed_once(engine_of, log, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: DecisionGraph) -> None:
        raise RuntimeError("not in a graph")

    right = by_sequence(steps_of(prepared(engine_of("chain of a head", goes_ahead=False), add(2))))
    monkeypatch.setattr(DecisionGraph, "_decide", refused)
    steps = steps_of(prepared(engine_of("chain of a head"), add(2)))
    assert by_sequence(steps) == right
    (notice,) = (event for events in steps for event in events if isinstance(event, Noticed))
    assert notice.message.endswith("the decision of a round cannot be recorded: not in a graph")
    assert not log
