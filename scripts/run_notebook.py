"""Run a notebook's code cells in order and store what they print.

    python scripts/run_notebook.py examples/predict.ipynb

It needs no Jupyter. A cell's output is what it prints; the value of a last expression is not shown.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any


def run_cells(notebook: dict[str, Any], name: str) -> list[str]:
    """Run the code cells in one namespace.

    Args:
        notebook: the parsed file (nbformat 4).
        name: of the file, for tracebacks.

    Returns:
        What each code cell printed.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            out = StringIO()
            with redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), namespace)
            printed.append(out.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """The notebook with the texts that its code cells printed."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, printed, strict=True), start=1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [stream] if text else []
    return notebook


def main(arguments: list[str]) -> int:
    """Run the named notebooks and write their outputs into them."""
    for name in arguments:
        file = Path(name)
        notebook = json.loads(file.read_text(encoding="utf-8"))
        done = with_outputs(notebook, run_cells(notebook, name))
        file.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
