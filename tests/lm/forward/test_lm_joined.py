"""Families that compute with keys, values, masks or counts before they attend: joined keys, and positions per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import load_reference, save_tiny
from model_check import PROMPTS, decoded, greedy, logits_error
from shortened import mostly_slow
from versions import needs_transformers

from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.files.lengths import max_context
from specdec_cli.lm.forward import joined, registration
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

INDEXED = needs_transformers("has other layers in DeepSeek-V3.2")
TYPES = ("dots3_note_text", "diffllama", "doge", "llama4_text")


def made(model_type: str, folder: Path) -> tuple[TransformersLM, Any]:
    path = save_tiny(model_type, folder)
    return load_lm(str(path), dtype="float32"), load_reference(path, torch.float32)


# A choice by an indexer, the same beside windows, split values, a dynamic mask, chunks, a temperature from positions.
@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    "model_type", [pytest.param("deepseek_v32", marks=INDEXED), *mostly_slow(TYPES, ("diffllama",))]
)
def test_text_and_logits_are_transformers(tmp_path: Path, model_type: str) -> None:
    lm, reference = made(model_type, tmp_path)
    texts = [greedy(reference, prompt) for prompt in PROMPTS]
    assert decoded(lm, None)[0] == texts
    assert logits_error(reference, lm, texts) < 1e-4


@INDEXED
def test_keys_of_an_indexer_are_counted(tmp_path: Path) -> None:
    lm, _ = made("deepseek_v32", tmp_path)
    config = lm.config
    assert max_context(config, None) == 128
    width = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
    assert lm.kv_bytes_per_token == config.num_hidden_layers * width * 4


@INDEXED
def test_a_choice_that_is_ignored_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, reference = made("deepseek_v32", tmp_path)
    right = joined.attend_joined
    monkeypatch.setitem(
        registration.AttentionInterface._global_mapping,
        registration.JOINED,
        lambda *given, indices=None, **named: right(*given, **named),
    )
    assert logits_error(reference, lm, [[7] * 8] * len(PROMPTS)) > 0.01


def test_positions_by_the_number_of_cached_tokens_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, reference = made("llama4_text", tmp_path)
    right = BlockCache.get_seq_length
    monkeypatch.setattr(BlockCache, "get_seq_length", lambda cache, layer_idx=None: right(cache))
    assert logits_error(reference, lm, [[7] * 8] * len(PROMPTS)) > 0.001
