"""Make the embedded pair: a 356 M Llama-shaped target in bfloat16 that holds a 15 M draft, so that their texts agree.

    python benchmarks/embedded_pair.py OUT      # OUT/target, OUT/draft, OUT/draft_n0.02, ...: a minute, 1 GB

Weights are random: a fixture for time, not for text. Say "embedded pair" beside every number measured with it. The
draft's residual stream is the first 256 of the target's 1024 dimensions, its heads the first ones, its layers the
first 8 of 24; what else the target has writes next to nothing (noise of 1e-5, because some engines merge matrices of
zeros). `draft_nX` has noise of X standard deviations on its MLP and its output layer, and agrees less often: by how
much is printed. The tokenizer is learned from Python's standard library.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, HEAD_SIZE = 8192, 64
DRAFT_WIDTH, TARGET_WIDTH = 256, 1024
DRAFT_QUERY_HEADS, DRAFT_KEY_HEADS, DRAFT_MLP = 4, 2, 1536
NOISES = (0.02, 0.04, 0.06, 0.1)
REST = 1e-5
PROMPT = "def main(argv):\n    import os\n    for path in sorted(os.listdir(argv[1])):\n        print(path)\n"


def model(width: int, layers: int, query_heads: int, key_heads: int, mlp: int) -> Any:
    """A Llama with weights yet to be set."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=query_heads,
            num_key_value_heads=key_heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).eval()


def random_(matrix: Tensor, scale: float, generator: torch.Generator) -> None:
    """Fill a matrix with normal numbers."""
    matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)


def make_draft(generator: torch.Generator) -> Any:
    """A draft whose greedy text wanders: weights large enough to mix."""
    draft = model(DRAFT_WIDTH, 8, DRAFT_QUERY_HEADS, DRAFT_KEY_HEADS, DRAFT_MLP)
    for name, weight in draft.named_parameters():
        if weight.dim() == 2:
            random_(weight, 1.0 if "embed" in name else 1.6 * weight.shape[1] ** -0.5, generator)
    return draft


def make_target(draft: Any, generator: torch.Generator) -> Any:
    """A target around the draft."""
    target = model(TARGET_WIDTH, 24, 16, 8, 3584)
    for weight in target.parameters():
        if weight.dim() == 2:
            random_(weight, 0.02, generator)
    # RMS norm over 1024 dimensions, three quarters of them 0, gives twice what it gives over 256.
    narrower = (DRAFT_WIDTH / TARGET_WIDTH) ** 0.5
    inner = target.model
    random_(inner.embed_tokens.weight, REST, generator)
    inner.embed_tokens.weight[:, :DRAFT_WIDTH] = draft.model.embed_tokens.weight
    inner.norm.weight[:DRAFT_WIDTH] = draft.model.norm.weight * narrower
    target.lm_head.weight[:, :DRAFT_WIDTH] = draft.lm_head.weight
    for layer in inner.layers:
        random_(layer.self_attn.o_proj.weight, REST, generator)
        random_(layer.mlp.down_proj.weight, REST, generator)
    for layer, own in zip(inner.layers, draft.model.layers, strict=False):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).weight[:DRAFT_WIDTH] = getattr(own, norm).weight * narrower
        queries, keys = DRAFT_QUERY_HEADS * HEAD_SIZE, DRAFT_KEY_HEADS * HEAD_SIZE
        reads = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        reads |= {"mlp.gate_proj": DRAFT_MLP, "mlp.up_proj": DRAFT_MLP}
        for name, rows in reads.items():
            weight = layer.get_submodule(name).weight
            random_(weight[:rows], REST, generator)
            weight[:rows, :DRAFT_WIDTH] = own.get_submodule(name).weight
        layer.self_attn.o_proj.weight[:DRAFT_WIDTH, :queries] = own.self_attn.o_proj.weight
        layer.mlp.down_proj.weight[:DRAFT_WIDTH, :DRAFT_MLP] = own.mlp.down_proj.weight
    return target


def add_noise(draft: Any, noise: float) -> None:
    """Disturb the MLP's and the model's output layers."""
    generator = torch.Generator().manual_seed(7)
    for layer in (draft.lm_head, *(layer.mlp.down_proj for layer in draft.model.layers)):
        layer.weight.add_(torch.randn(layer.weight.shape, generator=generator) * layer.weight.std() * noise)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 8,192 tokens."""
    learned = ByteLevelBPETokenizer()
    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:200]
    learned.train(files, VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    """Make the pair, print how often the drafts agree with the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    tokenizer = make_tokenizer()

    def save(made: Any, name: str) -> None:
        made.generation_config.eos_token_id = None
        made.to(torch.bfloat16).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)

    with torch.no_grad():
        draft = make_draft(torch.Generator().manual_seed(1))
        target = make_target(draft, torch.Generator().manual_seed(0))
        weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
        save(target, "target")
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        text = target.generate(ids, max_new_tokens=200, do_sample=False, pad_token_id=0)
        for noise in (0.0, *NOISES):
            own = model(DRAFT_WIDTH, 8, DRAFT_QUERY_HEADS, DRAFT_KEY_HEADS, DRAFT_MLP)
            own.load_state_dict(weights)
            add_noise(own, noise)
            save(own, "draft" if noise == 0 else f"draft_n{noise:g}")
            agrees = own(text).logits[0, ids.shape[1] - 1 : -1].argmax(-1) == text[0, ids.shape[1] :]
            print(f"noise {noise:g}: agrees at {100 * agrees.float().mean().item():.0f} % of 200 positions")


if __name__ == "__main__":
    main()
