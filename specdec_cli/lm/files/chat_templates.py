"""The chat templates of a model on this disk, read from its files without transformers."""

from __future__ import annotations

from pathlib import Path

from specdec_cli.errors import SpecdecError
from specdec_cli.files import given_path, read_text
from specdec_cli.lm.files.names import BUILTIN

_ENTRY = "tokenizer.chat_template"


def chat_templates(name: str) -> list[str] | None:
    """The texts of a model's chat templates; None where they are not here to be read, or only loading can judge."""
    path = given_path(name)
    if name in BUILTIN:
        path = Path(__file__).parents[2] / "builtin" / name.removeprefix("builtin:")
    try:
        if (path / "config.json").is_file():
            return _in_folder(path)
        from specdec_cli.lm.files.gguf_choice import local_gguf
        from specdec_cli.lm.files.gguf_header import read_gguf_header

        gguf = local_gguf(name)
        if gguf is not None:
            given = read_gguf_header(name, gguf).metadata.get(_ENTRY)
            return [given] if isinstance(given, str) else []
        return _in_folder(path) if path.is_dir() else None
    except (SpecdecError, OSError, ValueError):
        return None  # loading names what is wrong with the file


def _in_folder(folder: Path) -> list[str] | None:
    """Those of a transformers folder; an adapter's may be its base model's."""
    from specdec_cli.lm.files.reading import read_object

    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    templates = [read_text(file, "chat template") for file in files if file.is_file()]
    for file in ("chat_template.json", "tokenizer_config.json"):
        given = read_object(folder / file).get("chat_template") if (folder / file).is_file() else None
        named = given if isinstance(given, list) else [{"template": given}]
        templates += [
            str(template["template"]) for template in named if isinstance(template, dict) and template.get("template")
        ]
    return None if not templates and (folder / "adapter_config.json").is_file() else templates
