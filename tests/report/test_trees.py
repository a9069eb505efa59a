"""Drafted trees in reports: rows and tables that only trees have, marks for alternatives, and a drawn tree."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from specdec_cli.document import SpeculativeResult
from specdec_cli.drafted import Drafted
from specdec_cli.engine.meter import Meter
from specdec_cli.events import Emitted, SpeculativeCounts, Stepped
from specdec_cli.measure.chat.chat import ChatTurn
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS, NODES, ServerCounts, statistics
from specdec_cli.report.chat import statistics_line
from specdec_cli.report.endpoint import counter_lines
from specdec_cli.report.pieces import Piece, TokenPieces, marked
from specdec_cli.report.result import grid_of
from specdec_cli.report.table import Column, rank_words, run_table
from specdec_cli.report.trees import drawn_tree, tree_table

WORDS = ["Once", " upon", " a", " time", "\n", "\x1b[2J", " the", " end"]
TREE = Drafted((1, 2, 3, 4, 6, 7), (-1, -1, 0, 0, 2, 4))
STEPPED = Emitted(
    *(0, (1, 3, 6, 2), " upon time the a", 4, 3, False),
    num_nodes=6, ranks=((1, 2), (1, 2), (1, 1), (0, 1)), tree=TREE,
)  # fmt: skip


def shown(what: RenderableType | None, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_engine_that_counts_no_nodes_has_no_table() -> None:
    server = ServerCounts()
    server.add_run({DRAFTS: 3, DRAFTED: 12, ACCEPTED: 5}, 8)
    assert tree_table("arm", [("draft", SpeculativeResult.of(server))]) is None


def counts(*emitted: Emitted) -> SpeculativeCounts:
    found = SpeculativeCounts()
    for one in emitted:
        found.add(one)
    return found


def column(*emitted: Emitted) -> Column:
    meter = Meter()
    meter.observe(Stepped(emitted, 1, 0, 0, 0.1, 0.2, 0.1, 0, 0))
    return Column("with the draft", 4, meter)


CHAIN = Emitted(0, (1, 2), " upon a", 3, 1, False, num_nodes=3)


def test_the_summary_has_rows_of_trees_where_trees_ran() -> None:
    trees, chains = shown(run_table([column(STEPPED, CHAIN)])), shown(run_table([column(CHAIN)]))
    assert "drafted nodes" in trees
    assert " 9 " in trees
    assert "accepted by rank 1, 2, …" in trees
    assert "75% 0%" in trees
    assert "nodes" not in chains
    assert "rank" not in chains
    both = shown(run_table([column(STEPPED), column(CHAIN)]))
    assert [line.split()[-2:] for line in both.splitlines() if "nodes" in line] == [["6", "–"]]


def test_a_table_of_the_arms_with_trees() -> None:
    arms = [("tree", counts(STEPPED, CHAIN).as_dict()), ("chain", counts(CHAIN).as_dict()), ("other", None)]
    table = tree_table("arm", arms)
    assert table is not None
    assert table.rows == [["tree", "9", "4.5", "3.5", "75% 0%"]]
    assert tree_table("arm", arms[1:]) is None
    console = Console(file=io.StringIO(), width=80)
    console.print(grid_of(table))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines[:-1])) <= 80
    assert "nodes per step" in " ".join(lines)


@pytest.mark.parametrize(
    ("rates", "words"),
    [([], "–"), ([0.5, None], "50% –"), ([0.5] * 8, " ".join(["50%"] * 8)), ([0.5] * 9, " ".join(["50%"] * 8 + ["…"]))],
)
def test_ranks_in_a_cell(rates: list[float | None], words: str) -> None:
    assert rank_words(rates) == words


class OneByOne:
    provisional = ""

    def push(self, token_id: int) -> str:
        return WORDS[token_id]

    def flush(self) -> str:
        return ""


def test_a_token_that_was_not_the_drafts_first_choice_is_marked() -> None:
    emitted = Emitted(0, (0, 1, 2), "Once upon a", 2, 2, False, ranks=((2, 3), (1, 1)))
    found = TokenPieces(OneByOne()).feed(emitted)
    assert found == [Piece("Once", "alternative"), Piece(" upon", "accepted"), Piece(" a", "own")]
    assert "".join(map(marked, found)) == "{Once}[ upon] a"


def test_a_tree_is_drawn_with_its_accepted_path() -> None:
    lines = shown(drawn_tree(STEPPED, WORDS.__getitem__, is_coloured=False)).splitlines()
    assert lines[0] == "first drafted tree: 6 nodes, 3 accepted"
    assert [line.rstrip() for line in lines[1:]] == [
        "├── [ upon]",
        "│   ├── [ time][ the] end",
        "│   └── \\n",
        "└──  a",
    ]


def test_no_token_of_a_drawn_tree_acts_on_the_terminal() -> None:
    emitted = Emitted(0, (5,), "", 1, 1, False, num_nodes=2, tree=Drafted((5, 0), (-1, -1)))
    for is_coloured in (False, True):
        assert "\x1b" not in shown(drawn_tree(emitted, WORDS.__getitem__, is_coloured))


def test_a_tree_of_64_nodes_fits_a_screen() -> None:
    wide = Drafted(tuple(range(64)), (-1,) * 64)
    emitted = Emitted(0, (70,), "", 1, 0, False, num_nodes=64, tree=wide)
    lines = shown(drawn_tree(emitted, lambda token: "a long token of text " * 6, is_coloured=False)).splitlines()
    assert lines[-1].endswith("…")
    assert len([line for line in lines if line.startswith(("├", "└"))]) == 31
    assert max(map(len, lines[:-1])) <= 80


def test_a_chats_line_says_how_large_its_trees_were() -> None:
    def line(one: Emitted) -> str:
        return statistics_line(ChatTurn("", completion_tokens=4, speculative=counts(one).as_dict()), "k 4")

    assert "acceptance length 4.00 · 6.0 nodes per step · k 4" in line(STEPPED)
    assert "nodes" not in line(CHAIN)


def server(nodes: float) -> dict[str, float]:
    added = {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 5, "draft_nodes": nodes}
    ranks = {"alternatives_per_rank": (8, 4), "accepted_tokens_per_rank": (4, 1)}
    found = {f"spec_decode_num_{name}": float(value) for name, value in added.items()}
    return found | {
        f'spec_decode_num_{name}{{rank="{rank}"}}': float(value)
        for name, values in ranks.items()
        for rank, value in enumerate(values, start=1)
    }


def test_a_servers_trees_are_statistics_of_its_counters() -> None:
    found: dict[str, Any] = statistics(server(20)) or {}
    assert (found["num_draft_nodes"], found["acceptance_by_rank"]) == (20, [0.5, 0.25])
    (said,) = counter_lines({"engine": "specdec", "source": "/metrics", "speculative": found, "gauges": {}})
    assert "20 nodes of trees, accepted by rank 1, 2, …: 50% 25%" in said
    chains: dict[str, Any] = statistics(server(8)) or {}
    assert not {"num_draft_nodes", "acceptance_by_rank"} & chains.keys()


def test_an_answers_own_nodes_are_read() -> None:
    answer = Answer(0.0)
    figures = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 5, "num_spec_steps": 2, "num_draft_nodes": 20}
    answer.feed({"choices": [], "metrics": {"speculative_decoding": figures}}, 1.0)
    assert answer.speculation is not None
    assert answer.speculation.counts[NODES] == 20
