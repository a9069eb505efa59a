"""Long rope: a text up to a threshold is read with other frequencies than a longer one, so a row may need both."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_cli.lm.door import Row


@dataclass(frozen=True, slots=True)
class Sides:
    """A row's parts below and above the threshold.

    Args:
        rows: what is scored with the short (False) and with the long frequencies (True), where there is such a part.
        wanted: for each wanted logit of the row, the part that has it, and its number there.
    """

    rows: dict[bool, Row]
    wanted: list[tuple[bool, int]]


def both_sides(row: Row, threshold: int) -> Sides:
    """Cut a row at the threshold; the long part reads everything again, a tree's short part the nodes below it."""
    if row.drafted.is_chain:
        return _of_text(row.handle, [*row.context, *row.drafted.tokens], row.num_logits, threshold)
    if row.longest <= threshold or len(row.context) > threshold:
        is_long = row.longest > threshold
        return Sides({is_long: row}, [(is_long, i) for i in range(row.num_logits)])
    num_before = row.num_logits - len(row.drafted)
    assert num_before >= 0, "all nodes of a tree want logits"
    short = [i for i in range(len(row.drafted)) if len(row.context) + row.drafted.depth(i) <= threshold]
    number = {node: num_before + i for i, node in enumerate(short)}
    rows = {
        False: Row(row.handle, row.context, num_before + len(short), row.drafted.keep(short)),
        True: Row(row.handle, row.context, len(row.drafted), row.drafted),
    }
    nodes = [(node not in number, number.get(node, node)) for node in range(len(row.drafted))]
    return Sides(rows, [*((False, i) for i in range(num_before)), *nodes])


def _of_text(handle: int, text: list[int], num_logits: int, threshold: int) -> Sides:
    num_short = min(max(0, threshold - (len(text) - num_logits)), num_logits)
    rows = {}
    if num_short or len(text) <= threshold:
        rows[False] = Row(handle, text[:threshold], num_short)
    if len(text) > threshold:
        rows[True] = Row(handle, text, num_logits - num_short)
    return Sides(rows, [(i >= num_short, i - num_short if i >= num_short else i) for i in range(num_logits)])
