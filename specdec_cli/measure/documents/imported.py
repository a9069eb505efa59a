"""The document of `import`, `specdec.import/1`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_cli.document import Result, ResultDocument, SpeculativeResult
from specdec_cli.measure.documents.parts import GateResult

if TYPE_CHECKING:
    from specdec_cli.measure.imported.record import ImportedRun


class ImportSource(Result):
    """The tool that made the run, the form of its files, and their names."""

    tool: Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm", "specdec", "guidellm", "aiperf"]
    form: str
    files: list[str]


class ImportDocument(ResultDocument):
    """Speculation of a run that another tool made."""

    schema_name: ClassVar[str] = "specdec.import/1"

    source: ImportSource
    speculative: SpeculativeResult | None
    reported: dict[str, float] = Field(description="Figures that the tool reports itself, by its own names.")
    definitions: dict[str, str] = Field(description="The tool's own definitions of its figures.")
    notices: list[str]
    gates: list[GateResult] = Field(default_factory=list)


def imported_body(run: ImportedRun, files: Sequence[Path]) -> dict[str, Any]:
    """The document's own fields, after those that every document has. `gates` is empty until the gates are judged."""
    return ImportDocument(
        source=ImportSource(tool=run.tool, form=run.form, files=[str(path) for path in files]),
        speculative=run.stats(),
        reported=run.reported,
        definitions=run.meanings(),
        notices=run.notices,
    ).as_json()
