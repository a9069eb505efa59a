"""Drafted trees in reports: how many nodes they had, which alternative was accepted, and one of them drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from specdec_cli.drafted import CONTEXT_END
from specdec_cli.events import Emitted
from specdec_cli.quantities import counted
from specdec_cli.report.columns import PageTable, TableColumn, one_digit
from specdec_cli.report.pieces import STYLES, Kind, Piece, marked
from specdec_cli.report.table import NOTHING, rank_words
from specdec_cli.text.printable import printable

_LEGEND = "accepted by rank: how often the first, second, … alternative was accepted where the output came to it."
_COLUMNS = (
    TableColumn("drafted nodes", "num_draft_nodes"),
    TableColumn("nodes per step", "nodes", one_digit),
    TableColumn("depth", "depth", one_digit),
    TableColumn("accepted by rank", "acceptance_by_rank", rank_words),
)
_MOST_DRAWN = 30
"""Lines of a drawn tree; a tree of 64 nodes would fill two screens."""


def tree_table(name: str, arms: Iterable[tuple[str, Mapping[str, Any] | None]]) -> PageTable | None:
    """The trees that arms drafted; None where all of them drafted chains.

    Args:
        name: head of the first column.
        arms: names with their `speculative` objects of a document, None where nothing was counted.
    """
    rows = [
        {"name": arm, "nodes": counts["num_draft_nodes"] / num, "depth": counts["num_draft_tokens"] / num, **counts}
        for arm, counts in arms
        if counts is not None and "num_draft_nodes" in counts
        for num in [counts["num_drafts"]]
    ]
    columns = (TableColumn(name, "name"), *_COLUMNS)
    return PageTable.of("Drafted trees", columns, rows, _LEGEND) if rows else None


def drawn_tree(emitted: Emitted, piece: Callable[[int], str], is_coloured: bool) -> RenderableType:
    """The tree of a step as text: nodes without siblings stand in one line, the accepted path is marked.

    Args:
        emitted: of a step that drafted a tree.
        piece: text of a token.
        is_coloured: whether colour marks the path, otherwise brackets.
    """
    drafted = emitted.tree
    assert drafted is not None, "only a step with a tree is drawn"
    path = set(drafted.follow(emitted.tokens[: emitted.num_accepted]))
    head = f"first drafted tree: {counted(len(drafted), 'node')}, {len(path)} accepted"
    root = Tree(Text(head, style="dim"), guide_style="dim")
    waiting, num_lines = [(root, node) for node in reversed(drafted.children(CONTEXT_END))], 0
    while waiting:
        above, node = waiting.pop()
        line = [node]
        while len(following := drafted.children(line[-1])) == 1:
            line += following
        num_lines += 1
        if num_lines > _MOST_DRAWN:
            root.add(Text("…", style="dim"))
            break
        words = Text(overflow="fold")
        for node_ in line:
            kind: Kind = "accepted" if node_ in path else "text"
            shown = Piece(_one_line(piece(drafted.tokens[node_])), kind)
            words.append(shown.text if is_coloured else marked(shown), STYLES[kind] if is_coloured else "")
        below = above.add(words)
        waiting += [(below, child) for child in reversed(following)]
    return root


def _one_line(text: str) -> str:
    """A token's text without line breaks; one that has none that can be seen, as its escape."""
    shown = printable(text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r"))
    return shown or NOTHING
