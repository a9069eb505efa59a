"""EAGLE-3 heads with latent attention, as DeepSeek's and Kimi's models have them: guesses against the formulas."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import LAYERS, TEXT, features_of, loaded, row
from safetensors.torch import save_file
from tiny_engine import PROMPTS, decode, tokens
from tiny_heads import CONFIG, HEADS, HIDDEN, THETA, Reference, random_weights
from tiny_models import VOCAB
from torch import Tensor
from typed import not_none

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.heads.published import read_published
from specdec_cli.sampling.params import SamplingParams

FIXED, TURNED, VALUE, RANK, QUERY_RANK = 8, 4, 12, 16, 10
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512}  # fmt: skip
CONTENT = CONFIG | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": HEADS,
    "qk_nope_head_dim": FIXED, "qk_rope_head_dim": TURNED, "v_head_dim": VALUE, "kv_lora_rank": RANK,
    "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
}  # fmt: skip


@dataclass
class LatentReference(Reference):
    """`Reference` with latent attention.

    Args:
        frequencies: [TURNED / 2] of the rotary embedding.
        scale: that scores are multiplied with beside the usual one.
        is_interleaved: pairs are neighbours, as DeepSeek has them.
    """

    frequencies: Tensor | None = None
    scale: float = 1.0
    is_interleaved: bool = True

    def _project(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w, start = self.weights, "layers.0.self_attn."
        embedded = self._norm(w["embed_tokens.weight"][tokens], "layers.0.input_layernorm.weight")
        inputs = torch.cat([embedded, self._norm(feature, "layers.0.hidden_norm.weight")], -1)
        if f"{start}q_a_proj.weight" in w:
            inner = self._rms(inputs @ w[f"{start}q_a_proj.weight"].T) * w[f"{start}q_a_layernorm.weight"]
            queries = inner @ w[f"{start}q_b_proj.weight"].T
        else:
            queries = inputs @ w[f"{start}q_proj.weight"].T
        queries = queries.view(-1, HEADS, FIXED + TURNED)
        both = inputs @ w[f"{start}kv_a_proj_with_mqa.weight"].T
        latent, key = both[:, :RANK], both[:, None, RANK:]
        wide = self._rms(latent) * w[f"{start}kv_a_layernorm.weight"] @ w[f"{start}kv_b_proj.weight"].T
        wide = wide.view(-1, HEADS, FIXED + VALUE)
        turned = self._turn(key, positions).expand(-1, HEADS, -1)
        queries = torch.cat([queries[..., :FIXED], self._turn(queries[..., FIXED:], positions)], -1)
        keys = torch.cat([wide[..., :FIXED], turned], -1)
        return queries * self.scale, keys, wide[..., FIXED:], feature

    def _turn(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Each pair of numbers as a complex one, turned by its angle."""
        shape = (2, TURNED // 2)
        pairs = vectors.unflatten(-1, shape[::-1]) if self.is_interleaved else vectors.unflatten(-1, shape).mT
        angles = positions[:, None] * not_none(self.frequencies)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def _rms(self, values: Tensor) -> Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt()


def latent_weights(query_rank: int | None) -> dict[str, Tensor]:
    """Random weights of such a head by common names."""
    generator = torch.Generator().manual_seed(7)
    weights = random_weights(True, seed=3)
    weights = {name: value for name, value in weights.items() if ".self_attn." not in name}
    shapes = {"kv_a_proj_with_mqa": (RANK + TURNED, 2 * HIDDEN), "kv_b_proj": (HEADS * (FIXED + VALUE), RANK),
              "o_proj": (HIDDEN, HEADS * VALUE)}  # fmt: skip
    wide = HEADS * (FIXED + TURNED)
    if query_rank is None:
        shapes["q_proj"] = (wide, 2 * HIDDEN)
    else:
        shapes |= {"q_a_proj": (query_rank, 2 * HIDDEN), "q_b_proj": (wide, query_rank)}
    for name, shape in shapes.items():
        weights[f"layers.0.self_attn.{name}.weight"] = 2 * torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    for name, size in ({"kv_a": RANK} | ({} if query_rank is None else {"q_a": query_rank})).items():
        weights[f"layers.0.self_attn.{name}_layernorm.weight"] = 0.5 + torch.rand(size, generator=generator)
    return weights


def published(folder: Path, weights: dict[str, Tensor], query_rank: int | None, **keys) -> Path:
    """Save a head as SpecForge's and TorchSpec's exports are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONTENT | {"q_lora_rank": query_rank} | keys))
    named = {name.replace("layers.0.", "midlayer."): value.contiguous() for name, value in weights.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def plain_frequencies() -> Tensor:
    return THETA ** -(torch.arange(0, TURNED, 2) / TURNED)


@pytest.mark.parametrize("query_rank", [None, QUERY_RANK])
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_draw_from_what_the_formulas_say(
    lm, query_rank: int | None, is_interleaved: bool, temperature: float, tmp_path: Path
) -> None:
    weights = latent_weights(query_rank)
    drafter = loaded(lm, published(tmp_path / "head", weights, query_rank, rope_interleave=is_interleaved))
    states = features_of(lm, TEXT, LAYERS)
    expected = LatentReference(weights, frequencies=plain_frequencies(), is_interleaved=is_interleaved)
    check_rounds(drafter, expected, states, temperature)


def check_rounds(drafter, expected: LatentReference, states: Tensor, temperature: float) -> None:
    """A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new."""
    ids, known = expected._ids(torch.arange(40)), 0
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    for end in (9, 14, 16, 17, 17):
        features = states[known : end - 1] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, params=params)])[0]
        known, drafted = end - 1, torch.tensor(guess.drafted.tokens)
        after = torch.tensor(TEXT[1:end])
        logits, _ = expected.draft(states[: end - 1], after, 4, drafted.expand(len(after), -1))
        if temperature == 0:
            assert ids[logits[-1].argmax(-1)].tolist() == drafted.tolist()
        else:
            q = torch.zeros(4, VOCAB)
            q[:, ids] = logits[-1].softmax(-1)
            assert torch.allclose(guess.q, q, atol=2e-5)


def test_yarn_scales_scores(lm, tmp_path: Path) -> None:
    """Frequencies are blended between those of the text's length and those of the longer one, and scores grow."""
    weights = latent_weights(None)
    drafter = loaded(lm, published(tmp_path / "head", weights, None, rope_parameters=YARN))
    low, high = (TURNED * math.log(512 / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), TURNED - 1)
    share = 1 - ((torch.arange(TURNED // 2) - low) / (high - low)).clamp(0, 1)
    frequencies = plain_frequencies() / 4 * (1 - share) + plain_frequencies() * share
    expected = LatentReference(weights, frequencies=frequencies, scale=(0.1 * math.log(4) + 1) ** 2)
    check_rounds(drafter, expected, features_of(lm, TEXT, LAYERS), 1.0)


def test_texts_are_the_targets_own(lm, tmp_path: Path) -> None:
    folder = published(tmp_path / "head", latent_weights(QUERY_RANK), QUERY_RANK)
    for tree in (None, "3,2,1"):
        drafter = loaded(lm, folder)
        found = decode(lm, drafter, 3, PROMPTS, tree=tree)
        assert tokens(found) == tokens(decode(lm, None, 0, PROMPTS))


def test_a_missing_or_narrow_tensor_is_one_sentence(lm, tmp_path: Path) -> None:
    weights = latent_weights(None)
    narrow = weights | {"layers.0.self_attn.kv_b_proj.weight": torch.ones(HEADS * (FIXED + VALUE), RANK - 1)}
    lacking = {name: value for name, value in weights.items() if "kv_a_layernorm" not in name}
    for i, (bad, said) in enumerate(((narrow, "kv_b_proj.weight` .* has the shape"), (lacking, "lacks the tensor"))):
        with pytest.raises(UsageError, match=said):
            Engine.load(lm.name, str(published(tmp_path / str(i), bad, None)), kv_cache_bytes=1 << 20, check=False)


@pytest.mark.parametrize(("keys", "said"), [
    ({"v_head_dim": None}, "has no `v_head_dim`"),
    ({"kv_lora_rank": 0}, "`kv_lora_rank` is `0`, and must be a whole number of at least 1"),
    ({"num_attention_heads": "4"}, "`num_attention_heads` is `4`"),
    ({"qk_rope_head_dim": 3}, "`qk_rope_head_dim` of .* is `3`, which is no even number"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "of the type `dynamic`"),
    ({"rope_parameters": YARN | {"factor": 0}}, "`factor` of .* is `0`, and must be a number above 0"),
    ({"rope_parameters": YARN | {"factor": "4"}}, "`factor` of .* is `4`, and must be a number above 0"),
])  # fmt: skip
def test_a_bad_configuration_is_one_sentence(lm, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = published(tmp_path / "head", latent_weights(None), None, **keys)
    with pytest.raises((UsageError, RunError), match=said):
        read_published(str(folder))
