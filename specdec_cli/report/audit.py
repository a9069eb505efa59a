"""What a person sees of `audit`: what was compared, what was drawn, every difference, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specdec_cli.report.page import grid
from specdec_cli.report.schema import read_schema

if TYPE_CHECKING:
    from specdec_cli.measure.audit import AuditResult
    from specdec_cli.measure.divergence import Mismatch
    from specdec_cli.measure.draws import DistributionCheck

SCHEMA = "specdec.audit/1"
_MAX_SHOWN = 20


def print_audit(console: Console, result: AuditResult) -> None:
    """Print the report of an audit."""
    if result.compared:
        _print_compared(console, result)
    if result.mismatches:
        _print_mismatches(console, result.mismatches)
    if result.distribution:
        _print_distribution(console, result.distribution)
    for notice in result.notices:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)
    console.print(_verdict(result), soft_wrap=True)


def _print_compared(console: Console, result: AuditResult) -> None:
    table = grid(
        "token for token", "prompts", "configurations", "tokens", "drafted", "accepted", "different outputs",
        title="Equal to plain decoding, one sequence at a time",
    )  # fmt: skip
    for mode, one in result.compared.items():
        table.add_row(
            mode,
            str(one.num_prompts),
            str(one.num_configurations),
            str(one.num_tokens),
            str(one.num_draft_tokens),
            str(one.num_accepted_tokens),
            Text(str(len(one.mismatches)), style="bold red" if one.mismatches else "green"),
        )
    console.print(table)


def _print_mismatches(console: Console, mismatches: Sequence[Mismatch]) -> None:
    table = grid(
        "prompt", "token", "configuration", "expected", "got", "top-2 gap", "rounding explains", "class",
        "float32 prefers", title="First difference of each output",
    )  # fmt: skip
    for one in mismatches[:_MAX_SHOWN]:
        recheck = "–" if one.recheck is None else f"{one.recheck.prefers} (gap {one.recheck.top2_gap:.2g})"
        table.add_row(
            str(one.prompt + 1),
            str(one.position + 1),
            Text(one.configuration),
            _token(one.expected),
            _token(one.got),
            _gap(one.top2_gap),
            _gap(one.tolerance),
            Text(one.kind, style="yellow" if one.kind == "near-tie" else "bold red"),
            recheck,
        )
    console.print(table)
    if len(mismatches) > _MAX_SHOWN:
        console.print(Text(f"… and {len(mismatches) - _MAX_SHOWN} more (--json lists all)"))


def _print_distribution(console: Console, checks: Sequence[DistributionCheck]) -> None:
    table = grid(
        "configuration", "draws", "outcomes", "drafted", "accepted", "chi-square / dof", "p-value",
        "finds a shift of",
        title="Joint first tokens against exact enumeration",
    )  # fmt: skip
    for one in checks:
        statistic = "impossible outcome" if one.statistic is None else f"{one.statistic:.1f} / {one.dof}"
        table.add_row(
            Text(one.configuration),
            str(one.num_draws),
            str(one.num_cells),
            str(one.num_draft_tokens),
            str(one.num_accepted_tokens),
            statistic,
            Text(f"{one.p_value:.3g}", style="green" if one.is_fine else "bold red"),
            f"{100 * one.detectable_shift:.1f} %",
        )
    console.print(table)
    console.print(Text("finds a shift of: total variation, with 99 % power at 1e-6 false alarms", style="dim"))


def _verdict(result: AuditResult) -> Text:
    if result.passed:
        return Text(f"PASS: no difference found ({result.seconds:.0f} s)", style="bold green")
    return Text(f"FAIL: the output is not what the target alone produces ({result.seconds:.0f} s)", style="bold red")


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


def _gap(gap: float | None) -> str:
    return "–" if gap is None else f"{gap:.2g}"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the whole document."""
    return read_schema("audit")
