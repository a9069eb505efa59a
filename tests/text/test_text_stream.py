"""Streamed text is the decoded text, however it is fed, and stops where the text says so."""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.models.byt5 import ByT5Tokenizer

from specdec_cli.text.stream import Released
from specdec_cli.text.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LINES = [
    "Once upon a time, there was a little girl named Lily. She didn't like rain!",
    "The naïve café owner said: “Hello — 你好, здравствуй 🙂👩‍👩‍👧”.",
    "def add(a, b):\n\treturn a + b\n\n\n  # two  spaces\r\n",
]
SPECIALS = ["<unk>", "<s>", "</s>"]


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>"))


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("    "), AddedToken("é!"), AddedToken("日本")])
    return wrap(backend)


def byte_fallback(strip: bool) -> Tokenizer:
    pieces = sorted({c for line in LINES for c in line.replace(" ", "▁") if ord(c) < 0x250 and c not in "\n\t\r"})
    names = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *pieces, "▁the", "▁a", "�", "▁▁", "er"]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    backend.add_special_tokens(SPECIALS)
    return wrap(backend)


def trained(model: Any, trainer: Any, decoder: Any, pre: Any) -> Tokenizer:
    backend = Backend(model)
    backend.pre_tokenizer = pre
    backend.decoder = decoder
    backend.train_from_iterator(LINES, trainer)
    return wrap(backend)


class Bytes:
    """A tokenizer without a fast backend that shows incomplete characters as U+FFFD; token 256 is special."""

    all_special_ids: ClassVar[list[int]] = [256]
    eos_token_id = 256

    def get_vocab(self) -> dict[str, int]:
        return {f"b{i}": i for i in range(257)}

    def encode(self, text: str, **_: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: bool) -> str:
        parts = [b"<eos>" * (not skip_special_tokens) if i == 256 else bytes([i]) for i in ids]
        return b"".join(parts).decode(errors="replace")


@cache
def toy(name: str) -> Tokenizer:
    if name == "byte-level":
        return byte_level()
    if name.startswith("byte-fallback"):
        return byte_fallback(strip=name.endswith("strip"))
    if name.startswith("slow-bytes"):
        return Tokenizer(Bytes() if name.endswith("shown") else ByT5Tokenizer())
    if name == "metaspace":
        trainer = trainers.UnigramTrainer(
            vocab_size=90, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
        return trained(models.Unigram(), trainer, decoders.Metaspace(), pre_tokenizers.Metaspace())
    if name == "word-piece":
        wordpiece = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIALS, show_progress=False)
        model = models.WordPiece(unk_token="<unk>")
        return trained(model, wordpiece, decoders.WordPiece(), pre_tokenizers.BertPreTokenizer())
    suffix = trainers.BpeTrainer(
        vocab_size=150, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    pairs = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    return trained(pairs, suffix, decoders.BPEDecoder(), pre_tokenizers.WhitespaceSplit())


TOYS = [
    "byte-level",
    "byte-fallback",
    "byte-fallback-strip",
    "metaspace",
    "word-piece",
    "suffix",
    "slow-bytes",
    "slow-bytes-shown",
]
REAL = ["tokenizers/bpe1024", "tokenizers/gpt2", "tokenizers/neox20b", "tokenizers/tok512", "checkpoints/stories260K"]


@cache
def real(name: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(SHARED / name / "tokenizer.json")))


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> str:
    stream = tokenizer.stream(skip_special_tokens=skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [stream.feed(ids[a:b]) for a, b in pairwise(bounds)]
    assert all(part.stop is None for part in parts)
    return "".join(part.text for part in parts) + stream.finish()


def any_ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Random tokens, more often than not of real text, with byte tokens, special ones and unknown ids mixed in."""
    text = data.draw(st.sampled_from([*LINES, "€ñ🙂\n\n", "����", ""]))
    text_ids = tokenizer.encode(text, add_special_tokens=False)
    start = data.draw(st.integers(0, max(0, len(text_ids) - 1)))
    ids = text_ids[start : start + data.draw(st.integers(0, 40))]
    special = st.sampled_from(sorted(tokenizer.special_ids) or [0])
    some_byte = st.sampled_from(sorted(tokenizer.byte_tokens) or [0])
    noise = st.one_of(st.integers(0, tokenizer.num_tokens + 3), special, some_byte)
    for token in data.draw(st.lists(noise, max_size=25)):
        ids.insert(data.draw(st.integers(0, len(ids))), token)
    return ids


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_streamed_text_is_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = toy(name)
    ids = any_ids(tokenizer, data)
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=6))
    assert streamed(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, ids, [], skip) == streamed(tokenizer, ids, list(range(len(ids))), skip)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared tokenizers")
@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_streamed_text_is_the_decoded_text_of_real_tokenizers(name: str, data: st.DataObject) -> None:
    tokenizer = real(name)
    ids = any_ids(tokenizer, data)
    assert streamed(tokenizer, ids, [len(ids) // 2]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOYS[:4])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stop_crops_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = toy(name)
    text = data.draw(st.sampled_from(LINES))
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    stream = tokenizer.stream(stop=[stop, "never in there"])
    size = data.draw(st.integers(1, 7))
    shown, kept, found = "", 0, None
    for place in range(0, len(ids), size):
        released = stream.feed(ids[place : place + size])
        shown, kept, found = shown + released.text, kept + released.num_kept, released.stop
        assert stop not in shown
        if found is not None:
            break
    assert found == stream.stop
    assert shown + stream.finish() == whole.split(stop)[0]
    if found is not None:
        assert found == stop
        assert stop in tokenizer.decode(ids[:kept]), "the last kept token completes the stop"
        assert stop not in tokenizer.decode(ids[: kept - 1])


def feed_text(tokenizer: Tokenizer, text: str, stop: list[str]) -> tuple[str, str | int | None]:
    stream = tokenizer.stream(stop=stop)
    released = stream.feed(tokenizer.encode(text, add_special_tokens=False))
    return released.text + stream.finish(), released.stop


def test_the_earliest_of_several_stops_wins() -> None:
    tokenizer = toy("slow-bytes")
    assert feed_text(tokenizer, "one two three", ["three", "two"]) == ("one ", "two")
    assert feed_text(tokenizer, "abcabd", ["abd", "zz"]) == ("abc", "abd")
    assert feed_text(tokenizer, "aaab", ["aab"]) == ("a", "aab")
    tokenizer = toy("byte-fallback")
    stream = tokenizer.stream(stop=["he", "▁the".replace("▁", " ")])
    assert stream.feed([tokenizer.vocabulary["▁the"]]) == Released("", 1, " the"), "both end in one token"


def test_a_byte_token_stops_at_once() -> None:
    """Llama writes a newline as `<0x0A>`: the stop may not wait for the run of bytes to end."""
    tokenizer = toy("byte-fallback-strip")
    ids = [tokenizer.vocabulary[name] for name in ("▁the", "<0x0A>", "<0x0A>", "a")]
    stream = tokenizer.stream(stop=["\n\n"])
    assert [stream.feed([i]).text for i in ids[:2]] == ["the", ""]
    assert stream.feed(ids[2:]) == Released("", 1, "\n\n")
    assert stream.finish() == ""


def test_a_dropped_first_space_completes_no_stop() -> None:
    tokenizer = toy("byte-fallback-strip")
    stream = tokenizer.stream(stop=[" \n"])
    ids = [tokenizer.vocabulary[name] for name in ("<0x20>", "<0x0A>", "a")]
    assert stream.feed(ids) == Released("\na", 3)
    assert tokenizer.decode(ids) == "\na"


def test_an_incomplete_character_is_never_shown() -> None:
    for name in ("byte-level", "byte-fallback", "slow-bytes", "slow-bytes-shown"):
        tokenizer = toy(name)
        stream = tokenizer.stream()
        ids = tokenizer.encode("a 🙂👩 b", add_special_tokens=False)
        parts = [stream.feed([i]).text for i in ids]
        assert "�" not in "".join(parts)
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
    stream = toy("byte-level").stream()
    stream.feed(toy("byte-level").encode("a🙂", add_special_tokens=False)[:-1])
    assert stream.finish() == "�"


def test_stop_tokens_end_without_text() -> None:
    tokenizer = toy("byte-level")
    (end,) = tokenizer.eos_token_ids
    ids = tokenizer.encode("time", add_special_tokens=False)
    stream = tokenizer.stream(stop=["time!"], stop_ids={end})
    released = stream.feed([*ids, end, *ids])
    assert (released.num_kept, released.stop) == (len(ids) + 1, end)
    assert released.text + stream.finish() == "time", "what a stop string held back is given at the end"


def test_text_that_may_begin_a_stop_is_held() -> None:
    tokenizer = toy("slow-bytes")
    stream = tokenizer.stream(stop=["</end>"])
    parts = [stream.feed([i]).text for i in tokenizer.encode("a</en</em", add_special_tokens=False)]
    assert parts == ["a", "", "", "", "", "</en", "", "", "</em"]


def test_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tokens given to the decoder, for a text, for a text that never settles, and for one run of bytes."""
    for name, piece in (
        ("byte-fallback-strip", "▁the"),
        ("byte-fallback-strip", "�"),
        ("byte-fallback-strip", "<0x0A>"),
    ):
        tokenizer = toy(name)
        decoded: list[int] = []
        whole = tokenizer.decode
        monkeypatch.setattr(
            tokenizer,
            "decode",
            lambda ids, decode=whole, seen=decoded, **kw: seen.append(len(ids)) or decode(ids, **kw),
        )
        stream = tokenizer.stream(stop=["never"])
        ids = [tokenizer.vocabulary[piece]] * 500
        text = stream.feed(ids).text + stream.finish()
        assert sum(decoded) < 40 * len(ids)
        assert text == whole(ids)
        monkeypatch.undo()


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared tokenizers")
@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/tok512"])
def test_it_is_quick(name: str) -> None:
    tokenizer = real(name)
    ids = tokenizer.encode(LINES[0] * 20)
    random.Random(0).shuffle(ids)
    stream = tokenizer.stream(stop=["\n\nHuman:", "</s>"])
    stream.feed(ids)
    began = time.perf_counter()
    stream.feed(ids)
    microseconds = (time.perf_counter() - began) / len(ids) * 1e6
    print(f"{name}: {microseconds:.1f} µs per token")
    assert microseconds < 500
