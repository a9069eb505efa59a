"""Tiny DFlash, DFlash2 and DSpark drafts as published, and their forward in plain torch, in the layout of training.

All blocks of a text are computed at once: the queries are their rows, the keys are the context of the whole text and
these rows, and a mask has each row see the positions before its block and its own block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_heads import EPSILON, HEADS, HIDDEN, INNER, KV_HEADS, SIZE, _rotate
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional

BLOCK, MASK, RANK, NUM_LAYERS = 5, 96, 6, 2
NUM_TAPS, GROUP, CANDIDATES = 2, 8, 6
LAYER: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": VOCAB,
    "rms_norm_eps": EPSILON, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}  # fmt: skip
SELECTOR = {
    "conv_kernel_size": NUM_TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES,
}  # fmt: skip


@dataclass
class BlockReference:
    """A draft's forward.

    Args:
        weights: by published names.
        embedding: [V, hidden].
        head: [drafted tokens, hidden].
        windows: of each layer its window and whether it is causal; none for full layers.
        options: `softcap`, `multiplier`, `scale`, `mask` (an embedding) and `from_anchor`.
    """

    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    windows: Sequence[tuple[int, bool] | None] = (None,) * NUM_LAYERS
    options: dict[str, Any] = field(default_factory=dict)

    def states(self, features: Tensor, tokens: Sequence[int], starts: Sequence[int]) -> Tensor:
        """States [starts, BLOCK, hidden] of the blocks that begin with the tokens at these positions.

        Args:
            features: [T, taps, target hidden] of a text.
            tokens: of the text.
            starts: positions of the blocks' first rows, each at most T.
        """
        context = self._norm(features.flatten(1) @ self.weights["fc.weight"].T, "hidden_norm.weight")
        mask = self.options.get("mask", self.embedding[MASK])
        rows = torch.stack(
            [row for start in starts for row in (self.embedding[tokens[start]], *[mask] * (BLOCK - 1))]
        ) * self.options.get("scale", 1.0)
        places = torch.cat([torch.arange(start, start + BLOCK) for start in starts])
        positions = torch.cat([torch.arange(len(context)), places])
        first = torch.tensor(starts).repeat_interleave(BLOCK)
        is_own = first[:, None] == first[None]
        sees = torch.cat([torch.arange(len(context))[None] < first[:, None], is_own], 1)
        for i in range(NUM_LAYERS):
            visible = sees.clone()
            window = self.windows[i]
            if window is not None:
                behind = places[:, None] - positions[None]
                visible &= (behind < window[0]) & ((behind >= 0) if window[1] else (behind > -window[0]))
            rows = self._layer(i, rows, context, places, positions, visible)
        return self._norm(rows, "norm.weight").view(len(starts), BLOCK, HIDDEN)

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Logits [..., D, drafted tokens] of a block's rows behind given tokens [..., D]."""
        unary = self.unary(states)
        if "candidate_selector.predecessor_codebook" in self.weights:
            return self._selected(unary, states, before)
        return unary + self._markov(states, before) if "markov_head.markov_w1.weight" in self.weights else unary

    def unary(self, states: Tensor) -> Tensor:
        """Logits of rows, whatever stands before them."""
        found = states @ self.head.T * self.options.get("multiplier", 1.0)
        if "softcap" in self.options:
            found = self.options["softcap"] * torch.tanh(found / self.options["softcap"])
        return found

    def _markov(self, states: Tensor, before: Tensor) -> Tensor:
        latent = self.weights["markov_head.markov_w1.weight"][before]
        if "markov_head.gate_proj.weight" in self.weights:
            gate = torch.cat([states, latent], -1) @ self.weights["markov_head.gate_proj.weight"].T
            latent = latent * torch.sigmoid(gate + self.weights["markov_head.gate_proj.bias"])
        if "markov_head.joint_proj.weight" in self.weights:
            carried, outputs = torch.zeros_like(latent[..., 0, :]), []
            for i in range(latent.shape[-2]):
                joined = torch.cat([carried, latent[..., i, :], states[..., i, :]], -1)
                joined = joined @ self.weights["markov_head.joint_proj.weight"].T
                joined = joined + self.weights["markov_head.joint_proj.bias"]
                gate, new, output = joined[..., :RANK], joined[..., RANK : 2 * RANK], joined[..., 2 * RANK :]
                carried = torch.sigmoid(gate) * carried + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                outputs.append(torch.tanh(output))
            latent = torch.stack(outputs, -2)
        return latent @ self.weights["markov_head.markov_w2.weight"].T

    def _selected(self, unary: Tensor, states: Tensor, before: Tensor) -> Tensor:
        """Unary logits plus what each pair of tokens adds; -inf outside the largest unary logits of a row."""
        a, b = (self.weights[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
        projected = states @ self.weights["candidate_selector.hidden_projection.weight"].T
        pairs = torch.einsum("...r,...r,vr->...v", a[before], projected, b)
        least = unary.sort(-1, descending=True).values[..., CANDIDATES - 1 : CANDIDATES]
        return torch.where(unary >= least, unary + pairs, -torch.inf)

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        latent = self.weights["markov_head.markov_w1.weight"][before]
        found = torch.cat([states, latent], -1) @ self.weights["confidence_head.proj.weight"][0]
        return torch.sigmoid(found + self.weights["confidence_head.proj.bias"])

    def giving(self, states: Tensor) -> Tensor:
        """The rows that give a token."""
        return states if self.options.get("from_anchor") else states[..., 1:, :]

    def _layer(self, i: int, rows: Tensor, context: Tensor, places: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        name = f"layers.{i}."
        normed = self._norm(rows, name + "input_layernorm.weight")
        inputs = self._convolved(f"{name}attention_conv.", normed, normed, 0)
        queries, keys, values = (
            (source @ self.weights[f"{name}self_attn.{kind}_proj.weight"].T).view(len(source), -1, SIZE)
            for kind, source in (("q", inputs), *((kind, torch.cat([context, inputs])) for kind in "kv"))
        )
        queries = _rotate(self._norm(queries, f"{name}self_attn.q_norm.weight"), places)
        keys = _rotate(self._norm(keys, f"{name}self_attn.k_norm.weight"), positions)
        keys, values = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (keys, values))
        scores = torch.einsum("thd,shd->hts", queries, keys) / SIZE**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        attended = torch.einsum("hts,shd->thd", weights, values).flatten(1)
        attended = attended @ self.weights[f"{name}self_attn.o_proj.weight"].T
        rows = rows + self._convolved(f"{name}attention_conv.", normed, attended, 1)
        normed = self._norm(rows, name + "post_attention_layernorm.weight")
        inner = self._convolved(f"{name}mlp_conv.", normed, normed, 0)
        gate = functional.silu(inner @ self.weights[f"{name}mlp.gate_proj.weight"].T)
        inner = gate * (inner @ self.weights[f"{name}mlp.up_proj.weight"].T)
        found = inner @ self.weights[f"{name}mlp.down_proj.weight"].T
        return rows + self._convolved(f"{name}mlp_conv.", normed, found, 1)

    def _convolved(self, name: str, normed: Tensor, rows: Tensor, side: int) -> Tensor:
        """DFlash2's convolution before (0) or behind (1) a sublayer, tap by tap; DFlash has none."""
        if f"{name}base_kernel" not in self.weights:
            return rows
        base = self.weights[f"{name}base_kernel"]
        delta = normed @ self.weights[f"{name}kernel_projection.weight"].T
        groups, total = delta.shape[1] // (2 * NUM_TAPS), torch.zeros_like(rows)
        for tap in range(NUM_TAPS):
            first = (side * NUM_TAPS + tap) * groups
            own = delta[:, first : first + groups].repeat_interleave(HIDDEN // groups, 1)
            is_in_block = torch.arange(len(rows)) % BLOCK >= tap
            total = total + is_in_block[:, None] * (base[side, tap] + own) * rows.roll(tap, 0)
        return total

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * self.weights[name]


def random_block_weights(
    taps: int = 3, drafted: int = VOCAB, seed: int = 0, dspark: str | None = None, dflash2: bool = False
) -> dict[str, Tensor]:
    """Random weights of a draft by published names; `dspark` is the Markov head's type."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, taps * HIDDEN)}
    norms = {"hidden_norm.weight": HIDDEN, "norm.weight": HIDDEN}
    for i in range(NUM_LAYERS):
        name = f"layers.{i}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
            f"{name}self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
            f"{name}self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
            f"{name}self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
            f"{name}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{name}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{name}mlp.down_proj.weight": (HIDDEN, INNER),
        }
        norms |= {f"{name}{kind}_layernorm.weight": HIDDEN for kind in ("input", "post_attention")}
        norms |= {f"{name}self_attn.{kind}_norm.weight": SIZE for kind in "qk"}
    if drafted < VOCAB:
        shapes["lm_head.weight"] = (drafted, HIDDEN)
    if dspark is not None:
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (drafted, RANK)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
    if dspark == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if dspark == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, HIDDEN + 2 * RANK)}
        shapes |= {"markov_head.joint_proj.bias": (3 * RANK,)}
    if dflash2:
        names = [f"layers.{i}.{sublayer}_conv." for i in range(NUM_LAYERS) for sublayer in ("attention", "mlp")]
        shapes |= {f"{name}base_kernel": (2, NUM_TAPS, HIDDEN) for name in names}
        num = 2 * NUM_TAPS * HIDDEN // GROUP
        shapes |= {f"{name}kernel_projection.weight": (num, HIDDEN) for name in names}
        shapes |= {f"candidate_selector.{side}_codebook": (VOCAB, RANK) for side in ("predecessor", "successor")}
        shapes |= {"candidate_selector.hidden_projection.weight": (RANK, HIDDEN)}
    weights = {name: torch.randn(shape, generator=generator) * 2 * shape[-1] ** -0.5 for name, shape in shapes.items()}
    weights |= {name: 0.5 + torch.rand(size, generator=generator) for name, size in norms.items()}
    if drafted < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return weights


def publish_dflash(folder: Path, weights: dict[str, Tensor], form: str, layers: Sequence[int] = (1, 2, 3), **keys: Any):
    """Save a draft as it is published.

    Args:
        folder: to make.
        weights: by published names.
        form: z-lab, speculators, deepspec, dspark (speculators), or dflash2 (z-lab).
        layers: the target layers whose outputs it reads.
        keys: further keys of its configuration; of the form z-lab they stand in `dflash_config`.
    """
    folder.mkdir(parents=True)
    layer = dict(LAYER) | {key: keys.pop(key) for key in ("layer_types", "sliding_window") if key in keys}
    heads = {
        "markov_rank": RANK, "markov_head_type": keys.pop("markov_head_type", "vanilla"),
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    if form == "z-lab":
        config = {**layer, "architectures": ["DFlashDraftModel"], "num_target_layers": 6, "block_size": BLOCK}
        config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": list(layers), **keys}
    elif form == "dflash2":
        config = {**layer, "architectures": ["DFlash2DraftModel"], "num_target_layers": 6}
        config |= {key: keys.pop(key) for key in ("is_causal",) if key in keys}
        config["dflash_config"] = {
            "mask_token_id": MASK, "target_layer_ids": list(layers), "block_size": BLOCK, **SELECTOR, **keys,
        }  # fmt: skip
    elif form == "deepspec":
        config = {
            **layer, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK,
            "target_layer_ids": list(layers), "num_anchors": 512, **heads, **keys,
        }  # fmt: skip
    else:
        kind = {"speculators": "dflash"}.get(form, form.removesuffix(" speculators"))
        config = {
            "architectures": [f"{'DSpark' if form == 'dspark' else 'DFlash'}Speculator"],
            "speculators_model_type": kind, "speculators_version": "0.9.0", "transformer_layer_config": layer,
            "block_size": BLOCK, "aux_hidden_state_layer_ids": [one + 1 for one in layers], "mask_token_id": MASK,
            "draft_vocab_size": len(weights.get("lm_head.weight", torch.empty(VOCAB))),
            **(heads | {"sample_from_anchor": True} if form == "dspark" else {}),
            **(SELECTOR if kind == "dflash2" else {}), **keys,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: one.detach().clone().contiguous() for name, one in weights.items()}, folder / "model.safetensors")
    return folder
