"""A GGUF file's rows computed as they are: their numbers, the same text with every draft, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import plant
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM
from typed import not_none, stand_in

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.blocks_check import BlocksOracle
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.llama.file_rows import FileRows
from specdec_cli.lm.llama.llama_weights import Taking
from specdec_cli.lm.load import load_lm, load_model, read_model
from specdec_cli.lm.load_memory import load_bytes
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.sampling.params import SamplingParams

pytest.importorskip("gguf", reason="needs gguf")

from tiny_gguf import SIZES, write_gguf

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
FORMS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "qwen2": {"num_hidden_layers": 2},
    "gemma3_text": {"layer_types": None, "num_hidden_layers": 6, "tie_word_embeddings": True, "head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 256, "num_experts": 6, "num_experts_per_tok": 3},
    "mixtral": {"head_dim": 64},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "gpt_oss": {"head_dim": 64},
}
DRAFTS = "ngram", "file"
FAMILIES["qwen3_moe"]["norm_topk_prob"] = True  # as llama.cpp takes it of each file
MIXED = "Q4_K, F16"  # matrices in plain numbers beside blocks
MIXTURES = [
    ("gpt_oss", "MXFP4, BF16"),
    ("qwen3_moe", "Q4_K_M"),
    ("mixtral", "Q4_K_M"),
    ("olmoe", "Q8_0"),
    ("gpt_oss", "MXFP4"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("blocks")

    def file(family: str, form: str) -> Path:
        path = folder / f"{family}-{form}.gguf"
        if not path.exists():
            source = folder / family
            vectors = 0.3 if family == "gpt_oss" else 0.0  # sinks and biases
            made = source if source.exists() else make_tiny(family, source, 0, vectors, **SIZES | FAMILIES[family])
            write_gguf(made, path, form)
        return path

    return file


def score(lm: Any, row: int = 0) -> torch.Tensor:
    found: torch.Tensor = lm.score([Row(row, TOKENS, len(TOKENS))])
    lm.release(row)
    return found


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("llama", form) for form in (*FORMS, MIXED)),
        *(("qwen2", form) for form in ("Q8_0", MIXED)),
        *(("gemma3_text", form) for form in ("Q4_K_M", MIXED)),
        *MIXTURES,
    ],
)
def test_logits_are_those_of_the_numbers_but_for_rounded_inputs(files: Any, family: str, form: str) -> None:
    path = str(files(family, form))
    lm, plain = (load_lm(path, dtype="float32", compute=compute) for compute in ("native", "dequantized"))
    assert (lm.decoder, plain.decoder, lm.kind) == ("own, native", "own", "blocks")
    assert (lm.origin.quantize, plain.origin.quantize) == ("native", "none")  # by which traces are told apart
    assert 0 < relative_error(score(lm), score(plain)) < 0.15
    assert lm.weight_bytes < plain.weight_bytes / (1.5 if form == MIXED else 2.9)
    facts = describe(path)
    assert (facts.decoder, facts.weights_bytes) == ("own, native", lm.weight_bytes)


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_a_whole_file_in_16_bits_keeps_its_numbers(files: Any, family: str) -> None:
    path = str(files(family, "F16"))
    lm, plain = load_lm(path, dtype="float32"), load_lm(path, dtype="float32", compute="dequantized")
    assert (lm.decoder, describe(path).decoder, describe(path).dtype) == ("own, native", "own, native", "bfloat16")
    assert relative_error(score(lm), score(plain)) < 1e-5
    assert lm.weight_bytes < plain.weight_bytes * 0.51
    assert load_lm(path).decoder == "own, native"


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "form"), [("llama", "Q4_K_M"), ("llama", MIXED), ("qwen2", "F16"), *MIXTURES])
def test_a_row_has_its_bits_alone_and_in_company(files: Any, family: str, form: str, dtype: str) -> None:
    """On several threads, too, which prepare inputs of many rows together."""
    lm, text, before = load_lm(str(files(family, form)), dtype=dtype), TOKENS * 3, torch.get_num_threads()
    whole = torch.cat([lm.score([Row(0, text[:length], 1)]) for length in range(1, len(text) + 1)])
    lm.release(0)
    try:
        for num, num_threads in ((1, 1), (2, 2), (5, 2), (9, 1), (9, 3), (15, 2), (30, 2), (42, 3)):
            torch.set_num_threads(num_threads)
            if num < len(text):
                lm.score([Row(0, text[:-num], 0)])
            found = lm.score([Row(0, text, num), Row(1, [*text[:3], num], 4)])
            assert torch.equal(found[:num], whole[-num:]), (num, num_threads)
            lm.release(0)
            lm.release(1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize(
    ("family", "form", "draft", "tree"),
    [
        *(("llama", form, draft, tree) for form in ("Q8_0", MIXED) for draft in DRAFTS for tree in (None, "2,2")),
        ("llama", "Q8_0", "self-exit:1", None),
        ("gemma3_text", MIXED, "self-exit:1", None),
        ("qwen2", "F16", "ngram", "2,2"),
        ("gpt_oss", "Q8_0", "ngram", None),
        ("gpt_oss", "Q8_0", "file", "2,2"),
        ("gpt_oss", "Q8_0", "self-exit:1", None),
    ],
)
def test_text_with_a_draft_is_the_plain_one(files: Any, family: str, form: str, draft: str, tree: str | None) -> None:
    target = str(files(family, form))
    spec = str(files(family, "MXFP4" if family == "gpt_oss" else "Q4_0")) if draft == "file" else draft
    sampling = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    prompts = ["the rabbit and the hare", "the the the"]
    outputs = [
        [
            list(output.token_ids)
            for output in Engine.load(
                target, one, num_speculative_tokens=4, tree=None if one == "none" else tree
            ).generate(prompts, sampling)
        ]
        for one in ("none", spec)
    ]
    assert outputs[0] == outputs[1]


FAULTS = {
    "another scale": "block.factors[0][0] = packed[b] & 63;",
    "another minimum": "block.factors[1][0] = packed[b + 4] & 63;",
    "nibbles in another order": "block.codes[i] = b % 2 ? codes[i] >> 4 : codes[i] & 15;",
    "rows that moved": "rows + order[lane] * row_bytes<L>(in), number);",
}
WRONG = {
    "another scale": "block.factors[0][0] = (packed[b] & 63) ^ 1;",
    "another minimum": "block.factors[1][0] = packed[b + 5] & 63;",
    "nibbles in another order": "block.codes[i] = b % 2 ? codes[i] & 15 : codes[i] >> 4;",
    "rows that moved": "rows + order[lane ? lane - 1 : 0] * row_bytes<L>(in), number);",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("((Bits*)panel)[i * WIDTH + lane] = bits", "((Bits*)panel)[i * WIDTH + lane] = i ? bits : Bits(bits ^ 1)"),
        (
            "float_of(Half value) { return float_of_half(value.bits)",
            "float_of(Half value) { return float_of(value.bits)",
        ),
        ("small = float(rest) * 0x1p-24f", "small = float(rest) * 0x1p-23f"),
    ],
)
def test_a_planted_fault_in_reading_plain_rows_is_caught(
    files: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(files("llama", MIXED))
    plant(monkeypatch, (right, wrong), "-O0")
    with pytest.raises(RunError, match="other numbers in our decoder than in its file"):
        load_lm(path)


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_planted_fault_in_reading_blocks_is_caught(files: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(files("llama", "Q4_K_M"))
    plant(monkeypatch, (FAULTS[fault], WRONG[fault]), "-O0")
    with pytest.raises(RunError, match="other numbers in our decoder than in its file"):
        load_lm(path)


@pytest.mark.in_turn(3, every=9)
@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (
            "Q4_K_M",
            "whole[r] = L::PRODUCT_OFFSET * (Ints{} - taken)",
            "whole[r] = (L::PRODUCT_OFFSET + 1) * (Ints{} - taken)",
        ),
        ("Q4_K_M", "r * pitch)->scale);", "r * pitch)->scale * 1.5f);"),
        ("Q4_K_M", "least * spread(row.scale), sums[r]", "least * spread(-row.scale), sums[r]"),
        ("Q4_1", "scales * spread(block.scale), sum", "scales * spread(block.scale * 1.5f), sum"),
        ("Q4_1", "multiply_add(least, spread(block.sum), sum)", "multiply_add(least, spread(-block.sum), sum)"),
        (MIXED, "pitch)[i + p]), sums", "pitch)[i]), sums"),
        ("F16", "(sums[r][0] + sums[r][1]) + (sums", "(sums[r][0] + sums[r][1]) + 0.9f * (sums"),
        ("F16", "floats_of_halves((const uint8_t*)from); }", "floats_of((const uint16_t*)from); }"),
        ("Q8_0", "block->taken[o] = -OFFSETS[o] * sum", "block->taken[o] = -(OFFSETS[o] + 16) * sum"),
    ],
)
def test_a_planted_fault_in_products_is_caught(
    files: Any, form: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(files("llama", form))
    plant(monkeypatch, (right, wrong), "-O0")
    with pytest.raises(RunError, match="gives other logits with its weights in blocks than dequantized"):
        load_lm(path)


def test_layers_that_are_exchanged_are_caught(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_lm(str(files("llama", "Q8_0")), check=False)
    right = BlocksOracle(read_model(ModelPlan(lm.name), None))
    assert right.error(lm) < 0.1
    decoder: Any = lm._forward
    decoder._layers[0], decoder._layers[1] = decoder._layers[1], decoder._layers[0]
    assert right.error(lm) > 0.3


def experts_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Taking._experts
    monkeypatch.setattr(Taking, "_experts", lambda *given: right(*given)[::-1])


def gates_as_what_they_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Taking._gated
    monkeypatch.setattr(Taking, "_gated", lambda self, gate, up, *given: right(self, up, gate, *given))


def another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FileRows.fill

    def wrong(rows: FileRows, panels: torch.Tensor) -> None:
        data = rows.data.copy()
        data[:, 0] += 1  # the first exponent
        right(replace(rows, data=data) if "_down_exps" in rows.name else rows, panels)

    monkeypatch.setattr(FileRows, "fill", wrong)


@pytest.mark.parametrize("fault", [experts_in_another_order, gates_as_what_they_let_through, another_scale])
def test_a_fault_in_experts_is_caught(files: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(RunError, match=r"gives other logits with its weights in blocks|other numbers in our decoder"):
        load_lm(str(files("gpt_oss", "MXFP4")))


@pytest.mark.parametrize("norms", ["F16", "BF16"])
def test_49_norms_in_16_bits_are_the_numbers_in_the_file(tmp_path: Path, norms: str) -> None:
    path = tmp_path / f"{norms}.gguf"
    source = make_tiny("qwen2", tmp_path / "source", **SIZES | FAMILIES["qwen2"])
    weights = write_gguf(source, path, "Q8_0", norms=norms)
    lm, plain = load_lm(str(path), dtype="float32"), load_lm(str(path), dtype="float32", compute="dequantized")
    assert (lm.decoder, describe(str(path)).decoder) == ("own, native", "own, native")
    assert relative_error(score(lm), score(plain)) < 0.15
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        assert relative_error(score(plain), model.eval()(torch.tensor([TOKENS])).logits[0]) < 1e-5


def test_native_is_refused_with_its_reason(files: Any, tmp_path: Path) -> None:
    path = str(files("llama", "F32"))
    for form in ("F32", "BF16"):
        assert load_lm(str(files("llama", form))).decoder == "own"
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        (path, {}, "all of them are in `F32`"),
        (str(files("llama", "Q8_0")), {"quantize": "int8"}, "its weights are to be quantized again, to int8"),
        (str(files("llama", "Q8_0")), {"decoder": "transformers"}, "it is disabled"),
        ("builtin:draft", {}, "its weights are not those of a GGUF file"),
    )
    for name, options, reason in cases:
        with pytest.raises(UsageError, match=reason):
            load_lm(name, compute="native", **options)
    with pytest.raises(UsageError, match="compute must be `auto` or `native` or `dequantized`, not `'fast'`"):
        load_lm(path, compute=stand_in("fast"))


def test_a_copy_of_blocks_in_int8_is_refused(files: Any) -> None:
    with pytest.raises(UsageError, match="which are in blocks"):
        Engine.load(str(files("llama", "Q8_0")), "self-int8")


def test_an_embedding_in_16_bits_stays_in_its_file(files: Any, tmp_path: Path) -> None:
    path = files("llama", MIXED)
    table = not_none(ModelPlan(str(path)).header).tensors["token_embd.weight"]
    decoder: Any = load_lm(str(path), dtype="float32")._forward
    rows, tokens = decoder._embedding.file, torch.tensor([3, 0, 90])
    assert (table.kind, len(decoder._embedding.weight)) == ("F16", 0)
    assert torch.equal(decoder.embed(tokens), rows[tokens].reference())
    broken = tmp_path / "broken.gguf"
    content = bytearray(path.read_bytes())
    content[table.begin + table.num_bytes - 2 : table.begin + table.num_bytes] = b"\x00\x7e"  # not a number
    broken.write_bytes(content)
    with pytest.raises(RunError, match=r"`token_embd.weight`.*not finite"):
        load_lm(str(broken))


def test_an_embedding_apart_from_the_output_layer_stays_in_its_file(files: Any, tmp_path: Path) -> None:
    path = files("llama", "Q8_0")
    plan, tied = ModelPlan(str(path)), ModelPlan(str(files("gemma3_text", "Q4_K_M")))
    header = not_none(plan.header)
    table = header.tensors["token_embd.weight"]
    decoder: Any = load_model(plan)._forward
    assert decoder._embedding.file is not None
    assert not len(decoder._embedding.weight)
    assert stand_in(load_model(tied)._forward)._embedding.file is None
    numbers = decoder._embedding.file[torch.tensor([3, 0, 90])].reference().to(torch.bfloat16)
    assert torch.equal(decoder.embed(torch.tensor([3, 0, 90])), numbers)
    in_file = sum(tensor.num_bytes for tensor in header.tensors.values())
    assert in_file - table.num_bytes - 2**16 < load_bytes(plan) <= in_file - table.num_bytes, "norms are float32 there"
    broken = tmp_path / "broken.gguf"
    content = bytearray(path.read_bytes())
    content[table.begin : table.begin + 2] = b"\x00\x7c"  # an infinite scale
    broken.write_bytes(content)
    with pytest.raises(RunError, match=r"`token_embd.weight`.*not finite"):
        load_lm(str(broken))
