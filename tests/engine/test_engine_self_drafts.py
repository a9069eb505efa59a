"""Drafts made of the target's own weights, through the whole engine: no promise about the output gives way to them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_bits import logits_of
from test_engine_prefixes import PROMPTS as PREFIXES
from test_engine_prefixes import decoded
from tiny_engine import (
    PROMPTS,
    Checked,
    decode,
    drafter,
    preempted,
    self_draft,
    tiny_engine,
    tiny_lm,
    tokens,
    transformers_greedy,
)
from tiny_grammar import byte_tokenizer
from tiny_hybrids import save_hybrid
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.drafted import NOTHING
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.outputs import Outputs
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.lm.door import Row
from specdec_cli.lm.llama import llama_weights
from specdec_cli.lm.llama.llama import LlamaDecoder
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.measure.audit.chisquare import chi_square, enumerate_joint
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.grammar import compile_grammar
from specdec_cli.sampling.params import SamplingParams

SPECS = ("self-int8", "self-exit:1", "self-exit:2")
TREES = ("3,2+1,1", "dynamic:16")
PARAMS = SamplingParams(max_new_tokens=24)
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    lm = tiny_lm(tmp_path_factory.mktemp("deep"), "llama", 3, num_hidden_layers=NUM_LAYERS)
    if lm.decoder != "own":
        pytest.skip("our own decoder does not run here")
    return lm


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> TransformersLM:
    """In bfloat16, where bits are promised."""
    lm = tiny_lm(tmp_path_factory.mktemp("half"), "llama", 3, dtype="bfloat16", num_hidden_layers=NUM_LAYERS)
    if lm.decoder != "own":
        pytest.skip("our own decoder does not run here")
    return lm


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("spec", [*SPECS, "self-int4"])
def test_greedy_text_is_transformers_own(deep, spec: str) -> None:
    expected = transformers_greedy(deep.name, PROMPTS)
    for k in (1, 4, 8):
        outputs = decode(deep, self_draft(deep, spec), k, params=PARAMS)
        assert tokens(outputs) == expected
        drafted = sum(output.speculative.num_draft_tokens for output in outputs)
        accepted = sum(output.speculative.num_accepted_tokens for output in outputs)
        assert 0 < accepted <= drafted
        assert spec != "self-int8" or accepted > 0.7 * drafted, "a copy in int8 nearly always agrees"
        assert tokens(decode(deep, self_draft(deep, spec), k, PROMPTS[:1], PARAMS)) == expected[:1]
    for tree in TREES:
        assert tokens(decode(deep, self_draft(deep, spec), 4, params=PARAMS, tree=tree)) == expected


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("spec", [*SPECS, "self-int4"])
@pytest.mark.parametrize("tree", [None, *TREES])
def test_logits_are_the_same_bits(half, spec: str, tree: str | None) -> None:
    expected = [logits_of(half, drafter(None), [prompt], 0)[0] for prompt in PROMPTS]
    found = logits_of(half, self_draft(half, spec), PROMPTS, 4, tree)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_5_text"])
def test_transformers_forward_and_hybrids_exit_early_too(family: str, tmp_path: Path) -> None:
    folder = save_hybrid(family, tmp_path) if family.startswith("qwen") else make_tiny(family, tmp_path, 1)
    target = load_lm(str(folder), decoder="transformers")
    plain = tokens(decode(target, None, 0, params=PARAMS))
    assert tokens(decode(target, self_draft(target, "self-exit:1"), 4, params=PARAMS)) == plain


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("spec", SPECS)
def test_gumbel_gives_the_text_of_no_draft(deep, spec: str) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.9, seed=11, top_p=0.97)
    plain = tokens(decode(deep, None, 0, params=params, verify="gumbel"))
    for k, tree in ((1, None), (5, None), (4, "2,2,1")):
        found = decode(deep, self_draft(deep, spec), k, params=params, verify="gumbel", tree=tree, max_num_seqs=3)
        assert tokens(found) == plain


LENGTH, ALARM = 2, 1e-6
SAMPLED = SamplingParams(temperature=1.2, top_k=4, max_new_tokens=5, ignore_eos=True)


def p_of(lm: TransformersLM, text: tuple[int, ...]) -> Any:
    """The target's distribution after the prompt and a text [V]."""
    context = [*PROMPTS[0], *text]
    logits = lm.score([Row(10**6, context, 1)])
    lm.release(10**6)
    row = ChainRow(SAMPLED, context, len(PROMPTS[0]), NOTHING, frozenset())
    return distribution(logits, [row], lm.vocab_size).dense()[0].double().numpy()


def p_value(target: TransformersLM, draft: Any, verify: str, tree: str | None, num: int = 600) -> float:
    options = EngineOptions(3, verify=verify, tree=tree, max_num_seqs=64)
    engine = Engine(target, draft, None, options)
    outputs = engine.generate([PROMPTS[0]] * num, [replace(SAMPLED, index=i) for i in range(num)])
    counts = Counter(tuple(output.token_ids[:LENGTH]) for output in outputs)
    assert 0.2 * num < sum(output.speculative.num_accepted_tokens for output in outputs), "some drafts are accepted"
    joint = enumerate_joint(lambda text: p_of(target, text[len(PROMPTS[0]) :]), tuple(PROMPTS[0]), LENGTH)
    return chi_square(counts, joint).p_value


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize(("verify", "tree"), [("block", None), ("rejection", None), ("auto", "2,2")])
@pytest.mark.parametrize("spec", ["self-int8", "self-exit:2"])
def test_samples_follow_the_targets_distribution(deep, spec: str, verify: str, tree: str | None) -> None:
    assert p_value(deep, self_draft(deep, spec), verify, tree) > ALARM


@pytest.mark.parametrize("spec", SPECS)
def test_cached_prefixes_change_nothing(deep, spec: str) -> None:
    expected, _, _ = decoded(tiny_engine(deep, self_draft(deep, spec)), PREFIXES)
    sharing = tiny_engine(deep, self_draft(deep, spec), prefix_caching=True)
    assert decoded(sharing, PREFIXES)[0] == decoded(sharing, PREFIXES)[0] == expected


@pytest.mark.parametrize("tree", [None, "2,2,1"])
@pytest.mark.parametrize("spec", SPECS)
def test_preempted_sequences_go_on(deep, spec: str, tree: str | None) -> None:
    expected = tokens(decode(deep, None, 0, params=PARAMS))
    tight = load_lm(deep.name, block_size=4, num_blocks=20)
    engine = Checked(tight, self_draft(tight, spec), None, EngineOptions(4, max_num_seqs=4, tree=tree))
    found, num_preemptions = preempted(engine, PARAMS)
    assert tokens(found) == expected
    assert num_preemptions


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("spec", SPECS)
def test_a_grammar_holds(tmp_path: Path, spec: str, temperature: float) -> None:
    tokenizer, source = byte_tokenizer(), "(ab|[0-9]){2,9}x?"
    target = tiny_lm(
        tmp_path, "llama", 1, vocab_size=tokenizer.num_tokens, max_position_embeddings=256, num_hidden_layers=NUM_LAYERS
    )
    if spec == "self-int8" and target.decoder != "own":
        pytest.skip("our own decoder does not run here")
    grammar, params = compile_grammar("regex", source, tokenizer), SamplingParams(60, temperature=temperature)
    texts = []
    for draft in (drafter(None), self_draft(target, spec, tokenizer.num_tokens)):
        engine = Engine(target, draft, tokenizer, EngineOptions(4, verify="gumbel"), eos_token_ids=(0,))
        outputs, driver = Outputs(), Driver(engine)
        for prompt in PROMPTS:
            outputs.add(driver, prompt, params=params, grammar=grammar)
        for events in driver.steps():
            for event in events:
                outputs.observe(event)
        texts.append([output.text for output in outputs.finished()])
    assert texts[0] == texts[1]
    assert all(re.fullmatch(source, text) for text in texts[0])


@pytest.mark.parametrize("spec", SPECS)
def test_a_trace_foretells_the_engines_counts(deep, spec: str) -> None:
    draft = self_draft(deep, spec)
    requests = [Request(PromptRow(i, ""), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    trace = trace_target(Engine(deep, draft, None, EngineOptions(max_num_seqs=4)), requests)
    trace.drafts[spec] = trace_draft(trace, draft, 4)
    for one in replay(trace, spec, "greedy", 4):
        counts = [found.speculative for found in decode(deep, draft, one.k, params=PARAMS)]
        assert one.num_steps.sum() == sum(each.num_steps for each in counts)


def files_among_the_targets(decoder: LlamaDecoder, *given: Any) -> LlamaDecoder:
    """A planted fault: the draft writes its keys and values where the target reads its own."""
    made = OWN(decoder, *given)
    made.allocate = lambda num_blocks, num_prefix_states=0: None
    made._cache, made._step.cache = decoder._cache, decoder._cache.data_ptr()
    made._step.num_slots, made._step.block = decoder._step.num_slots, decoder._step.block
    return made


OWN, ROWS = LlamaDecoder.self_draft, llama_weights.from_panels


def test_a_draft_that_writes_into_the_targets_cache_is_caught(deep, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokens(decode(deep, None, 0, params=PARAMS))
    monkeypatch.setattr(LlamaDecoder, "self_draft", files_among_the_targets)
    assert tokens(decode(deep, self_draft(deep, "self-int8"), 4, params=PARAMS)) != plain


def test_a_copy_of_shuffled_weights_is_caught(deep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays the target's, and nothing that is drafted is accepted."""
    monkeypatch.setattr(llama_weights, "from_panels", lambda found, half, shape: ROWS(found, half, shape).roll(1, 0))
    outputs = decode(deep, self_draft(deep, "self-int8"), 4, params=PARAMS)
    assert tokens(outputs) == tokens(decode(deep, None, 0, params=PARAMS))
    assert max(not_none(output.speculative.acceptance_rate) for output in outputs) < 0.4
