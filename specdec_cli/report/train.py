"""A training run in reports: its plan, its live table, and its part of pages and pictures."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from specdec_cli.quantities import counted, in_millions
from specdec_cli.report.columns import PageTable, TableColumn, origin
from specdec_cli.report.live_table import LiveTable
from specdec_cli.report.pace import duration
from specdec_cli.report.table import number, percent
from specdec_cli.train.events import Evaluated, Trained, TrainingEvent

if TYPE_CHECKING:
    from specdec_cli.report.view import Screen
    from specdec_cli.train.plan import TrainingPlan

Document = Mapping[str, Any]


def training_heading(document: Document) -> str:
    """The run's subject, in a line."""
    recipe = document["recipe"]
    return f"specdec train-draft: {recipe['train']['method']} for {recipe['target']['model']}"


def train_facts(document: Document) -> list[tuple[str, str]]:
    """How the draft was trained, each fact with its name."""
    train = document["recipe"]["train"]
    settled = ", ".join(f"{key} {value}" for key, value in document["settled"].items())
    steps = f"{document['num_steps']}{', interrupted' if document['interrupted'] else ''}"
    return [
        ("method", f"{train['method']}{f': {settled}' if settled else ''}"),
        ("data", str(train["data"])),
        ("steps", f"{steps}, {document['num_tokens']} tokens, {document['seconds']:.0f} s"),
        *origin(document, ("cpu", "gpu")),
    ]


NOTHING_DRAFTED = "acceptance was not measured: the answers to the held-out prompts are too short to draft in"


def train_findings(document: Document) -> list[str]:
    """The best acceptance that was measured."""
    best = document["best"]
    if best is None:
        return ["acceptance was not measured"]
    if not best["acceptance_by_depth"]:
        return [f"{NOTHING_DRAFTED}."]
    held_out = counted(document["recipe"]["train"]["num_held_out"], "held-out prompt")
    length = f"{best['acceptance_length']:.2f}"
    return [f"Acceptance length {length} at k = {best['k']} on {held_out}, after step {best['step']}."]


def evaluations_table(document: Document) -> PageTable:
    """Acceptance at each evaluation."""
    depths = max((evaluation["k"] for evaluation in document["evaluations"]), default=0)
    columns = (
        TableColumn("step", "step"),
        TableColumn("loss", "loss", lambda loss: number(loss, 3)),
        TableColumn("length", "acceptance_length", number),
        TableColumn("accepted", "acceptance_rate", percent),
        *(TableColumn(f"depth {depth + 1}", f"acceptance_by_depth.{depth}", percent) for depth in range(depths)),
    )
    return PageTable.of("Acceptance on held-out prompts", columns, document["evaluations"])


_USES = {
    "target": "target",
    "draft": "draft",
    "gradients": "gradients",
    "optimizer": "AdamW",
    "frozen": "copies of the target's layers",
    "hidden_states": "hidden states",
    "logits": "logits of a batch",
    "checkpoints": "checkpoints",
}


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Lines of text: tokens, parameters, memory, disk and time."""
    lines = [
        f"tokens: {plan.num_prompt_tokens} of prompts, {plan.num_answer_tokens} of answers at most",
        f"parameters: {in_millions(plan.num_trained)} trained, {in_millions(plan.num_target)} in the target",
        f"memory: {_sizes(plan.memory_bytes)}; an estimate without activations and the engine's KV cache",
        f"disk: {_sizes(plan.disk_bytes)}",
    ]
    if plan.flops_per_second is None or plan.bytes_per_second is None or plan.step_seconds is None:
        return [*lines, "time: not known, because the device is not here"]
    steps = f"{duration(plan.step_seconds)} for the steps"
    times = f"{duration(plan.answer_seconds)} for the answers, {steps}" if plan.answer_seconds else steps
    rates = f"{plan.flops_per_second / 1e9:.0f} GFLOP/s and {plan.bytes_per_second / 1e9:.0f} GB/s"
    what = f"{plan.operations + plan.answer_operations:.1e} operations at the {rates} that this machine reaches"
    return [*lines, f"time: at least {times}; an estimate by {what} in float32, without loading and evaluations"]


def _sizes(sizes: Mapping[str, int]) -> str:
    """`21.0 GB (target 16.0, draft 5.0)`."""
    unit, name = (1e9, "GB") if sum(sizes.values()) >= 1e9 else (1e6, "MB")
    parts = ", ".join(f"{_USES[use]} {size / unit:.1f}" for use, size in sizes.items() if size)
    return f"{sum(sizes.values()) / unit:.1f} {name} ({parts})"


_RECENT = 50  # steps that the shown loss and rates are averaged over


class TrainView(LiveTable):
    """Shows a run as its events come.

    Args:
        screen: the streams.
        num_steps: of the whole run.
        step: steps taken before.
    """

    def __init__(self, screen: Screen, num_steps: int, step: int) -> None:
        super().__init__(screen.console, screen.is_live, screen.say)
        self._screen, self._num_steps, self._step = screen, num_steps, step
        self._recent: deque[Trained] = deque(maxlen=_RECENT)
        self._evaluations: list[Evaluated] = []

    def watch(self, event: TrainingEvent) -> None:
        """Show one event."""
        if isinstance(event, Trained):
            self._recent.append(event)
            self._step = event.step
        elif isinstance(event, Evaluated):
            self._evaluations.append(event)
            self._screen.say(evaluation_words(event))
        self.draw(self._table, self._progress())

    def _progress(self) -> str:
        parts = [f"step {self._step} of {self._num_steps}"]
        if self._recent:
            num, seconds = len(self._recent), sum(step.seconds for step in self._recent)
            parts.append(f"loss {sum(step.loss for step in self._recent) / num:.3f}")
            parts.append(f"{sum(step.num_tokens for step in self._recent) / seconds:.0f} tokens/s")
            parts.append(f"{duration((self._num_steps - self._step) * seconds / num)} left")
        return ", ".join(parts)

    def _table(self) -> RenderableType:
        """Acceptance by depth: of the last steps' batches, and of the last evaluations."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("")
        table.add_column("length", justify="right")
        shown = self._evaluations[-4:]
        depths = max([len(step.matches_by_depth) for step in self._recent] + [it.k for it in shown], default=0)
        for depth in range(1, depths + 1):
            table.add_column(f"depth {depth}", justify="right")
        for it in shown:
            length = f"{it.acceptance_length:.2f}"
            table.add_row(f"step {it.step}, held out", length, *_percentages(it.acceptance_by_depth))
        if self._recent:
            by_depth = zip(*(step.matches_by_depth for step in self._recent), strict=True)
            means = [sum(matches) / len(self._recent) for matches in by_depth]
            table.add_row(f"step {self._step}, training", "", *_percentages(means))
        return table


def evaluation_words(evaluation: Evaluated) -> str:
    """`step 40: acceptance length 2.31 at k = 5 (62 % 41 % ...), the best so far`."""
    if not evaluation.acceptance_by_depth:
        return f"step {evaluation.step}: {NOTHING_DRAFTED}"
    rates = " ".join(_percentages(evaluation.acceptance_by_depth))
    best = ", the best so far" if evaluation.is_best else ""
    length = f"acceptance length {evaluation.acceptance_length:.2f} at k = {evaluation.k}"
    return f"step {evaluation.step}: {length} ({rates}){best}"


def _percentages(rates: Sequence[float]) -> list[str]:
    return [f"{100 * rate:.0f} %" for rate in rates]
