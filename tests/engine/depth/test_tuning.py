"""The table of the adaptive policy's constants: each has a unit and a reason, and each is used."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from specdec_cli.engine.depth import tuning

FILE = Path(str(tuning.__file__))
BODY = ast.parse(FILE.read_text(encoding="utf-8")).body


def names(node: ast.Assign) -> list[str]:
    return [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]


CONSTANTS = [name for node in BODY if isinstance(node, ast.Assign) for name in names(node)]


def test_each_constant_has_its_unit_and_its_reason() -> None:
    for node, reason in pairwise(BODY):
        if isinstance(node, ast.Assign):
            assert isinstance(reason, ast.Expr), names(node)
            assert isinstance(reason.value, ast.Constant), names(node)
            assert re.fullmatch(r"[A-Z][^;]+; .+", str(reason.value.value)), names(node)


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_is_used(name) -> None:
    others = [path for path in FILE.parent.glob("*.py") if path != FILE]
    assert any(f"tuning.{name}" in path.read_text(encoding="utf-8") for path in others)
