"""What every drafter in the folder keeps to; a new file is picked up by itself."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every_draft import publish_draft
from tiny_heads import HIDDEN
from tiny_models import VOCAB
from tiny_mtp import make_target
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typed import not_none

from specdec_cli import drafters
from specdec_cli.drafters.contract import Drafter, DraftRow, Guesses, Resources, WithoutFeatures
from specdec_cli.lm.door import LM, Row
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.measure.audit.table import LMWithoutWeights
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

NUM_TOKENS = 11
NEEDED: dict[str, dict[str, Any]] = {
    "model": {"model": "tiny"},
    "universal": {"model": "tiny"},
    "prediction": {"text": "abcabdab"},
    "self-exit": {"layers": 1},
    "pard2": {"layers": "final-3-1"},
}
TAPPED = {name for name, method in drafters.methods().items() if method.taps is not WithoutFeatures.taps}


class TableLM(LMWithoutWeights):
    """Logits that depend on the last two tokens; three more of them than the vocabulary, as padding."""

    name, vocab_size, max_context, num_blocks, block_size, num_free_blocks = "tiny", NUM_TOKENS + 3, 40, 1, 1, 1

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        parts = [torch.empty(0, self.vocab_size)]
        for row in rows:
            text = row.as_chain()
            for end in range(len(text) - row.num_logits + 1, len(text) + 1):
                seed = sum(token * 31**i for i, token in enumerate(reversed(text[max(0, end - 2) : end])))
                parts.append(2 * torch.randn(1, self.vocab_size, generator=torch.Generator().manual_seed(seed)))
        return torch.cat(parts)

    def release(self, handle: int) -> None:
        pass

    def self_draft(self, draft: SelfDraft) -> LM:
        return TableLM()


@pytest.fixture(scope="module", autouse=True)
def heads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Published heads for the methods that read one."""
    for method in TAPPED - {"mtp"}:
        folder = tmp_path_factory.mktemp("heads") / method
        publish_draft(method, folder)
        NEEDED[method] = NEEDED.get(method, {}) | {"model": str(folder)}
    folder = tmp_path_factory.mktemp("pard")
    (folder / "config.json").write_text('{"spd_type": "pard", "pard_token": 12, "vocab_size": 14}')
    NEEDED["pard"] = {"model": str(folder)}
    TappedLM.name = str(tmp_path_factory.mktemp("target"))
    make_target("llama", Path(TappedLM.name))


class TappedLM(TableLM):
    """A target that lends a head its embedding and its output layer, and has MTP modules."""

    vocab_size, num_blocks, block_size = VOCAB, 64, 16

    def embed(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))[list(tokens)]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(2))
        return torch.cat([0.02 * row @ weight for row in hidden.split(1)])  # a row's bits are its own


def letters(names: str) -> Tokenizer:
    """A token for each letter, in their order."""
    backend = Backend(BPE({name: i for i, name in enumerate(names)}, []))
    backend.decoder = Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


TOKENIZERS: dict[str, Any] = {"tokenizer": letters("abcdefghijk"), "load_tokenizer": lambda _: letters("kdbaxchefgyz")}


def load(method: str) -> Drafter:
    drafter = drafters.create(method, NEEDED.get(method, {}))
    encode = lambda text: [0] * bool(text) + [ord(letter) - ord("a") for letter in text]  # noqa: E731
    target = TappedLM() if method in TAPPED else TableLM()
    drafter.load(Resources(lambda name: TableLM(), encode, NUM_TOKENS, target, **TOKENIZERS))
    return drafter


def ask(drafter: Drafter, batch: Sequence[DraftRow]) -> list[Guesses]:
    """Its guesses; a drafter that reads hidden states is given those of whole contexts, as new sequences."""
    if not drafter.taps:
        return drafter.propose(batch)
    for row in batch:
        drafter.release(row.handle)
        states = [
            torch.randn(len(drafter.taps), HIDDEN, generator=torch.Generator().manual_seed(t)) for t in row.context
        ]
        row.features = torch.stack(states[:-1]) if len(states) > 1 else None
    guesses = drafter.propose(batch)
    for row in batch:
        row.features = None
    return guesses


def rows(temperature: float, needs_q: bool = True, shares_noise: bool = False, seed: int = 3) -> list[DraftRow]:
    contexts = ([0, 1, 2, 0, 1, 2, 0, 1], [5], [3, 3, 3, 3], [1, 2, 12, 1, 2])
    params = SamplingParams(temperature=temperature, seed=seed)
    return [
        DraftRow(i, list(context), 1, k, params, frozenset({7}), needs_q, shares_noise, 0.0)
        for i, (context, k) in enumerate(zip(contexts, (4, 1, 8, 3), strict=True))
    ]


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("shares_noise", [True, False])
@pytest.mark.parametrize("needs_q", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", sorted(drafters.methods()))
def test_every_drafter_keeps_the_contract(method: str, temperature: float, needs_q: bool, shares_noise: bool) -> None:
    drafter = load(method)
    batch = rows(temperature, needs_q, shares_noise)
    before = copy.deepcopy(batch)
    guesses = ask(drafter, batch)
    assert batch == before, "rows and contexts are read, never changed"
    assert len(guesses) == len(batch)
    for row, guess in zip(batch, guesses, strict=True):
        assert len(guess.drafted) <= row.k
        assert all(type(token) is int and 0 <= token < NUM_TOKENS for token in guess.drafted.tokens)
        if guess.q is not None:
            assert guess.q.shape == (len(guess.drafted), NUM_TOKENS)
            assert guess.q.dtype == torch.float32
            torch.testing.assert_close(guess.q.sum(-1), torch.ones(len(guess.drafted)))
            assert all(guess.q[i, token] > 0 for i, token in enumerate(guess.drafted.tokens))
    for row in batch:
        drafter.release(row.handle)
        drafter.release(row.handle)
    assert same(ask(drafter, batch), guesses), "a released handle starts anew"


@pytest.mark.parametrize("method", sorted(drafters.methods()))
def test_a_guess_depends_on_its_row_alone(method: str) -> None:
    """Not on neighbours, not on the steps that led here, and not on what the handle held before."""
    drafter = load(method)
    batch = rows(0.8)
    together = ask(drafter, batch)
    alone = [ask(load(method), [row])[0] for row in batch]
    assert same(alone, together)
    for row in batch:
        for length in (len(row.context), 1, 3):
            shorter = copy.deepcopy(row)
            shorter.context = [9, *row.context[:length], *row.context, 4][-length - 2 :]
            shorter.num_prompt_tokens = 1
            ask(drafter, [shorter])
    assert same(ask(drafter, batch), together)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("shares_noise", [True, False])
@pytest.mark.parametrize("method", sorted(drafters.methods()))
def test_whoever_draws_by_chance_brings_its_q_where_it_is_needed(method: str, shares_noise: bool) -> None:
    """Without q a guess has to be the same for every seed."""
    drafter = load(method)
    by_seed = [ask(drafter, rows(0.8, True, shares_noise, seed)) for seed in range(8)]
    is_by_chance = len({tuple(guess.drafted for guess in guesses) for guesses in by_seed}) > 1
    assert all((guess.q is not None) == is_by_chance for guesses in by_seed for guess in guesses if guess.drafted)


def same(first: list[Guesses], second: list[Guesses]) -> bool:
    return all(
        a.drafted.tokens == b.drafted.tokens
        and ((a.q is None and b.q is None) or torch.allclose(not_none(a.q), not_none(b.q), atol=1e-6))
        for a, b in zip(first, second, strict=True)
    )


def test_listing_the_registry_imports_no_torch() -> None:
    code = (
        "import sys; from specdec_cli import drafters; m = drafters.methods(); "
        "[drafters.options(name) for name in m]; drafters.parse_spec('ngram:max=3'); "
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
