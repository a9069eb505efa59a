"""Log lines about speculation: vLLM's, llama.cpp's and SGLang's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.measure.imported.record import ACCEPTED, DRAFTED, DRAFTS, ImportedRun, amount

_NUMBER = r"(\d+(?:\.\d+)?)"
_VLLM = re.compile(
    rf"SpecDecoding metrics: Mean acceptance length: {_NUMBER}.*?Accepted: (\d+) tokens, Drafted: (\d+) tokens"
    r".*?Per-position acceptance rate: ([\d., ]+?), Avg Draft acceptance rate"
)
_LLAMA = re.compile(
    r"draft acceptance(?: rate)? = *[\d.]+ *\( *(\d+) accepted */ *(\d+) generated\)"
    rf"(?:, mean len = *{_NUMBER})?"
)
_LLAMA_POSITIONS = re.compile(r"acc per pos = \(([\d., ]+)\)")
_SGLANG = re.compile(rf"accept len: {_NUMBER}, accept rate: {_NUMBER}")
_ROUNDED = 0.0051
_FROM_LENGTHS = "they follow from its mean length, which has two decimals"
_NOTHING_ACCEPTED = "where nothing was accepted, as many tokens a step are taken to be drafted as elsewhere in the log"


@dataclass
class _AcceptanceLine:
    """A line's figures.

    Args:
        accepted: drafted tokens that were accepted.
        drafted: drafted tokens.
        length: 1 + accepted tokens for each step that drafted, with two decimals; None where the line has none.
        rates: share of steps that accepted position 1, 2, ... and all before it.
        is_full: whether steps may draft all positions, so that their number is exact.

    Attributes:
        full_steps: steps, if each drafted every position.
        steps: as the length says; None where it says nothing.
    """

    accepted: int
    drafted: int
    length: str | None
    rates: list[float]
    is_full: bool = False

    def __post_init__(self) -> None:
        self.full_steps = self.drafted / len(self.rates) if self.is_full and self.rates else None
        beyond = amount(self.length) - 1 if self.length is not None else 0.0
        self.steps = self.accepted / beyond if beyond > 0 else None
        if self.full_steps and abs(self.accepted / self.full_steps - beyond) <= _ROUNDED:
            self.steps = self.full_steps


def read_vllm_log(text: str) -> ImportedRun | None:
    """vLLM's lines `SpecDecoding metrics: …`, one for each interval of ten seconds."""
    lines = list(_VLLM.finditer(text))
    if not lines:
        return None
    run, parts = ImportedRun("vllm", f"log with {_lines(lines)} of SpecDecoding metrics"), list[_AcceptanceLine]()
    for line in lines:
        rates = [amount(part) for part in line[4].split(",") if part.strip()]
        parts.append(_AcceptanceLine(int(line[2]), int(line[3]), line[1], rates, is_full=True))
    _add_parts(run, parts)
    is_full = all(one.steps == one.full_steps or not one.drafted for one in parts)
    how = "they are its drafted tokens over the number of positions" if is_full else _FROM_LENGTHS
    run.notices.append(f"vLLM's log counts no steps: {how}")
    return run


def read_llama_log(text: str) -> ImportedRun | None:
    """llama-server's lines `draft acceptance = …`, one for each request, and `acc per pos`, if they are there."""
    lines = list(_LLAMA.finditer(text))
    if not lines:
        return None
    run = ImportedRun("llama.cpp", f"log with {_lines(lines)} of draft acceptance")
    places = list(_LLAMA_POSITIONS.finditer(text))
    texts = [place[1] for place in places] if len(places) == len(lines) else [""] * len(lines)
    parts = [
        _AcceptanceLine(int(line[1]), int(line[2]), line[3], [amount(part) for part in text.split(",") if part.strip()])
        for line, text in zip(lines, texts, strict=True)
    ]
    _add_parts(run, parts)
    if DRAFTS in run.counts:
        run.notices.append(f"llama.cpp's log counts no steps: {_FROM_LENGTHS}")
    return run


def read_sglang_log(text: str) -> ImportedRun | None:
    """SGLang's decode lines with `accept len` and `accept rate`: averages of intervals without counts."""
    lines = list(_SGLANG.finditer(text))
    if not lines:
        return None
    run = ImportedRun("sglang", f"log with {len(lines)} decode lines")
    lengths, rates = ([amount(line[i]) for line in lines] for i in (1, 2))
    run.reported = {"accept len": sum(lengths) / len(lines), "accept rate": sum(rates) / len(lines)}
    run.definitions = {
        "acceptance_length": "completion tokens for each verification, a mean over the log's lines",
        "acceptance_rate": "accepted tokens over verifications times (draft tokens - 1), a mean over the log's lines",
    }
    run.notices.append("SGLang's log has averages alone: import responses with meta_info for counts")
    return run


def _add_parts(run: ImportedRun, parts: Sequence[_AcceptanceLine]) -> None:
    """Count parts; one that accepted nothing, whose length tells no steps, drafted as much a step as the others."""
    known = [one for one in parts if one.steps]
    drafted_a_step = sum(one.drafted for one in known) / sum(one.steps or 0 for one in known) if known else 0.0
    for one in parts:
        if one.steps is None and one.length is not None and drafted_a_step and not one.accepted:
            one.steps = one.drafted / drafted_a_step
            run.notices += [_NOTHING_ACCEPTED] if one.drafted and _NOTHING_ACCEPTED not in run.notices else []
        run.add({DRAFTS: one.steps, DRAFTED: one.drafted, ACCEPTED: one.accepted})
        run.add_rates(one.rates, one.steps or 0.0)
        if one.length is not None and one.drafted:
            run.check_shares(one.rates, amount(one.length) - 1, _ROUNDED)


def _lines(lines: Sequence[object]) -> str:
    return "1 line" if len(lines) == 1 else f"{len(lines)} lines"
