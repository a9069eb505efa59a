"""In bfloat16 on a CPU a row has the same bits in any company: decoding alone, verifying, in a batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from invariance import holds, known_invariance
from shortened import mostly_slow
from tiny_models import make_tiny
from typed import stand_in

from specdec_cli.lm import invariance
from specdec_cli.lm.door import Row
from specdec_cli.lm.kernels.kinds import kind_for
from specdec_cli.lm.load import load_lm

FAMILIES = ["llama", "llama by transformers", "mistral", "gemma2", "gpt2", "qwen2", "qwen3", "qwen3 by transformers"]
FAMILIES += ["bitnet", "olmo2", "mistral by transformers", "gemma2 by transformers", "olmo2 by transformers"]
TEXT = [(11 * i * i + 3 * i) % 97 for i in range(100)]


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
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


@pytest.mark.parametrize("num_rows", mostly_slow([2, 5, 9], [5]))
def test_verifying_equals_decoding_alone(lm, num_rows: int) -> None:
    plain = one_by_one(lm, 50, 90)
    lm.score([Row(0, TEXT[:50], 0)])
    steps = [
        lm.score([Row(0, TEXT[: min(90, end)], min(90, end) - end + num_rows)])
        for end in range(50 + num_rows, 90 + num_rows, num_rows)
    ]
    lm.release(0)
    assert torch.equal(torch.cat(steps), plain)


def test_a_batch_equals_decoding_alone(lm) -> None:
    plain = one_by_one(lm, 61, 70)
    for handle in range(4):
        lm.score([Row(handle, TEXT[: 61 - 7 * handle], 0)])
    for i, length in enumerate(range(62, 71)):
        logits = lm.score([Row(handle, TEXT[: length - 7 * handle], 1) for handle in range(4)])
        assert torch.equal(logits[0], plain[i])
    for handle in range(4):
        lm.release(handle)


def test_many_rows_equal_decoding_alone(lm) -> None:
    """As many as the row-invariance test tries: some kernels keep bits among fewer only, and take turns."""
    plain = one_by_one(lm, 61, 73)
    for handle in range(5):
        lm.score([Row(handle, TEXT[: 61 - handle], 0)])
    logits = lm.score([Row(handle, TEXT[: 73 - handle], 12) for handle in range(5)])
    for handle in range(5):
        assert torch.equal(logits[12 * handle + handle : 12 * handle + 12], plain[: 12 - handle])
        lm.release(handle)


def test_turns_give_every_row_its_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("mistral", tmp_path)), dtype="float32", decoder="transformers")
    rows = [Row(0, TEXT[:9], 3), Row(1, TEXT[5:8], 0), Row(2, TEXT[3:23], 12), Row(3, TEXT[:1], 1), Row(4, TEXT[:2], 2)]
    whole = lm.score(rows)
    for row in rows:
        lm.release(row.handle)
    sizes = []
    forward = lm._forward
    run = stand_in(forward).run
    monkeypatch.setattr(forward, "run", lambda layout: sizes.append(len(layout.tokens)) or run(layout))
    monkeypatch.setattr(forward, "layouts", replace(stand_in(forward).layouts, rows_together=6))
    torch.testing.assert_close(lm.score(rows), whole, rtol=1e-3, atol=1e-4)
    assert sizes == [6, 6, 6, 6, 6, 5]
    lm.check_integrity()
    longer = [Row(row.handle, [*row.context, 7], 1) for row in rows]
    found = lm.score(longer)
    assert sizes[6:] == [5]
    for row in rows:
        lm.release(row.handle)
    monkeypatch.setattr(forward, "layouts", replace(stand_in(forward).layouts, rows_together=64))
    torch.testing.assert_close(found, lm.score(longer), rtol=1e-3, atol=1e-4)
    for row in rows:
        lm.release(row.handle)
    assert lm.score([Row(0, TEXT[:80], 1), Row(1, TEXT[:3], 1)]).shape == (2, 97)
    assert sizes[-1] == 83, "more than the promise covers go together"


def test_fewer_rows_are_taken_together_where_products_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.lm import invariance

    class Tiled:
        """As AMX has it: another order of sums beyond 32 rows."""

        def __init__(self, weight, *_) -> None:
            self.weight = weight

        def __call__(self, rows):
            return rows.flip(0) if len(rows) > 32 else rows

    alone = invariance.rows_together.__wrapped__
    monkeypatch.setattr(invariance, "pack", Tiled)
    assert alone(torch.bfloat16, "packed") == 32
    monkeypatch.setattr(Tiled, "__call__", lambda _, rows: rows)
    assert alone(torch.bfloat16, "packed") == 64
    monkeypatch.setattr(Tiled, "__call__", lambda _, rows: rows * len(rows))
    assert alone(torch.bfloat16, "packed") == 64, "turns would not mend it; doctor finds it"


def test_rejected_drafts_leave_no_trace(lm) -> None:
    plain = one_by_one(lm, 58, 68)
    lm.score([Row(0, TEXT[:58], 0)])
    for i, length in enumerate(range(59, 69)):
        logits = lm.score([Row(0, [*TEXT[:length], 3, 1, 4, 1], 5)])
        assert torch.equal(logits[0], plain[i])
    lm.release(0)


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_float32_and_our_own_decoder_run_unpadded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    folder = str(make_tiny("llama", tmp_path))
    for dtype, rows in (("float32", 1), ("bfloat16", 1 if decoder == "auto" else 2), ("float16", 2)):
        lm = load_lm(folder, dtype=dtype, decoder=decoder)
        seen: list[Any] = []
        real = stand_in(lm)._forward.run

        def watching(layout, seen=seen, run=real):
            seen.append(len(layout.tokens))
            return run(layout)

        monkeypatch.setattr(lm._forward, "run", watching)
        assert lm.score([Row(0, [5], 1)]).shape == (1, 97)
        assert seen == [rows]
        assert lm.score([Row(0, [5, 6, 7], 0), Row(1, [5], 1)]).shape == (1, 97)


def test_invariance_is_asked_of_attention_and_of_our_own_decoder() -> None:
    checks = known_invariance(torch.bfloat16)
    assert {check.dtype for check in checks} == {"bfloat16"}
    assert any(check.kernel.startswith("attention") for check in checks)
    assert [check.holds for check in checks if "own decoder" in check.kernel] == [True] * 9


def test_its_models_have_the_weights_of_those_of_transformers() -> None:
    """Plain modules stand for these classes, whose import takes seconds."""
    same = {**invariance.DECODER, "tie_word_embeddings": False}
    with torch.device("meta"):
        right = [transformers.LlamaForCausalLM(transformers.LlamaConfig(**same))]
        right += [transformers.GptOssForCausalLM(transformers.GptOssConfig(**same, **invariance.EXPERTS))]
    for make, model in zip(invariance._MODELS.values(), right, strict=True):
        plain = invariance._random(make(), torch.float32)
        shapes, theirs = ({key: weight.shape for key, weight in m.state_dict().items()} for m in (plain, model))
        assert shapes == theirs
        assert type(plain).__name__ == type(model).__name__


def test_the_plain_product_is_needed_where_no_packed_one_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in {"plain", kind_for(torch.bfloat16, torch.device("cpu"))}:
        monkeypatch.setattr(invariance, "kind_for", lambda *_, kind=kind: kind)
        with torch.inference_mode():
            every = invariance._linear_checks(torch.bfloat16, torch.Generator().manual_seed(0))
            checks = [check for check in every if check.kernel.startswith("linear")]
        together = [check.needed for check in checks if "alone" not in check.kernel]
        assert together == [kind == "plain"] * len(invariance.LINEAR_SHAPES)


def test_attention_without_the_key_grain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: keys read up to the last query, so that a position's sum depends on its company."""
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    monkeypatch.setattr(invariance, "KEY_GRAIN", 1 << 10)
    right = invariance.Span

    def too_few_keys(start, stop, num_keys, *others):
        return right(start, stop, min(num_keys, 700 + stop), *others)

    monkeypatch.setattr(invariance, "Span", too_few_keys)
    with torch.inference_mode():
        checks = [*invariance._attention_checks(torch.bfloat16, torch.Generator().manual_seed(0))]
    assert not all(check.holds for check in checks)
