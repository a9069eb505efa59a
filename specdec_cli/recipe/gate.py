"""What `--fail-if` says: a path into a result, a comparison and a number."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_IN_PATH = r"(?:[^<>=!]|(?<![<>=!])=(?!=))"  # a draft's name may hold `=`, and no operator is a single one
_EXPRESSION = re.compile(
    rf"\s*(?P<path>{_IN_PATH}*(?!\s){_IN_PATH})\s*(?P<operator><=|>=|==|<|>)\s*(?P<number>[^<>=!\s]+)\s*"
)


@dataclass(frozen=True, slots=True)
class GateExpression:
    """`PATH OP NUMBER`: the gate fails where this is true.

    Args:
        path: keys from the document's root, with dots between.
        operator: one of OPERATORS.
        number: what the value is compared with.
    """

    path: str
    operator: str
    number: float

    def __str__(self) -> str:
        """The expression in one spelling."""
        return f"{self.path} {self.operator} {self.number:g}"

    def is_crossed(self, value: float) -> bool:
        """Whether a value lies on the failing side."""
        return OPERATORS[self.operator](value, self.number)


def parse_gate(text: str) -> GateExpression | None:
    """Read an expression; None where the text is none."""
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        return None
    try:
        number = float(match["number"])
    except ValueError:
        return None
    return GateExpression(match["path"], match["operator"], number) if math.isfinite(number) else None


def parse_percentage(text: str) -> float | None:
    """0.05 for `5%`; None where the text is no percentage from 0 up to below 100."""
    match = re.fullmatch(r"\s*(\d{1,2}(?:\.\d{1,9})?)\s*%\s*", text)
    return float(match[1]) / 100 if match else None
