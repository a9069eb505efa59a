"""Make the inflated built-in target: the built-in target's text at the cost of 355 M parameters.

    python benchmarks/inflated_builtin.py OUT      # a folder with a model in float32: half a minute, 1.4 GB

The built-in target's residual stream is the first 160 of 1024 dimensions, its heads the first 5 of 32, its layers the
first 14 of 24; whatever else the model has writes next to nothing (see `embedded_pair`, whose weights are random: its
text changes with every rounding, and a trained model's hardly does).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from embedded_pair import REST, random_
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import specdec_cli

BUILT_IN = Path(specdec_cli.__file__).parent / "builtin" / "target"
WIDTH, LAYERS, HEADS, MLP = 1024, 24, 32, 3392


def outline(config: Any) -> Any:
    """A Llama of the larger size, with weights yet to be set."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=WIDTH,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps * config.hidden_size / WIDTH,
            tie_word_embeddings=False,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
        )
    ).eval()


def inflate(small: Any) -> Any:
    """The larger model with the small one in it."""
    generator, width = torch.Generator().manual_seed(0), small.config.hidden_size
    made, narrower = outline(small.config), (width / WIDTH) ** 0.5
    inner, own = made.model, small.model
    random_(inner.embed_tokens.weight, REST, generator)
    random_(made.lm_head.weight, REST, generator)
    inner.embed_tokens.weight[:, :width] = own.embed_tokens.weight
    made.lm_head.weight[:, :width] = small.lm_head.weight
    inner.norm.weight[:width] = own.norm.weight * narrower
    for layer in inner.layers:
        random_(layer.self_attn.o_proj.weight, REST, generator)
        random_(layer.mlp.down_proj.weight, REST, generator)
    for layer, its in zip(inner.layers, own.layers, strict=False):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).weight[:width] = getattr(its, norm).weight * narrower
        for name, weight in its.named_parameters():
            if weight.dim() == 2:
                larger, (rows, columns) = layer.get_parameter(name), weight.shape
                if columns == width and not name.endswith("o_proj.weight"):
                    random_(larger[:rows], REST, generator)
                larger[:rows, :columns] = weight
    return made


def main() -> None:
    """Make the model, and say how many numbers it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with torch.no_grad():
        small = AutoModelForCausalLM.from_pretrained(BUILT_IN).eval()
        made = inflate(small)
        ids = torch.arange(5, 45)[None]
        error = (made(ids).logits - small(ids).logits).abs().max().item()
    made.save_pretrained(out)
    AutoTokenizer.from_pretrained(BUILT_IN).save_pretrained(out)
    print(f"{made.num_parameters() / 1e6:.0f} M parameters; logits differ by {error:.2g} from the built-in target's")


if __name__ == "__main__":
    main()
