"""Tokenizers of GGUF files: ids, end tokens and flags as llama.cpp has them.

The expected pieces are what llama.cpp (xllamacpp 2026.10.11549, vocab_only) makes of the same vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refusal
from tiny_models import make_tiny
from tokenizers import pre_tokenizers

from specdec_cli.cli.main import run
from specdec_cli.errors import UsageError
from specdec_cli.lm.files.gguf_pre_tokenizers import PRE_TOKENIZERS
from specdec_cli.lm.files.gguf_tokenizer import GgufTokenizer
from specdec_cli.lm.load import load_tokenizer

pytest.importorskip("gguf", reason="needs gguf")

from tiny_gguf import SIZES, write_gguf

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [
    *("1 2", "12 3", "123 4", "1234 5", "= =", "x =", "= 1", "b 1", "Ġ Ġ", "ĠĠ Ġ", "Ġ a", "a b", "A B", "' s", "' S"),
    *("b '", "B '", "! !", "!! Ċ", "Ċ Ċ", "ĊĊ Ċ", "Ã ī", "Ãī A", "ÃīA B", "` `", "`` a", "$ 1", "Ġ 1", "æ Ĺ", "æĹ ¥"),
    *("Ċ Ġ", "! a"),
]
TEXTS = ["x==12345", "ab 12345", "ab's AB'S", "!!\n\n\n  ab", "ÉAB", "``ab $1", "日ab!ab"]
PIECES = {
    "llama3": ["x == 123 4 5", "ab Ġ 123 4 5", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "ÃīAB"],
    "dbrx": ["x == 123 4 5", "ab Ġ 123 4 5", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "Ãī AB"],
    "qwen2": ["x == 1 2 3 4 5", "ab Ġ 1 2 3 4 5", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "Ãī AB"],
    "gpt-2": ["x == 12345", "ab Ġ 12345", "ab 's Ġ AB ' S", "!! ĊĊĊ Ġ Ġa b", "Ãī AB"],
    "starcoder": ["x == 1 2 3 4 5", "ab Ġ 1 2 3 4 5", "ab 's Ġ AB ' S", "!! ĊĊĊ Ġ Ġa b", "Ãī AB"],
    "falcon": ["x == 123 4 5", "ab Ġ 123 4 5", "ab ' s Ġ AB ' S", "!! ĊĊĊ Ġ Ġa b", "Ãī AB"],
    "deepseek-coder": ["x == 1 2 3 4 5", "ab Ġ 1 2 3 4 5", "ab ' s Ġ AB ' S", "!! Ċ Ċ Ċ Ġ Ġa b", "Ãī AB"],
    "deepseek-llm": ["x == 12345", "ab Ġ 12345", "ab ' s Ġ AB ' S", "!! Ċ Ċ Ċ Ġ Ġa b", "Ãī AB"],
    "seed-coder": ["x == 1 2 3 4 5", "ab Ġ 1 2 3 4 5", "ab 's Ġ AB 'S", "!! ĊĊĊ Ġ Ġa b", "Ãī AB"],
    "minicpm5": ["x == 123 4 5", "ab Ġ 123 4 5", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "ÃīAB"],
    "poro-chat": ["x == 12345", "ab Ġ 12345", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "Ãī AB"],
    "viking": ["x == 1 2 3 4 5", "ab Ġ 1 2 3 4 5", "ab 's Ġ AB 'S", "!!Ċ ĊĊ Ġ Ġa b", "Ãī AB"],
}
SAME = {
    "llama3": "llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5",
    "dbrx": "smaug-bpe chatglm-bpe deepseek-v3 hunyuan-dense joyai-llm hy_v4 gpt-4o llama4 kanana2 talkie"
    " minimax-m2 jais-2",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2 megrez stablelm2 qwen35 bailingmoe bailingmoe2"
    " llada-moe exaone-moe",
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
    "falcon": "default",
    "poro-chat": "bloom gpt3-finnish",
}
SAME_BUT_FOR_TOKENS = {"tekken": "qwen2"}
EXPECTED = PIECES | {name: PIECES[first] for first, names in SAME.items() for name in names.split()}
EXPECTED |= {name: PIECES[first] for name, first in SAME_BUT_FOR_TOKENS.items()}


def metadata(tokens: list[str], kinds: dict[str, int] | None = None, **entries: Any) -> dict[str, Any]:
    types = [(kinds or {}).get(token, 1) for token in tokens]
    found = {"model": "gpt2", "tokens": tokens, "token_type": np.array(types), "eos_token_id": 0} | entries
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def byte_level(pre: str | None, extra: dict[str, int] | None = None, **entries: Any) -> GgufTokenizer:
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<end>", *(extra or {})]
    given = {"merges": MERGES, "eos_token_id": tokens.index("<end>"), "add_bos_token": False} | entries
    return GgufTokenizer(metadata(tokens, {"<end>": 3} | (extra or {}), pre=pre, **given))


def pieces(tokenizer: GgufTokenizer, text: str) -> str:
    return " ".join(tokenizer.tokens[one] for one in tokenizer.build().encode(text).ids)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_49_5_a_pre_tokenizer_cuts_as_llama_cpp_does(name: str) -> None:
    built = byte_level(name).build()
    found = [" ".join(built.encode(text).tokens) for text in TEXTS]
    last = "`` ab Ġ $1" if name in ("poro-chat", "bloom", "gpt3-finnish") else "`` ab Ġ $ 1"
    assert found == [*EXPECTED[name], last, "æĹ¥ ab ! ab"]


def test_49_5_a_file_without_a_name_has_the_default() -> None:
    assert pieces(byte_level(None), "x==12345") == pieces(byte_level("default"), "x==12345") == "x == 123 4 5"


@pytest.mark.parametrize("name", ["invented", "kimi-k2", "tiny_aya", "smollm2"])
def test_49_5_another_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(make_tiny("llama", tmp_path / "llama", **SIZES), path, "F32", pre=name)
    said = refusal(path)
    assert isinstance(said, UsageError)
    assert f"says `tokenizer.ggml.pre: {name}`, which is not read" in said.message
    for arguments in (["generate", "a", "-d", "none"], ["doctor"]):
        assert run([*arguments, "-t", str(path)]) == 2
        assert f"`tokenizer.ggml.pre: {name}`" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "plamo2", "whitespace"])
def test_49_5_another_kind_of_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(make_tiny("llama", tmp_path / "llama", **SIZES), path, "F32", tokenizer=model)
    assert f"says `tokenizer.ggml.model: {model}`, which is not read" in refusal(path).message


def test_49_5_smollm_splits_digits_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "smollm.gguf"
    write_gguf(make_tiny("llama", tmp_path / "llama", **SIZES), path, "F32", pre="smollm")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer("x=12345")["input_ids"]) == list("x=12345")


def test_49_5_bos_and_eos_are_added_as_the_file_and_the_name_say() -> None:
    def ends(pre: str, **entries: Any) -> tuple[bool, bool]:
        one = byte_level(pre, {"<begin>": 3}, **entries)
        ids = one.build().encode("ab").ids
        return ids[0] == one.bos, ids[-1] == one.eos

    begin = len(ALPHABET) + len(MERGES) + 1
    assert ends("llama-bpe", add_bos_token=None, bos_token_id=begin) == (True, False)
    assert ends("llama-bpe", bos_token_id=begin) == (False, False)
    assert ends("qwen2", add_bos_token=None, bos_token_id=begin) == (False, False)
    assert ends("qwen2", add_bos_token=True, add_eos_token=True, bos_token_id=begin) == (True, True)


def test_49_5_special_tokens_and_answers_ends_are_llama_cpps() -> None:
    one = byte_level("qwen2", {"<|im_end|>": 1, "<think>": 4, "</s>": 1, "<|fim_pad|>": 1, "<|file_sep|>": 3})
    assert [one.tokens[end] for end in one.ends] == ["<end>", "<|im_end|>", "</s>", "<|fim_pad|>", "<|file_sep|>"]
    assert pieces(one, "ab<|im_end|><think>ab</s>") == "ab <|im_end|> <think> ab </s>"
    assert one.build().decode(one.build().encode("a<think>b<|im_end|>").ids) == "a<think>b"
    harmony = byte_level("gpt-4o", {"<|end|>": 3, "<|return|>": 3, "<|call|>": 3, "<|channel|>": 3})
    assert [harmony.tokens[end] for end in harmony.ends] == ["<end>", "<|return|>", "<|call|>"]
    assert harmony.build().decode(harmony.build().encode("<|channel|>a<|end|>").ids) == "<|channel|>a<|end|>"


def sentencepiece(**entries: Any) -> GgufTokenizer:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "  ",
    ]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "  ": 4} | {token: 6 for token in tokens if token.startswith("<0x")}
    scores = np.array([0.0] * 259 + [-10, -11, -12, -2, -1, -3, 0], np.float32)
    given = {"model": "llama", "scores": scores, "eos_token_id": 2} | entries
    return GgufTokenizer(metadata(tokens, kinds, **given))


@pytest.mark.parametrize(
    ("entries", "text", "expected"),
    [
        ({}, "ab ab", "<s> ▁ab ▁ab"),
        ({}, " ab", "<s> ▁ ▁ab"),
        ({}, "a</s>b", "<s> ▁a </s> ▁ b"),
        ({}, "é", "<s> ▁ <0xC3> <0xA9>"),
        ({}, "a  b", "<s> ▁a    ▁ b"),
        ({"add_space_prefix": False}, "ab ab", "<s> ab ▁ab"),
        ({"add_bos_token": False, "add_space_prefix": False}, "a\n", "a <0x0A>"),
    ],
)
def test_49_5_sentencepiece_merges_the_best_score_first(entries: dict[str, Any], text: str, expected: str) -> None:
    one = sentencepiece(**entries)
    assert pieces(one, text) == expected


def test_49_5_phi_3_strips_what_follows_its_special_tokens() -> None:
    plain, named = sentencepiece(), sentencepiece()
    named._metadata = {**named._metadata, "general.name": "Phi-3 Mini"}
    assert pieces(plain, "</s> \n ab") == "<s> </s> ▁ ▁ <0x0A> ▁ab"
    assert pieces(named, "</s> \n ab") == "<s> </s> ▁ab"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"merges": None}, "has no `tokenizer.ggml.merges`"),
        ({"token_type": np.ones(3)}, "has 3 numbers for"),
    ],
)
def test_49_5_lists_that_do_not_fit_are_one_sentence(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        byte_level("qwen2", **entries).build()


def test_49_5_a_token_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="has the token `a` twice"):
        GgufTokenizer(metadata(["a", "b", "a"], pre="qwen2", merges=[]))
