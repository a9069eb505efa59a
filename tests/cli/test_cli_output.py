import io
import json
import sys
from datetime import datetime
from pathlib import Path

import pytest

from specdec_cli import __version__
from specdec_cli.cli import output
from specdec_cli.cli.shared import Shared
from specdec_cli.errors import RunError, UsageError
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.workload.folder import _check_one_set


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")])
def test_colour_only_where_it_is_welcome(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    assert output.colourful(Terminal())
    assert not output.colourful(io.StringIO())
    monkeypatch.setenv(name, value)
    assert not output.colourful(Terminal())


def test_envelope() -> None:
    document = output.envelope(SweepDocument, None, {"rows": [1]}, device="cpu", dtype="float32")
    assert list(document) == ["schema", "specdec_version", "created", "environment", "recipe", "rows"]
    assert document["specdec_version"] == __version__
    assert datetime.fromisoformat(document["created"]).tzinfo is not None
    assert document["environment"]["device"] == "cpu"
    assert document["environment"]["torch"]


def test_stdout_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    output.deliver({"a": "é\n"}, Shared(json=True, output=path))
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text()) == {"a": "é\n"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_stream_without_unicode_gets_json_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    output.deliver({"a": "é 🙂"}, Shared(json=True))
    stream.flush()
    assert json.loads(raw.getvalue()) == {"a": "é 🙂"}


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        output.deliver({"a": float("nan")}, Shared(output=tmp_path / "x.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appeared_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    output.check_destination(path, force=False)
    path.write_text("mine")
    with pytest.raises(RunError, match="already exists"):
        output.deliver({}, Shared(output=path))
    assert path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_force_overwrites_through_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    output.deliver({"a": 1}, Shared(output=link, force=True))
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"a": 1}


@pytest.mark.skipif(sys.platform == "win32", reason="device files")
def test_devices_are_no_destination() -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        output.check_destination(Path("/dev/null"), force=True)


def test_a_command_in_a_hint_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    with pytest.raises(UsageError, match="does not exist") as missing:
        output.check_destination(folder / "a.json", force=False)
    assert f"`mkdir -p '{folder}'`" in str(missing.value.hint)
    for part in ("one", "two"):
        (folder / part).mkdir(parents=True)
    with pytest.raises(UsageError, match="several folders") as several:
        _check_one_set(folder, str(folder), [folder / "one" / "a.jsonl", folder / "two" / "b.jsonl"])
    assert several.value.hint == f"name one: --dataset '{folder / 'one'}'"
