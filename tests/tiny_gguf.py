"""Tiny GGUF files, written with the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, RopeScalingType, TokenType, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

Array = NDArray[Any]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 300}
"""Of a tiny model whose rows are whole blocks of 256 numbers, with room for the bytes' tokens."""
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "mixtral": "llama", "gpt_oss": "gpt-oss"}


def _q4_k(rows: Array) -> Array:
    """Q4_K by its layout in ggml's `block_q4_K`: 8 runs of 32 numbers, with 6-bit scales and minima."""
    runs = rows.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(runs.min(2), 0)
    step, least = (runs.max(2) - low) / 15, -low
    d, dmin = (np.maximum(one.max(1, keepdims=True) / 63, 1e-8).astype(np.float16) for one in (step, least))
    scales = np.round(step / d.astype(np.float32)).clip(0, 63).astype(np.uint8)
    minima = np.round(least / dmin.astype(np.float32)).clip(0, 63).astype(np.uint8)
    by = np.maximum(d.astype(np.float32) * scales, 1e-8)[..., None]
    numbers = np.round((runs + (dmin.astype(np.float32) * minima)[..., None]) / by).clip(0, 15).astype(np.uint8)
    packed = numbers.reshape(-1, 4, 2, 32)
    low_bits = [scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6]
    high_bits = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    parts = [d.view(np.uint8), dmin.view(np.uint8), *low_bits, high_bits]
    return np.concatenate([*parts, (packed[:, :, 0] | packed[:, :, 1] << 4).reshape(-1, 128)], axis=1)


def _q6_k(rows: Array) -> Array:
    """Q6_K by its layout in ggml's `block_q6_K`: 16 runs of 16 numbers, with 8-bit scales."""
    runs = rows.reshape(-1, 16, 16).astype(np.float32)
    step = np.abs(runs).max(2) / 31
    d = np.maximum(step.max(1, keepdims=True) / 127, 1e-8).astype(np.float16)
    scales = np.round(step / d.astype(np.float32)).clip(1, 127).astype(np.int8)
    by = (d.astype(np.float32) * scales)[..., None]
    numbers = (np.round(runs / by).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = numbers & 15
    nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    high = numbers >> 4
    bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [nibbles.reshape(-1, 128), bits.reshape(-1, 64), scales.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


_BY_HAND: dict[Type, Callable[[Array], Array]] = {Type.Q4_K: _q4_k, Type.Q6_K: _q6_k}
"""Types that the gguf package reads and does not write."""


_OTHERS = {"MXFP4": Type.Q8_0, "MXFP4, BF16": Type.BF16}
_PLAIN = {"token_embd": Type.F16, "0.attn_v": Type.F16, "0.ffn_up": Type.BF16, "0.ffn_down": Type.F32, "1.": Type.F16}
"""Some matrices in plain numbers, and of one product's inputs others in blocks."""


def quantized(weight: Array, kind: Type) -> Array:
    """A matrix in blocks of a type."""
    if kind in _BY_HAND:
        return _BY_HAND[kind](weight).reshape(*weight.shape[:-1], -1)
    return np.asarray(quants.quantize(weight, kind))


def kind_of(name: str, form: str) -> Type:
    """The type of a matrix in a form; Q4_K_M keeps some in Q6_K."""
    if form == "Q4_K_M":
        is_finer = name in ("output.weight", "token_embd.weight") or name.endswith(("attn_v.weight", "ffn_down.weight"))
        return Type.Q6_K if is_finer else Type.Q4_K
    if form in _OTHERS:  # as of gpt-oss: the experts alone in its type
        return Type.MXFP4 if "_exps" in name else _OTHERS[form]
    if form == "Q4_K, F16":
        return next((kind for part, kind in _PLAIN.items() if part in name), Type.Q4_K)
    return Type[form]


def write_gguf(
    folder: Path,
    path: Path,
    form: str,
    *,
    architecture: str = "",
    without: str = "",
    extra: str = "",
    nan_in: str = "",
    norms: str = "F32",
    rope_factors: bool = False,
    pre: str = "qwen2",
    tokenizer: str = "gpt2",
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint as a GGUF file with a byte tokenizer.

    Args:
        folder: of the checkpoint.
        path: of the file.
        form: F32, F16, BF16, Q8_0, Q4_0, Q4_K_M, ...
        architecture: another name of it.
        without: a tensor that is left out.
        extra: a tensor that nothing reads.
        nan_in: a tensor, the first of whose numbers or scales is none.
        norms: the type of vectors: F32, F16 or BF16.
        rope_factors: write Llama 3's factors of rotary frequencies, or wrong ones where the model has none.
        pre: name of what cuts text before it is merged.
        tokenizer: name of the tokenizer's kind.
        metadata: further entries of the architecture; those that begin with `split__` or `general__` stand alone.

    Returns:
        The weights that the file holds, by their names in transformers and in float32.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    known = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture or known)
    _write_config(writer, config, metadata)
    _write_tokenizer(writer, config.vocab_size, pre, tokenizer)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == known)
    names, kept = get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if ".experts." in name:
            kept[name] = _write_experts(writer, name, tensor, form, config)
            continue
        gguf_name = f"{names.get_name(stem)}.{suffix}" if names.get_name(stem) else f"{names.get_name(name)}.weight"
        if gguf_name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        kept[name] = torch.from_numpy(
            _write_tensor(writer, gguf_name, tensor, form, config, gguf_name == nan_in, Type[norms])
        )
    if extra:
        writer.add_tensor(extra, np.ones(config.hidden_size, np.float32))
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", _rope_factors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _rope_factors(model: Any) -> Array:
    """What the rotary frequencies of a model are divided by."""
    plain = model.config.rope_parameters["rope_theta"] ** -torch.arange(0, 1, 2 / model.config.head_dim)
    factors: Array = (plain / model.model.rotary_emb.inv_freq).numpy()
    return factors if factors.max() > 1.1 else 2 + np.arange(len(factors), dtype=np.float32)


def _write_experts(writer: GGUFWriter, name: str, tensor: torch.Tensor, form: str, config: Any) -> torch.Tensor:
    """Write gates and what these let through, which transformers keeps as one, or the other matrices of experts."""
    kept = tensor.clone()
    is_mixed, suffix = config.model_type == "gpt_oss", "bias" if name.endswith("_bias") else "weight"
    view = kept.transpose(1, 2) if is_mixed and suffix == "weight" else kept
    parts = {"down": view}
    if "gate_up" in name:
        gate, up = (view[:, 0::2], view[:, 1::2]) if is_mixed else view.chunk(2, 1)
        parts = {"gate": gate, "up": up}
    for part, numbers in parts.items():
        key = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{suffix}"
        numbers.copy_(torch.from_numpy(_write_tensor(writer, key, numbers.contiguous(), form, config)))
    return kept


def _write_tensor(
    writer: GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    form: str,
    config: Any,
    is_broken: bool = False,
    vectors: Type = Type.F32,
) -> Array:
    """Write one tensor, and return what a reader finds in it."""
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    turned = next((count for part, count in heads.items() if part in name), None) if _turns(config) else None
    values = tensor.numpy() if turned is None else _interleaved(tensor.numpy(), turned)
    values = np.ascontiguousarray(values + 1 if "norm" in name and config.model_type.startswith("gemma") else values)
    if values.ndim < 2 or name.endswith(".bias") or "gate_inp" in name:
        if is_broken:
            values[0] = np.nan
        if vectors is Type.F32:
            writer.add_tensor(name, values)
            return tensor.numpy()
        blocks = quantized(values, vectors)
        writer.add_tensor(name, blocks, raw_dtype=vectors)
        return quants.dequantize(blocks, vectors)
    kind = kind_of(name, form) if values.shape[-1] % 256 == 0 else Type.F16
    blocks = values.astype(np.float16) if kind is Type.F16 else quantized(values, kind)
    if is_broken:  # the first block's scale is no number
        blocks[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    found = quants.dequantize(blocks, kind).reshape(values.shape)
    return np.ascontiguousarray(found if turned is None else _interleaved(found, turned, is_back=True))


def _turns(config: Any) -> bool:
    """Whether llama.cpp's converter interleaves the halves of a head, as its rotation for Llama pairs neighbours."""
    return config.model_type in ("llama", "mixtral")


def _interleaved(rows: Array, num_heads: int, *, is_back: bool = False) -> Array:
    halves = (num_heads, -1, 2) if is_back else (num_heads, 2, len(rows) // num_heads // 2)
    return rows.reshape(*halves, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_config(writer: GGUFWriter, config: Any, metadata: Mapping[str, Any]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    theta = config.rope_parameters.get("rope_theta") or config.rope_parameters["full_attention"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    if config.rope_parameters.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if getattr(config, "num_local_experts", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type in ("qwen3_moe", "gpt_oss"):
            width = getattr(config, "moe_intermediate_size", config.intermediate_size)
            writer.add_expert_feed_forward_length(width)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        name = name if name.startswith(("split.", "general.")) else f"{writer.arch}.{name}"
        add: dict[type, Any] = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](name, value)


def _write_tokenizer(writer: GGUFWriter, num_tokens: int, pre: str, model: str) -> None:
    """A token for every byte, `<end>` that ends a text, and unused ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<end>", "th", *(f"<{i}>" for i in range(len(alphabet) + 2, num_tokens))]
    kinds = [*[TokenType.NORMAL] * len(alphabet), TokenType.CONTROL, TokenType.NORMAL]
    kinds += [TokenType.UNUSED] * (num_tokens - len(kinds))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(alphabet))
    writer.add_chat_template(CHAT)
