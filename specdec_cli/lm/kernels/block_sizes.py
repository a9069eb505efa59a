"""The blocks that `--quantize int4` makes: their types by ggml's numbers, and how large they are."""

from __future__ import annotations

from typing import Final

INT4: Final = 3
"""Of linear layers, Q4_1: 5 bits a number, with a scale and a minimum for each block."""
INT8: Final = 8
"""Of embeddings and the output layer, Q8_0: 8.5 bits a number."""
BLOCK: Final = 32
CODE_BYTES: Final = {INT4: BLOCK // 2, INT8: BLOCK}
_SCALE_BYTES = {INT4: 4, INT8: 2}


def block_bytes(type_: int) -> int:
    """Bytes of a block of INT4 or INT8."""
    return _SCALE_BYTES[type_] + CODE_BYTES[type_]


def row_bytes(type_: int, num_inputs: int) -> int:
    """Bytes of an output's blocks; the last one may have room left."""
    return -(-num_inputs // BLOCK) * block_bytes(type_)
