"""Log lines about speculation: vLLM's, llama.cpp's and SGLang's.

A line is read field by field, so that a field that is missing, new or in another place costs no other one. Figures of
speculation that no field takes are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec_cli.measure.endpoint.server_counts import ACCEPTED, DRAFTED, DRAFTS
from specdec_cli.measure.imported.record import ImportedRun, amount
from specdec_cli.quantities import counted

_NUMBER = r"(\d+(?:\.\d+)?)"
_LIST = r"[(\[]?([\d.]*\d(?:, *[\d.]*\d)*)[)\]]?"
_ROUNDED = 0.0051
_FROM_LENGTHS = "they follow from its mean length, which has two decimals"
_NOTHING_ACCEPTED = "where nothing was accepted, as many tokens a step are taken to be drafted as elsewhere in the log"
_ACCEPTANCE = re.compile(
    r"\b(?:accept(?:ed|ance)?|acc)\b[^=:\n]{0,40}[=:] *[(\[]? *\.?\d|\bdraft[^\n]{0,80}\b\d+ accepted\b", re.IGNORECASE
)
"""A figure of acceptance; settings such as `accept_threshold=1.0` are none."""
_FIGURE = re.compile(r"[=:(] *\[?\d")
_UNFILLED = re.compile(
    r"(?:mean (?:len|acceptance length)|acc per pos|acceptance rate per position|per-position acceptance rate"
    r"|accept (?:len|rate)) *[=:]",
    re.IGNORECASE,
)
"""A figure that is read wherever it has a value."""


@dataclass(frozen=True, slots=True)
class _LineFormat:
    """A tool's line about speculation.

    Args:
        marker: what such a line contains.
        fields: pattern of each figure that is read, by its name.
        needed: fields without which a line says nothing.
        passed: pattern of figures that follow from others or are not about acceptance.
    """

    marker: re.Pattern[str]
    fields: Mapping[str, re.Pattern[str]]
    needed: frozenset[str]
    passed: re.Pattern[str] | None = None

    def read(self, line: str) -> tuple[dict[str, str], str] | None:
        """The line's fields, and the text from its marker on that none of them took; None for another line."""
        begin = self.marker.search(line)
        if begin is None:
            return None
        rest, fields = line[begin.start() :], dict[str, str]()
        for name, pattern in self.fields.items():
            match = pattern.search(rest)
            if match is not None:
                fields[name] = match[1]
                rest = f"{rest[: match.start()]}\n{rest[match.end() :]}"
        if not self.needed <= fields.keys():
            return None
        return fields, rest if self.passed is None else self.passed.sub("\n", rest)


_VLLM = _LineFormat(
    re.compile("SpecDecoding metrics:"),
    {
        "length": re.compile(rf"Mean acceptance length: {_NUMBER}"),
        "accepted": re.compile(r"Accepted: (\d+) tokens"),
        "drafted": re.compile(r"Drafted: (\d+) tokens"),
        "rates": re.compile(rf"Per-position acceptance rate: {_LIST}"),
        "percent": re.compile(rf"(?:Avg )?Draft acceptance rate: {_NUMBER}%"),
    },
    frozenset(("accepted", "drafted")),
    re.compile(rf"(?:Accepted|Drafted) throughput: {_NUMBER}|(?:Avg )?Draft acceptance rate: nan%"),
)
_LLAMA = _LineFormat(
    re.compile(r"draft acceptance(?: rate)? *= *[\d.]+"),
    {
        "accepted": re.compile(r"(\d+) accepted"),
        "drafted": re.compile(r"(\d+) generated"),
        "length": re.compile(rf"mean (?:len|acceptance length) *= *{_NUMBER}"),
        "rates": re.compile(rf"(?:acc per pos|acceptance rate per position) *= *{_LIST}"),
        "share": re.compile(rf"draft acceptance(?: rate)? *= *{_NUMBER}(?![\d.%])"),
    },
    frozenset(("accepted", "drafted")),
)
_LLAMA_RATES = _LineFormat(
    re.compile(r"acc per pos|acceptance rate per position"), {"rates": _LLAMA.fields["rates"]}, frozenset(("rates",))
)
_LLAMA_REQUEST = re.compile(r"\bid +\d+ \| task +-?\d+")
_LLAMA_TOTALS = re.compile(r"\bstatistics +\S+: *#calls")
"""llama.cpp's totals of each drafting method since its start, which hold the requests' figures again."""
_SGLANG = _LineFormat(
    re.compile(r"^.*(?<![\w-] )accept len:"),
    {
        "length": re.compile(rf"(?<![\w-] )accept len: {_NUMBER}"),
        "rate": re.compile(rf"(?<![\w-] )accept rate: {_NUMBER}"),
    },
    frozenset(("length",)),
)


def read_log(lines: Mapping[int, str]) -> tuple[list[ImportedRun], dict[int, str]]:
    """Read the lines of a log, which come by their number.

    Returns:
        The counts of each tool whose lines it holds, and lines with figures that are not understood, by their number.

    Raises:
        ValueError: a figure that is no number.
    """
    unread, apart = dict[int, str](), _RatesApart()
    fields_by_tool: dict[str, list[dict[str, str]]] = {tool: [] for tool in _FORMATS}
    for number, line in lines.items():
        tool, (fields, rest) = next(
            ((tool, read) for tool, form in _FORMATS.items() if (read := form.read(line)) is not None), ("", ({}, ""))
        )
        if tool:
            fields_by_tool[tool].append(fields)
            if tool == "llama.cpp":
                apart.begin(line, fields)
            if (_ACCEPTANCE if tool == "sglang" else _FIGURE).search(rest) or _UNFILLED.search(rest):
                unread[number] = rest
        elif (
            (_ACCEPTANCE.search(line) or _UNFILLED.search(line))
            and not _LLAMA_TOTALS.search(line)
            and not apart.take(number, line)
        ):
            unread[number] = line
    runs = [_READERS[tool](parts) for tool, parts in fields_by_tool.items() if parts]
    return runs, dict(sorted((unread | apart.without_request()).items()))


class _RatesApart:
    """llama.cpp's rates by position on lines of their own, and the requests that they belong to."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[str, str]] = {}
        self._waiting: dict[str, tuple[int, str, str]] = {}

    def begin(self, line: str, fields: dict[str, str]) -> None:
        """Take a request's line, whose rates may have come before it."""
        key = self._key(line)
        self._requests[key] = fields
        if "rates" not in fields and key in self._waiting:
            fields["rates"] = self._waiting.pop(key)[2]

    def take(self, number: int, line: str) -> bool:
        """Take a line with rates alone; returns whether it is one."""
        read, key = _LLAMA_RATES.read(line), self._key(line)
        if read is None:
            return False
        rates, request = read[0]["rates"], self._requests.get(key)
        if request is not None and "rates" not in request:
            request["rates"] = rates
        else:
            self._waiting[key] = number, line, rates
        return True

    def without_request(self) -> dict[int, str]:
        """Lines that belong to no request, by their number."""
        return {number: line for number, line, _ in self._waiting.values()}

    def _key(self, line: str) -> str:
        match = _LLAMA_REQUEST.search(line)
        return "" if match is None else match[0]


class _AcceptanceLine:
    """A line's figures as numbers.

    Args:
        fields: of the line.
        is_full: whether steps may draft all positions, so that their number is exact.

    Attributes:
        accepted: drafted tokens that were accepted.
        drafted: drafted tokens.
        length: 1 + accepted tokens for each step that drafted, with two decimals; None where the line has none.
        rates: share of steps that accepted position 1, 2, ... and all before it.
        full_steps: steps, if each drafted every position.
        steps: as the length says; None where it says nothing.
    """

    def __init__(self, fields: Mapping[str, str], is_full: bool) -> None:
        self.accepted, self.drafted = amount(fields["accepted"]), amount(fields["drafted"])
        self.length = amount(fields["length"]) if "length" in fields else None
        self.rates = [amount(rate) for rate in fields.get("rates", "").split(",") if rate.strip()]
        self.full_steps = self.drafted / len(self.rates) if is_full and self.rates else None
        beyond = self.length - 1 if self.length is not None else 0.0
        self.steps = self.accepted / beyond if beyond > 0 else None
        if self.full_steps and abs(self.accepted / self.full_steps - beyond) <= _ROUNDED:
            self.steps = self.full_steps
        self._fields = fields

    def odd_rate(self) -> str | None:
        """End of a sentence about a rate that differs from the counts beyond its rounding; None if it does not."""
        for name, unit, of_all in (("share", "", 1), ("percent", " %", 100)):
            text = self._fields.get(name)
            if text is None or not self.drafted:
                continue
            rounded = 0.51 * 10.0 ** -len(text.partition(".")[2])
            if abs(amount(text) - of_all * self.accepted / self.drafted) > rounded:
                counts = f"{self.accepted:.0f} accepted of {counted(round(self.drafted), 'drafted token')}"
                return f"an acceptance rate of {text}{unit}, and {counts}"
        return None


def _of_vllm(lines: Sequence[Mapping[str, str]]) -> ImportedRun:
    """vLLM's lines `SpecDecoding metrics: …`, one for each interval of ten seconds."""
    run = ImportedRun("vllm", f"log with {counted(len(lines), 'line')} of SpecDecoding metrics")
    parts = _add_lines(run, lines, is_full=True)
    is_full = all(part.steps == part.full_steps or not part.drafted for part in parts)
    how = "they are its drafted tokens over the number of positions" if is_full else _FROM_LENGTHS
    run.notices.append(f"vLLM's log counts no steps: {how}")
    return run


def _of_llama(lines: Sequence[Mapping[str, str]]) -> ImportedRun:
    """llama-server's lines `draft acceptance = …`, one for each request."""
    run = ImportedRun("llama.cpp", f"log with {counted(len(lines), 'line')} of draft acceptance")
    _add_lines(run, lines, is_full=False)
    if DRAFTS in run.counts:
        run.notices.append(f"llama.cpp's log counts no steps: {_FROM_LENGTHS}")
    return run


def _of_sglang(lines: Sequence[Mapping[str, str]]) -> ImportedRun:
    """SGLang's decode lines with `accept len` and `accept rate`: averages of intervals without counts."""
    run = ImportedRun("sglang", f"log with {counted(len(lines), 'decode line')}")
    for name, key in (("accept len", "length"), ("accept rate", "rate")):
        figures = [amount(line[key]) for line in lines if key in line]
        run.reported |= {name: sum(figures) / len(figures)} if figures else {}
    run.definitions = {
        "accept len": "mean of the log lines' means of completion tokens for each verification",
        "accept rate": "mean of the log lines' means of accepted tokens over verifications times (draft tokens - 1)",
    }
    run.notices.append("SGLang's log has averages alone: import responses with meta_info for counts")
    return run


_FORMATS = {"vllm": _VLLM, "llama.cpp": _LLAMA, "sglang": _SGLANG}
_READERS = {"vllm": _of_vllm, "llama.cpp": _of_llama, "sglang": _of_sglang}


def _add_lines(run: ImportedRun, lines: Sequence[Mapping[str, str]], is_full: bool) -> list[_AcceptanceLine]:
    """Count lines; one that accepted nothing, whose length tells no steps, drafted as much a step as the others."""
    parts = [_AcceptanceLine(fields, is_full) for fields in lines]
    known = [part for part in parts if part.steps]
    drafted_a_step = sum(part.drafted for part in known) / sum(part.steps or 0 for part in known) if known else 0.0
    for part in parts:
        if part.steps is None and part.length is not None and drafted_a_step and not part.accepted:
            part.steps = part.drafted / drafted_a_step
            run.notices += [_NOTHING_ACCEPTED] if part.drafted and _NOTHING_ACCEPTED not in run.notices else []
        run.add({DRAFTS: part.steps, DRAFTED: part.drafted, ACCEPTED: part.accepted})
        run.add_rates(part.rates, part.steps or 0.0 if part.rates else 0.0)
        run.contradicted = run.contradicted or part.odd_rate()
        if part.length is not None and part.drafted:
            run.check_shares(part.rates, part.length - 1, _ROUNDED)
    num_rated = sum(bool(part.rates) for part in parts)
    if 0 < num_rated < len(parts):
        run.notices.append(
            f"rates by position are those of {num_rated} of {counted(len(parts), 'line')}: the others have none"
        )
    return parts
