"""Tokenizers that llguidance reads, small enough for random models: bytes with a few merges, and four letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specdec_cli.text.tokenizer import Tokenizer

LETTERS = "abcd"


def _wrapped(vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], **special: Any) -> Tokenizer:
    model = BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=list(merges))
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


def byte_tokenizer() -> Tokenizer:
    """Every byte, a few longer tokens, `</s>` at 0 and `<end>` at 1."""
    merges = [("{", '"'), ('"', ":"), ('"', ","), ("t", "r"), ("u", "e"), ("tr", "ue"), ("a", "b"), ("o", "k")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["</s>", "<end>", *letters, *(one + other for one, other in merges)]
    return _wrapped(words, merges, eos_token="</s>", additional_special_tokens=["<end>"])


def byte_tokens(num: int) -> Tokenizer:
    """So many bytes, each a token; no end token."""
    return _wrapped(sorted(pre_tokenizers.ByteLevel.alphabet())[:num], [])


def letter_tokens() -> Tokenizer:
    """`a`, `b`, `c`, `d`, each a token; no end token."""
    return _wrapped(LETTERS, [])
