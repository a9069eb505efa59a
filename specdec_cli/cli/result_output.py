"""Writes the files of a measurement beside its document: tables, a picture, a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.output import write_file

if TYPE_CHECKING:
    from specdec_cli.cli.measurement_options import Wish


def write_results(document: Mapping[str, Any], wish: Wish, csv: Callable[[], str], force: bool) -> None:
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
    from specdec_cli.report.result_files import junit, markdown

    texts: Mapping[str, Callable[[], str]] = {
        "markdown": lambda: markdown(document),
        "csv": csv,
        "junit": lambda: junit(document),
    }
    for kind, path in wish.files.items():
        if path is not None:
            write_file(path, texts[kind](), force)
    if wish.plot is not None:
        write_file(wish.plot, picture(document, wish.plot.suffix.lower()), force)
    if wish.html is not None:
        write_file(wish.html, html(document), force)
