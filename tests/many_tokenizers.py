"""Small tokenizers of every common kind, trained in the test on a few lines, as transformers' tokenizer objects."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdec_cli.text.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]
_LINES = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park.",
    "def mean(values):\n    if not values:\n        raise ValueError('empty')\n    return sum(values) / len(values)",
    "Dear Ms. Müller, the café on the corner costs €12.50 a month 🙂 🙂 你好,世界",
    "the lion and the bear went to the river, and the river was cold and deep and very wide",
] * 20
TEXTS = [
    "Once upon a time there was a lion named Bear. He loved the river.",
    "  two  spaces\n\n\tand tabs, a naïve café — 你好 🙂🙂 zoë\r\nend ",
    "def add(a, b):\n    return a + b\n",
    "日本語の長い文章には空白がないので区切りが必要です。" * 6,
    "ﬁne ＦＵＬＬ width, HELLO World",
    "",
]


def _trained(model: Any, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        if part is not None:
            setattr(made, name, part)
    made.train_from_iterator(_LINES, trainer)
    return made


def _byte_level(size: int = 420) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(
        models.BPE(),
        trainer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )


def _permuted() -> tokenizers.Tokenizer:
    """The byte-level one with other ids."""
    state = json.loads(_byte_level().to_str())
    vocabulary = state["model"]["vocab"]
    others = sorted((token for token in vocabulary if vocabulary[token] >= len(SPECIAL)), key=vocabulary.__getitem__)
    numbered = enumerate(reversed(others), start=len(SPECIAL))
    state["model"]["vocab"] = {name: i for i, name in enumerate(SPECIAL)} | {token: i for i, token in numbered}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's: a space before every text, and bytes for unknown characters."""
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL, *byte_names], show_progress=False)
    made = _trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainer,
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=pre_tokenizers.Split("▁", "merged_with_next"),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        post_processor=processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    )
    # The trainer takes the bytes for special tokens, which those of a checkpoint are not.
    state = json.loads(made.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return _trained(
        models.Unigram(),
        trainer,
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )


def _word_piece() -> tokenizers.Tokenizer:
    """As BERT's: lower case, accents and runs of spaces are lost."""
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return _trained(
        models.WordPiece(unk_token="<unk>"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(cleanup=False),
        post_processor=processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
    )


def _characters() -> tokenizers.Tokenizer:
    letters = sorted({letter for line in _LINES for letter in line})
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *letters])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.decoder = decoders.Fuse()
    return made


_MAKERS = {
    "byte-level": _byte_level,
    "coarser byte-level": lambda: _byte_level(700),
    "sentencepiece": _sentencepiece,
    "unigram": _unigram,
    "word-piece": _word_piece,
    "characters": _characters,
}
KINDS = list(_MAKERS)
PERMUTED = "permuted byte-level"
_MAKERS[PERMUTED] = _permuted


@cache
def made(kind: str) -> tokenizers.Tokenizer:
    """A trained tokenizer of a kind."""
    return _MAKERS[kind]()


def hf_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The same as an object of transformers."""
    return PreTrainedTokenizerFast(tokenizer_object=made(kind), unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The same as the house sees it."""
    return Tokenizer(hf_tokenizer(kind))
