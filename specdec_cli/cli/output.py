"""Output of the program: one JSON document, on stdout or in a file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from specdec_cli import __version__
from specdec_cli.cli.terminal import colourful, version_of
from specdec_cli.errors import RunError, UsageError
from specdec_cli.report.page import open_page, to_nowhere

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.cli.shared import Shared
    from specdec_cli.document import ResultDocument
    from specdec_cli.engine.engine import Engine


def environment(
    device: str | None = None,
    draft_device: str | None = None,
    dtype: str | None = None,
    decoder: str | None = None,
    draft_decoder: str | None = None,
    cpu: str | None = None,
    gpu: str | None = None,
    draft_vocabulary: Mapping[str, Any] | None = None,
) -> dict[str, object]:
    """Versions, device, threads, dtype, whose forward runs; from packages' metadata, so nothing heavy is imported.

    `cpu` and `gpu` are models, the latter of the target's device, or else of the draft's. `draft_vocabulary` says what
    a draft with another tokenizer has in common with the target.
    """
    torch: Any = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "specdec": __version__,
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "platform": platform.platform(terse=True),
        "device": device,
        "draft_device": draft_device,
        "threads": torch.get_num_threads() if torch is not None else None,
        "dtype": dtype,
        "decoder": decoder,
        "draft_decoder": draft_decoder,
        "cpu": cpu,
        "gpu": gpu,
        "draft_vocabulary": draft_vocabulary,
    }


def envelope(
    kind: type[ResultDocument], recipe: Mapping[str, Any] | None, body: Mapping[str, Any], **machine: Any
) -> dict[str, Any]:
    """A JSON document: what every one begins with, then its own keys.

    Args:
        kind: names the schema.
        recipe: the resolved recipe (`Recipe.as_dict()`), or None where there is none.
        body: the document's own keys.
        machine: what `machine_of` has for `environment`.
    """
    head = {
        "schema": kind.schema_name,
        "specdec_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "environment": environment(**machine),
        "recipe": recipe,
    }
    return head | dict(body)


def machine_of(engine: Engine, outputs: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
    """Device, dtype and decoder of an engine's models, for `envelope`.

    Args:
        engine: loaded.
        outputs: what was decoded, for the share of it that a draft with another tokenizer can guess.
    """
    import torch

    from specdec_cli.measure.machine.machine import cpu_model

    target, draft, shared = engine.target, engine.drafter.lm, engine.drafter.shared_vocabulary
    devices = [lm.device for lm in (target, draft) if lm is not None]
    return {
        "cpu": cpu_model(),
        "gpu": next((torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"), None),
        "device": str(target.device),
        "draft_device": None if draft is None else str(draft.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": target.decoder,
        "draft_decoder": None if draft is None else draft.decoder,
        "draft_vocabulary": None if shared is None else shared.result(outputs).as_json(),
    }


def check_destination(path: Path | None, force: bool, flag: str = "--output") -> None:
    """Refuse an `--output`, or another file that a flag names, that could not be written, before any work is done.

    Raises:
        UsageError: it exists without `--force`, is not a regular file, or its folder is missing or not writable.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"`{flag} {path}` is a folder", "name a file in it")
    if os.path.lexists(path):
        if path.exists() and not path.is_file():
            raise UsageError(f"`{flag} {path}` is not a regular file", "name another; --json writes to stdout")
        if not force:
            raise UsageError(f"`{flag} {path}` already exists", "name another file, or overwrite it with --force")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(
            f"the folder of `{flag} {path}` does not exist", f"create it first: `mkdir -p {shlex.quote(str(folder))}`"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the folder of `{flag} {path}` is not writable", "name a file in another folder")


def deliver(document: Mapping[str, Any], shared: Shared) -> None:
    """Write a document where `--output` and `--json` want it: to a file all at once, to stdout as the only thing there.

    If stdout has no reader any more, the command continues, because its exit code matters more.

    Raises:
        RunError: the file cannot be written, or appeared while the work was done.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if shared.output is not None:
        write_file(shared.output, text, shared.force)
    if shared.json:
        is_unicode = _is_unicode(sys.stdout)
        try:
            sys.stdout.write(text if is_unicode else json.dumps(document, indent=2, allow_nan=False) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            to_nowhere(sys.stdout)


def _is_unicode(stream: IO[str]) -> bool:
    """Whether a stream takes every character; what others write for one that they lack is no JSON."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")


def is_interrupted(path: Path) -> bool:
    """Whether a file holds the document of a measurement that was interrupted."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return document["plan"]["interrupted"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_file(path: Path, content: str | bytes, force: bool = False) -> None:
    """Write a file so that it is there whole or not at all; without `force` one that exists stays.

    Raises:
        RunError: it cannot be written, or exists.
    """
    final = path.resolve()
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        if not force:
            os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(temporary, final)
    except FileExistsError:
        raise RunError(f"`{path}` already exists", "name another file, or overwrite it with --force") from None
    except OSError as error:
        raise RunError(f"`{path}` cannot be written: {error.strerror}", "name a file in another folder") from None
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def show_plan(
    recipe: Mapping[str, Any] | None,
    body: Mapping[str, Any],
    shared: Shared,
    text: str,
    document: type[ResultDocument] | None = None,
) -> None:
    """Show a dry run or a list: a document with `--json` or `--output`, and text without `--json`.

    Args:
        recipe: the resolved one (`Recipe.as_dict()`), or None where there is none.
        body: the document's own keys.
        shared: the command's shared options.
        text: for people.
        document: its class; None takes that of dry runs.
    """
    if shared.wants_document:
        from specdec_cli.measure.documents.recipes import PlanDocument

        made = document or PlanDocument
        deliver(envelope(made, recipe, made.given(body)), shared)
    if not shared.json:
        sys.stdout.write(text)


def deliver_with_report(document: Mapping[str, Any], shared: Shared, draw: Callable[[Console], None]) -> None:
    """Write the document where it was asked for, and the report to stdout unless the document stands there.

    The report is printed even if the file cannot be written.

    Args:
        document: goes to stdout with `--json`, to a file with `--output`.
        shared: the command's shared options.
        draw: prints the report on the page that it is given.
    """
    try:
        deliver(document, shared)
    finally:
        if not (shared.json and shared.quiet):
            stream = sys.stderr if shared.json else sys.stdout
            draw(open_page(stream, colourful(stream)))


def write_results(
    document: Mapping[str, Any], shared: Shared, csv: Callable[[], str] = str, *, force: bool = False
) -> None:
    """Write every further file of a result that was asked for.

    Args:
        document: of the measurement.
        shared: names the files by kind.
        csv: the figures as rows of a table.
        force: replace files that are there, also without --force.

    Raises:
        RunError: one cannot be written.
    """
    for kind, path in shared.files.items():
        write_file(path, _content(kind, path, document, csv), force or shared.force)


def _content(kind: str, path: Path, document: Mapping[str, Any], csv: Callable[[], str]) -> str | bytes:
    from specdec_cli.report.html import html
    from specdec_cli.report.plot import picture
    from specdec_cli.report.result_files import junit, markdown

    if kind == "csv":
        return csv()
    if kind == "plot":
        return picture(document, path.suffix.lower())
    return {"html": html, "markdown": markdown, "junit": junit}[kind](document)
