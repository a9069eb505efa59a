"""How one model is loaded: the settings that recipes, the command line and Python share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from specdec_cli.call_checks import checked_fields
from specdec_cli.errors import UsageError
from specdec_cli.recipe.keys import check_ranges
from specdec_cli.recipe.schema import LoadedModel
from specdec_cli.recipe.values import Compute, LoadFormat, Quantize, is_device


@checked_fields
@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How one model is loaded.

    Args:
        revision: branch, tag or commit on the hub.
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        load_format: auto, or dummy for random weights.
        quantize: how linear layers are quantized when they are loaded: none, int8 or int4.
        compute: auto (a GGUF file's blocks as they are, where that is possible), native, or dequantized.
    """

    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    quantize: Quantize = "none"
    compute: Compute = "auto"

    def __post_init__(self) -> None:
        """Refuse values out of range, each by its name."""
        check_ranges(self, LoadedModel)
        if not is_device(self.device):
            raise UsageError(f"device is out of range: `{self.device}`", "use auto, cpu, cuda or cuda:N")


class ModelArguments(TypedDict, total=False):
    """The fields of ModelSettings as keyword arguments, for type checkers; a test compares both."""

    revision: str | None
    dtype: str
    device: str
    load_format: LoadFormat
    quantize: Quantize
    compute: Compute
