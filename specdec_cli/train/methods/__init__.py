"""The table of training methods: a name, and the class that is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from specdec_cli.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from specdec_cli.train.method import TrainingMethod

METHODS = {
    "dflash": "dflash:DFlashTraining",
    "dflash2": "dflash2:DFlash2Training",
    "distill": "distill:DistillTraining",
    "dspark": "dspark:DSparkTraining",
    "eagle3": "eagle3:Eagle3Training",
    "medusa": "medusa:MedusaTraining",
    "pard": "pard:PardTraining",
}
"""Each method's module in this folder, and its class."""


def training_method(name: str) -> type[TrainingMethod]:
    """The class of a method.

    Raises:
        UsageError: there is none of the name.
    """
    if name not in METHODS:
        raise UsageError(
            f"unknown training method `{name}`{did_you_mean(name, METHODS)}", f"one of: {', '.join(METHODS)}"
        )
    module, _, class_name = METHODS[name].partition(":")
    method: type[TrainingMethod] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return method
