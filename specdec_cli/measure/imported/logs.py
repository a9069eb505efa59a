"""Log lines about speculation: vLLM's, llama.cpp's and SGLang's."""

from __future__ import annotations

import re

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


def read_vllm_log(text: str) -> ImportedRun | None:
    """vLLM's lines `SpecDecoding metrics: …`, one for each interval of ten seconds."""
    lines = list(_VLLM.finditer(text))
    if not lines:
        return None
    run = ImportedRun("vllm", f"log with {len(lines)} lines of SpecDecoding metrics")
    for line in lines:
        accepted, drafted = int(line[2]), int(line[3])
        rates = [amount(part) for part in line[4].split(",") if part.strip()]
        steps = drafted / len(rates) if rates else 0.0  # vLLM drafts as many tokens in every step
        _add(run, steps, drafted, accepted)
        run.add_rates(rates, steps)
    run.notices.append("vLLM's log counts no steps: they are its drafted tokens over the number of positions")
    return run


def read_llama_log(text: str) -> ImportedRun | None:
    """llama-server's lines `draft acceptance = …`, one for each request, and `acc per pos`, if they are there."""
    lines = list(_LLAMA.finditer(text))
    if not lines:
        return None
    run = ImportedRun("llama.cpp", f"log with {len(lines)} lines of draft acceptance")
    has_lengths = all(line[3] is not None for line in lines)
    places = list(_LLAMA_POSITIONS.finditer(text))
    for i, line in enumerate(lines):
        accepted, drafted = int(line[1]), int(line[2])
        steps = _steps(accepted, line[3])
        if has_lengths and steps is not None:
            _add(run, steps, drafted, accepted)
            if len(places) == len(lines):
                run.add_rates([amount(part) for part in places[i][1].split(",") if part.strip()], steps)
        else:
            _add(run, None, drafted, accepted)
    if DRAFTS in run.counts:
        run.notices.append("llama.cpp's log counts no steps: they follow from its mean length, which has two decimals")
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


def _steps(accepted: int, length: str | None) -> float | None:
    """Drafting steps behind a mean length; None where it does not say, as where nothing was accepted."""
    beyond = amount(length) - 1 if length is not None else 0.0
    return accepted / beyond if beyond > 0 else None


def _add(run: ImportedRun, steps: float | None, drafted: int, accepted: int) -> None:
    found = {DRAFTED: drafted, ACCEPTED: accepted} | ({} if steps is None else {DRAFTS: steps})
    for name, count in found.items():
        run.counts[name] = run.counts.get(name, 0.0) + count
