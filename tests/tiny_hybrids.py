"""Tiny random checkpoints of the families whose layers carry a state, each with attention beside it where it can be."""

from __future__ import annotations

from pathlib import Path

from every_type import HYBRIDS, save_tiny

__all__ = ["EXPERTS", "HYBRIDS", "save_hybrid"]
EXPERTS = {"lfm2_moe", "nemotron_h", "qwen3_5_moe_text"}
"""Families whose routers may choose another expert after a rounding; the others have none here."""


def save_hybrid(family: str, folder: Path) -> Path:
    """Save a random checkpoint of a family."""
    made = save_tiny(family, folder / family)
    assert (made / "model.safetensors").is_file(), f"no checkpoint of {family} was made"
    return made
