"""Files of other tools, recognized by what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
_EVENT_FIELD = re.compile(r":|(?:event|id|retry):|data: *\[DONE\]")
"""Lines of a stream of events besides its data."""
_FIGURE_IN_JSON = re.compile(
    r'"(?!\w*threshold)\w*(?:accept(?!ed_prediction)|draft_n|n_draft|draft_tokens|spec_verify)\w*" *: *[\d.]'
)
_MOST_SHOWN = 160
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
            tools or forms, or of one server whose counters would be counted twice; or `before` is of another server.
    """
    if before is not None and len(files) != 1:
        raise UsageError("`--before` needs one FILE with the metrics after the run", "name one file")
    _refuse_twice([*files, *([before] if before is not None else [])])
    runs = [_read(path, before) for path in files]
    for run in runs:
        _refuse_contradiction(run, f"`{run.path}`")
    _refuse_repeated_requests(runs)
    tools = sorted({run.tool for run in runs})
    if len(tools) > 1:
        raise UsageError(f"the files are of several tools: {', '.join(tools)}", "import those of one tool at a time")
    _refuse_counting_twice(runs)
    forms = list(dict.fromkeys(run.form for run in runs))
    run = summed(runs)
    _refuse_contradiction(run, "the sum of the files")
    if len(runs) > 1:
        run.form = f"{len(runs)} files: {'; '.join(forms)}"
    if len(runs) > 1 and run.page is not None:
        run.notices.append(f"the counts of {len(runs)} dumps of metrics are added up, as of as many servers")
    run.notices += run.missing()
    return run


def _refuse_counting_twice(runs: Sequence[ImportedRun]) -> None:
    """Refuse files that may count the same tokens: a run's log and its metrics, or two dumps of one server."""
    first = runs[0]
    for other in runs[1:]:
        if other.kind != first.kind:
            message = f"`{first.path}` is of the form `{first.form}`, and `{other.path}` of `{other.form}`"
            raise UsageError(f"{message}: they may count the same tokens", "import files of one form at a time")
    dumps: dict[tuple[str, float], Path] = {}
    for run in runs:
        for series in () if run.page is None else run.page.began.items():
            if series in dumps and dumps[series] != run.path:
                message = f"`{dumps[series]}` and `{run.path}` are metrics of one server, which would be counted twice"
                raise UsageError(message, "name the later one, and the earlier one as --before")
            dumps[series] = run.path


def _refuse_repeated_requests(runs: Sequence[ImportedRun]) -> None:
    """Refuse files that hold the same request: it would be counted twice."""
    seen: dict[str, Path] = {}
    for run in runs:
        twice = next((request for request in sorted(run.requests) if request in seen), None)
        if twice is not None:
            message = f"`{seen[twice]}` and `{run.path}` both hold the request `{twice}`, which would be counted twice"
            raise UsageError(message, "import one of them, or one file with the lines of both")
        seen |= dict.fromkeys(run.requests, run.path)


def _refuse_twice(files: Sequence[Path]) -> None:
    """Refuse a file under two names: it would be counted twice, or subtracted from itself."""
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        with suppress(OSError):  # reading it says what is wrong with it
            status = given_path(path).stat()
            key = (status.st_dev, status.st_ino)
            if key in seen:
                message = (
                    f"`{path}` is given twice" if seen[key] == path else f"`{seen[key]}` and `{path}` are one file"
                )
                raise UsageError(message, "name each file once")
            seen[key] = path


def _refuse_contradiction(run: ImportedRun, what: str) -> None:
    """Refuse counts that contradict themselves."""
    message = run.contradiction()
    if message is not None:
        raise UsageError(f"{what} cannot be right: it has {message}", "check how the file was made")


def _read(path: Path, before: Path | None) -> ImportedRun:
    """One file's counts."""
    text = read_text(given_path(path), f"`{path}`")
    page = parse(text, str(path), "")
    if page is not None:
        return replace(_of_metrics(page, before), path=path, kind="metrics", page=page)
    if before is not None:
        raise UsageError(f"`--before` needs metrics, and `{path}` holds none", "name two dumps of /metrics")
    try:
        runs, unread = _recognized(text)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise UsageError(f"`{path}` has figures of speculation of the wrong kind", _HINT) from None
    if not runs and unread:
        raise UsageError(f"`{path}` has no figures of speculation that are understood; {_unread(unread)}", _HINT)
    if not runs:
        raise UsageError(f"`{path}` holds nothing about speculation that is known here", _HINT)
    kind, run = runs[0]
    if len(runs) > 1:
        tools, forms = sorted({each.tool for _, each in runs}), " and a ".join(each.form for _, each in runs)
        if len(tools) > 1:
            message = f"is a log of several tools: {', '.join(tools)}"
            raise UsageError(f"`{path}` {message}", "import the lines of one tool at a time")
        raise UsageError(f"`{path}` holds {forms}: they may count the same tokens", "import one of them")
    if unread:
        run.notices.append(_unread(unread))
    return replace(run, path=path, kind=kind)


def _recognized(text: str) -> tuple[list[tuple[str, ImportedRun]], dict[int, str]]:
    """The runs in a file with their readers' names, and lines with figures that are not understood, by number."""
    value, by_line, others = _json_values(text)
    known = _known(value)
    lines = others if known is not None else dict(enumerate(text.split("\n"), start=1))
    log_runs, unread = logs.read_log(lines)
    unread |= {number: line for number, line in lines.items() if _FIGURE_IN_JSON.search(line)}
    counted = set() if known is None else known[1].requests
    for number, value in by_line.items() if known is not None else ():
        line = json.dumps(value)
        if _FIGURE_IN_JSON.search(line) and not counted & reports.request_ids(value) and not _known(value):
            unread[number] = line
    runs = [*([] if known is None else [known]), *((f"{run.tool} log", run) for run in log_runs)]
    return runs, dict(sorted(unread.items()))


def _known(value: Any) -> tuple[str, ImportedRun] | None:
    """The run in a JSON value, by the first reader that knows it."""
    results = ((reader.__name__, reader(value)) for reader in OF_JSON)
    return next(((name, run) for name, run in results if run is not None), None)


def _json_values(text: str) -> tuple[Any, dict[int, Any], dict[int, str]]:
    """A file's JSON value, or the list of its lines' values; these by line; and the lines that are no JSON.

    A stream of events is its data. A string may hold other line breaks than the file's.
    """
    try:
        return json.loads(text), {}, {}
    except (ValueError, RecursionError):
        pass
    values, others = dict[int, Any](), dict[int, str]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or _EVENT_FIELD.match(line):
            continue
        try:
            values[number] = json.loads(line.removeprefix("data:"))
        except (ValueError, RecursionError):
            others[number] = line
    return list(values.values()), values, others


def _unread(lines: Mapping[int, str]) -> str:
    """The sentence about lines with figures that are not understood."""
    number, line = next(iter(lines.items()))
    shown = " ".join(line.split()).strip(" ,;.")
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
    if len(lines) == 1:
        return f"line {number} holds figures that are not understood: `{shown}`"
    return f"{len(lines)} lines hold figures that are not understood, the first is line {number}: `{shown}`"


def _of_metrics(page: MetricsPage, before: Path | None) -> ImportedRun:
    """Counts of a Prometheus page: since the server's start, or since an earlier page."""
    run = ImportedRun(page.engine, "metrics")
    _refuse_mixed(page)
    if len(page.models) > 1:
        run.notices.append(f"the counts of {len(page.models)} models are added up: {', '.join(page.models)}")
    run.reported = {page.prefix + name: value for name, value in page.gauges.items() if isfinite(value)}
    if before is None:
        run.counts = dict(page.counters)
        run.notices += silence(page, {name: count for name, count in page.counters.items() if isfinite(count)})
        run.notices.append("metrics count since the server's start; --before FILE leaves out what was before a run")
        return run
    earlier = parse(read_text(given_path(before), f"`{before}`"), str(before), "")
    if earlier is None or earlier.engine != page.engine:
        raise UsageError(f"`--before {before}` holds no metrics of {page.engine}", "name an earlier dump of /metrics")
    _refuse_mixed(earlier)
    _refuse_another_server(earlier, page)
    counters = difference(earlier, page, None)
    run.counts = dict(counters.added)
    run.notices += counters.notices
    return run


def _refuse_mixed(page: MetricsPage) -> None:
    """Refuse metrics of several servers or moments in one file, whose sum would count tokens twice."""
    if page.mixed is not None:
        raise UsageError(f"`{page.path}` holds {page.mixed}", "import one dump of one server at a time")


def _refuse_another_server(before: MetricsPage, after: MetricsPage) -> None:
    """Refuse an earlier dump of other labels, of larger counts or of another start of the server."""
    hint = "name two dumps of one server that was not restarted in between, the earlier one as --before"
    lost = next((name for name in before.series if name not in after.series), None)
    if lost is not None:
        raise UsageError(f"`{before.path}` has the counter `{lost}`, and `{after.path}` has none of these labels", hint)
    less = next((name for name, count in before.series.items() if after.series[name] < count), None)
    if less is not None:
        message = f"{after.series[less]:.0f} of the counter `{less}`, and `{before.path}` had {before.series[less]:.0f}"
        raise UsageError(f"`{after.path}` has {message}", hint)
    if after.restarted(before):
        raise UsageError(f"the counters of `{before.path}` and `{after.path}` began at different times", hint)
