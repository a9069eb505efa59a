"""Whether products take a GGUF file's blocks as they are (native), or numbers dequantized at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import UsageError
from specdec_cli.lm.decoders import own_obstacle
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_of
from specdec_cli.lm.files.gguf_folder import gguf_of
from specdec_cli.lm.files.gguf_header import read_gguf_header
from specdec_cli.lm.gguf_blocks import blocks_obstacle

NATIVE, DEQUANTIZED = "native", "dequantized"


def is_native(
    name: str, folder: Path, config: Any, compute: str, *, quantize: str, decoder: str, device: torch.device
) -> bool:
    """Whether a model's products take its file's blocks.

    Args:
        name: for messages.
        folder: of the model.
        config: of the model.
        compute: auto (native where that is possible), native or dequantized.
        quantize: none or int8.
        decoder: one of DECODERS.
        device: where it runs.

    Raises:
        UsageError: native, which is not possible; or another word.
    """
    if compute not in ("auto", NATIVE, DEQUANTIZED):
        raise UsageError(f"unknown computation `{compute}`", f"use auto, {NATIVE} or {DEQUANTIZED}")
    if compute == DEQUANTIZED:
        return False
    obstacle = native_obstacle(name, folder, config, quantize=quantize, decoder=decoder, device=device)
    if obstacle is not None and compute == NATIVE:
        raise UsageError(
            f"`{name}` cannot be computed on as its file holds it: {obstacle}", "leave --compute out (target.compute)"
        )
    return obstacle is None


def native_obstacle(
    name: str, folder: Path, config: Any, *, quantize: str, decoder: str, device: torch.device
) -> str | None:
    """Why a model's products cannot take its file's blocks; None where they can."""
    path = gguf_of(folder)
    if path is None:
        return "its weights are not those of a GGUF file"
    if adapter_of(folder) is not None:
        return "an adapter is merged into plain numbers"
    if quantize != "none":
        return f"they are to be quantized again, to {quantize}"
    outline = dummy.on_paper(config, "auto", False)
    return own_obstacle(outline, decoder, device) or blocks_obstacle(read_gguf_header(name, path))
