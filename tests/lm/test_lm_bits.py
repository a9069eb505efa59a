"""In bfloat16 on a CPU a row has the same bits in any company: decoding alone, verifying, in a batch."""

import functools

import pytest
import torch
from tiny_models import make_tiny

from specdec_cli.lm.door import Row
from specdec_cli.lm.invariance import row_invariance
from specdec_cli.lm.load import load_lm

FAMILIES = ["llama", "llama by transformers", "mistral", "gemma2", "gpt2", "qwen2", "qwen3", "qwen3 by transformers"]
FAMILIES += ["bitnet", "olmo2"]
TEXT = [(11 * i * i + 3 * i) % 97 for i in range(100)]


@functools.cache
def holds(dtype):
    return all(check.holds for check in row_invariance(dtype) if check.needed)


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request, tmp_path_factory):
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    family, _, decoder = request.param.partition(" by ")
    folder = make_tiny(family, tmp_path_factory.mktemp(family))
    return load_lm(str(folder), dtype="bfloat16", decoder=decoder or "auto")


def one_by_one(lm, start, stop):
    """Plain decoding: one lone token a forward after the prompt."""
    lm.score([Row(0, TEXT[:start], 0)])
    logits = [lm.score([Row(0, TEXT[:length], 1)]) for length in range(start + 1, stop + 1)]
    lm.release(0)
    return torch.cat(logits)


@pytest.mark.parametrize("num_rows", [2, 5, 9])
def test_verifying_equals_decoding_alone(lm, num_rows):
    plain = one_by_one(lm, 50, 90)
    lm.score([Row(0, TEXT[:50], 0)])
    steps = [
        lm.score([Row(0, TEXT[: min(90, end)], min(90, end) - end + num_rows)])
        for end in range(50 + num_rows, 90 + num_rows, num_rows)
    ]
    lm.release(0)
    assert torch.equal(torch.cat(steps), plain)


def test_a_batch_equals_decoding_alone(lm):
    plain = one_by_one(lm, 61, 70)
    for handle in range(4):
        lm.score([Row(handle, TEXT[: 61 - 7 * handle], 0)])
    for i, length in enumerate(range(62, 71)):
        logits = lm.score([Row(handle, TEXT[: length - 7 * handle], 1) for handle in range(4)])
        assert torch.equal(logits[0], plain[i])
    for handle in range(4):
        lm.release(handle)


def test_rejected_drafts_leave_no_trace(lm):
    plain = one_by_one(lm, 58, 68)
    lm.score([Row(0, TEXT[:58], 0)])
    for i, length in enumerate(range(59, 69)):
        logits = lm.score([Row(0, [*TEXT[:length], 3, 1, 4, 1], 5)])
        assert torch.equal(logits[0], plain[i])
    lm.release(0)


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_float32_and_our_own_decoder_run_unpadded(tmp_path, monkeypatch, decoder):
    folder = str(make_tiny("llama", tmp_path))
    for dtype, rows in (("float32", 1), ("bfloat16", 1 if decoder == "auto" else 2), ("float16", 2)):
        lm = load_lm(folder, dtype=dtype, decoder=decoder)
        seen = []
        forward = lm._forward

        def watching(cache, tokens, layout, wanted, seen=seen, forward=forward):
            seen.append(len(tokens))
            return forward(cache, tokens, layout, wanted)

        monkeypatch.setattr(lm, "_forward", watching)
        assert lm.score([Row(0, [5], 1)]).shape == (1, 97)
        assert seen == [rows]
        assert lm.score([Row(0, [5, 6, 7], 0), Row(1, [5], 1)]).shape == (1, 97)


def test_invariance_finds_what_differs():
    """float32 products of 1 and 5 rows round apart on some machine or other; the check must be able to say so."""
    checks = row_invariance(torch.bfloat16)
    assert {check.dtype for check in checks} == {"bfloat16"}
    assert any(check.kernel.startswith("attention") for check in checks)
    assert [check.holds for check in checks if "own decoder" in check.kernel] == [True, True]
    assert all(check.holds == (not check.rows_that_differ) for check in checks)


def test_attention_without_the_key_grain_is_caught(monkeypatch):
    """The planted fault: keys read up to the last query, so that a position's sum depends on its company."""
    from specdec_cli.lm import invariance

    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    monkeypatch.setattr(invariance, "KEY_GRAIN", 1 << 10)
    right = invariance.Span

    def too_few_keys(start, stop, num_keys, *others):
        return right(start, stop, min(num_keys, 700 + stop), *others)

    monkeypatch.setattr(invariance, "Span", too_few_keys)
    assert not all(check.holds for check in row_invariance(torch.bfloat16) if check.kernel.startswith("attention"))
