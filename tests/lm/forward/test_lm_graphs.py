"""Recorded forwards of fixed shapes: padding, slots and masks on the device give what the forward gives without them.

On a CPU nothing can be recorded; there what would be recorded runs anew at each replay, from the same inputs into the
same output. On a GPU the same tests take CUDA's graphs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lm_llama import CUTS, drawn_one_by_one, one_by_one
from tiny_engine import PROMPTS, decode, ngram, tiny_engine, tokens
from tiny_models import VOCAB, make_tiny
from typed import not_none

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm import decoders
from specdec_cli.lm.cache.pending_tokens import PendingTokens
from specdec_cli.lm.door import Draw, Row, Tapped
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.forward.graph_inputs import Bucket
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.sampling.params import SamplingParams

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "olmo2"]
TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(120)]
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
)
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
LONG_ROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}


class Recorder:
    """Stands in for `graphs.record` on a CPU."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, run, device, pool):
        self.num_recorded += 1
        with torch.inference_mode():
            outputs = run()

        def replay() -> None:
            self.num_replayed += 1
            with torch.inference_mode():
                for output, now in zip(outputs, run(), strict=True):
                    output.copy_(now)

        return replay, outputs


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture
def recorder(device, monkeypatch: pytest.MonkeyPatch):
    """Counts what is recorded; without a GPU it stands in for one."""
    recorder, real = Recorder(), graphs.record

    def counted(*given):
        recorder.num_recorded += 1
        return real(*given)

    monkeypatch.setattr(graphs, "record", recorder if device == "cpu" else counted)
    if device == "cpu":
        monkeypatch.setattr(decoders, "check_recordable", lambda *_: None)
    return recorder


@pytest.fixture
def both(tmp_path: Path, device, recorder):
    """Makes a model's forward twice: as it is, and in graphs. Blocks have four tokens: contexts grow into more."""

    def made(family: str = "llama", seed=0, quantize: str = "none", **shape):
        folder = str(make_tiny(family, tmp_path / f"{family}{seed}", seed, **shape))
        how = {"device": device, "quantize": quantize, "block_size": 4, "check": False}
        return [load_lm(folder, decoder=name, **how) for name in ("transformers", "graphs")]

    return made


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_lengths_have_the_logits_of_the_forward_as_it_is(family, both, recorder) -> None:
    plain, recorded = both(family)
    assert recorded.decoder == "transformers, graphs"
    steps = [
        [Row(0, TEXT[:9], 1)],
        [Row(0, TEXT[:12], 3), Row(1, TEXT[30:37], 7)],
        [Row(0, TEXT[:10], 1), Row(1, TEXT[30:41], 4), Row(2, TEXT[50:53], 2)],
        [Row(1, TEXT[30:36], 1), Row(2, TEXT[50:58], 5), Row(0, TEXT[:13], 3)],
        [Row(0, TEXT[:80], 2)],
        [Row(0, TEXT[:83], 3), Row(2, TEXT[50:59], 1)],
    ]
    for rows in steps:
        expected, found = plain.score(rows), recorded.score(rows)
        assert torch.allclose(expected, found, atol=2e-4), (expected - found).abs().max()
        found += 1  # what a caller does with it changes no later step
        recorded.check_integrity()
    before = recorder.num_recorded
    for lm in (plain, recorded):
        lm.release(1)
    rows = [Row(3, TEXT[60:67], 7), Row(2, TEXT[50:60], 2)]
    assert torch.allclose(plain.score(rows), recorded.score(rows), atol=2e-4)
    assert recorder.num_recorded == before, "a shape that was recorded is recorded again"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_int8_weights_are_recorded_too(family: str, both, recorder) -> None:
    plain, recorded = both(family, quantize="int8")
    for rows in ([Row(0, TEXT[:9], 1)], [Row(0, TEXT[:12], 3), Row(1, TEXT[30:37], 7)]):
        expected, found = plain.score(rows), recorded.score(rows)
        # A number at the border between two whole ones may round either way.
        assert float((expected - found).norm() / expected.norm()) < 0.02
    assert recorder.num_recorded == 2


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_texts_with_a_draft_in_graphs_are_those_without_graphs(family: str, both, recorder) -> None:
    target, other = both(family), both(family, seed=1)
    params = SamplingParams(max_new_tokens=40)
    texts = [
        tokens(decode(lm, draft, 3, PROMPTS, params))
        for lm, draft in zip((*target, target[1]), (*other, ngram()), strict=True)
    ]
    assert texts[0] == texts[1] == texts[2]
    sampled = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
    texts = [tokens(decode(lm, draft, 3, PROMPTS, sampled)) for lm, draft in zip(target, other, strict=True)]
    assert texts[0] == texts[1]


def test_a_guess_in_one_graph_is_the_likeliest_tokens_one_by_one(both) -> None:
    _, recorded = both()
    contexts = {0: TEXT[:9], 1: TEXT[20:23], 2: TEXT[40:71]}
    for counts in ([4, 1, 3], [2, 5, 4]):
        rows = [Row(handle, context, n) for (handle, context), n in zip(contexts.items(), counts, strict=True)]
        found = recorded.guess(rows, VOCAB - 20)
        recorded.check_integrity()
        assert not found.unread.is_read
        guesses = [found.unread.known(one) for one in found.tokens]
        for (handle, context), n, guess in zip(contexts.items(), counts, guesses, strict=True):
            for _ in range(n):
                logits = recorded.score([Row(10 + handle, context, 1)])[0, : VOCAB - 20]
                context = [*context, int(logits.argmax())]
            assert guess == context[-n:]
            # And the cache holds it: what follows has the logits that it has anew.
            fresh = recorded.score([Row(20 + handle, context, 1)])
            assert torch.allclose(recorded.score([Row(handle, context, 1)]), fresh, atol=2e-4)
            recorded.release(10 + handle)
            recorded.release(20 + handle)
            contexts[handle] = context[:-1]


@pytest.mark.in_turn(3, every=8)
@pytest.mark.parametrize("num_tokens", [VOCAB, VOCAB - 20])
@pytest.mark.parametrize("cut", [*CUTS])
def test_drawn_guesses_are_those_of_the_sampling_chain(cut: str, num_tokens: int, device, both, recorder) -> None:
    """Beside one of likeliest tokens, and one that is drawn otherwise; then others in the same graph."""
    plain, recorded = both()
    noise = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).tolist()
    noise[0][:3] = 2.0**-53, 1 - 2.0**-53, 0.5
    draws = [Draw(*CUTS[cut], noise[0]), None, Draw(*CUTS[cut], noise[1]), Draw(0.05, None, 1.0, 0.0, noise[2][:2])]
    for some in (draws, [draws[0], None, None, Draw(*CUTS[cut], noise[3])]):
        rows = [
            Row(i, TEXT[7 * i : 9 * i + 5], 8 if draw is None else len(draw.uniforms), draw=draw)
            for i, draw in enumerate(some)
        ]
        found = not_none(recorded.guess(rows, num_tokens))
        assert found.q.keys() == {i for i, draw in enumerate(some) if draw is not None}
        for place, row in enumerate(rows):
            tokens = not_none(found.unread).known(found.tokens[place])
            if row.draw is None:
                assert tokens == one_by_one(plain, row, num_tokens)
                continue
            expected, q = drawn_one_by_one(plain, row, num_tokens)
            assert tokens == expected
            if device == "cpu":  # a GPU may round what stands at the cut
                assert torch.equal(found.q[place] > 1e-36, q > 1e-36)
            torch.testing.assert_close(found.q[place], q, rtol=1e-3, atol=1e-4)
    assert recorder.num_recorded == 2, "another draw was another graph"


def test_equal_logits_are_cut_in_the_order_of_their_ids(both) -> None:
    plain, recorded = both()
    with torch.no_grad():
        for lm in (plain, recorded):
            lm.model.get_output_embeddings().weight[1::2] = lm.model.get_output_embeddings().weight[::2][: VOCAB // 2]
    draw = Draw(0.5, 9, 1.0, 0.0, [0.05, 0.5, 0.95])
    found = not_none(recorded.guess([Row(0, TEXT[:9], 3, draw=draw)], VOCAB))
    expected, q = drawn_one_by_one(plain, Row(0, TEXT[:9], 3, draw=draw), VOCAB)
    assert not_none(found.unread).known(found.tokens[0]) == expected
    assert ((q > 0).sum(-1) == 9).all()
    assert torch.equal(found.q[0] > 0, q > 0)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_sampled_texts_with_a_draft_in_graphs_are_those_without(verify: str, both, recorder) -> None:
    target, other = both(), both(seed=1)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    expected, found = (decode(*pair, 3, PROMPTS, params, verify=verify) for pair in zip(target, other, strict=True))
    assert tokens(found) == tokens(expected)
    counts = [[one.speculative.num_accepted_tokens for one in outputs] for outputs in (found, expected)]
    assert counts[0] == counts[1]
    assert recorder.num_recorded


def test_a_guess_says_where_no_largest_logit_is_a_number(both) -> None:
    _, recorded = both()
    found = recorded.guess([Row(0, TEXT[:9], 4)], VOCAB)
    clean = found.unread.known(found.tokens[0])
    assert len(clean) == 4
    assert found.unread.is_whole
    with torch.no_grad():
        recorded.model.get_input_embeddings().weight[clean[1]] = torch.nan
    drawn = recorded.guess([Row(2, TEXT[:9], 4, draw=Draw(1e-3, 5, 1.0, 0.0, [0.5] * 4))], VOCAB)
    assert not drawn.unread.is_whole
    assert drawn.q[0].isfinite().all()
    found = recorded.guess([Row(1, TEXT[:9], 4)], VOCAB)
    assert not found.unread.is_whole
    num = clean.index(clean[1]) + 1
    assert found.unread.known(found.tokens[0]) == clean[:num] + [0] * (4 - num)


def test_stand_ins_are_the_tokens_that_they_stand_for(both) -> None:
    (plain, target), (_, draft) = both(), both(seed=1)
    contexts = [TEXT[:9], TEXT[20:23], TEXT[40:47]]
    rows = [Row(handle, context, 3 + handle) for handle, context in enumerate(contexts)]
    together = draft.guess(rows, VOCAB)
    each = [draft.guess([Row(10 + row.handle, row.context, row.num_logits)], VOCAB) for row in rows]

    def longer(tokens, unreads):
        return [
            Row(i, [*context, *more], len(more) + 1, unread=unread)
            for i, (context, more, unread) in enumerate(zip(contexts, tokens, unreads, strict=True))
        ]

    unread = target.score(longer(together.tokens, [together.unread] * 3))
    assert not together.unread.is_read
    for lm in (plain, target):
        lm.release(0)
    some_left = target.score(longer(together.tokens, [together.unread] * 3)[:1])
    of_each = target.score(longer([one.tokens[0] for one in each], [one.unread for one in each]))
    known = [together.unread.known(one) for one in together.tokens]
    expected = plain.score(longer(known, [None] * 3))
    assert torch.allclose(unread, expected, atol=2e-4)
    assert torch.allclose(some_left, expected[:4], atol=2e-4)
    assert torch.allclose(of_each, expected, atol=2e-4)


def test_a_prefix_that_nobody_read_is_found_again(both) -> None:
    _, recorded = both()
    recorded.adopt(0, TEXT[:7], "salt")
    found = recorded.guess([Row(0, TEXT[:7], 6)], VOCAB)
    recorded.release(0)
    whole = [*TEXT[:7], *found.unread.known(found.tokens[0])]
    assert recorded.adopt(1, whole, "salt") == 12
    recorded.check_integrity()


def test_the_target_reads_a_guess_before_the_host_does(both, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait in a step: by the time the host reads what was drafted, the target has judged it."""
    (_, target), (_, draft) = both(), both(seed=1)
    told: list[Any] = []
    score, known = target.score, PendingTokens.known

    def scored(rows):
        told.append(("score", [row.unread is not None and not row.unread.is_read for row in rows]))
        return score(rows)

    def read(self, context):
        if not self.is_read:
            told.append(("read", None))
        return known(self, context)

    monkeypatch.setattr(target, "score", scored)
    monkeypatch.setattr(PendingTokens, "known", read)
    decode(target, draft, 3, PROMPTS[:2], SamplingParams(max_new_tokens=12, ignore_eos=True), goes_ahead=False)
    steps = [one for one in told if one != ("score", [False, False])]
    assert len(steps) >= 6
    assert {what for what, _ in steps[::2]} == {"score"}
    assert {what for what, _ in steps[1::2]} == {"read"}


def test_a_draft_whose_logits_are_no_numbers_is_noticed_after_the_step(both, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, target), (_, draft) = both(), both(seed=1)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    right = tokens(decode(target, ngram(), 3, PROMPTS, params))
    with torch.no_grad():
        draft.model.get_input_embeddings().weight.fill_(torch.nan)
    engine = tiny_engine(target, draft, 3)
    assert [output.token_ids for output in engine.generate(PROMPTS, params)] == right
    assert engine.drafters.num_failures["model"] >= 1


def test_what_fits_no_graph_runs_as_it_does_without(both, recorder) -> None:
    plain, recorded = both()
    prompt = [Row(0, TEXT[:90], 1)]
    assert torch.allclose(plain.score(prompt), recorded.score(prompt), atol=2e-4)
    chunk = [Row(1, TEXT[:20], 0)]
    assert plain.score(chunk).shape == recorded.score(chunk).shape == (0, VOCAB)
    assert recorder.num_recorded == 0
    recorded.check_integrity()


def test_rows_are_replayed_beside_prompts_as_they_are_without(both, recorder) -> None:
    (_, alone), (plain, recorded) = both(), both()
    short = [Row(0, TEXT[:9], 2), Row(1, TEXT[30:37], 7)]
    for lm in (alone, plain, recorded):
        lm.score(short)
    own, before = alone.score([Row(0, TEXT[:10], 1), Row(1, TEXT[30:39], 2)]), recorder.num_replayed
    rows = [Row(2, TEXT[:90], 2), Row(0, TEXT[:10], 1), Row(3, TEXT[5:12], 0), Row(1, TEXT[30:39], 2)]
    expected, found = plain.score(rows), recorded.score(rows)
    assert torch.allclose(expected, found, atol=2e-4)
    assert torch.equal(found[2:], own), "a prompt beside a row changes its bits"
    if found.device.type == "cpu":
        assert recorder.num_replayed == before + 1
    recorded.check_integrity()


def test_a_guess_behind_a_text_too_long_for_a_graph_is_made_in_one(both, recorder) -> None:
    plain, recorded = both()
    rows = [Row(0, TEXT[:90], 3), Row(1, TEXT[:9], 2), Row(2, TEXT[:65], 4)]
    found = recorded.guess(rows, VOCAB)
    assert recorder.num_recorded == 1
    recorded.check_integrity()
    guesses = [found.unread.known(one) for one in found.tokens]
    assert guesses == [one_by_one(plain, row, VOCAB) for row in rows]
    longer = [Row(row.handle, [*row.context, *guess], 1) for row, guess in zip(rows, guesses, strict=True)]
    assert torch.allclose(plain.score(longer), recorded.score(longer), atol=2e-4)


def test_what_fills_a_shape_is_written_nowhere(both) -> None:
    _, recorded = both()
    full = [Row(handle, TEXT[handle : handle + 8], 1) for handle in range(3)]
    before = recorded.score(full)
    recorded.guess([Row(3, TEXT[:5], 6), Row(4, TEXT[:7], 1)], VOCAB)
    recorded.score([Row(5, TEXT[:3], 3), Row(6, TEXT[:9], 9), Row(7, TEXT[:5], 1)])
    assert torch.allclose(recorded.score(full), before, atol=2e-4)


@pytest.mark.parametrize(
    ("wanted", "bucket"),
    [
        ((1, 1, 1), (1, 2, 16)),
        ((2, 1, 1), (2, 1, 16)),
        ((3, 10, 17), (4, 12, 24)),
        ((8, 9, 33), (8, 9, 48)),
        ((5, 65, 64), (8, 65, 64)),
    ],
)
def test_buckets_hold_what_is_asked_for_and_little_more(wanted, bucket) -> None:
    assert Bucket.around(*wanted) == Bucket(*bucket)


def test_who_cannot_be_recorded_is_told_so(tmp_path: Path) -> None:
    def refused(family, device: str = "cuda", **shape):
        folder = str(make_tiny(family, tmp_path / family, **shape))
        with pytest.raises(UsageError) as caught:
            decoders.check_recordable(folder, ModelPlan(folder).config, torch.device(device))
        return caught.value.message

    assert "is for a GPU, and" in refused("llama", "cpu")
    assert "not as wide as its keys" in refused("llama", v_head_dim=4)
    assert "`falcon` of" in refused("falcon")
    assert "depend on the context's length" in refused("phi3", rope_parameters=LONG_ROPE)


def test_a_forward_that_waits_for_the_device_is_one_sentence(both, monkeypatch: pytest.MonkeyPatch) -> None:
    _, recorded = both()

    def refuse(run, device, pool) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "record", refuse)
    with pytest.raises(RunError, match="a forward of `llama` cannot be recorded: CUDA error: operation not permitted"):
        recorded.score([Row(0, TEXT[:9], 1)])


def test_what_a_graph_cannot_hold_is_named_and_not_how_the_recording_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run, device, pool) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "record", refuse)
    cpu = torch.device("cpu")
    with pytest.raises(RunError, match="a sum cannot be recorded: operation not permitted when stream is capturing"):
        graphs.recorded(lambda: (torch.zeros(1),), cpu, graphs.GraphPool(cpu), "a sum")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_recording_that_fails_leaves_the_stream_and_lets_others_follow() -> None:
    device, cuda = torch.device("cuda"), torch.cuda
    pool, before = graphs.GraphPool(device), cuda.current_stream(device)
    x = torch.ones(3, device=device)

    def waits() -> tuple[torch.Tensor]:
        return (x * x.sum().item(),)

    with pytest.raises(RunError, match=r"a product cannot be recorded: .*captur"):
        graphs.recorded(waits, device, pool, "a product")
    assert cuda.current_stream(device) == before
    replay, (found,) = graphs.recorded(lambda: (x * 2,), device, pool, "another product")
    x.fill_(5)
    replay()
    assert found.tolist() == [10, 10, 10]


def test_graphs_give_the_hidden_states_that_rows_want(both, recorder) -> None:
    plain, recorded = both()
    for lm in (plain, recorded):
        lm.tap((1, "final"))
    rows = [Row(0, TEXT[:9], 1), Row(1, TEXT[30:43], 3)]
    assert torch.allclose(plain.score(rows), recorded.score(rows), atol=2e-4)
    before = recorder.num_recorded
    steps = [
        [Row(0, TEXT[:12], 3, tapped=Tapped()), Row(1, TEXT[30:44], 1)],
        [Row(0, TEXT[:13], 1, tapped=Tapped()), Row(1, TEXT[30:47], 3, tapped=Tapped())],
        [Row(0, TEXT[:14], 1, tapped=Tapped())],
        [Row(2, TEXT[:80], 0, tapped=Tapped()), Row(0, TEXT[:15], 1, tapped=Tapped())],
    ]
    for rows in steps:
        copies = [replace(row, tapped=row.tapped and Tapped()) for row in rows]
        assert torch.allclose(plain.score(rows), recorded.score(copies), atol=2e-4)
        for row, copy in zip(rows, copies, strict=True):
            assert (row.tapped is None) == (copy.tapped is None)
            if row.tapped is not None:
                assert row.tapped.first == not_none(copy.tapped).first
                assert torch.allclose(not_none(row.tapped.states), not_none(not_none(copy.tapped).states), atol=2e-4)
                kept = not_none(not_none(copy.tapped).states).clone()
                recorded.score([Row(9, TEXT[:5], 2, tapped=Tapped())])
                assert torch.equal(not_none(not_none(copy.tapped).states), kept), "they are the caller's own"
    assert recorder.num_recorded > before
    hidden = not_none(not_none(rows[0].tapped).states)[:, 1]
    assert torch.allclose(plain.head(hidden), recorded.head(hidden), atol=2e-4)
