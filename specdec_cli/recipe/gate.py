"""The expressions of `--fail-if`: a path into a result, a comparison, and a number or a verdict."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from specdec_cli.errors import closest

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
Verdict = Literal["speculate", "do-not-speculate", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_OF_VERDICTS = ("==", "!=")
_IN_PATH = r"(?:[^<>=!]|(?<![<>=!])=(?!=))"  # a draft's name may hold `=`, and no operator is a single one
_EXPRESSION = re.compile(
    rf"\s*(?P<path>{_IN_PATH}*(?!\s){_IN_PATH})\s*(?P<operator><=|>=|==|!=|<|>)\s*(?P<value>[^<>=!\s]+)\s*"
)


_MISTYPED = {
    "=>": ">=",
    "=<": "<=",
    "=": "==",
    "===": "==",
    ">==": ">=",
    "<==": "<=",
    "!==": "!=",
    "=!": "!=",
    "<>": "!=",
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
}
"""Operators of other languages, and slips, by the operator that is meant."""
_WORDS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "below": "<", "above": ">"}
_SLIP = re.compile(r"\s*(?P<path>.*?\S)\s*(?P<operator>[=<>!]==|=>|=<|=!|<>|≥|≤|≠|=)\s*(?P<value>[^<>=!\s]+)\s*")
_WORDED = re.compile(rf"\s*(?P<path>\S+)\s+-?(?P<operator>{'|'.join(_WORDS)})\s+(?P<value>\S+)\s*")


@dataclass(frozen=True, slots=True)
class GateExpression:
    """`PATH OP NUMBER`, or `PATH == VERDICT`: the gate fails where this is true.

    Args:
        path: keys from the document's root, with dots between.
        operator: one of OPERATORS; of a verdict `==` or `!=`.
        number: what the value is compared with; NaN for a verdict.
        verdict: what it is compared with instead, or None.
    """

    path: str
    operator: str
    number: float
    verdict: str | None = None

    def __str__(self) -> str:
        """The expression in one spelling."""
        return f"{self.path} {self.operator} {self.verdict or format(self.number, 'g')}"

    def is_crossed(self, value: float) -> bool:
        """Whether a value lies on the failing side."""
        return OPERATORS[self.operator](value, self.number)

    def is_crossed_by(self, verdict: str) -> bool:
        """Whether a verdict is the failing one."""
        return (verdict == self.verdict) == (self.operator == "==")


def parse_gate(text: str) -> GateExpression | None:
    """Read an expression; None where the text is none."""
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        return None
    path, operator_, value = match["path"], match["operator"], match["value"]
    if path.endswith("="):  # `=>`
        return None
    if value in VERDICTS:
        return GateExpression(path, operator_, math.nan, value) if operator_ in _OF_VERDICTS else None
    try:
        number = float(value)
    except ValueError:
        return None
    return GateExpression(path, operator_, number) if operator_ in OPERATORS and math.isfinite(number) else None


def meant_gate(text: str) -> str | None:
    """The expression that was most likely meant by a text that is none; None where nothing is close."""
    for match in (_SLIP.fullmatch(text), _WORDED.fullmatch(text), _EXPRESSION.fullmatch(text)):
        if match is None:
            continue
        operator_ = (_MISTYPED | _WORDS).get(match["operator"], match["operator"])
        verdict = closest(match["value"], VERDICTS) if operator_ in _OF_VERDICTS else None
        meant = f"{match['path']} {operator_} {verdict or match['value']}"
        if parse_gate(meant) is not None:
            return meant
    return None


def parse_percentage(text: str) -> float | None:
    """0.05 for `5%`; None where the text is no percentage from 0 up to below 100."""
    match = re.fullmatch(r"\s*(\d{1,2}(?:\.\d{1,9})?)\s*%\s*", text)
    return float(match[1]) / 100 if match else None
