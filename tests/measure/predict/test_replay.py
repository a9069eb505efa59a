"""The trace against the engine: what replay predicts is what the engine counts, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from expected_counts import expected_counts
from many_tokenizers import tokenizer
from typed import not_none, stand_in
from universal_engine import reciter, universal_engine

from specdec_cli.draft_shape import DraftShape
from specdec_cli.drafted import Drafted
from specdec_cli.drafters import create, from_fields, parse_spec
from specdec_cli.drafters.contract import Guesses, Resources, WithoutModel
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.measure.documents.replayed import ReplayedResult, replayed_figures
from specdec_cli.measure.predict.replay import (
    by_position,
    by_task,
    check_knowable,
    replay,
    replay_table,
    replay_unsure,
)
from specdec_cli.measure.predict.starts import Starts
from specdec_cli.measure.predict.trace import GuessTrace, ModelTrace
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.sampling.params import SamplingParams

V = 6
EOS = 5


def table_pair(max_context=4096, eos=-3.0):
    """A target with calm and uncertain stretches, which a draft follows well and badly: what averaging gets wrong."""
    rng = np.random.default_rng(3)
    easy = rng.normal(0, 3.0, (V, V))
    hard = rng.normal(0, 0.7, (V, V))
    draft_hard = rng.normal(0, 1.5, (V, V))

    def target(context):
        last = context[-1]
        row = (easy if last < V // 2 else hard)[last].copy()
        row[: V // 2] += 0.2 if last < V // 2 else -0.8
        row[EOS] = eos
        return row

    def draft(context):
        last = context[-1]
        row = target(context) if last < V // 2 else draft_hard[last].copy()
        row[EOS] = eos
        return row

    made = [TableLM(f, V, order=1, name=n, max_context=4096) for f, n in ((target, "target"), (draft, "draft"))]
    made[1].max_context = max_context
    return made


def model_drafter(lm):
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: lm, None, V))
    return drafter


def engine_of(target, drafter, k=4, verify: str = "auto"):
    options = EngineOptions(num_speculative_tokens=k, verify=verify, max_num_seqs=512)
    return Engine(target, drafter, None, options, eos_token_ids=(EOS,))


def requests_of(num, params, task=None):
    rows = [PromptRow(i, "", category=task(i) if task else None) for i in range(num)]
    return [Request(row, [row.index % V, 1, 2][: 1 + row.index % 3], replace(params, index=row.index)) for row in rows]


def count(engine, requests, k, verify: str = "auto") -> SpeculativeCounts:
    counts = SpeculativeCounts()
    for request in requests:
        engine.add(request.token_ids, request.params, k, verify)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Stepped):
                for emitted in event.emitted:
                    counts.add(emitted)
    return counts


def assert_equal_counts(replayed, counts) -> None:
    want, got = counts.as_dict(), expected_counts(replayed)
    for name in got:
        left = got[name] if not isinstance(got[name], list) else got[name][: len(want[name])]
        np.testing.assert_allclose(
            np.array(left, dtype=float), np.array(want[name], dtype=float), rtol=1e-9, err_msg=name
        )
        if isinstance(got[name], list):
            assert not any(got[name][len(want[name]) :])
    assert replayed.num_steps.sum() == pytest.approx(counts.num_steps)


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("max_context", [4096, 14])
@pytest.mark.parametrize("verify", ["greedy", "gumbel"])
def test_rules_without_chance_are_replayed_to_the_last_count(verify: str, max_context: int) -> None:
    target, draft = table_pair(max_context)
    drafter = model_drafter(draft)
    engine = engine_of(target, drafter)
    params = SamplingParams(max_new_tokens=20, temperature=0.0 if verify == "greedy" else 1.2, frequency_penalty=0.4)
    requests = requests_of(40, params)
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 8)
    for one in replay(trace, "draft", verify, 8):
        assert_equal_counts(one, count(engine, requests, one.k, verify))


@pytest.mark.parametrize("p_min", [0.5, 0.8])
def test_a_draft_that_ends_unsure_accepts_as_in_decoding(p_min: float) -> None:
    """Only what is drafted behind the first refusal is not known, so fewer or more tokens may be drafted in vain."""
    target, draft = table_pair()
    drafter = model_drafter(draft)
    requests = requests_of(40, SamplingParams(max_new_tokens=20, temperature=1.0))
    trace = trace_target(engine_of(target, drafter), requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 4)
    full, unsure = replay(trace, "draft", "gumbel", 4)[-1], replay_unsure(trace, "draft", "gumbel", 4, [p_min])
    assert [(shape.k, shape.p_min) for shape in unsure] == [(k, p_min) for k in (1, 2, 3, 4)]
    found = unsure[DraftShape(4, p_min=p_min)]
    options = EngineOptions(
        num_speculative_tokens=4, verify="gumbel", depth_policy="confidence", p_min=p_min, max_num_seqs=512
    )
    counts = count(Engine(target, drafter, None, options, eos_token_ids=(EOS,)), requests, 4, "gumbel")
    assert found.num_accepted_tokens.sum() == counts.num_accepted_tokens
    assert found.num_steps.sum() == counts.num_steps
    assert found.num_draft_tokens.sum() == pytest.approx(counts.num_draft_tokens, rel=0.1)
    assert 0 < counts.num_draft_tokens < 0.9 * full.num_draft_tokens.sum()
    passes = (found.steps_by_asked * np.arange(5)).sum()
    assert found.num_draft_tokens.sum() < passes <= found.num_draft_tokens.sum() + counts.num_steps
    trace.drafts["draft"] = replace(stand_in(trace.drafts["draft"]), confidence=None)
    assert replay_unsure(trace, "draft", "gumbel", 4, [p_min]) == {}


@pytest.mark.in_turn(0)
@pytest.mark.parametrize(
    ("spec", "temperature"),
    [
        ("ngram:min=1", 0.0),
        ("ngram:min=1", 0.8),
        ("suffix:min_expected=0.3", 0.0),
        ("suffix:min_prob=0.02,min_expected=0", 0.8),
        ("suffix:min_expected=0.5+draft", 0.0),
        ("none", 0.0),
    ],
)
def test_a_guessing_draft_is_replayed_with_its_state(spec: str, temperature: float) -> None:
    target, draft = table_pair()
    drafter = from_fields(parse_spec(spec))
    drafter.load(Resources(lambda name: draft, None, V))
    engine = engine_of(target, drafter)
    requests = requests_of(30, SamplingParams(max_new_tokens=30, temperature=temperature))
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 5)
    for one in replay(trace, "draft", "auto" if temperature == 0 else "gumbel", 5):
        counts = count(engine, requests, one.k, "gumbel")
        if spec == "none":
            assert expected_counts(one)["acceptance_length"] is None
        assert_equal_counts(one, counts)


@pytest.fixture(scope="module")
def sampled():
    target, draft = table_pair(eos=-20.0)
    drafter = model_drafter(draft)
    engine = engine_of(target, drafter)
    requests = requests_of(700, SamplingParams(max_new_tokens=40, temperature=1.0))
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 8)
    return engine, requests, trace, (target, draft)


def decoded(engine, requests, k, verify):
    """Outputs and counts of decoding with a draft."""
    outputs, counts = {}, SpeculativeCounts()
    for request in requests:
        outputs[engine.add(request.token_ids, request.params, k, verify)] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Stepped):
                for emitted in event.emitted:
                    counts.add(emitted)
                    outputs[emitted.sequence_id] += emitted.tokens
    return list(outputs.values()), counts


def trace_along(trace, pair, outputs, drafter):
    """A trace of texts that were decoded with the draft: given the text, counts are left with the noise of refusals."""
    prompts = [replace(p, output=tuple(o)) for p, o in zip(trace.prompts, outputs, strict=True)]
    log_p = []
    for prompt in prompts:
        context = [*prompt.token_ids, *prompt.output[:-1]]
        scores = pair[0].score([Row(-1, context, len(prompt.output))]).log_softmax(-1)
        log_p += scores.gather(1, torch.tensor(prompt.output)[:, None])[:, 0].tolist()
    made = replace(trace, prompts=prompts, log_p=np.array(log_p, dtype=np.float32), drafts={})
    made.drafts["draft"] = trace_draft(made, drafter, 8)
    return made


@pytest.fixture(scope="module")
def spoken(sampled):
    """By rule: a trace of the text that the engine decoded with k = 8, and its counts."""
    engine, requests, trace, pair = sampled
    found = {}
    for rule in ("rejection", "block", "exact-match"):
        outputs, counts = decoded(engine, requests, 8, rule)
        found[rule] = trace_along(trace, pair, outputs, engine.drafter), counts
    return found


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("rule", ["rejection", "block", "exact-match"])
def test_given_the_text_the_engine_counts_what_replay_expects(spoken, rule: str) -> None:
    trace, counts = spoken[rule]
    replayed = replay(trace, "draft", rule, 8)[7]
    assert replayed.acceptance_length().median == pytest.approx(counts.acceptance_length, rel=0.01)
    marginal = [one.median for one in replayed.marginal_rates()]
    assert marginal == pytest.approx(counts.per_position_acceptance_rates, abs=0.02)
    conditional = [one.median for one in replayed.conditional_rates()]
    assert conditional == pytest.approx(counts.conditional_acceptance_rates, abs=0.03)


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("rule", ["rejection", "block", "exact-match"])
def test_the_target_alone_tells_what_the_engine_will_count(sampled, spoken, rule: str) -> None:
    engine, requests, trace, _ = sampled
    replayed = replay(trace, "draft", rule, 8)
    length = replayed[7].acceptance_length()
    assert not_none(length.ci95)[0] < spoken[rule][1].acceptance_length < not_none(length.ci95)[1]
    length = replayed[1].acceptance_length()
    assert length.median == pytest.approx(count(engine, requests, 2, rule).acceptance_length, rel=0.02)


def overlap_averages(trace, pair):
    """Σ min(p, q) at every position [B, n] of the text: the planted fault's acceptance."""
    found = np.zeros((len(trace.prompts), max(len(p.output) for p in trace.prompts)))
    for b, prompt in enumerate(trace.prompts):
        context = [*prompt.token_ids, *prompt.output[:-1]]
        p, q = (lm.score([Row(-1, context, len(prompt.output))]).softmax(-1) for lm in pair)
        found[b, : len(prompt.output)] = torch.minimum(p, q).sum(-1).numpy()
    return found


def test_planted_fault_averaging_overlaps_over_all_positions_is_caught(sampled, spoken) -> None:
    trace, counts = spoken["rejection"]
    overlaps = overlap_averages(trace, sampled[3])
    windows = np.stack([overlaps[:, i : 32 + i] for i in range(1, 9)])
    faulty = 1 + np.cumprod(windows, axis=0).sum(axis=0).mean()
    assert faulty != pytest.approx(counts.acceptance_length, rel=0.02), f"{faulty} is not seen to be wrong"


def test_planted_fault_starting_everywhere_alike_is_caught(spoken) -> None:
    trace, counts = spoken["rejection"]
    starts = Starts(trace, "draft", "rejection", 8)
    steps = starts.steps(8)
    uniform = (np.arange(steps.drafted.shape[1]) >= 1) & (steps.drafted == 8)
    uniform &= np.arange(steps.drafted.shape[1]) + 8 <= starts.lengths[:, None]
    faulty = 1 + steps.survival[uniform][:, 1:].sum(axis=1).mean()
    assert faulty != pytest.approx(counts.acceptance_length, rel=0.02), f"{faulty} is not seen to be wrong"


def test_block_accepts_more_than_rejection_and_survival_follows_its_formula(sampled) -> None:
    _, _, trace, _ = sampled
    rejection, block = (replay(trace, "draft", rule, 6) for rule in ("rejection", "block"))
    assert block[0].acceptance_length().median == pytest.approx(rejection[0].acceptance_length().median)
    assert block[5].acceptance_length().median > rejection[5].acceptance_length().median
    starts = Starts(trace, "draft", "block", 6)
    draft = trace.drafts["draft"]
    ratio = np.exp(draft.log_q[3:8].astype(float) - trace.log_p[3:8])
    kept = 1.0
    for i, one in enumerate(ratio, 1):
        kept = min(1.0, kept / one)
        expected = kept * np.prod(ratio[:i])
        assert not_none(starts.survival)[0, 3, i] == pytest.approx(expected, rel=1e-5)


def test_counts_add_up(sampled) -> None:
    _, _, trace, _ = sampled
    for one in replay(trace, "draft", "block", 4):
        emitted = one.num_steps + one.num_accepted_tokens
        assert (emitted >= one.num_emitted - 1e-6).all(), "only an accepted end token saves a step its own"
        np.testing.assert_allclose(one.steps_by_drafted.sum(axis=1), one.num_steps, atol=1e-9)
        np.testing.assert_allclose(one.steps_by_asked, one.steps_by_drafted, atol=1e-9)
        np.testing.assert_allclose(one.histogram.sum(axis=1), one.num_drafts, atol=1e-9)
        np.testing.assert_allclose(one.histogram @ np.arange(one.k + 1), one.num_accepted_tokens, atol=1e-9)
        assert one.drafts_by_position.sum() == pytest.approx(one.num_drafts.sum())
        assert one.accepted_by_position.sum() == pytest.approx(one.num_accepted_tokens.sum())


def test_a_table_of_k_follows_the_batch() -> None:
    target, draft = table_pair()
    drafter = model_drafter(draft)
    engine = engine_of(target, drafter)
    requests = requests_of(9, SamplingParams(max_new_tokens=24, ignore_eos=True), task=lambda i: "ab"[i % 2])
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 4)
    flat = replay_table(trace, "draft", "auto", {1: 4}, max_num_seqs=3)
    for name, value in expected_counts(replay(trace, "draft", k_max=4)[3]).items():
        assert expected_counts(flat)[name] == pytest.approx(value)
    options = EngineOptions(num_speculative_tokens=4, max_num_seqs=3, disable_by_batch_size=2)
    counts = count(Engine(target, drafter, None, options), requests, 4)
    assert_equal_counts(replay_table(trace, "draft", "auto", {1: 4, 3: 0}, max_num_seqs=3), counts)


def gumbel_places(engine, requests, k):
    """Where each drafting step of the engine began in its output, and what it accepted."""
    places, ids = [], [engine.add(request.token_ids, request.params, k, "gumbel") for request in requests]
    length = dict.fromkeys(ids, 0)
    while engine.has_work:
        for event in engine.step():
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                if not emitted.from_prefill and emitted.num_drafted:
                    places.append((length[emitted.sequence_id], emitted.num_accepted))
                length[emitted.sequence_id] += len(emitted.tokens)
    return places


def test_tasks_and_places_in_the_text_are_the_engines() -> None:
    target, draft = table_pair()
    drafter = model_drafter(draft)
    engine = engine_of(target, drafter)
    params = SamplingParams(max_new_tokens=24, temperature=1.2, frequency_penalty=0.4)
    requests = requests_of(24, params, task=lambda i: "ab"[i % 3 == 0])
    trace = trace_target(engine, requests)
    trace.drafts["draft"] = trace_draft(trace, drafter, 4)
    replays = replay(trace, "draft", "gumbel", 4)
    tasks, bins = by_task(replays), by_position(replays)
    assert list(tasks) == ["b", "a"]
    for name, rows in tasks.items():
        own = [request for request in requests if request.row.category == name]
        for row in rows:
            counts = count(engine, own, row["k"], "gumbel")
            assert row["acceptance_length"].median == pytest.approx(counts.acceptance_length)
            assert row["acceptance_rate"].median == pytest.approx(counts.acceptance_rate)
            assert row["acceptance_length"].ci95[0] < counts.acceptance_length < row["acceptance_length"].ci95[1]
            assert row["acceptance_length"].pairs == len(own)
    assert (bins[0]["from"], bins[-1]["to"]) == (1, 23)
    for k in (1, 4):
        places = gumbel_places(engine, requests, k)
        assert len({round(one["by_k"][k - 1]["acceptance_length"].median, 6) for one in bins}) > 4
        for one in bins:
            accepted = [number for begin, number in places if one["from"] <= begin <= one["to"]]
            found = one["by_k"][k - 1]["acceptance_length"]
            assert found.median == pytest.approx(1 + np.mean(accepted))
            assert found.ci95[0] < found.median < found.ci95[1]


def test_acceptance_as_json_has_the_counts_and_their_intervals(sampled) -> None:
    _, _, trace, _ = sampled
    one = replay(trace, "draft", "block", 4)[3]
    found, counts = ReplayedResult.of(replayed_figures(one)), expected_counts(one)
    for name in ("per_position_acceptance_rates", "conditional_acceptance_rates", "acceptance_histogram"):
        assert found[name] == pytest.approx(counts[name])
    for name in ("acceptance_rate", "acceptance_length"):
        assert found[name]["median"] == pytest.approx(counts[name])
        assert found[name]["ci95"][0] < counts[name] < found[name]["ci95"][1]
    for name in ("per_position", "conditional"):
        for rate, (low, high) in zip(found[f"{name}_acceptance_rates"], found[f"{name}_ci95"], strict=True):
            assert low < rate < high


def test_what_a_trace_cannot_know_is_refused(sampled) -> None:
    _, _, trace, _ = sampled
    for rule, p_min in (("typical", 0.0), ("rejection", 0.3), ("nonsense", 0.0)):
        with pytest.raises(UsageError):
            check_knowable(rule, p_min)
    with pytest.raises(UsageError, match="temperature 0"):
        replay(trace, "draft", "greedy")
    with pytest.raises(UsageError, match="no draft `other`"):
        replay(trace, "other")


def test_a_draft_that_samples_and_is_no_language_model_is_refused() -> None:
    class Sampler(WithoutModel):
        def propose(self, rows):
            return [Guesses(Drafted.chain([1]), torch.full((1, V), 1 / V)) for _ in rows]

        def release(self, handle) -> None:
            pass

    target, draft = table_pair()
    trace = trace_target(engine_of(target, model_drafter(draft)), requests_of(1, SamplingParams(max_new_tokens=4)))
    with pytest.raises(UsageError, match="samples"):
        trace_draft(trace, stand_in(Sampler()), 2)


STORY = "Once upon a time there was a lion named Bear. He loved the river and the café, and Lily went to the park."


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, GuessTrace), (0.9, ModelTrace)])
def test_a_draft_with_another_tokenizer_is_replayed_to_the_last_count(temperature: float, kind: type) -> None:
    """By text it is asked at every start, by intersection its distribution along the text is enough."""
    draft = reciter("sentencepiece", STORY, 4.0)
    engine = universal_engine(reciter("byte-level", STORY, 4.0), "byte-level", draft, "sentencepiece", verify="gumbel")
    params = SamplingParams(max_new_tokens=14, temperature=temperature)
    beginnings = [tokenizer("byte-level").encode(STORY[:end], False) for end in (4, 9, 16, 30)]
    requests = [Request(PromptRow(i, ""), ids, replace(params, index=i)) for i, ids in enumerate(beginnings)]
    trace = trace_target(engine, requests)
    found = trace.drafts["draft"] = trace_draft(trace, engine.drafter, 4)
    assert isinstance(found, kind)
    for one in replay(trace, "draft", "auto" if temperature == 0 else "gumbel", 4):
        assert_equal_counts(one, count(engine, requests, one.k, "gumbel"))
