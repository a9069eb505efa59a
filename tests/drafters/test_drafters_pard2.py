"""PARD-2 drafts as they are published: guesses against transformers' forward, and texts against the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import CHANCE, GREEDY, TEXT, loaded
from safetensors.torch import load_file, save_file
from tiny_engine import PROMPTS, decode, letter_tokenizer, tokens
from tiny_heads import features_of
from tiny_models import VOCAB
from tiny_pard2 import TAPS, Pard2Reference, publish_pard2, save_projection, train_pard2
from torch import Tensor
from typed import not_none

from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape


def row(context: Sequence[int], features: Tensor | None, params=GREEDY, **more: Any) -> DraftRow:
    return DraftRow(
        0, list(context), 3, 4, params, frozenset(), params.temperature > 0, False, 0.0, features=features, **more
    )


@pytest.mark.parametrize("params", [GREEDY, CHANCE])
@pytest.mark.parametrize(("family", "wrap"), [("llama", True), ("qwen3", False)])
def test_rounds_draw_from_what_transformers_says(lm, family: str, wrap: bool, params, tmp_path: Path) -> None:
    folder = publish_pard2(tmp_path / "draft", family, wrap=wrap)
    drafter = loaded(lm, folder)
    assert drafter.taps == TAPS
    states, given, known = features_of(lm, TEXT, TAPS), Pard2Reference(folder), 0
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end in (9, 14, 16, 17, 17):
        features = states[known : end - 1] if known < end - 1 else None
        guess, known = drafter.propose([row(TEXT[:end], features, params)])[0], end - 1
        with torch.no_grad():
            expected = given.logits(TEXT[:end], states, 4)[:, :VOCAB]
        assert len(guess.drafted) == 4
        if params is GREEDY:
            assert list(guess.drafted.tokens) == expected.argmax(-1).tolist()
        else:
            torch.testing.assert_close(guess.q, expected.softmax(-1), atol=2e-5, rtol=0)
    tree = drafter.propose([row(TEXT[:17], None, tree=TreeShape.parse("3,2,1"))])[0].drafted
    assert len(tree) == 15


@pytest.fixture(scope="module")
def fitted(lm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = publish_pard2(tmp_path_factory.mktemp("fitted") / "draft")
    text = [*PROMPTS[1], *tokens(decode(lm, None, 0, [PROMPTS[1]], params=SamplingParams(max_new_tokens=38)))[0]]
    train_pard2(folder, text, features_of(lm, text, TAPS), len(PROMPTS[1]), 4)
    return folder, text


FAULTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda states: states,
    "features one position off": lambda states: states.roll(1, 0),
    "no features": torch.zeros_like,
}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_overfitted_draft_is_always_right_and_faults_are_seen(lm, fitted, fault: str | None) -> None:
    drafter, prompt = loaded(lm, fitted[0]), PROMPTS[1]
    propose, states = drafter.propose, features_of(lm, TEXT, TAPS)

    def faulty(rows: Sequence[DraftRow]) -> list[Guesses]:
        changed = [None if one.features is None else FAULTS[fault](one.features) for one in rows]
        found: list[Guesses] = propose([replace(a, features=b) for a, b in zip(rows, changed, strict=True)])
        return found

    drafter.propose = faulty
    [found] = decode(lm, drafter, 4, [prompt], params=SamplingParams(max_new_tokens=28))
    assert found.token_ids == fitted[1][len(prompt) : len(prompt) + 28]
    if fault is None:
        assert found.speculative.num_accepted_tokens == found.speculative.num_draft_tokens
    guess = drafter.propose([replace(row(TEXT[:9], states[:8], CHANCE), handle=7)])[0]
    with torch.no_grad():
        expected = Pard2Reference(fitted[0]).logits(TEXT[:9], states, 4)[:, :VOCAB].softmax(-1)
    assert torch.allclose(not_none(guess.q), expected, atol=1e-4) == (fault is None)


def test_a_trace_foretells_the_engines_counts(lm, fitted) -> None:
    drafter, params = loaded(lm, fitted[0]), replace(CHANCE, temperature=0.5)
    requests = [Request(PromptRow(i, ""), prompt, replace(params, index=i)) for i, prompt in enumerate(PROMPTS[:2])]
    trace = trace_target(Engine(lm, drafter, None, EngineOptions(max_num_seqs=4)), requests)
    trace.drafts["pard2"] = trace_draft(trace, drafter, 3, target=lm)
    for one in replay(trace, "pard2", "gumbel", 3):
        its = [request.params for request in requests]
        counts = [each.speculative for each in decode(lm, drafter, one.k, PROMPTS[:2], its, verify="gumbel")]
        assert one.num_accepted_tokens.sum() == sum(each.num_accepted_tokens for each in counts)


def test_doctor_says_what_the_folder_holds(lm, tmp_path: Path) -> None:
    folder = publish_pard2(tmp_path / "draft")
    pair = preflight(resolve(sets=[f"target.model={lm.name}", f"draft.model={folder}"]).recipe, look())
    reads = "the final hidden states, the output of layer 3, the output of layer 1"
    assert pair.head == (f"PARD-2 draft: reads {reads}; drafts all tokens in one pass, by mask token 100; 105 tokens")
    assert (pair.draft_method, pair.taps, pair.errors) == ("pard2", TAPS, [])


BAD: dict[str, tuple[dict[str, Any], Callable[[Path], Any], str]] = {
    "no layers": ({"pard2_target_layers": None}, lambda _: None, "no list of layers: `None`"),
    "another depth": ({"pard2_target_layers": [-1, -8, -3]}, lambda _: None, "state `-8`, and its target has 6 layers"),
    "no mask": ({"pard_token": None}, lambda _: None, "is `None`, and its `vocab_size` is `105`"),
    "another width": ({"pard2_target_dim": 12}, lambda _: None, "3 hidden states of 12 numbers in all"),
    "no projection": ({}, lambda f: (f / "warp_model.bin").unlink(), r"lacks the tensor `target_proj\.weight`"),
    "a wrong shape": ({}, lambda f: save_projection(f, torch.ones(3, 5)), r"`target_proj\.weight` .* \[3, 5\]"),
    "no numbers": ({}, lambda f: save_projection(f, torch.full((32, 96), torch.nan)), "not finite"),
    "other layers": ({"model_type": "gpt2"}, lambda _: None, "`gpt2` layers"),
    "a missing tensor": (
        {},
        lambda f: save_file(
            {name: one for name, one in load_file(f / "model.safetensors").items() if "layers.1.mlp.up" not in name},
            f / "model.safetensors",
        ),
        r"lacks the tensor `layers\.1\.mlp\.up_proj\.weight`",
    ),
    "another tokenizer": ({}, lambda f: letter_tokenizer(without="the").save_pretrained(f), "tokenizers of target"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence(lm, case: str, tmp_path: Path) -> None:
    keys, spoil, said = BAD[case]
    folder = publish_pard2(tmp_path / "draft", **keys)
    spoil(folder)
    with pytest.raises(UsageError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)
