"""Writes the files of a measurement beside its document: tables, a picture, a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.output import write_file

if TYPE_CHECKING:
    from pathlib import Path

    from specdec_cli.cli.measurement_options import MeasurementOptions


def write_results(document: Mapping[str, Any], wish: MeasurementOptions, csv: Callable[[], str], force: bool) -> None:
    """Write every file that was asked for.

    Args:
        document: of the measurement.
        wish: names the files.
        csv: the figures as rows of a table.
        force: replace files that are there.

    Raises:
        RunError: one cannot be written.
    """
    from specdec_cli.report.html import html
    from specdec_cli.report.plot import picture

    write_texts(document, wish.files, force, csv)
    if wish.plot is not None:
        write_file(wish.plot, picture(document, wish.plot.suffix.lower()), force)
    if wish.html is not None:
        write_file(wish.html, html(document), force)


def write_texts(
    document: Mapping[str, Any],
    files: Mapping[str, Path | None],
    force: bool,
    csv: Callable[[], str] | None = None,
) -> None:
    """Write the files of a result that are text.

    Args:
        document: of the measurement.
        files: by kind: markdown, junit, or csv; None for those not requested.
        force: replace files that are there.
        csv: the figures as rows of a table; None where a command has no such file.

    Raises:
        RunError: one cannot be written.
    """
    from specdec_cli.report.result_files import junit, markdown

    texts: dict[str, Callable[[], str]] = {"markdown": lambda: markdown(document), "junit": lambda: junit(document)}
    if csv is not None:
        texts["csv"] = csv
    for kind, path in files.items():
        if path is not None:
            write_file(path, texts[kind](), force)
