"""Paths in documents, such as `by_task.math.speedup.median`, which gates, baselines and tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where it was not measured."""
    node: Any = document
    while path and node is not None:
        items = _items(node)
        key, path = first_key(path, list(items))
        node = items.get(key)
    return node


def _items(node: Any) -> Mapping[str, Any]:
    """The children of a node by key; items of a list by position, and by the name of their draft."""
    if isinstance(node, Mapping):
        return node
    items = list(node) if isinstance(node, list) else []
    named = {item["draft"]: item for item in items if isinstance(item, Mapping) and isinstance(item.get("draft"), str)}
    return {str(place): item for place, item in enumerate(items)} | named


def first_key(path: str, known: Sequence[str]) -> tuple[str, str]:
    """The longest known key that a path begins with (a task's name may hold dots), else its first part."""
    fitting = [key for key in known if path == key or path.startswith(f"{key}.")]
    key = max(fitting, key=len, default=path.partition(".")[0])
    return key, path[len(key) + 1 :]
