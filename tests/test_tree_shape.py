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
        ("3,2+1,1", [0, 3, 6, 9, 9], 3, False),
        ("3,0+2,0+1", [0, 3, 5, 6, 6], 3, False),
        ("2,1+0,2", [0, 2, 3, 5, 5], 3, False),
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


@pytest.mark.parametrize("text", ["4,2,1", "3,2+1,1", "3,0+2,0+1", "2,1+0,2", "1,1", "64", "5"])
def test_a_shape_names_the_children_of_every_node(text: str) -> None:
    shape = TreeShape.parse(text)
    parents = shape.parents
    for node in range(-1, len(parents)):
        assert list(shape.children(node)) == [child for child, parent in enumerate(parents) if parent == node]
    assert TreeShape.of(parents) == shape
    assert str(TreeShape.of(parents)) == text


def test_a_shape_has_one_spelling() -> None:
    assert str(TreeShape.parse("3, 1 + 1 + 1")) == "3,1"
    assert str(TreeShape.parse("3,2+1+0")) == "3,2+1"
    assert str(TreeShape.parse("3,2+1,1").cut(2)) == "3,2+1"


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
        "3,0+0",
        "3,+1",
        "3,2+1.5",
        "dynamic:2+1",
        "autos",
        "²",
    ],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shape"):
        TreeShape.parse(text)


def test_auto_is_a_wish_and_no_shape() -> None:
    with pytest.raises(UsageError, match="the tree `auto` is for `sweep-k`, which looks for the best shape"):
        TreeShape.parse(" auto ")


@pytest.mark.parametrize("text", ["65", "8,8", "4,4,4", "dynamic:65", "64,1", ",".join("1" * 65), "999999,999999"])
def test_a_tree_of_too_many_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="`64` are possible"):
        TreeShape.parse(text)


@pytest.mark.parametrize("text", ["2+1", "2,1+1+1", "3,1+0+0,1+1"])
def test_more_counts_than_nodes_above_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="counts at depth"):
        TreeShape.parse(text)
