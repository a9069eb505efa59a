"""Traces of draft heads: what they foretell for every k, greedy and sampled, beside what the engine counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from head_drafts import LAYERS, features_of, loaded, row
from tiny_engine import decode, letter_tokenizer, tokens
from tiny_heads import Reference, publish, random_weights
from tiny_models import VOCAB, make_tiny

from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.predict import depth_pass
from specdec_cli.measure.predict import trace as traces
from specdec_cli.measure.predict.draft_trace import DepthTrace
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.traced import _holds
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.sampling.params import SamplingParams

K, NUM = 4, 24
FITTED = [[5, 17, 80], [3, 9, 27, 81], [44, 2, 71, 13, 60]]
PROMPTS = [[(7 * i * i + 3 * i + 11 * p) % 89 + 2 for i in range(3 + p % 9)] for p in range(24)]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=8, check=False)


@pytest.fixture(scope="module")
def drafter(lm, tmp_path_factory: pytest.TempPathFactory):
    """Random weights, so flat that q is much like the nearly uniform p of a random target."""
    weights = random_weights(True, drafted=VOCAB, seed=8)
    weights["lm_head.weight"] *= 0.1
    return loaded(lm, publish(tmp_path_factory.mktemp("heads") / "head", weights, "speculators"))


@pytest.fixture(scope="module")
def fitted(lm, tmp_path_factory: pytest.TempPathFactory):
    """A head that was fitted to the sampled texts of three prompts: accepted often, and deep."""
    found = decode(lm, None, 0, FITTED, sampled(len(FITTED)), verify="gumbel")
    texts = [[*prompt, *its] for prompt, its in zip(FITTED, tokens(found), strict=True)]
    weights = random_weights(True, drafted=VOCAB, seed=8)
    expected = Reference({name: value.requires_grad_() for name, value in weights.items()})
    cases = []
    for text in texts:
        num = len(text) - 1 - 2
        forced = torch.tensor([text[s + 2 : s + 4] for s in range(num)])
        cases.append((features_of(lm, text, LAYERS)[:num], torch.tensor(text[1 : num + 1]), forced))
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        for states, after, forced in cases:
            logits, _ = expected.draft(states, after, 2, forced)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), forced.flatten()).backward()
        optimizer.step()
    weights = {name: value.detach() for name, value in weights.items()}
    return loaded(lm, publish(tmp_path_factory.mktemp("heads") / "fitted", weights, "speculators"))


def sampled(num):
    return [SamplingParams(max_new_tokens=NUM, temperature=0.7, seed=3, index=i) for i in range(num)]


def made(lm, drafter, params, prompts=PROMPTS):
    requests = [Request(PromptRow(i, ""), prompt, replace(params, index=i)) for i, prompt in enumerate(prompts)]
    trace = trace_target(Engine(lm, drafter, None, EngineOptions(max_num_seqs=8)), requests)
    trace.drafts["head"] = trace_draft(trace, drafter, K, target=lm)
    return trace


def counted(lm, drafter, k, params, verify, prompts=PROMPTS):
    each = [replace(params, index=i) for i in range(len(prompts))]
    found = decode(lm, drafter, k, prompts, each, verify=verify, max_num_seqs=8)
    counts = [one.speculative for one in found]
    drafted, accepted = (sum(getattr(one, f"num_{name}_tokens") for one in counts) for name in ("draft", "accepted"))
    return sum(one.num_steps for one in counts), drafted, accepted


def test_shared_noise_is_replayed_token_by_token(lm, fitted) -> None:
    [params, *_] = sampled(1)
    trace = made(lm, fitted, params, FITTED)
    assert isinstance(trace.drafts["head"], DepthTrace)
    for one in replay(trace, "head", "gumbel", K):
        expected = counted(lm, fitted, one.k, params, "gumbel", FITTED)
        found = one.num_steps.sum(), one.num_draft_tokens.sum(), one.num_accepted_tokens.sum()
        assert found == pytest.approx(expected), "the same text by the same noise"
    assert one.accepted_at_least.sum(0)[1] > 4, "often two in a row"


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("verify", ["rejection", "block", "exact-match"])
def test_sampled_acceptance_is_foretold_within_noise(lm, drafter, verify: str) -> None:
    params = SamplingParams(max_new_tokens=NUM, temperature=1.0, seed=5)
    trace = made(lm, drafter, params)
    for one in replay(trace, "head", verify, K)[1::2]:
        num_steps, drafted, accepted = counted(lm, drafter, one.k, replace(params, seed=6), verify)
        rate, foretold = accepted / num_steps, one.num_accepted_tokens.sum() / one.num_steps.sum()
        spread = np.sqrt((foretold + foretold**2) / num_steps)  # of a geometric count, which both sides have
        assert abs(rate - foretold) < 5 * spread
        assert 0.005 < foretold < one.k
        assert drafted > num_steps


def test_each_depth_has_the_distribution_that_it_is_drafted_from(lm, drafter) -> None:
    """log q of what a step drafts, along its own draft, is that of the trace's pass along the same tokens."""
    text = [*PROMPTS[8], *PROMPTS[7]]
    states = features_of(lm, text, drafter.taps)
    params = SamplingParams(temperature=1.0, seed=5)
    guess = drafter.propose([row(text, states[:-1], params=params)])[0]
    drafter.release(0)
    [logits] = drafter.path_logits([row(text, states[:-1], params=params)], [guess.drafted.tokens])
    drafter.release(0)
    assert torch.allclose(logits.softmax(-1), guess.q, atol=1e-6)


def foretells(lm, fitted) -> bool:
    """Whether the trace and the engine agree on what is accepted."""
    [params, *_] = sampled(1)
    one = replay(made(lm, fitted, params, FITTED), "head", "gumbel", K)[-1]
    return bool(one.num_accepted_tokens.sum() == counted(lm, fitted, K, params, "gumbel", FITTED)[2])


def test_states_one_position_off_are_caught(lm, fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault."""
    right = depth_pass.hidden_states
    monkeypatch.setattr(depth_pass, "hidden_states", lambda *given: right(*given).roll(1, 0))
    assert not foretells(lm, fitted)


def test_nodes_behind_other_tokens_than_the_texts_are_caught(lm, fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what a step recycles is not of the emitted text."""
    right = fitted.path_logits
    monkeypatch.setattr(fitted, "path_logits", lambda rows, paths: right(rows, [[0] * len(path) for path in paths]))
    assert not foretells(lm, fitted)


def log_q(trace):
    found = trace.drafts["head"]
    assert isinstance(found, DepthTrace)
    return found.log_q


def test_a_file_serves_the_head_that_it_is_of(lm, drafter, tmp_path) -> None:
    trace = made(lm, drafter, SamplingParams(max_new_tokens=8, temperature=1.0))
    trace.save(tmp_path / "trace")
    kept = traces.load(tmp_path / "trace")
    assert np.array_equal(log_q(kept), log_q(trace))
    assert _holds(kept, "head", drafter, needs_ranks=False)
    other = loaded(lm, publish(tmp_path / "other", random_weights(True, drafted=VOCAB, seed=9), "speculators"))
    assert not _holds(kept, "head", other, needs_ranks=False), "trained anew"
    assert "other weights" in kept.notices[-1]
