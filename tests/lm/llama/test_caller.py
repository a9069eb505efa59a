"""Tables of rotary positions: numbers in order, however transformers' rotary module lays its own out."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specdec_cli.lm.llama.caller import Rotations


def by_frequency(_: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers 5.17's GPT-OSS: [1, R/2, positions] transposed, so that a position's numbers lie far apart."""
    angles = (torch.tensor([[1.0], [0.5], [0.25]]) * positions.float()).T
    return angles.cos()[None], angles.sin()[None]


def test_a_rotary_module_may_return_views() -> None:
    rotations = Rotations(by_frequency, 6, None)
    (table,) = ctypes.cast(rotations.address(4), ctypes.POINTER(ctypes.c_void_p))[:1]
    numbers = torch.tensor(ctypes.cast(table, ctypes.POINTER(ctypes.c_float))[: 4 * 3 * 2]).view(4, 3, 2)
    angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.5, 0.25])
    assert torch.allclose(numbers, torch.stack((angles.cos(), angles.sin()), 2))
