"""Multimodal models decode text alone, with the positions that text has there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_type import load_reference, save_tiny
from model_check import PROMPTS, decoded, doctors_words, greedy, logits_error
from shortened import mostly_slow

from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm


# M-RoPE, a wrapper around a listed family, latents inside a wrapper.
@pytest.mark.parametrize("model_type", mostly_slow(["qwen2_5_vl", "mistral3", "kimi_k25"], ("qwen2_5_vl",)))
def test_text_and_logits_are_transformers(tmp_path: Path, model_type: str) -> None:
    folder = save_tiny(model_type, tmp_path)
    lm, reference = load_lm(str(folder), dtype="float32"), load_reference(folder, torch.float32)
    texts = [greedy(reference, prompt) for prompt in PROMPTS]
    assert decoded(lm, None)[0] == texts
    assert logits_error(reference, lm, texts) < 1e-4
    assert doctors_words(folder) == "it runs"


@pytest.mark.parametrize("model_type", ["pix2struct", "diffusion_gemma", "instructblip"])
def test_what_does_not_continue_text_is_refused_by_both(tmp_path: Path, model_type: str) -> None:
    folder = save_tiny(model_type, tmp_path)
    with pytest.raises(UsageError) as refused:
        load_lm(str(folder))
    assert doctors_words(folder) == refused.value.message
