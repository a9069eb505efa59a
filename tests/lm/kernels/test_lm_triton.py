"""The kernels for a GPU: attention split over keys, products of few rows. Without one Triton interprets them."""

from pathlib import Path

import pytest
import torch
from tiny_engine import PROMPTS, decode, ngram, tokens
from tiny_models import make_tiny
from typed import not_none

pytest.importorskip("triton", reason="Triton's kernels take Triton, which is for Linux")

from test_lm_graphs import GPU, TEXT, Recorder

from specdec_cli.lm import decoders
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward import graphs
from specdec_cli.lm.kernels import few_rows, kinds, linear, split_attention
from specdec_cli.lm.kernels.packing import Part, pack_model
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = [*GPU.marks]
SHAPES = [
    # sequences, queries of each, heads, key heads, head size, keys
    (1, 1, 4, 2, 64, 96),
    (2, 5, 4, 1, 128, 130),
    (3, 2, 2, 2, 80, 65),
    (1, 20, 1, 1, 32, 1100),
]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (7.0, False), (None, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_softmax_of_what_a_query_may_see(shape, softcap: float | None, has_sinks: bool) -> None:
    sequences, each, heads, key_heads, size, num_keys = shape
    num, groups = sequences * each, heads // key_heads
    keys, values = drawn(1, key_heads, 2000, size), drawn(1, key_heads, 2000, size, seed=1)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(2))[: sequences * num_keys]
    slots = order.view(sequences, num_keys).to(DEVICE)
    query = drawn(1, num, heads, size, seed=3).transpose(1, 2)
    last = torch.arange(num_keys - each, num_keys).repeat(sequences).to(DEVICE)
    places = torch.arange(num_keys, device=DEVICE)
    allowed = (places <= last[:, None]) & (places > last[:, None] - 90)
    sinks = drawn(heads, seed=4) if has_sinks else None
    unseen = slots[~allowed.view(sequences, each, num_keys).any(1)]
    spoiled_keys, spoiled_values = keys.clone(), values.clone()
    for kept in (spoiled_keys, spoiled_values):
        kept[0, :, unseen] = torch.nan  # of others, or of those that have been there
    found = split_attention.attend(query, spoiled_keys, spoiled_values, slots, allowed, size**-0.5, softcap, sinks)
    its_keys, its_values = (
        kept[0][:, slots].repeat_interleave(groups, 0).repeat_interleave(each, 1) for kept in (keys, values)
    )
    scores = torch.einsum("hnd,hntd->hnt", query[0], its_keys) * size**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if has_sinks:
        scores = torch.cat((scores, not_none(sinks)[:, None, None].expand(-1, num, 1)), 2)
    weights = scores.softmax(2)[:, :, :num_keys]
    expected = torch.einsum("hnt,hntd->nhd", weights, its_values)
    assert torch.allclose(found[0], expected, atol=2e-5), (found[0] - expected).abs().max()


def test_a_query_that_may_see_nothing_gets_zeros() -> None:
    keys, slots = drawn(1, 2, 100, 32), torch.arange(70, device=DEVICE)[None]
    nothing = torch.zeros(1, 70, dtype=torch.bool, device=DEVICE)
    query = drawn(1, 1, 4, 32, seed=1).transpose(1, 2)
    assert not split_attention.attend(query, keys, keys, slots, nothing, 1.0, None, None).any()


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else() -> None:
    keys, values = drawn(1, 3, 50, 80), drawn(1, 3, 50, 80, seed=1)
    key, value = drawn(1, 7, 3, 80, seed=2).transpose(1, 2), drawn(1, 7, 3, 160, seed=3)[..., :80].transpose(1, 2)
    slots = torch.tensor([44, 3, 9, 0, 49, 17, 30], device=DEVICE)
    expected = keys.index_copy(2, slots, key), values.index_copy(2, slots, value)
    split_attention.write(key, value, keys, values, slots)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize("num_rows", [1, 5, 17, 64, 65])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 256), (130, 384), (64, 100)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_of_any_number_of_rows(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    x, weight = drawn(1, num_rows, num_inputs).half(), drawn(num_outputs, num_inputs, seed=1).half()
    bias = drawn(num_outputs, seed=2).half() if has_bias else None
    found = few_rows.multiply(x, weight, bias)
    expected = x.double() @ weight.double().t() + (not_none(bias).double() if has_bias else 0)
    assert found.shape == (1, num_rows, num_outputs)
    assert found.dtype == torch.float16
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 17, 64, 65])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(72, 256), (136, 512), (64, 96)])
def test_a_product_of_whole_numbers_is_exact(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    if DEVICE == "cpu":  # where torch's product, which takes what the kernel does not, saturates beside AVX2 alone
        monkeypatch.setattr(few_rows, "plain_integer_product", linear.float_integer_product)
    chance = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(-127, 128, (num, num_inputs), dtype=torch.int8, generator=chance).to(DEVICE)
        for num in (num_rows, num_outputs)
    )
    scales = drawn(num_outputs).abs()
    found = few_rows.integer_product(rows, weight, scales)
    assert torch.equal(found, (rows.double() @ weight.double().t()).float() * scales)


@pytest.mark.parametrize("shape", [(128256, 4096), (4096, 14336), (4096, 4096), (5120, 13824), (2048, 5632), (70, 128)])
def test_a_program_reads_whole_pieces_of_a_weight_that_fits(shape) -> None:
    _, inputs, _, _ = few_rows.shape_of_program(*shape)
    assert shape[1] % inputs == 0
    assert few_rows.fits(torch.empty(shape, device="meta", dtype=torch.bfloat16))
    assert not few_rows.fits(torch.empty((4, 100), device="meta", dtype=torch.bfloat16))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a model whose graphs attend by the kernels; on a CPU what is recorded runs anew."""
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "record", Recorder())
        monkeypatch.setattr(graphs, "kernels_for", lambda _: split_attention)
        monkeypatch.setattr(decoders, "check_recordable", lambda *_: None)

    def made(family, **shape):
        folder = str(make_tiny(family, tmp_path / family, **shape))
        return [load_lm(folder, decoder=name, device=DEVICE, block_size=4) for name in ("transformers", "graphs")]

    return made


# A mixture's experts are chosen by the host, which no graph of a GPU holds.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", *["gpt_oss"] * (DEVICE == "cpu")])
def test_graphs_attend_by_the_kernels_as_without(family, recorded) -> None:
    plain, ours = recorded(family)
    steps = [
        [Row(0, TEXT[:9], 1)],
        [Row(1, TEXT[30:37], 4), Row(0, TEXT[:13], 1), Row(2, TEXT[50:53], 2)],
        [Row(0, TEXT[:80], 2)],
    ]
    for rows in steps:
        expected, found = plain.score(rows), ours.score(rows)
        assert torch.allclose(expected, found, atol=2e-4), (expected - found).abs().max()


def test_a_model_of_such_products_computes_what_it_did(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    plain, packed = (
        load_lm(str(make_tiny("qwen2", tmp_path, **shape)), decoder="transformers", device=DEVICE, dtype="float16")
        for _ in "ab"
    )
    pack_model(packed.model, "few rows")
    assert sum(isinstance(module, Part) for module in packed.model.modules()) == 2 * 5
    rows = [Row(0, TEXT[:9], 2), Row(1, TEXT[20:25], 1)]
    assert torch.allclose(plain.score(rows), packed.score(rows), atol=5e-3)


def on_gpu(tmp_path: Path, quantize, seed=0):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    folder = str(make_tiny("llama", tmp_path / str(seed), seed, **shape))
    how = {"device": "cuda", "dtype": "bfloat16", "quantize": quantize, "block_size": 4}
    return load_lm(folder, decoder="graphs", **how)


@pytest.mark.parametrize("quantize", [pytest.param(how, marks=needs_gpu) for how in ("none", "int8")])
def test_a_gpu_gives_a_row_the_same_bits_in_any_company(quantize, tmp_path: Path) -> None:
    lm = on_gpu(tmp_path, quantize)
    alone = [lm.score([Row(0, TEXT[:n], 1)])[0] for n in range(40, 48)]
    for num in (2, 5, 8):
        lm.release(0)
        lm.score([Row(0, TEXT[:39], 1)])
        assert torch.equal(lm.score([Row(0, TEXT[: 39 + num], num)]), torch.stack(alone[:num]))
    lm.score([Row(1, TEXT[50:70], 1), Row(2, TEXT[20:90], 1)])
    lm.release(0)
    lm.score([Row(0, TEXT[:39], 1)])
    together = lm.score([Row(1, TEXT[50:74], 4), Row(0, TEXT[:42], 3), Row(2, TEXT[20:91], 1)])
    assert torch.equal(together[4:7], torch.stack(alone[:3]))


@pytest.mark.parametrize("quantize", [pytest.param(how, marks=needs_gpu) for how in ("none", "int8")])
def test_a_gpu_decodes_the_same_text_with_any_draft_bit_for_bit(quantize, tmp_path: Path) -> None:
    target, draft = on_gpu(tmp_path, quantize), on_gpu(tmp_path, quantize, seed=1)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain = [tokens(decode(target, None, 0, [prompt], params)) for prompt in PROMPTS[:2]]
    for drafter, k in ((draft, 3), (draft, 7), (ngram(), 4)):
        assert [tokens(decode(target, drafter, k, [prompt], params)) for prompt in PROMPTS[:2]] == plain


def wrong(rows, weight, bias):
    return torch.zeros(len(rows), len(weight))


def broken(rows, weight, bias) -> None:
    raise RuntimeError("Failed to find C compiler.")


def test_kernels_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds._try_triton() is None
    for product, said in (
        (wrong, "its kernel computes something else"),
        (broken, "its operator failed: Failed to find"),
    ):
        monkeypatch.setattr(few_rows, "multiply", product)
        kinds.missing.cache_clear()
        assert str(kinds.missing("few rows")).startswith(said)
    kinds.missing.cache_clear()
