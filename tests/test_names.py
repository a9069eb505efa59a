"""Class names are unique in the package: whoever greps for one finds one."""

import ast
from collections import defaultdict
from pathlib import Path

import specdec_cli

ROOT = Path(specdec_cli.__file__).parent

PLUG_INS = {"Drafter"}
"""Classes that a file is found by: every file in `drafters/` has one, and so has a drafter from another package."""


def classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_class_names_are_unique() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1 and name not in PLUG_INS} == {}


def test_plug_ins_lie_in_their_room() -> None:
    for name in PLUG_INS:
        assert all(place.startswith("drafters/") for place in classes()[name])
