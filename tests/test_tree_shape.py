"""Shapes of drafted trees: what `--tree` takes."""

from __future__ import annotations

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import TreeShape


@pytest.mark.parametrize(
    ("text", "nodes", "depth", "is_chain"),
    [
        ("4,2,1", [0, 4, 12, 20, 20], 3, False),
        ("1,1", [0, 1, 2, 2, 2], 2, True),
        ("3", [0, 3, 3, 3, 3], 1, False),
        ("1,2", [0, 1, 3, 3, 3], 2, False),
        ("dynamic:60", [0, 60, 60, 60, 60], 60, False),
        ("dynamic:1", [0, 1, 1, 1, 1], 1, False),
    ],
)
def test_a_shape_and_its_nodes_by_depth(text: str, nodes: list[int], depth: int, is_chain: bool) -> None:
    shape = TreeShape.parse(f" {text} ")
    assert str(shape) == text
    assert [shape.num_nodes(k) for k in range(5)] == nodes
    assert (shape.depth, shape.is_chain, shape.is_dynamic) == (depth, is_chain, text.startswith("dynamic"))
    assert shape == TreeShape.parse(text)


def test_width_is_that_of_the_depth() -> None:
    assert [TreeShape.parse("4,2,1").width(depth) for depth in range(1, 5)] == [4, 2, 1, 0]
    assert TreeShape.parse("dynamic:9").width(3) == 9


def test_parents_come_depth_by_depth_and_siblings_together() -> None:
    assert TreeShape.parse("3,2,1").parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)
    assert TreeShape.parse("1,1,1").parents == (-1, 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "4,",
        "4,0",
        "-1",
        "4.5",
        "a",
        "dynamic",
        "dynamic:",
        "dynamic:0",
        "dynamic:4,2",
        "static:4",
        "auto",
        "²",
    ],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shape"):
        TreeShape.parse(text)


@pytest.mark.parametrize("text", ["65", "8,8", "4,4,4", "dynamic:65", "64,1", ",".join("1" * 65), "999999,999999"])
def test_a_tree_of_too_many_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="`64` are possible"):
        TreeShape.parse(text)
