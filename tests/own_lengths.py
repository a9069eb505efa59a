"""Which modelling files of transformers make masks or positions from lengths, as packed rows must not have it.

A packed forward holds tokens of several sequences and, where attention is not replaced, their keys one behind another.
Code that slices a buffer by the number of queries or keys, or counts positions by the tokens that it is given, takes
them for one sequence. Found in the syntax trees, so that a new family of a later transformers is found, too.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING


def signs(model_type: str) -> frozenset[str]:
    """What the modelling file of a causal type does by lengths: `self.buffer[...]`, a function of positions."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return _signs_of_file(Path(inspect.getfile(sys.modules[model_class.__module__])))


@cache
def _signs_of_file(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    buffers = {_name(call.args[0]) for call in calls if _called(call) == "register_buffer" and call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node.value) == "Buffer":
            buffers |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    found = {f"self.{its}" for node in ast.walk(tree) if (its := _sliced_by_length(node)) in buffers}
    found |= {_called(call) for call in calls if _called(call).startswith("create_position_ids_from_input")}
    return frozenset(found)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _name(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _sliced_by_length(node: ast.AST) -> str | None:
    """X of `self.X[..., :length]`, whose bound is computed."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Attribute):
        return None
    bounds = [
        bound for part in ast.walk(node.slice) if isinstance(part, ast.Slice) for bound in (part.lower, part.upper)
    ]
    is_computed = any(bound is not None and not isinstance(bound, ast.Constant) for bound in bounds)
    return node.value.attr if is_computed else None
