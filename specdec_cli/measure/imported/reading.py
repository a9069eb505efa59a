"""Files of other tools, recognized by what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.files import given_path, read_text
from specdec_cli.measure.endpoint.counters import MetricsPage, difference, parse, silence
from specdec_cli.measure.imported import logs, reports
from specdec_cli.measure.imported.record import ImportedRun, summed

Reader = Callable[[Any], ImportedRun | None]
OF_JSON: tuple[Reader, ...] = (
    reports.read_vllm_bench,
    reports.read_aiperf,
    reports.read_request_metrics,
    reports.read_llama_responses,
    reports.read_sglang_responses,
    reports.read_trtllm_stats,
    reports.read_trtllm_requests,
)
OF_TEXT: tuple[Callable[[str], ImportedRun | None], ...] = (
    logs.read_vllm_log,
    logs.read_llama_log,
    logs.read_sglang_log,
)
_HINT = (
    "read are vLLM's, llama.cpp's and SGLang's logs, /metrics of vLLM, llama.cpp, SGLang, TensorRT-LLM and specdec, "
    "results of `vllm bench serve`, AIPerf and guidellm, and responses of SGLang, TensorRT-LLM, llama.cpp and vLLM"
)


def read_runs(files: Sequence[Path], before: Path | None = None) -> ImportedRun:
    """The counts of files that one tool wrote.

    Args:
        files: logs, metrics or reports.
        before: metrics from before the run, which those of the one file are reduced by.

    Raises:
        UsageError: a file cannot be read or holds nothing about speculation, or is named twice, or they are of several
            tools.
    """
    if before is not None and len(files) != 1:
        raise UsageError("`--before` needs one FILE with the metrics after the run", "name one file")
    _refuse_twice([*files, *([before] if before is not None else [])])
    runs = [_read(path, before) for path in files]
    tools = sorted({run.tool for run in runs})
    if len(tools) > 1:
        raise UsageError(f"the files are of several tools: {', '.join(tools)}", "import those of one tool at a time")
    run = _checked(summed(runs), "the sum of the files")
    run.notices += run.missing()
    return run


def _refuse_twice(files: Sequence[Path]) -> None:
    """Refuse a file under two names: it would be counted twice, or subtracted from itself."""
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        with suppress(OSError):  # reading it says what is wrong with it
            found = given_path(path).stat()
            key = (found.st_dev, found.st_ino)
            if key in seen:
                said = f"`{path}` is given twice" if seen[key] == path else f"`{seen[key]}` and `{path}` are one file"
                raise UsageError(said, "name each file once")
            seen[key] = path


def _checked(run: ImportedRun, what: str) -> ImportedRun:
    """The run itself.

    Raises:
        UsageError: its counts contradict themselves.
    """
    said = run.contradiction()
    if said is not None:
        raise UsageError(f"{what} cannot be right: it has {said}", "check how the file was made")
    return run


def _read(path: Path, before: Path | None) -> ImportedRun:
    """One file's counts, which do not contradict themselves."""
    return _checked(_found(path, before), f"`{path}`")


def _found(path: Path, before: Path | None) -> ImportedRun:
    text = read_text(given_path(path), f"`{path}`")
    page = parse(text, str(path), "")
    if page is not None:
        return _of_metrics(page, before)
    if before is not None:
        raise UsageError(f"`--before` needs metrics, and `{path}` holds none", "name two dumps of /metrics")
    try:
        run = _recognized(text)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise UsageError(f"`{path}` has figures of speculation of the wrong kind", _HINT) from None
    if run is None:
        raise UsageError(f"`{path}` holds nothing about speculation that is known here", _HINT)
    return run


def _recognized(text: str) -> ImportedRun | None:
    """The run, by the first reader that knows the text."""
    of_json = (reader(value) for value in _json_values(text) for reader in OF_JSON)
    of_text = (read(text) for read in OF_TEXT)
    return next((run for run in chain(of_json, of_text) if run is not None), None)


def _json_values(text: str) -> list[Any]:
    """The file's JSON value, or its lines' values as one list; nothing where it is no JSON."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        pass
    try:
        return [[json.loads(line) for line in text.splitlines() if line.strip()]]
    except (ValueError, RecursionError):
        return []


def _of_metrics(page: MetricsPage, before: Path | None) -> ImportedRun:
    """Counts of a Prometheus page: since the server's start, or since an earlier page."""
    run = ImportedRun(page.engine, "metrics")
    run.reported = {page.prefix + name: value for name, value in page.gauges.items() if isfinite(value)}
    if before is None:
        run.counts = dict(page.counters)
        run.notices += silence(page, {name: count for name, count in page.counters.items() if isfinite(count)})
        run.notices.append("metrics count since the server's start; --before FILE leaves out what was before a run")
        return run
    earlier = parse(read_text(given_path(before), f"`{before}`"), str(before), "")
    if earlier is None or earlier.engine != page.engine:
        raise UsageError(f"`--before {before}` holds no metrics of {page.engine}", "name an earlier dump of /metrics")
    found = difference(earlier, page, None)
    run.counts = dict(found.added)
    run.notices += found.notices
    return run
