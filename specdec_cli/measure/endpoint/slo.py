"""How many users a server serves at once within service-level objectives, with its draft and without.

A user sends the next request as soon as the last one is answered. The number of users doubles until fewer than 90 % of
the requests meet every objective; bisection then finds the largest number that does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Literal, cast, get_args

import numpy as np

from specdec_cli.document import Count, Seconds, Share
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.draft_switch import check_plain, without_draft
from specdec_cli.measure.endpoint.endpoint_arm import EndpointArm, check_counted
from specdec_cli.measure.endpoint.request_fields import warm_up_row
from specdec_cli.measure.endpoint.sending import Sender
from specdec_cli.measure.endpoint.server_counts import DRAFTED
from specdec_cli.quantities import counted

Objective = Literal["ttft", "tpot", "latency", "tokens_per_second"]
SHARE = 0.9
"""Share of the requests that must meet all objectives."""
MOST_USERS = 64
_REQUESTS_PER_USER, _MIN_REQUESTS = 2, 10
_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([0-9.]+)\s*(ms|s)?\s*")
_EXAMPLE = "for example --slo 'ttft<500ms,tokens_per_second>20'"


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """A bound on a request's time or rate.

    Args:
        name: of the figure: time to first text, time per token after it, whole answer, or tokens per second after it.
        is_upper: whether the figure must stay below the bound.
        bound: in seconds, or tokens per second.
        text: as it was given.
    """

    name: Objective
    is_upper: bool
    bound: float
    text: str

    def holds(self, value: float | None) -> bool:
        """Whether a figure meets it; one that is not known does not."""
        return value is not None and (value <= self.bound if self.is_upper else value >= self.bound)

    def shown(self, value: float) -> str:
        """A figure with its unit."""
        return f"{value:.1f} tokens/s" if self.name == "tokens_per_second" else f"{1000 * value:.0f} ms"


def parse_slo(text: str) -> list[ServiceObjective]:
    """Read `--slo`.

    Raises:
        UsageError: it holds something else than bounds of known figures.
    """
    objectives = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UsageError(f"`--slo` holds `{part.strip()}`, which is no objective", _EXAMPLE)
        name, operator, number, unit = match.groups()
        known = get_args(Objective)
        if name not in known:
            raise UsageError(f"`--slo` names the figure `{name}`", f"the figures are {', '.join(known)}")
        is_upper, is_rate = operator.startswith("<"), name == "tokens_per_second"
        if is_upper == is_rate:
            message = "must be a lower bound" if is_rate else "must be an upper bound"
            raise UsageError(f"`--slo {part.strip()}`: {name} {message}", _EXAMPLE)
        if is_rate == (unit is not None):
            unit_words = "has no unit" if is_rate else "needs ms or s"
            raise UsageError(f"`--slo {part.strip()}`: {name} {unit_words}", _EXAMPLE)
        try:
            bound = float(number) * (0.001 if unit == "ms" else 1.0)
        except ValueError:
            raise UsageError(f"`--slo` holds the number `{number}`", _EXAMPLE) from None
        objectives.append(ServiceObjective(cast(Objective, name), is_upper, bound, part.strip()))
    return objectives


@dataclass(frozen=True, slots=True)
class UserLevel:
    """A number of users, and the requests that they sent.

    Args:
        users: requests that were open at once.
        requests: sent in all.
        failed: without a whole answer; they meet no objective.
        met: share that met every objective.
        reached: by objective, the value that 90 % of the requests reach or better; null where too few are known.
        missed: by objective, requests that did not meet it.
    """

    users: Count
    requests: Count
    failed: Count
    met: Share
    reached: dict[str, Seconds | None]
    missed: dict[str, Count]

    @property
    def passes(self) -> bool:
        """Whether enough requests met every objective."""
        return self.met >= SHARE


@dataclass(frozen=True, slots=True)
class UserCapacity:
    """The largest number of users that a server serves within the objectives.

    Args:
        users: that number; 0 if one user alone is too many.
        is_bound: whether a larger number failed; otherwise none was tried.
        limited_by: the objective that the most requests miss at the next number; `failures` for requests that failed.
        levels: every number that was tried, in order.
    """

    users: Count
    is_bound: bool
    limited_by: str | None
    levels: list[UserLevel]


def find_capacity(measure: Callable[[int], UserLevel], most: int) -> UserCapacity:
    """Double the users while they are served, then bisect.

    Args:
        measure: sends the requests of so many users.
        most: users to try.
    """
    levels: dict[int, UserLevel] = {}
    served, failed, users = 0, None, 1
    while failed is None and served < most:
        levels[users] = measure(users)
        if levels[users].passes:
            served, users = users, min(2 * users, most)
        else:
            failed = users
    while failed is not None and failed - served > 1:
        users = (served + failed) // 2
        levels[users] = measure(users)
        served, failed = (users, failed) if levels[users].passes else (served, users)
    limit = None if failed is None else _limit(levels[failed])
    return UserCapacity(served, failed is not None, limit, [levels[users] for users in sorted(levels)])


def _limit(level: UserLevel) -> str:
    missed = Counter(level.missed) + Counter({"failures": level.failed})
    return missed.most_common(1)[0][0]


@dataclass(slots=True)
class SloStudy:
    """The search on a server with its draft and without.

    Args:
        draft: the server with the draft.
        plain: the one without; the same where requests switch their draft off.
        rows: the prompts, which are sent again where there are too few.
        objectives: what each request must meet.
        most: users to try.
        watch: takes words about the progress.
        stopped: whether to send no more.

    Attributes:
        capacities: by `draft` and `plain`.
        notices: sentences about what the figures rest on.
    """

    draft: EndpointArm
    plain: EndpointArm
    rows: Sequence[PromptRow]
    objectives: Sequence[ServiceObjective]
    most: int
    watch: Callable[[str], None]
    stopped: Callable[[], bool]
    capacities: dict[str, UserCapacity] = field(init=False, default_factory=dict)
    notices: list[str] = field(init=False, default_factory=list)

    def run(self) -> None:
        """Search with the draft, then without.

        Raises:
            RunError: a server went away, counts no tokens, or cannot switch its draft off.
        """
        if self.plain is self.draft:
            without_draft(self.draft)  # before anything is measured
        for name, arm in (("draft", self.draft), ("plain", self.plain)):
            arm.ask(warm_up_row(self.rows))
            self.capacities[name] = find_capacity(partial(self._level, name, arm), self.most)
        if _num_requests(max(level.users for each in self.capacities.values() for level in each.levels)) > len(
            self.rows
        ):
            self.notices.append("prompts were sent several times: a server with prefix caching answers those faster")

    def _level(self, name: str, arm: EndpointArm, users: int) -> UserLevel:
        if self.stopped():
            raise KeyboardInterrupt
        self.watch(f"{name}: {users} at once")
        rows = [replace(row, index=i) for i, row in enumerate(islice(cycle(self.rows), _num_requests(users)))]
        off = without_draft(arm) if name == "plain" and arm is self.draft else {}
        plan = replace(arm.plan, concurrency=users, repeats=1)
        sender = Sender(plan, lambda row: {**arm.body(row), **off}, self.stopped, lambda: None)
        arm.send(sender, rows)
        if sender.gone is not None:
            raise RunError(f"the server went away at {counted(users, 'user')}: {sender.gone.message}", "check its log")
        answers = [visit.answer for visit in sender.visits if visit.answer is not None]
        if name == "plain":
            check_plain(arm, sum(answer.speculation.counts[DRAFTED] for answer in answers if answer.speculation))
        if self._needs_tokens:
            check_counted(answers)
        return level_of(users, self.objectives, answers, len(sender.visits))

    @property
    def _needs_tokens(self) -> bool:
        return any(objective.name in ("tpot", "tokens_per_second") for objective in self.objectives)


def _num_requests(users: int) -> int:
    return max(_MIN_REQUESTS, _REQUESTS_PER_USER * users)


def level_of(
    users: int, objectives: Sequence[ServiceObjective], answers: Sequence[Answer], num_requests: int
) -> UserLevel:
    """The result of so many users.

    Args:
        users: requests that were open at once.
        objectives: what each request must meet.
        answers: whole ones.
        num_requests: sent; those without an answer failed.
    """
    values = {each.text: [_value(answer, each.name) for answer in answers] for each in objectives}
    held = {
        each.text: [
            each.holds(value) or _has_no_rate(answer, each.name)
            for answer, value in zip(answers, values[each.text], strict=True)
        ]
        for each in objectives
    }
    num_met = sum(map(all, zip(*held.values(), strict=True)))
    return UserLevel(
        users,
        num_requests,
        num_requests - len(answers),
        num_met / num_requests if num_requests else 0.0,
        {each.text: _reached(values[each.text], each.is_upper) for each in objectives},
        {text: holds.count(False) for text, holds in held.items()},
    )


def _has_no_rate(answer: Answer, name: Objective) -> bool:
    """Whether an answer is too short to have a time per token."""
    return name in ("tpot", "tokens_per_second") and answer.num_tokens is not None and answer.num_tokens < 2


def _reached(values: Sequence[float | None], is_upper: bool) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, SHARE if is_upper else 1 - SHARE)) if known else None


def _value(answer: Answer, name: Objective) -> float | None:
    if name == "tokens_per_second":
        return None if not answer.tpot_s else 1 / answer.tpot_s
    return {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "latency": answer.end_s}[name]
