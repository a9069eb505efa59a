"""Tokenizers that are only a sentencepiece or tiktoken file: their own pieces, or the package that is missing."""

from __future__ import annotations

import base64
import io
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from refused import refusal
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.lm.load import load_tokenizer

LINES = [
    "The old dog sleeps by the door, and nobody wakes it.", "Numbers such as 12 and 345 are split.",
    "A line with signs: (a) [b] - c!", "the the the dog door old",
]  # fmt: skip
TEXTS = ["The old dog", "a door, 345 dogs!", "nobody\nwakes"]
WORDS = (b"th", b"the", b" the", b"do", b"dog", b" d", b" do", b" dog", b"ol", b"old", b" o", b" ol", b" old")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", vocab_size=400)


def write_class(folder: Path, name: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))


def write_sentencepiece(folder: Path, kind: str, **rules: Any) -> Any:
    """A sentencepiece file, and sentencepiece's own reading of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its classes are old
        spm = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
        pytest.importorskip("google.protobuf", reason="needs protobuf")
        made = io.BytesIO()
        rules = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **rules}
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(50 * LINES), model_writer=made, vocab_size=340, model_type=kind, byte_fallback=True,
            hard_vocab_limit=False, minloglevel=2, **rules,
        )  # fmt: skip
        (folder / "tokenizer.model").write_bytes(made.getvalue())
        return spm.SentencePieceProcessor(model_proto=made.getvalue())


def write_ranks(folder: Path, name: str = "tokenizer.model") -> dict[bytes, int]:
    """A tiktoken file, and its ranks."""
    tokens = [*(bytes([byte]) for byte in range(256)), *WORDS]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (folder / name).write_text("\n".join(lines))
    return ranks


def piece(text: str, score: float, kind: int = 1) -> bytes:
    """A piece of a sentencepiece file, by its protocol buffer."""
    body = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score)
    body += b"" if kind == 1 else b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body


@pytest.mark.parametrize(("name", "rules"), [("LlamaTokenizer", {}), ("GemmaTokenizer", {"add_dummy_prefix": False})])
def test_39_a_sentencepiece_file_keeps_its_pieces(folder: Path, name: str, rules: dict[str, Any]) -> None:
    own = write_sentencepiece(folder, "bpe", **rules)
    write_class(folder, name)
    tokenizer = load_tokenizer(str(folder))
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert found == [own.encode(text) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in found] == TEXTS


def test_39_without_its_class_a_sentencepiece_file_is_refused_where_it_would_be_split_otherwise(folder: Path) -> None:
    """Transformers before 5.24 leaves out the space before a text."""
    own = write_sentencepiece(folder, "bpe")
    if Version(transformers.__version__) < Version("5.24"):
        assert (
            "transformers splits text in another way than the tokenizer of" in refusal(folder, load_tokenizer).message
        )
    else:
        tokenizer = load_tokenizer(str(folder))
        assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == list(
            map(own.encode, TEXTS)
        )


@pytest.mark.parametrize(("kind", "name"), [("unigram", "LlamaTokenizer"), ("bpe", "GemmaTokenizer")])
def test_39_a_tokenizer_of_another_algorithm_is_refused(folder: Path, kind: str, name: str) -> None:
    write_sentencepiece(folder, kind)
    write_class(folder, name)
    said = refusal(folder, load_tokenizer)
    assert "transformers splits text in another way than the tokenizer of" in said.message
    assert "name its `tokenizer_class`" in not_none(said.hint)


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_39_a_tiktoken_file_keeps_its_tokens(folder: Path, name: str | None) -> None:
    pytest.importorskip("tiktoken", reason="needs tiktoken")
    ranks = write_ranks(folder)
    if name is not None:
        write_class(folder, name)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer("the old dog", add_special_tokens=False)["input_ids"]
    assert ids == [ranks[b"the"], ranks[b" old"], ranks[b" dog"]]
    assert tokenizer.decode(ids) == "the old dog"


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer"])
def test_39_a_file_of_another_name_is_no_empty_tokenizer(folder: Path, name: str) -> None:
    write_ranks(folder, "qwen.tiktoken")
    write_class(folder, name)
    said = refusal(folder, load_tokenizer)
    assert "is empty but for special tokens: transformers reads `qwen.tiktoken` by the name `tokenizer.model`" in (
        said.message
    )


@pytest.mark.parametrize("absent", ["sentencepiece", "protobuf"])
def test_39_the_missing_package_of_a_sentencepiece_file_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    pieces = piece("<unk>", 0, 2) + b"".join(piece(letter, -place) for place, letter in enumerate("▁abc"))
    (folder / "tokenizer.model").write_bytes(pieces)
    monkeypatch.setattr("transformers.utils.is_sentencepiece_available", lambda: absent != "sentencepiece")
    monkeypatch.setattr("transformers.utils.is_protobuf_available", lambda: absent != "protobuf")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    said = refusal(folder, load_tokenizer)
    assert "is the sentencepiece file `tokenizer.model`" in said.message
    assert f"`{absent}` is not installed" in said.message
    assert "tiktoken" not in said.message + not_none(said.hint)
    assert "pip install 'specdec-cli[tokenizers]'" in not_none(said.hint)


def test_39_the_missing_package_of_a_tiktoken_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(folder)
    monkeypatch.setattr("transformers.utils.is_tiktoken_available", lambda: False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    said = refusal(folder, load_tokenizer)
    assert "is the tiktoken file `tokenizer.model`, which takes `tiktoken`: `tiktoken` is not installed" in said.message
    assert "pip install 'specdec-cli[tokenizers]'" in not_none(said.hint)


@pytest.mark.parametrize("size", [0, 20, 300])
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_39_a_truncated_file_is_one_sentence(folder: Path, kind: str, size: int) -> None:
    if kind == "sentencepiece":
        write_sentencepiece(folder, "bpe")
    else:
        pytest.importorskip("tiktoken", reason="needs tiktoken")
        write_ranks(folder)
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:size])
    write_class(folder, "LlamaTokenizer")
    assert "tokenizer" in refusal(folder, load_tokenizer).message


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("whatever transformers says")
