"""Tiny EAGLE heads as they are published, and their forward in plain torch, written from the formulas alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional

from specdec_cli.lm.door import LM, Row, Tap, Tapped

HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 32, 4, 2, 8, 48
THETA, EPSILON = 10000.0, 1e-5
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": EPSILON,
    "rope_theta": THETA, "hidden_act": "silu", "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip


@dataclass
class Reference:
    """A head's forward at all positions of a text at once, k steps on.

    Step 1 at position s reads the target's states up to s. Step j reads its own output of step j - 1, and attends to
    the true slots up to s and to its own earlier steps.

    Args:
        weights: official names, `layers.0.` for the layer.
        is_third: EAGLE-3, else EAGLE.
        target_head: [V, hidden], EAGLE's output layer.
        options: the variants of EAGLE-3.
    """

    weights: dict[str, Tensor]
    is_third: bool = True
    target_head: Tensor | None = None
    options: dict[str, bool] = field(default_factory=dict)

    def draft(self, features: Tensor, tokens: Tensor, k: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, k, drafted vocabulary] and the likeliest target tokens [T, k], or those that are forced.

        Args:
            features: [T, taps, target hidden].
            tokens: [T] the token that follows each position.
            k: steps.
            forced: [T, k] what is drafted instead of the likeliest tokens.
        """
        mixed = self._mix(features)
        positions = torch.arange(len(tokens))
        queries, keys, values, residual = self._project(tokens, mixed, positions)
        mask = torch.ones(len(tokens), len(tokens)).tril().bool()
        own: list[tuple[Tensor, Tensor]] = []
        logits, chosen = [], []
        true = (keys, values)
        for step in range(k):
            hidden = self._finish(residual, self._attend(queries, true, own, mask))
            logits.append(self._logits(hidden))
            chosen.append(self._ids(logits[-1].argmax(-1)) if forced is None else forced[:, step])
            feature = self._norm(hidden, "norm.weight") if self.options.get("norm_output") else hidden
            queries, keys, values, residual = self._project(chosen[-1], feature, positions + step + 1)
            own.append((keys, values))
        return torch.stack(logits, 1), torch.stack(chosen, 1)

    def masked(self, features: Tensor, tokens: Tensor, k: int, mask: int) -> Tensor:
        """Logits [k, drafted vocabulary] of P-EAGLE at the end of a text: one pass over it and k - 1 masks.

        Args:
            features: [T, taps, target hidden].
            tokens: [T] the token that follows each position.
            k: drafted tokens.
            mask: the mask token.
        """
        state = self.weights["mask_hidden"].view(1, features.shape[1], -1).expand(k - 1, -1, -1)
        tokens, features = torch.cat([tokens, torch.full((k - 1,), mask)]), torch.cat([features, state])
        places, causal = torch.arange(len(tokens)), torch.ones(len(tokens), len(tokens)).tril().bool()
        queries, keys, values, residual = self._project(tokens, self._mix(features), places)
        hidden = self._finish(residual, self._attend(queries, (keys, values), [], causal))
        for i in range(1, 1 + max(int(name.split(".")[1]) for name in self.weights if name.startswith("layers."))):
            start = f"layers.{i}."
            own = {
                name.replace(start, "layers.0."): one for name, one in self.weights.items() if name.startswith(start)
            }
            layer = Reference(own)
            inputs = self._norm(hidden, f"{start}input_layernorm.weight")
            found = [inputs @ own[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv"]
            queries, keys, values = (one.view(len(tokens), -1, SIZE) for one in found)
            queries, keys = _rotate(queries, places), _rotate(keys, places)
            hidden = layer._finish(hidden, layer._attend(queries, (keys, values), [], causal))
        return self._logits(hidden[-k:])

    def _mix(self, features: Tensor) -> Tensor:
        if not self.is_third:
            return features[:, 0]
        parts = [features[:, i] for i in range(features.shape[1])]
        if self.options.get("fc_norm"):
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.options.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return joined @ self.weights["fc.weight"].T

    def _project(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        embedded = self.weights["embed_tokens.weight"][tokens]
        if self.is_third:
            normalized = self._norm(feature, "layers.0.hidden_norm.weight")
            inputs = torch.cat([self._norm(embedded, "layers.0.input_layernorm.weight"), normalized], -1)
            residual = normalized if self.options.get("norm_before_residual") else feature
        else:
            inputs = torch.cat([embedded, feature], -1) @ self.weights["fc.weight"].T + self.weights["fc.bias"]
            residual = inputs
        queries, keys, values = (
            (inputs @ self.weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(tokens), -1, SIZE)
            for name in "qkv"
        )
        return _rotate(queries, positions), _rotate(keys, positions), values, residual

    def _attend(
        self, queries: Tensor, true: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        share = HEADS // true[0].shape[1]
        keys, values = (one.repeat_interleave(share, 1) for one in true)
        scores = torch.einsum("thd,shd->hts", queries, keys).masked_fill(~mask, -torch.inf)
        extra = [(queries * key.repeat_interleave(share, 1)).sum(-1).T for key, _ in own]
        weights = (torch.cat([scores, *(one[..., None] for one in extra)], -1) / queries.shape[-1] ** 0.5).softmax(-1)
        found = torch.einsum("hts,shd->thd", weights[..., : len(mask)], values)
        for i, (_, value) in enumerate(own):
            found = found + weights[..., len(mask) + i].T[..., None] * value.repeat_interleave(share, 1)
        return found.flatten(1) @ self.weights["layers.0.self_attn.o_proj.weight"].T

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + attended
        inner = self._norm(hidden, "layers.0.post_attention_layernorm.weight")
        gate = functional.silu(inner @ self.weights["layers.0.mlp.gate_proj.weight"].T)
        inner = gate * (inner @ self.weights["layers.0.mlp.up_proj.weight"].T)
        return hidden + inner @ self.weights["layers.0.mlp.down_proj.weight"].T

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self.is_third:
            assert self.target_head is not None
            return hidden @ self.target_head.T
        return self._norm(hidden, "norm.weight") @ self.weights["lm_head.weight"].T

    def _ids(self, drafted: Tensor) -> Tensor:
        return drafted + self.weights["d2t"][drafted] if "d2t" in self.weights else drafted

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * self.weights[name]


def _rotate(vectors: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, SIZE]: the first half is turned with the second."""
    angles = positions[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def random_weights(
    is_third: bool,
    taps: int = 3,
    drafted: int = 40,
    seed: int = 0,
    layers: int = 1,
    masked: bool = False,
    **options: bool,
) -> dict[str, Tensor]:
    """Random weights of a head by official names."""
    generator = torch.Generator().manual_seed(seed)
    joined = HIDDEN * (taps if is_third else 2)
    width = HIDDEN * (2 if is_third else 1)
    shapes = {
        "fc.weight": (HIDDEN, joined),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "layers.0.self_attn.q_proj.weight": (HEADS * SIZE, width),
        "layers.0.self_attn.k_proj.weight": (KV_HEADS * SIZE, width),
        "layers.0.self_attn.v_proj.weight": (KV_HEADS * SIZE, width),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    norms = ["layers.0.post_attention_layernorm.weight"]
    if is_third:
        shapes["lm_head.weight"] = (drafted, HIDDEN)
        norms += ["layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"]
        norms += [f"fc_norm.{i}.weight" for i in range(taps)] if options.get("fc_norm") else []
    weights = {
        name: torch.randn(shape, generator=generator) * (1.0 if "embed" in name else 2 * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    weights |= {name: 0.5 + torch.rand(HIDDEN, generator=generator) for name in norms}
    if is_third and options.get("norm_before_fc"):
        weights["input_norm.weight"] = 0.5 + torch.rand(joined, generator=generator)
    if not is_third:
        weights["fc.bias"] = torch.randn(HIDDEN, generator=generator)
    if layers > 1 or masked:
        weights |= _further(layers, generator) | {"mask_hidden": torch.randn(1, 1, joined, generator=generator)}
    if is_third and drafted < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return weights


def _further(layers: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights of the layers of P-EAGLE behind the first."""
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, HIDDEN), "self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    found = {}
    for i in range(1, layers):
        for name, shape in shapes.items():
            found[f"layers.{i}.{name}.weight"] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{i}.{name}.weight"] = 0.5 + torch.rand(HIDDEN, generator=generator)
    return found


def publish(
    folder: Path, weights: dict[str, Tensor], form: str, layers: tuple[int, ...] = (1, 2, 3), **keys: Any
) -> Path:
    """Save a head as it is published.

    Args:
        folder: to make.
        weights: by official names, `layers.0.` for the layer.
        form: official (pickled, `midlayer.`), specforge, speculators, peagle (its several layers), modelopt, or eagle.
        layers: the target layers whose outputs it reads.
        keys: further keys of its configuration.
    """
    folder.mkdir(parents=True)
    entered = [layer + 1 for layer in layers]
    if form in ("speculators", "peagle"):
        shape = CONFIG | {"num_hidden_layers": len({name[:9] for name in weights if name.startswith("layers.")})}
        kind = "eagle3" if form == "speculators" else "peagle"
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
            "transformer_layer_config": shape, "eagle_aux_hidden_state_layer_ids": entered,
            "draft_vocab_size": len(weights["lm_head.weight"]), "target_hidden_size": HIDDEN, **keys,
        }  # fmt: skip
    elif form == "eagle":
        config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "bias": True, **keys}
    else:
        config = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], **keys}
        config["draft_vocab_size"] = len(weights["lm_head.weight"])
    if form == "modelopt":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        weights = {name: value for name, value in weights.items() if name not in ("t2d", "embed_tokens.weight")}
        weights = {name.replace("layers.0.hidden_norm", "hidden_norm"): value for name, value in weights.items()}
    if form == "specforge":
        config["eagle_aux_hidden_state_layer_ids"] = entered
        weights = {name: value for name, value in weights.items() if name != "embed_tokens.weight"}
    if form in ("official", "specforge"):
        weights = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    if form in ("official", "eagle"):
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def features_of(lm: LM, text: Sequence[int], taps: Sequence[Tap]) -> Tensor:
    """The target's states [tokens, taps, hidden] of a text."""
    row = Row(-7, text, 0, tapped=Tapped())
    lm.tap(taps)
    lm.score([row])
    lm.release(-7)
    assert row.tapped is not None
    assert row.tapped.states is not None
    return row.tapped.states[:, [lm.taps.index(tap) for tap in taps]]
