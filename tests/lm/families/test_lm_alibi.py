"""Families with biases that grow with a key's position (ALiBi)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_type import load_reference, save_tiny
from model_check import PROMPTS, decoded, greedy, logits_error
from tiny_models import make_tiny

from specdec_cli.lm.cache.layout import Layout
from specdec_cli.lm.load import load_lm

OLD_FALCON = {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1}


def made(model_type: str, folder: Path) -> Path:
    """A checkpoint; `falcon` is the first Falcon-RW, with ALiBi."""
    if model_type == "falcon":
        return make_tiny("falcon", folder, **OLD_FALCON)
    return save_tiny(model_type, folder)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon"])
def test_text_and_logits_are_transformers(tmp_path: Path, model_type: str) -> None:
    folder = made(model_type, tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    texts = [greedy(reference, prompt) for prompt in PROMPTS]
    assert decoded(lm, None)[0] == texts
    assert logits_error(reference, lm, texts) < 1e-4


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon"])
def test_biases_by_the_place_among_joined_keys_are_caught(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(model_type, tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)

    def shifted(layout: Layout) -> torch.Tensor:
        return torch.cat([torch.arange(span.num_keys) for span in layout.spans]).flip(0)

    monkeypatch.setattr(Layout, "joined_key_positions", property(shifted))
    assert logits_error(reference, lm, [[7] * 8] * len(PROMPTS)) > 0.01


def test_transformers_own_forward_is_as_it_was(tmp_path: Path) -> None:
    folder = made("bloom", tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    text = torch.tensor([PROMPTS[1]])
    lm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.allclose(lm.model(text).logits, reference(text).logits, atol=1e-4)
