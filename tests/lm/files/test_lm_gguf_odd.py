"""GGUF files that are truncated, hostile or of another kind: one sentence by doctor and load alike, at once."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from refused import refusal
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm, load_tokenizer

pytest.importorskip("gguf", reason="needs gguf")

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_parts import LIST, NUMBER, REAL, TEXT, Parts, text
from tiny_gguf import SIZES, write_gguf

Change = Callable[[Parts], object]
WHOLE, READ = "is not a whole GGUF file: ", "cannot be read as a GGUF file: "


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(make_tiny("llama", folder / "source", **SIZES), folder / "tiny.gguf", "Q4_0")
    return folder / "tiny.gguf"


def of_type(kind: str, name: str = "blk.0.ffn_up.weight") -> Change:
    """A tensor of zeros in a type, behind all others."""

    def change(parts: Parts) -> None:
        its, (per_block, num_bytes) = parts.tensor(name), GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        its.type, its.offset = int(GGMLQuantizationType[kind]), len(parts.data)
        parts.data += bytes(its.sizes[0] * (its.sizes[1] if len(its.sizes) > 1 else 1) // per_block * num_bytes)

    return change


def attribute(name: str, value: object) -> Change:
    return lambda parts: setattr(parts, name, value)


def of_tensor(tensor: str, name: str, value: object) -> Change:
    return lambda parts: setattr(parts.tensor(tensor), name, value)


def entry(key: str, value: object, kind: int | None = None) -> Change:
    return lambda parts: parts.set(key, value, kind)


def more(kind: int, raw: bytes, key: str = "key") -> Change:
    return lambda parts: parts.more_entries.append((key, kind, raw))


def texts(*values: str) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


K, UP, EMBEDDING = "blk.0.attn_k.weight", "blk.0.ffn_up.weight", "token_embd.weight"
CONTEXT, HEADS = "llama.context_length", "llama.attention.head_count_kv"
NO_MODEL = "which no model has"
ODD: dict[str, tuple[Change, str]] = {
    "magic": (attribute("magic", b"GGML"), "is not a GGUF file: it does not begin with `GGUF`"),
    "version 1": (attribute("version", 1), READ + "its version is 1, and little-endian files of versions 2 and 3"),
    "version 4": (attribute("version", 4), READ + "its version is 4"),
    "big-endian": (attribute("order", ">"), READ + "it is big-endian"),
    "many tensors": (lambda parts: setattr(parts, "counts", (2**60, len(parts.entries))), "GGUF file: "),
    "many entries": (attribute("counts", (1, 2**60)), "GGUF file: "),
    "nothing": (attribute("counts", (0, 0)), READ + "it names no `general.architecture`"),
    "offset beyond": (of_tensor(K, "offset", 2**40), WHOLE + "it ends 10995"),
    "offset at most": (of_tensor(K, "offset", 2**64 - 32), WHOLE),
    "two in a place": (
        lambda parts: setattr(parts.tensor(K), "offset", parts.tensor(UP).offset),
        "lie over each other",
    ),
    "a tensor twice": (lambda parts: parts.tensors.append(parts.tensor(K)), f"the tensor `{K}` twice"),
    "an entry twice": (more(NUMBER, b"\2\0\0\0", "llama.block_count"), "the entry `llama.block_count` twice"),
    "a long name": (more(NUMBER, b"\0\0\0\0", "x" * (1 << 25)), "a text of 33554432 bytes"),
    "a name in colour": (more(NUMBER, b"\0\0\0\0", "\x1b[31m\n"), r"the name '\x1b[31m\n'"),
    "a text of 2**60": (more(TEXT, struct.pack("<Q", 2**60)), WHOLE + "its header does not end"),
    "a list of 2**60 texts": (more(LIST, struct.pack("<IQ", TEXT, 2**60)), "a list of 1152921504606846976 texts"),
    "a list of 2**60 numbers": (more(LIST, struct.pack("<IQ", NUMBER, 2**60)), WHOLE),
    "a list of texts beyond the end": (more(LIST, struct.pack("<IQ", TEXT, 2**20)), WHOLE),
    "a text of a list beyond the end": (more(LIST, struct.pack("<IQQ", TEXT, 2**20, 2**63)), "GGUF file: "),
    "a list of lists": (more(LIST, struct.pack("<IQ", LIST, 1)), "`key` is a list of type 9"),
    "an unknown type of entry": (more(77, b""), "`key` is of type 77, which is not known"),
    "tokens of another type": (entry("tokenizer.ggml.tokens", 5, NUMBER), "`tokenizer.ggml.tokens` is not a list"),
    "an unknown type of tensor": (of_tensor(K, "type", 2**31), f"`{K}` is of type 2147483648, which is not known"),
    "no dimension": (of_tensor(K, "sizes", []), f"`{K}` has 0 dimensions"),
    "many dimensions": (of_tensor(K, "sizes", [1] * 2**16), f"`{K}` has 65536 dimensions"),
    "a size of 2**60": (of_tensor(K, "sizes", [256, 2**60]), WHOLE),
    "rows that are no blocks": (of_tensor(UP, "sizes", [250, 256]), "rows of 250 numbers, and `Q4_0` blocks of 32"),
    "another shape": (of_tensor(K, "sizes", [512, 64]), f"`{K}` has another shape, [64, 512] instead of [128, 256]"),
    "other dimensions": (of_tensor(EMBEDDING, "sizes", [256, 300, 1]), "has another shape"),
    "a tensor missing": (lambda parts: parts.tensors.remove(parts.tensor(UP)), f"`{UP}` is missing"),
    "no architecture": (lambda parts: parts.entries.pop("general.architecture"), "names no `general.architecture`"),
    "architecture in colour": (entry("general.architecture", "\x1b[31m"), "names no `general.architecture`"),
    "another architecture": (entry("general.architecture", "flux"), "does not read architecture `flux`"),
    "a part of a split": (entry("split.count", 3, 2), "is one of 3 files of a model"),
    "a split of text": (entry("split.count", "x", TEXT), "says `split.count: x`, which no part of a model has"),
    "alignment": (entry("general.alignment", 0, NUMBER), "its `general.alignment` is 0"),
    "alignment of text": (entry("general.alignment", "x", TEXT), "its `general.alignment` is 'x'"),
    "no context length": (lambda parts: parts.entries.pop(CONTEXT), f"does not say its `{CONTEXT}`"),
    "context length": (entry(CONTEXT, 0), f"says `{CONTEXT}: 0`, {NO_MODEL}"),
    "context length in text": (entry(CONTEXT, "x", TEXT), f"says `{CONTEXT}: x`, {NO_MODEL}"),
    "layers": (entry("llama.block_count", 2**31), f"says `llama.block_count: 2147483648`, {NO_MODEL}"),
    "key heads": (entry(HEADS, 0), f"says `{HEADS}: 0`, {NO_MODEL}"),
    "width": (entry("llama.embedding_length", 2**62, 10), NO_MODEL),
    "base": (entry("llama.rope.freq_base", float("nan"), REAL), f"says `llama.rope.freq_base: nan`, {NO_MODEL}"),
    "epsilon": (entry("llama.attention.layer_norm_rms_epsilon", -1.0, REAL), f"epsilon: -1.0`, {NO_MODEL}"),
    "a part of each head": (
        entry("llama.rope.dimension_count", 32),
        "`llama.rope.dimension_count: 32`, which is not read",
    ),
    "another tokenizer": (
        entry("tokenizer.ggml.model", "rwkv"),
        "says `tokenizer.ggml.model: rwkv`, which is not read",
    ),
    "no tokens": (
        lambda parts: parts.entries.pop("tokenizer.ggml.tokens"),
        "`tokenizer.ggml.tokens` is not a list of texts",
    ),
    "no merges": (lambda parts: parts.entries.pop("tokenizer.ggml.merges"), "it has no `tokenizer.ggml.merges`"),
    "merges of numbers": (
        entry("tokenizer.ggml.merges", struct.pack("<IQI", NUMBER, 1, 7), LIST),
        "`tokenizer.ggml.merges` is not a list of texts",
    ),
    "equal tokens": (entry("tokenizer.ggml.tokens", texts(*["a"] * 300), LIST), "the token `a` twice"),
    "too few types": (
        entry("tokenizer.ggml.token_type", struct.pack("<IQ2i", 5, 2, 1, 1), LIST),
        "has 2 numbers for 300",
    ),
    "an end in text": (entry("tokenizer.ggml.eos_token_id", "x", TEXT), "eos_token_id: x`, which is no token"),
    "a template of numbers": (entry("tokenizer.chat_template", 5, NUMBER), "chat_template: 5`, which is no template"),
    "Q8_K": (of_type("Q8_K"), f"`{UP}` of `"),
    "I32": (of_type("I32", "output_norm.weight"), "is in `I32`, which is not read"),
}  # fmt: skip


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("what", ODD)
def test_49_12_an_odd_file_is_one_sentence(base: Path, tmp_path: Path, what: str) -> None:
    change, sentence = ODD[what]
    parts = Parts.of(base)
    change(parts)
    message = refusal(parts.write(tmp_path / "odd.gguf")).message
    assert sentence in message
    assert "odd.gguf" in message


def test_49_12_a_truncated_file_is_one_sentence_wherever_it_ends(base: Path, tmp_path: Path) -> None:
    whole, header = base.read_bytes(), len(Parts.of(base).header())
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 11, 23, 30, 100, 1000, 5000, header - 1, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        said = "is not a GGUF file: " if length < 4 else WHOLE
        assert f"`{path}` {said}" in refusal(path).message
    path.write_bytes(whole[:-1])
    assert "it ends 1 byte before `" in refusal(path).message
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10, 10) + bytes(1 << 20))
    assert READ + "it has the entry `` twice" in refusal(path).message


@pytest.mark.parametrize(("name", "value"), [("version", 1), ("version", 4), ("order", ">")])
def test_a_new_copy_of_another_version_is_not_suggested(base: Path, tmp_path: Path, name: str, value: object) -> None:
    parts = Parts.of(base)
    attribute(name, value)(parts)
    assert "convert it again" in (refusal(parts.write(tmp_path / "odd.gguf")).hint or "")


def test_a_gguf_file_under_another_name_is_recognized(base: Path, tmp_path: Path) -> None:
    (tmp_path / "UPPER.GGUF").write_bytes(base.read_bytes())
    said = refusal(tmp_path / "UPPER.GGUF")
    assert said.message == f"`{tmp_path / 'UPPER.GGUF'}` is a GGUF file whose name does not end in `.gguf`"
    assert said.hint == "rename it, or link to it under such a name"


@pytest.mark.parametrize("kind", ["IQ2_XS", "TQ1_0"])
def test_49_12_types_that_our_kernels_do_not_take_are_dequantized(base: Path, tmp_path: Path, kind: str) -> None:
    parts = Parts.of(base)
    of_type(kind)(parts)
    path = str(parts.write(tmp_path / "mixed.gguf"))
    assert describe(path).decoder == load_lm(path).decoder == "own"
    assert f"`{UP}` is in `{kind}`" in refusal(path, compute="native").message


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_matrices_in_16_bits_among_blocks_are_native(base: Path, tmp_path: Path, kind: str) -> None:
    parts = Parts.of(base)
    of_type(kind)(parts)
    path = str(parts.write(tmp_path / "mixed.gguf"))
    assert describe(path).decoder == load_lm(path).decoder == "own, native"


def test_49_12_an_end_that_is_no_token_is_the_usual_one(base: Path, tmp_path: Path) -> None:
    parts = Parts.of(base)
    parts.set("tokenizer.ggml.eos_token_id", -1, 5)
    right = load_tokenizer(str(base)).convert_ids_to_tokens(11)  # llama.cpp's for such vocabularies
    assert load_tokenizer(str(parts.write(tmp_path / "end.gguf"))).eos_token in (right, None)


def test_49_12_a_token_of_a_million_letters_takes_no_minutes(base: Path, tmp_path: Path) -> None:
    parts = Parts.of(base)
    parts.set("tokenizer.ggml.model", "llama")
    parts.set("tokenizer.ggml.tokens", texts("x" * (1 << 20), *(f"t{i}" for i in range(299))), LIST)
    assert "a token has 1048576 letters" in refusal(parts.write(tmp_path / "long.gguf")).message


def test_49_12_commands_say_the_same_sentence(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(base.read_bytes()[:1000])
    sentences = []
    for command in (["generate", "Hi"], ["doctor"], ["serve", "--port", "0"], ["bench"], ["chat"], ["audit"]):
        assert run([*command, "-t", str(path), "-d", "ngram", "--quiet"]) == 1
        sentences.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")][-1])
    assert set(sentences) == {
        f"error: `{path}` is not a whole GGUF file: its header does not end within its 1000 bytes"
    }


def test_49_12_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "pipe.gguf" in refusal(tmp_path / "pipe.gguf").message
