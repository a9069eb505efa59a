"""Long pieces of prompts on a GPU: torch's causal kernel gives what a mask gives, and takes such pieces alone.

On a CPU the tests have the same pieces go through torch's causal attention there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, make_tiny

from specdec_cli.drafted import Drafted
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward import attention
from specdec_cli.lm.load import load_lm

TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(120)]
TREE = Drafted((5, 6, 7, 8, 9), (-1, -1, 0, 0, 2))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch):
    """Queries and keys of each piece that went through the causal kernel."""
    sizes: list[tuple[int, int]] = []
    attend = attention._attend_causally

    def noted(queries, keys, values, scaling):
        sizes.append((queries.shape[2], keys.shape[2]))
        return attend(queries, keys, values, scaling)

    monkeypatch.setattr(attention, "_has_causal_kernel", lambda queries: queries.shape[2] >= 3)
    monkeypatch.setattr(attention, "_attend_causally", noted)
    return sizes


@pytest.mark.filterwarnings("ignore")  # torch says which of a GPU's kernels it cannot take here
@pytest.mark.parametrize(
    ("family", "num_pieces"),
    # Windows, soft-capped scores and sinks keep their masks.
    [("llama", 2), ("gpt2", 2), ("gemma3_text", 1), ("mistral", 0), ("gemma2", 0), ("gpt_oss", 0)],
)
def test_prompts_have_the_logits_of_masks(
    family: str, num_pieces: int, pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load_lm(str(make_tiny(family, tmp_path)), decoder="transformers", block_size=4, check=False)
    steps = [
        [Row(0, TEXT[:19], 0), Row(1, TEXT[30:32], 1)],
        [Row(1, TEXT[30:44], 3), Row(0, TEXT[:41], 2)],
        [Row(0, TEXT[:42], 6, TREE), Row(1, TEXT[30:64], 20)],
    ]
    found = [lm.score(rows) for rows in steps]
    each = [(19, 19), (12, 14), (22, 41), (20, 34)]
    assert sorted(pieces) == sorted(each * num_pieces)
    monkeypatch.setattr(attention, "_has_causal_kernel", lambda _: False)
    lm.hold(lm.num_blocks)
    for logits, rows in zip(found, steps, strict=True):
        assert torch.allclose(logits, lm.score(rows), atol=1e-4)
    assert len(pieces) == num_pieces * len(each)


def test_the_kernel_is_for_long_pieces_on_a_gpu() -> None:
    long, short = (torch.zeros(1, 4, num, 8, dtype=torch.bfloat16) for num in (128, 127))
    assert not attention._has_causal_kernel(long)
    if torch.cuda.is_available():
        assert attention._has_causal_kernel(long.cuda())
        assert not attention._has_causal_kernel(short.cuda())
        assert not attention._has_causal_kernel(long.cuda().float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_keys", [200, 333])
@pytest.mark.parametrize("num_key_heads", [2, 8])
def test_a_gpus_kernel_is_causal_to_the_last_key(num_keys: int, num_key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 8, 200, 64, generator=generator).cuda().bfloat16()
    keys, values = (torch.randn(1, num_key_heads, num_keys, 64, generator=generator).cuda().bfloat16() for _ in "kv")
    found = attention._attend_causally(queries, keys, values, None)
    groups = 8 // num_key_heads
    mask = torch.ones(200, num_keys, dtype=torch.bool, device="cuda").tril(num_keys - 200)
    keys, values = (one.float().repeat_interleave(groups, 1) for one in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(queries.float(), keys, values, attn_mask=mask)
    assert torch.allclose(found.float(), expected, atol=2e-2)
