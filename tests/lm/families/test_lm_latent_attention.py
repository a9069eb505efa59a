"""Multi-head latent attention: the cache keeps the latents, and text is transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_type import load_reference, save_tiny
from model_check import PROMPTS, decoded, greedy, logits_error

from specdec_cli.lm.cache.latents import ExpandedStore
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm

RANK, ROTATED, LAYERS = 16, 8, 4  # of tests/every_type.py


def test_a_token_takes_the_size_of_its_latents(tmp_path: Path) -> None:
    folder = save_tiny("deepseek_v3", tmp_path)
    lm = load_lm(str(folder), dtype="float32")
    assert lm.kv_bytes_per_token == LAYERS * (RANK + ROTATED) * 4
    assert describe(str(folder), dtype="float32").kv_bytes_per_token == lm.kv_bytes_per_token


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "minicpm3"])
def test_text_and_logits_are_transformers(tmp_path: Path, model_type: str) -> None:
    folder = save_tiny(model_type, tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    texts = [greedy(reference, prompt) for prompt in PROMPTS]
    assert decoded(lm, None)[0] == texts
    assert logits_error(reference, lm, texts) < 1e-4


def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents read one slot late."""
    folder = save_tiny("deepseek_v3", tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    right = ExpandedStore.read

    def late(store, span):
        keys, values = right(store, span)
        return keys.roll(1, 2), values.roll(1, 2)

    monkeypatch.setattr(ExpandedStore, "read", late)
    assert logits_error(reference, lm, [[7] * 8] * len(PROMPTS)) > 0.01


def test_bfloat16_rows_have_the_same_bits_in_company(tmp_path: Path) -> None:
    lm = load_lm(str(save_tiny("deepseek_v3", tmp_path)), dtype="bfloat16")
    text = [(5 * i) % 91 + 3 for i in range(70)]
    whole = lm.score([Row(0, text, 9)])
    lm.release(0)
    parts = [lm.score([Row(0, text[:61], 0), Row(1, text[:30], 1)])[:0]]
    parts += [lm.score([Row(0, text[: 62 + i], 1), Row(1, text[: 31 + i], 1)])[:1] for i in range(9)]
    assert torch.equal(torch.cat(parts), whole)


def test_transformers_own_forward_of_the_model_stays(tmp_path: Path) -> None:
    folder = save_tiny("youtu", tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    lm.model.set_attn_implementation("eager")
    text = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        assert torch.allclose(lm.model(text).logits, reference(text).logits, atol=1e-4)
