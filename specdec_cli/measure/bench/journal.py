"""The journal of a long measurement: what is finished, so that an interrupted run continues with what is left.

JSON lines beside the result's file. The first says what is measured, and another recipe, workload, machine or version
is refused by it; then comes a line for every profile of costs and every pass. A pass holds what statistics need: its
tokens, seconds, and the counts of its steps, not its text. A last line that a crash cut in two is dropped. Turns are
resumed whole (a group in every arm), so that no pair of passes straddles two runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_cli.engine.arms import ArmRun
from specdec_cli.errors import RunError, UsageError
from specdec_cli.events import Emitted, Event, Noticed, Stepped
from specdec_cli.measure.bench.passes import Group, Pass
from specdec_cli.measure.predict.cost import Costs, ProfileLoad, Rounds
from specdec_cli.timing import Timing
from specdec_cli.tree_shape import TreeShape

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request

FORMAT = "specdec.journal/3"
_OTHER = {
    "format": "another format",
    "specdec_version": "another version of specdec",
    "schema": "another command",
    "recipe": "another recipe",
    "plan": "another plan",
    "workload": "other prompts",
    "environment": "another machine or other libraries",
}


def journal_path(output: Path) -> Path:
    """The journal of a result's file."""
    return output.with_name(f"{output.name}.partial")


def check_journal(output: Path, resume: bool, force: bool) -> None:
    """Refuse to throw away what an earlier run finished, before anything is loaded.

    Raises:
        UsageError: there is a journal, and neither `--resume` nor `--force` says what becomes of it.
    """
    path = journal_path(output)
    if path.exists() and not (resume or force):
        raise UsageError(
            f"`{path}` holds the results of an interrupted run",
            "continue it with --resume, or start again with --force",
        )


@dataclass(slots=True)
class Journal:
    """A journal, open for the run."""

    path: Path
    num_resumed: int = 0
    _passes: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    _costs: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def trace_path(self) -> Path:
        """File beside the journal that holds the target's text."""
        return self.path.with_name(f"{self.path.name}.trace")

    @property
    def num_kept(self) -> int:
        """Passes from an earlier run."""
        return sum(map(len, self._passes.values()))

    def turn(self, group: Group, repeat: int, arms: Sequence[str]) -> dict[str, Pass]:
        """A group's passes by arm; empty unless every arm's is there."""
        kept = self._passes.get((repeat, group.place), {})
        if not set(arms) <= kept.keys():
            return {}
        self.num_resumed += len(arms)
        return {arm: _restored(group, repeat, kept[arm]) for arm in arms}

    def keep(self, arm: str, pass_: Pass) -> None:
        """Append a finished pass.

        Raises:
            RunError: the file cannot be written.
        """
        self._append({"pass": arm, "repeat": pass_.repeat, "group": pass_.group.place, **_kept(pass_)})

    def costs(self, name: str, measure: Callable[[], Costs]) -> Costs:
        """Costs by name: the earlier run's, so that its choice of what to measure holds, else measured now."""
        if name in self._costs:
            return _restored_costs(self._costs[name])
        costs = measure()
        assert costs.rounds is not None, "a profile keeps its rounds"
        self._append({"costs": name, **_plain(costs)})
        return costs

    def remove(self) -> None:
        """Delete the journal: the run is whole."""
        for path in (self.path, self.trace_path):
            with suppress(FileNotFoundError):
                path.unlink()

    def _append(self, line: Mapping[str, Any]) -> None:
        """One line in one write, so that a reader never sees two runs' lines mixed."""
        data = (json.dumps(line, separators=(",", ":"), default=_plain) + "\n").encode()
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            hint = "free space there, then repeat the command with --resume"
            raise RunError(f"the journal `{self.path}` cannot be written: {error.strerror}", hint) from error


def workload_digest(requests: Sequence[Request]) -> str:
    """Fingerprint of a workload: tokens and sampling parameters."""
    message = [[request.token_ids, asdict(request.params)] for request in requests]
    return hashlib.sha256(json.dumps(message, sort_keys=True, default=str).encode()).hexdigest()[:16]


def open_journal(output: Path, head: Mapping[str, Any], resume: bool) -> Journal:
    """The journal of a run: a new one, or with `resume` the earlier run's where there is one.

    Args:
        output: the result's file.
        head: what is measured: `specdec_version`, `schema`, `recipe`, `plan`, `workload`, `environment`.
        resume: whether to continue.

    Raises:
        UsageError: the journal is of something else, or damaged.
        RunError: it cannot be written.
    """
    journal = Journal(journal_path(output))
    wanted = json.loads(json.dumps({"format": FORMAT, **head}))
    if not resume:
        journal.remove()
    if journal.path.exists():
        _read(journal, wanted)
    else:
        journal._append(wanted)
    return journal


def _read(journal: Journal, wanted: Mapping[str, Any]) -> None:
    hint = "start again with --force, or name another --output"
    try:
        text = journal.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            raise UsageError(f"the journal `{journal.path}` ends within its first line: it holds no pass", hint)
        first, *lines = [json.loads(line) for line in whole.splitlines()]
        other = next((key for key in _OTHER if first.get(key) != wanted.get(key)), None)
        if other is not None:
            raise UsageError(f"the journal `{journal.path}` is of {_OTHER[other]}", hint)
        for line in lines:
            if "costs" in line:
                journal._costs[line["costs"]] = line
            else:
                journal._passes.setdefault((line["repeat"], line["group"]), {})[line["pass"]] = line
        if whole != text:
            os.truncate(journal.path, len(whole.encode()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"the journal `{journal.path}` cannot be read: {error}", hint) from error


def _kept(pass_: Pass) -> dict[str, Any]:
    run, timing = pass_.run, pass_.run.timing
    places = {sequence_id: place for place, sequence_id in enumerate(run.sequence_ids)}
    steps = [
        [
            [event.draft_seconds, event.verify_seconds, event.overhead_seconds],
            [
                (
                    *(places[e.sequence_id], len(e.tokens), e.num_drafted, e.num_accepted, int(e.from_prefill)),
                    *(e.num_nodes, e.ranks),
                )
                for e in event.emitted
            ],
        ]
        for event in run.events
        if isinstance(event, Stepped)
    ]
    return {
        "tokens": run.token_ids,
        "counted": run.counted,
        "timing": [timing.ttft_s, timing.decode_s, timing.total_s, timing.decode_tokens_per_second],
        "num_first_tokens": run.num_first_tokens,
        "lost_share": pass_.lost_share,
        "num_discarded": pass_.num_discarded,
        "steps": steps,
        "notices": [event.message for event in run.events if isinstance(event, Noticed)],
    }


def _restored(group: Group, repeat: int, line: Mapping[str, Any]) -> Pass:
    """A pass whose events count as those that were measured; of their tokens only the number is known."""
    events: list[Event] = [Noticed(None, message) for message in line["notices"]]
    for (draft, verify, overhead), rows in line["steps"]:
        emitted = tuple(
            Emitted(
                *(place, (0,) * num, "", drafted, accepted, bool(from_prefill)),
                num_nodes=num_nodes,
                ranks=tuple(map(tuple, ranks)),
            )
            for place, num, drafted, accepted, from_prefill, num_nodes, ranks in rows
        )
        events.append(Stepped(emitted, len(rows), 0, 0, draft, verify, overhead, 0, 0))
    tokens = None if line["tokens"] is None else tuple(map(tuple, line["tokens"]))
    places = range(len(group.requests)) if line["steps"] else ()
    run = ArmRun(
        tokens,
        Timing(*line["timing"]),
        line["num_first_tokens"],
        tuple(events),
        tuple(places),
        tuple(line.get("counted", ())),
    )
    return Pass(group, repeat, run, line["lost_share"], line["num_discarded"])


def _plain(value: Any) -> Any:
    """A part of step costs in JSON: tables as lists, trees as text, and the fields of whatever has some."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, TreeShape) else {f.name: getattr(value, f.name) for f in fields(value)}


def _restored_costs(line: Mapping[str, Any]) -> Costs:
    restored = {name: value for name, value in line.items() if name != "costs"}
    restored |= {name: np.array(value) for name, value in line.items() if name.endswith("_seconds")}
    return Costs(
        **restored
        | {
            "context_lengths": tuple(line["context_lengths"]),
            "load": ProfileLoad(**line["load"]),
            "rounds": Rounds(**{name: np.array(table) for name, table in line["rounds"].items()}),
            "trees": tuple(map(TreeShape.parse, line["trees"])),
        }
    )
