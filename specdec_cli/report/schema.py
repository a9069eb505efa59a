"""The JSON Schemas of the documents, shipped beside this file in `schemas/`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def read_schema(name: str, shared: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of one document.

    Args:
        name: the command's name, `generate` for example.
        shared: another schema whose definitions this one refers to; its own of the same name win.
    """
    text = files("specdec_cli.report").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    if shared is not None:
        schema["$defs"] = shared["$defs"] | schema["$defs"]
    return schema
