"""bfloat16 bits of models whose own classes multiply or attend: linear layers, attention, routers of a mixture."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_type import TYPES, VOCAB, save_tiny
from invariance import holds
from transformers.models.codegen.modeling_codegen import CodeGenAttention

from specdec_cli.lm.door import Row
from specdec_cli.lm.families import own_attention
from specdec_cli.lm.kernels import own_products
from specdec_cli.lm.kernels.own_products import steady_linear
from specdec_cli.lm.load import load_lm

LENGTH = 45
ROUTED = [name for name in ("flint",) if name in TYPES]  # transformers 5.17 lacks it
FAMILIES = ["falcon", "codegen", "gptj", *ROUTED]
PATCHED = ["codegen"] if hasattr(CodeGenAttention, "_attn") else []  # transformers before 5.24


def num_that_differ(folder: Path, length: int = LENGTH) -> int:
    """How many tokens' logits have other bits in drafts of three sequences than in plain decoding of each."""
    lm = load_lm(str(folder), dtype="bfloat16", num_blocks=120, block_size=4, extra_tokens=8, check=False)
    chance = random.Random(0)
    texts = [[chance.randrange(VOCAB) for _ in range(length)] for _ in range(3)]
    alone = [
        torch.cat([lm.score([Row(i, text[:end], 1)]) for end in range(1, length + 1)]) for i, text in enumerate(texts)
    ]
    for handle in range(3):
        lm.release(handle)
    ends, differ = [0, 0, 0], 0
    while min(ends) < length:
        counts = [min(chance.randrange(7), length - end) for end in ends]
        rows = [Row(i, texts[i][: ends[i] + n], n) for i, n in enumerate(counts) if n]
        found = iter(torch.split(lm.score(rows), [row.num_logits for row in rows])) if rows else iter(())
        for i, n in enumerate(counts):
            if n:
                differ += int((next(found) != alone[i][ends[i] : ends[i] + n]).any(1).sum())
            ends[i] += n
    return differ


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    assert num_that_differ(save_tiny(family, tmp_path / family)) == 0


@pytest.mark.parametrize("family", ["falcon", *ROUTED, *PATCHED])
def test_what_depends_on_the_company_is_caught(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults, in the functions that take the place of torch's and of the family's attention."""
    attend = own_attention.each_sequence

    def product(input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return steady_linear(input, weight, bias) * (1 + 0.01 * (len(input) > 2))

    def attention(alone: Any, query: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return attend(alone, query, *given, **named) * (1 + 0.01 * (query.shape[2] > 2))

    monkeypatch.setattr(own_products, "steady_linear", product)
    monkeypatch.setattr(own_attention, "each_sequence", attention)
    assert num_that_differ(save_tiny(family, tmp_path / family), 12) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_steady_product_is_the_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (7, 10))
    bias, right = torch.ones(10, dtype=dtype), rows.float() @ weight.float().t() + 1
    for count in range(8):
        found = steady_linear(rows[:count], weight, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), right[:count], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(steady_linear(rows[None], weight)[0], F.linear(rows, weight), rtol=2e-2, atol=2e-2)
