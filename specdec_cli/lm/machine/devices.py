"""Devices by their names in recipes: auto, cpu, cuda or cuda:N."""

from __future__ import annotations

import torch

from specdec_cli.errors import RunError


def device_of(name: str) -> torch.device:
    """The device that a name means, whether it is here or not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def device_named(name: str) -> torch.device:
    """The same, once it is found to be here.

    Raises:
        RunError: it is not here.
    """
    device = device_of(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device `{name}` is not here", "use --device cpu, or --device auto")
    return device
