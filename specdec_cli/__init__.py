"""specdec: speculative decoding that proves its output is the target's and says what it gains.

from specdec_cli import Engine, SamplingParams
engine = Engine.load("builtin:target", "builtin:draft")
print(engine.generate("Once upon a time")[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.engine.jobs.async_engine import AsyncEngine
    from specdec_cli.engine.jobs.records import Delta
    from specdec_cli.engine.loading import LoadSettings, ModelSettings
    from specdec_cli.engine.options import EngineOptions
    from specdec_cli.engine.outputs import Generated, Output
    from specdec_cli.events import Emitted, Event, Failed, Finished, Noticed, SpeculativeCounts, Stepped, TokenLogprob
    from specdec_cli.measure.notebook import ResultTable, WorkloadTrace, trace
    from specdec_cli.sampling.params import SamplingParams

__version__ = "0.2.0"
__all__ = [
    "AsyncEngine",
    "Delta",
    "Emitted",
    "Engine",
    "EngineOptions",
    "Event",
    "Failed",
    "Finished",
    "Generated",
    "LoadSettings",
    "ModelSettings",
    "Noticed",
    "Output",
    "ResultTable",
    "SamplingParams",
    "SpeculativeCounts",
    "Stepped",
    "TokenLogprob",
    "WorkloadTrace",
    "__version__",
    "trace",
]

_WHERE = {
    "AsyncEngine": "specdec_cli.engine.jobs.async_engine",
    "Delta": "specdec_cli.engine.jobs.records",
    "Emitted": "specdec_cli.events",
    "Engine": "specdec_cli.engine.engine",
    "EngineOptions": "specdec_cli.engine.options",
    "Event": "specdec_cli.events",
    "Failed": "specdec_cli.events",
    "Finished": "specdec_cli.events",
    "Generated": "specdec_cli.engine.outputs",
    "LoadSettings": "specdec_cli.engine.loading",
    "ModelSettings": "specdec_cli.engine.loading",
    "Noticed": "specdec_cli.events",
    "Output": "specdec_cli.engine.outputs",
    "ResultTable": "specdec_cli.measure.notebook",
    "SamplingParams": "specdec_cli.sampling.params",
    "SpeculativeCounts": "specdec_cli.events",
    "Stepped": "specdec_cli.events",
    "TokenLogprob": "specdec_cli.events",
    "WorkloadTrace": "specdec_cli.measure.notebook",
    "trace": "specdec_cli.measure.notebook",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: torch costs seconds, and `--help` needs none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module `specdec_cli` has no attribute `{name}`")
    from importlib import import_module

    from specdec_cli.engine.garbage import importing_torch

    with importing_torch():
        return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
