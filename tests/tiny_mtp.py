"""Tiny targets with MTP modules as they are published, and the modules' forward in plain torch from the formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

HIDDEN, HEADS, KV_HEADS, SIZE, THETA, EPSILON = 32, 4, 2, 8, 10000.0, 1e-6
NOPE, ROPE, V_SIZE, RANK = 8, 4, 6, 16
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    "rms_norm_eps": EPSILON,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SIGMOID = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "q_lora_rank": 12, "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE, "v_head_dim": V_SIZE, "routed_scaling_factor": 2.5, **_MOE, **_SIGMOID,
        },
    ),
    "glm": (
        "Glm4MoeConfig",
        {
            "head_dim": SIZE, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.0,
            **_MOE, **_SIGMOID,
        },
    ),
    "qwen": (
        "Qwen3NextConfig",
        {
            "head_dim": SIZE, "num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0],
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **_MOE,
        },
    ),
    "mimo": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {"rms_norm_eps": EPSILON}),
}  # fmt: skip
"""Targets by whose names their modules have; `mimo` and `llama` stand for targets that transformers does not run."""
_NAMES = {
    "deepseek": ("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("mtp.layers.{}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mimo": ("model.mtp_layers.{}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


class Reference:
    """A text's drafts by modules that read everything again for every token: no cache, no positions to keep.

    Args:
        kind: of the target, a key of TARGETS.
        modules: the tensors of each, under DeepSeek's names without a prefix.
        table: the target's embedding [V, hidden].
        head: the target's output layer [V, hidden].
        recycles_normed: the state that goes on is that behind the norm.
    """

    def __init__(
        self, kind: str, modules: Sequence[dict[str, Tensor]], table: Tensor, head: Tensor, recycles_normed: bool = True
    ) -> None:
        self.kind, self.modules, self.table, self.head = kind, modules, table, head
        self.recycles_normed = recycles_normed

    def draft(self, states: Tensor, text: Tensor, forced: Tensor) -> Tensor:
        """Logits [B, k, V] of k drafted tokens.

        Args:
            states: the target's final states [B, n, hidden] of the first n positions.
            text: [B, n + 1] tokens: one more.
            forced: [B, k] what is drafted.
        """
        tokens, num, k = torch.cat([text, forced], 1), states.shape[1], forced.shape[1]
        logits, feature = [], states
        for step in range(k):
            if step < len(self.modules):  # module m at slot t reads token t + m
                weights = self.modules[step]
                pairs = self._pair(weights, tokens[:, step + 1 : step + 1 + num], feature)
            else:  # the last one goes on: its own state stands for that of the module before it
                after = num + step
                more = self._pair(weights, tokens[:, after : after + 1], feature[:, -1:])
                pairs = torch.cat([pairs, more], 1)
            hidden = self._layer(weights, pairs)
            normed = self._norm(hidden, weights["shared_head.norm.weight"])
            logits.append(normed[:, -1] @ self.head.T)
            feature = normed if self.recycles_normed else hidden
        return torch.stack(logits, 1)

    def _pair(self, weights: dict[str, Tensor], tokens: Tensor, feature: Tensor) -> Tensor:
        embedded = self._norm(self.table[tokens], weights["enorm.weight"])
        feature = self._norm(feature, weights["hnorm.weight"])
        pair = [feature, embedded] if self.kind == "mimo" else [embedded, feature]
        return torch.cat(pair, -1) @ weights["eh_proj.weight"].T

    def _layer(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        attend = self._latents if self.kind == "deepseek" else self._heads
        hidden = inputs + attend(weights, self._norm(inputs, weights["input_layernorm.weight"]))
        return hidden + self._mlp(weights, self._norm(hidden, weights["post_attention_layernorm.weight"]))

    def _heads(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        queries, keys, values = (_linear(weights, f"self_attn.{name}_proj", inputs) for name in "qkv")
        shape = (*inputs.shape[:2], -1, SIZE)
        gate = None
        if self.kind == "qwen":
            queries, gate = queries.view(*inputs.shape[:2], HEADS, 2 * SIZE).chunk(2, -1)
        queries, keys, values = queries.reshape(shape), keys.view(shape), values.view(shape)
        if "self_attn.q_norm.weight" in weights:
            queries = self._norm(queries, weights["self_attn.q_norm.weight"])
            keys = self._norm(keys, weights["self_attn.k_norm.weight"])
        turned = {"glm": SIZE // 2, "qwen": SIZE // 4}.get(self.kind, SIZE)
        queries, keys = _rotate(queries, turned), _rotate(keys, turned)
        keys, values = (one.repeat_interleave(HEADS // KV_HEADS, 2) for one in (keys, values))
        found = _attend(queries, keys, values).flatten(2)
        if gate is not None:
            found = found * gate.flatten(2).sigmoid()
        return _linear(weights, "self_attn.o_proj", found)

    def _latents(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        batch, num, _ = inputs.shape
        low = self._norm(_linear(weights, "self_attn.q_a_proj", inputs), weights["self_attn.q_a_layernorm.weight"])
        queries = _linear(weights, "self_attn.q_b_proj", low).view(batch, num, HEADS, NOPE + ROPE)
        joint = _linear(weights, "self_attn.kv_a_proj_with_mqa", inputs)
        latent = self._norm(joint[..., :RANK], weights["self_attn.kv_a_layernorm.weight"])
        expanded = _linear(weights, "self_attn.kv_b_proj", latent).view(batch, num, HEADS, NOPE + V_SIZE)
        # Neighbouring numbers are turned together.
        turned = _rotate(_interleaved(queries[..., NOPE:]), ROPE)
        key = _rotate(_interleaved(joint[..., RANK:].unsqueeze(2)), ROPE).expand(-1, -1, HEADS, -1)
        queries = torch.cat([queries[..., :NOPE], turned], -1)
        found = _attend(queries, torch.cat([expanded[..., :NOPE], key], -1), expanded[..., NOPE:])
        return _linear(weights, "self_attn.o_proj", found.flatten(2))

    def _mlp(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if "mlp.gate.weight" not in weights:
            return _gated(weights, "mlp", inputs)
        scores = inputs @ weights["mlp.gate.weight"].T
        if self.kind == "qwen":
            found, chosen = scores.softmax(-1).topk(2)
            shared = _gated(weights, "mlp.shared_expert", inputs)
            out = (inputs @ weights["mlp.shared_expert_gate.weight"].T).sigmoid() * shared
            found = found / found.sum(-1, keepdim=True)
        else:
            scores = scores.sigmoid()
            biased = scores + weights["mlp.gate.e_score_correction_bias"]
            groups = biased.unflatten(-1, (2, 2)).sum(-1)  # two groups of two experts: the better group alone
            best = groups.argmax(-1, keepdim=True).repeat_interleave(4, -1) == torch.tensor([0, 0, 1, 1])
            chosen = biased.masked_fill(~best, -torch.inf).topk(2).indices
            found = scores.gather(-1, chosen)
            found = found / found.sum(-1, keepdim=True) * (2.5 if self.kind == "deepseek" else 1.0)
            out = _gated(weights, "mlp.shared_experts", inputs)
        every = torch.stack([_gated(weights, f"mlp.experts.{i}", inputs) for i in range(4)], -2)
        picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, HIDDEN))
        return out + (found[..., None] * picked).sum(-2)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        scaled = hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
        return scaled * (1 + weight if self.kind == "qwen" else weight)


def _linear(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    return functional.linear(inputs, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _gated(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    gate = functional.silu(_linear(weights, f"{name}.gate_proj", inputs))
    return _linear(weights, f"{name}.down_proj", gate * _linear(weights, f"{name}.up_proj", inputs))


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention [B, n, heads, size]."""
    scores = torch.einsum("bthd,bshd->bhts", queries, keys) * queries.shape[-1] ** -0.5
    mask = torch.ones(queries.shape[1], queries.shape[1]).tril().bool()
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)


def _interleaved(vectors: Tensor) -> Tensor:
    return torch.cat([vectors[..., 0::2], vectors[..., 1::2]], -1)


def _rotate(vectors: Tensor, turned: int) -> Tensor:
    """Rotary embedding of the first numbers of [B, n, heads, size], at positions from 0 on."""
    positions = torch.arange(vectors.shape[1])
    angles = positions[:, None] / THETA ** (torch.arange(0, turned, 2) / turned)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = vectors[..., :turned].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, vectors[..., turned:]], -1)


def make_target(kind: str, folder: Path, num_modules: int = 1, seed: int = 1, **shape: int) -> list[dict[str, Tensor]]:
    """Save a random target with random modules, in two shards as such checkpoints are published.

    Returns:
        The tensors of each module, as `Reference` takes them.
    """
    config_name, own = TARGETS[kind]
    config = getattr(transformers, config_name)(**(_SHAPE | own | shape))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 1.0 if "embed" in name else 2.5 * parameter.shape[-1] ** -0.5)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        start = f"model.layers.{config.num_hidden_layers - 1}."
        saved = load_file(folder / "model.safetensors")
        layer = {name.removeprefix(start): one.shape for name, one in saved.items() if name.startswith(start)}
        modules = [_random(kind, layer) for _ in range(num_modules)]
        if kind == "qwen":  # which shares all but the layers
            shared = {
                name: one for name, one in modules[0].items() if name.startswith(("enorm", "hnorm", "eh", "shared_"))
            }
            modules = [module | shared for module in modules]
    write_modules(folder, kind, modules)
    return modules


def _random(kind: str, layer: dict[str, Any]) -> dict[str, Tensor]:
    shapes = layer | {f"{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    found = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            found[name] = 2 * torch.randn(shape) * shape[-1] ** -0.5
        elif name.endswith("norm.weight"):
            found[name] = torch.rand(shape) - (0.5 if kind == "qwen" else -0.5)
        else:
            found[name] = 0.3 * torch.randn(shape)
    return found


def write_modules(folder: Path, kind: str, modules: Sequence[dict[str, Tensor]], **keys: Any) -> None:
    """Add modules to a target's folder under the names of its family; further keys go into its configuration."""
    config = json.loads((folder / "config.json").read_text())
    prefix, *published = _NAMES["deepseek" if kind in ("glm", "llama") else kind]
    common = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    found = {}
    for i, module in enumerate(modules):
        begin = prefix.format(i + (config["num_hidden_layers"] if prefix == "model.layers.{}." else 0))
        for name, value in module.items():
            own = next((new for old, new in zip(common, published, strict=True) if name == f"{old}.weight"), None)
            if own is not None:
                found[f"{own}.weight" if kind == "qwen" else f"{begin}{own}.weight"] = value
            else:
                found[begin + name] = value
        if prefix == "model.layers.{}." and kind != "llama":  # copies of the target's, which are shared
            found[f"{begin}embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
            found[f"{begin}shared_head.head.weight"] = torch.zeros(VOCAB, HIDDEN)
    config |= {"mtp_num_hidden_layers" if kind == "qwen" else "num_nextn_predict_layers": len(modules)} | keys
    (folder / "config.json").write_text(json.dumps(config))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / first)
    save_file(
        {name: one.detach().clone().contiguous() for name, one in found.items()}, folder / second, {"format": "pt"}
    )
    where = dict.fromkeys(load_file(folder / first), first) | dict.fromkeys(found, second)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
