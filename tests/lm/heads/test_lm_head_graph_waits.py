"""How often a step in graphs waits for the GPU, counted on a CPU that stands in for one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_drafts import loaded as loaded_head
from host_waits import HostWaits
from shortened import mostly_slow
from test_lm_graph_guesses import loaded as loaded_model
from test_lm_head_graphs import device, publish_head, recorder  # noqa: F401  # two are fixtures
from tiny_engine import step_of, tiny_engine
from tiny_grammar import byte_tokens
from tiny_models import VOCAB, make_tiny
from tiny_pard import publish_pard

from specdec_cli.engine.device_verdicts import ChanceJudge
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.forward.device_rounds import RoundsOnDevice
from specdec_cli.lm.forward.graph_draws import drawn_q
from specdec_cli.lm.heads import head_graphs
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.grammar import Grammar, compile_grammar
from specdec_cli.sampling.params import SamplingParams

NUM_STEPS = 6
READ = "a round that was launched ahead"
CHUNK = 80


@contextmanager
def reads_counted(waits: HostWaits) -> Iterator[None]:
    """Counts rounds that were launched ahead and are read now: without a GPU nothing else shows that wait."""
    read = RoundsOnDevice.read

    def counted(rounds: RoundsOnDevice) -> Any:
        waits.lines[READ] += 1
        return read(rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundsOnDevice, "read", counted)
        yield


def waits_of(
    models: tuple[Any, Any],
    k: int,
    params: SamplingParams,
    num_rows: int = 1,
    more: Sequence[int] = (),
    grammar: Grammar | None = None,
    **options: Any,
) -> HostWaits:
    """What some steps of sequences waited for, after the first ones; before the counted steps a prompt may be added."""
    engine, waits = tiny_engine(*models, k, max_num_seqs=num_rows + 1, **options), HostWaits()
    record = graphs.record

    def unseen(run, *place):
        def quietly():
            before, waits.paused = waits.paused, True
            try:
                return run()
            finally:
                waits.paused = before

        replay, outputs = record(quietly, *place)

        def replayed():
            waits.paused = True
            try:
                replay()
            finally:
                waits.paused = False

        return replayed, outputs

    graphs.record = unseen
    try:
        for row in range(num_rows):
            engine.add(list(range(5 + row % 7, 16 + row % 5)), replace(params, index=row), grammar=grammar)
        for _ in range(3):
            engine.step()
        with waits, reads_counted(waits):
            engine.step()  # reads what was launched uncounted
            waits.lines.clear()
            if more:
                engine.add(list(more), params)
            for _ in range(NUM_STEPS):
                assert engine.has_work
                assert step_of(engine).num_prefill_tokens == (CHUNK if more else 0)
        assert not any(engine.drafters.num_failures.values())
    finally:
        graphs.record = record
        engine.close()
    return waits


FORCED: dict[str, Any] = {"verify": "synthetic", "synthetic_acceptance_rates": (0.8, 0.7, 0.6)}
ARMS: dict[str, tuple[str, int, float, dict[str, Any], float]] = {
    # Of each the draft, k, the temperature, options of the engine, and the waits of a step.
    "plain": ("official", 0, 0, {}, 1),
    "judged chain": ("official", 3, 0, {}, 1),
    "judged chain of a model": ("model", 3, 0, {}, 1),
    "judged tree": ("official", 3, 0, {"tree": "3,2,1"}, 1),
    "judged dynamic tree": ("official", 3, 0, {"tree": "dynamic:6"}, 1),
    "chain": ("official", 3, 0, FORCED, 1),
    "chain of a model": ("model", 3, 0, FORCED, 1),
    "masks of a model": ("pard", 3, 0, FORCED, 1),
    "tree": ("official", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "block": ("dflash", 3, 0, FORCED, 1),
    "tree of a block": ("dflash", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "masks": ("p-eagle", 3, 0, FORCED, 1),
    "masks of a model on states": ("pard2", 3, 0, FORCED, 1),
    "heads side by side": ("medusa", 3, 0, FORCED, 1),
    "dynamic tree": ("official", 3, 0, {"tree": "dynamic:6", **FORCED}, 1),
    "dynamic tree of a block": ("dflash", 3, 0, {"tree": "dynamic:6", **FORCED}, 1),
    "tree of a model": ("model", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "dynamic tree of a model": ("model", 3, 0, {"tree": "dynamic:6", **FORCED}, 1),
    "tree by masks of a model": ("pard", 3, 0, {"tree": "3,2,1", **FORCED}, 1),
    "sampled, plain": ("official", 0, 1, {}, 1),
    "sampled, chain": ("official", 3, 1, {"verify": "block"}, 1),
    "sampled, chain of a model": ("model", 3, 1, {"verify": "block"}, 1),
    "sampled, masks of a model": ("pard", 3, 1, {"verify": "block"}, 1),
    "sampled, chain, by token": ("official", 3, 1, {"verify": "rejection"}, 1),
    "sampled, chain, its own draws": ("official", 3, 1, {"verify": "exact-match"}, 1),
    "sampled, chain, by entropy": ("official", 3, 1, {"verify": "typical"}, 1),
    "sampled, tree": ("official", 3, 1, {"tree": "3,2,1", "verify": "traversal"}, 1),
    "sampled, tree of a block": ("dflash", 3, 1, {"tree": "3,2,1", "verify": "traversal"}, 1),
    "sampled, tree of a model": ("model", 3, 1, {"tree": "3,2,1", "verify": "traversal"}, 1),
    "sampled, tree, walked down": ("official", 3, 1, {"tree": "3,2,1", "verify": "rejection"}, 1),
    "sampled, dynamic tree": ("official", 3, 1, {"tree": "dynamic:6"}, 1),
    "sampled, dynamic tree, judged": ("official", 3, 1, {"tree": "dynamic:6", "verify": "traversal"}, 2),
    "sampled, gumbel": ("official", 3, 1, {"verify": "gumbel"}, 1),
    "sampled, gumbel, chain of a model": ("model", 3, 1, {"verify": "gumbel"}, 1),
    "sampled, gumbel, tree of a model": ("model", 3, 1, {"tree": "3,2,1", "verify": "gumbel"}, 1),
    "sampled, gumbel, masks of a model": ("pard", 3, 1, {"verify": "gumbel"}, 1),
    "sampled, gumbel, tree": ("official", 3, 1, {"tree": "3,2,1", "verify": "gumbel"}, 1),
}
BESIDE_PROMPTS = {
    "plain": 1,
    "chain": 1,
    "chain of a model": 1,
    "tree": 1,
    "dynamic tree": 1,
    "sampled, chain": 2,
    "sampled, chain, by entropy": 4,
}
"""Waits of a step while a prompt is read beside it."""


@pytest.fixture
def pair(tmp_path, device, recorder):  # noqa: F811
    """Makes a target and a draft in graphs, with room for many sequences."""

    def made(draft: str) -> tuple[Any, Any]:
        how: dict[str, Any] = {
            "decoder": "graphs",
            "device": device,
            "block_size": 4,
            "max_num_seqs": 18,
            "check": False,
        }
        shape: dict[str, Any] = {"max_position_embeddings": 640}
        lm = load_lm(str(make_tiny("llama", tmp_path / "target", 1, num_hidden_layers=6, **shape)), **how)
        if draft == "model":
            return lm, load_lm(str(make_tiny("llama", tmp_path / "draft", 2, **shape)), **how)
        if draft == "pard":
            publish_pard(tmp_path / "draft", max_position_embeddings=640)
            return lm, loaded_model("pard", load_lm(str(tmp_path / "draft"), **how))
        publish_head(tmp_path / "head", draft)
        return lm, loaded_head(lm, tmp_path / "head")

    return made


def moved_with_a_wait(recorded, moves) -> None:
    recorded._cache.move(*torch.tensor(moves, device=recorded._device).t())


def q_read_row_by_row(draws, counts, q):
    for each in q[0]:
        assert float(each.sum()) > 0
    return drawn_q(draws, counts, q)


def test_a_planted_wait_is_counted(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Graphs, "move", moved_with_a_wait)
    with pytest.raises(AssertionError, match="moved_with_a_wait"):
        test_a_chunk_of_a_prompt_adds_no_wait("tree", pair)


def test_a_planted_wait_of_each_row_is_counted(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_graphs, "drawn_q", q_read_row_by_row)
    with pytest.raises(AssertionError, match="q_read_row_by_row': 24"):
        test_a_chunk_of_a_prompt_adds_no_wait("sampled, chain", pair)


def lengths_read(judge, begins, lengths) -> None:
    assert lengths.tolist()
    prepare(judge, begins, lengths)


prepare = ChanceJudge.prepare


def test_a_planted_wait_ahead_of_a_round_is_counted(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChanceJudge, "prepare", lengths_read)
    with pytest.raises(AssertionError, match=f"lengths_read': {NUM_STEPS}"):
        test_a_step_waits_as_often_as_the_documentation_says("sampled, chain", 1, pair)


@pytest.mark.in_turn(6, every=8)
@pytest.mark.parametrize("num_rows", mostly_slow([1, 16], [1]))
@pytest.mark.parametrize("arm", [*ARMS])
def test_a_step_waits_as_often_as_the_documentation_says(arm: str, num_rows: int, pair) -> None:
    draft, k, temperature, options, num = ARMS[arm]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    waits = waits_of(pair(draft), k, params, num_rows, **options)
    assert waits.num == num * NUM_STEPS, waits.lines


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize(
    "arm", ["plain", "judged chain of a model", "tree", "sampled, chain", "sampled, tree of a block"]
)
def test_of_rounds_ahead_the_host_reads_each_once(arm: str, pair) -> None:
    draft, k, temperature, options, _ = ARMS[arm]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    waits = waits_of(pair(draft), k, params, 4, **options)
    assert waits.lines == {READ: NUM_STEPS}


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("arm", [*BESIDE_PROMPTS])
def test_a_chunk_of_a_prompt_adds_no_wait(arm: str, pair) -> None:
    waits = waits_beside_chunks(arm, pair, goes_ahead=False)
    assert waits.num == BESIDE_PROMPTS[arm] * NUM_STEPS, waits.lines


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("arm", [*BESIDE_PROMPTS])
def test_beside_chunks_of_a_prompt_the_host_reads_rounds_alone(arm: str, pair) -> None:
    assert waits_beside_chunks(arm, pair).lines == {READ: NUM_STEPS}


def waits_beside_chunks(arm: str, pair: Any, **more: Any) -> HostWaits:
    """What steps with a chunk of a prompt waited for."""
    draft, k, temperature, options, _ = ARMS[arm]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    limits: dict[str, Any] = {"prefill_chunk": CHUNK, "max_num_batched_tokens": CHUNK}
    prompt = [(7 * i) % 89 + 2 for i in range(CHUNK * NUM_STEPS + 1)]
    return waits_of(pair(draft), k, params, 4, prompt, **options, **limits, **more)


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("arm", ["sampled, chain", "sampled, tree"])
def test_cuts_add_no_wait(arm: str, cut: dict[str, Any], pair) -> None:
    draft, k, temperature, options, num = ARMS[arm]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3, **cut)
    waits = waits_of(pair(draft), k, params, 4, **options)
    assert waits.num == num * NUM_STEPS, waits.lines


CONFIDENT: dict[str, Any] = {"depth_policy": "confidence", "p_min": 1e-9}
PENALTY: dict[str, Any] = {"presence_penalty": 0.1}
GRAMMAR: dict[str, Any] = {"grammar": "(.|\n)*"}
HOST_NEEDED: dict[str, tuple[str, dict[str, Any], float]] = {
    # Of each an arm, what it does beside, and the waits of a step. With a penalty or a cut by confidence a depth of a
    # draft is a round of the host, and a chain's are k = 3. That a grammar waits for the guess is not seen here.
    "chain, penalty": ("chain", PENALTY, 1 + 3),
    "chain, confidence": ("chain", CONFIDENT, 1 + 2 * 3),
    "sampled, plain, penalty": ("sampled, plain", PENALTY, 2),
    "sampled, chain, penalty": ("sampled, chain", PENALTY, 2 + 2 * 3),
    "sampled, chain, confidence": ("sampled, chain", CONFIDENT, 2 + 3 * 3),
    "sampled, tree, penalty": ("sampled, tree", PENALTY, 14),
    "sampled, tree, grammar": ("sampled, tree", GRAMMAR, 2),
}


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("case", [*HOST_NEEDED])
def test_what_needs_the_host_waits_as_often_as_the_documentation_says(case: str, pair) -> None:
    arm, more, num = HOST_NEEDED[case]
    draft, k, temperature, options, _ = ARMS[arm]
    penalty = more.get("presence_penalty", 0.0)
    params = SamplingParams(
        max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=3, presence_penalty=penalty
    )
    grammar = compile_grammar("regex", more["grammar"], byte_tokens(VOCAB)) if "grammar" in more else None
    more = {key: value for key, value in more.items() if key in CONFIDENT}
    waits = waits_of(pair(draft), k, params, 4, grammar=grammar, **options, **more)
    assert waits.num == num * NUM_STEPS, waits.lines


def test_log_probabilities_of_all_rows_are_one_wait(pair) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, logprobs=3)
    waits = waits_of(pair("official"), 3, params, 4, **FORCED)
    assert waits.num == 2 * NUM_STEPS, waits.lines
