"""A library that is compiled once and kept: damage, company, read-only folders, compilers that fail, full disks."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from specdec_cli.lm.llama import library as module
from specdec_cli.lm.llama.library import BuildError, Library, load_library

SOURCE = 'extern "C" long answer() { return 42; }'
OTHER = 'extern "C" long answer() { return 7; }'
WHAT = "our own decoder for this CPU"
LABEL = f"compiling {WHAT}, once"

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform == "win32", reason="there is no C++ compiler"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The user's cache, empty."""
    caplog.set_level(logging.INFO, logger="specdec_cli")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec"


def load(source: str = SOURCE, *command: str, may_lack_compiler: bool = False) -> Library:
    command = command or ("g++", "-x", "c++")
    return load_library(source, command, may_lack_compiler=may_lack_compiler, name="llama-step", what=WHAT)


def answer(found: Library) -> int:
    return found.calls.answer()


def compiler(folder: Path, build: str, name: str = "cc") -> str:
    """A compiler that says what it is, and does something else (a shell's words) where it is to build.

    `$out` is the file that it should make.
    """
    path = folder / name
    path.write_text(
        '#!/bin/sh\nfor one in "$@"; do [ "$one" = -dM ] && exec g++ "$@"; out="$one"; done\n'
        f'echo "$out" >> {folder}/calls\n{build}\n'
    )
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


GOOD = 'exec g++ "$@"'


def test_a_library_is_built_once_and_it_is_said(cache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = (compiler(tmp_path, GOOD), "-x", "c++")
    assert [answer(load(SOURCE, *command)) for _ in range(3)] == [42] * 3
    assert len(calls(tmp_path)) == 1
    assert caplog.messages == [LABEL]
    assert len(list(cache.glob("*.so"))) == 1
    assert not list(cache.glob("building-*"))
    assert load(SOURCE, *command).not_kept is None


def test_sources_and_options_do_not_meet() -> None:
    assert (answer(load(SOURCE)), answer(load(OTHER))) == (42, 7)
    source = 'extern "C" long answer() { return ANSWER; }'
    assert [answer(load(source, "g++", f"-DANSWER={n}", "-x", "c++")) for n in (1, 2)] == [1, 2]


def foreign(path: Path) -> bytes:
    other = path.with_name("other.so")
    subprocess.run(["g++", "-x", "c++", "-shared", "-fPIC", "-", "-o", str(other)], input=OTHER.encode(), check=True)
    return other.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: b"",
        lambda path: path.read_bytes()[:-1],
        lambda path: path.read_bytes()[:1000],
        lambda path: path.read_bytes()[:200] + b"\x00" * 64 + path.read_bytes()[264:],
        lambda path: b"not a library at all",
        foreign,
    ],
    ids=["empty", "a byte short", "cut", "overwritten", "text", "another library"],
)
def test_point_4_a_damaged_library_is_built_again(cache, caplog: pytest.LogCaptureFixture, damage) -> None:
    load(SOURCE)
    (kept,) = cache.glob("*.so")
    damaged = damage(kept)
    kept.unlink()  # what is loaded may not be written into
    kept.write_bytes(damaged)
    assert answer(load(SOURCE)) == 42
    assert caplog.messages == [LABEL, LABEL]
    assert answer(load(SOURCE)) == 42
    assert caplog.messages == [LABEL, LABEL], "the second one is kept"


def test_a_folder_in_a_librarys_place_is_no_obstacle(cache) -> None:
    load(SOURCE)
    (kept,) = cache.glob("*.so")
    kept.unlink()
    kept.mkdir()
    assert answer(load(SOURCE)) == 42


IN_A_PROCESS = """
import sys
from specdec_cli.lm.llama.library import load_library
assert load_library(sys.argv[1], [sys.argv[2], "-x", "c++"], may_lack_compiler=False, name="a").calls.answer() == 42
"""


def test_point_4_processes_at_the_same_time_build_once(cache, tmp_path: Path) -> None:
    slow = compiler(tmp_path, f"sleep 1\n{GOOD}")
    running = [subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, SOURCE, slow]) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert len(calls(tmp_path)) == 1
    assert len(list(cache.glob("*.so"))) == 1


def test_a_library_waits_for_no_other_one(tmp_path: Path) -> None:
    waiting = compiler(tmp_path, 'while sleep 0.1; do [ -e $(dirname $0)/go ] && break; done\nexec g++ "$@"')
    process = subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, SOURCE, waiting])
    while not calls(tmp_path):
        assert process.poll() is None
        sleep(0.02)
    assert answer(load(OTHER)) == 7
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(60) == 0


def test_a_process_that_dies_while_it_builds_keeps_nobody_waiting(tmp_path: Path) -> None:
    slow = compiler(tmp_path, "sleep 30")
    process = subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, SOURCE, slow], start_new_session=True)
    while not calls(tmp_path):
        assert process.poll() is None
    os.killpg(process.pid, 9)
    process.wait(10)
    assert answer(load(SOURCE)) == 42


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nowhere", "no home"])
def test_a_cache_that_cannot_be_written_is_said_and_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "file").write_text("")
    where = {"a file": tmp_path / "file", "below a file": tmp_path / "file/below"}.get(place, place)
    monkeypatch.setenv("XDG_CACHE_HOME", "" if place == "no home" else str(where))
    if place == "no home":

        def home() -> None:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(module.Path, "home", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = load(SOURCE)
    assert answer(found) == 42
    assert found.not_kept is not None
    assert "for this run alone" in caplog.messages[-1]
    assert "XDG_CACHE_HOME" in caplog.messages[-1]
    assert not list(tmp_path.glob("specdec-*")), "nothing is left in the temporary folder"


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_read(cache, caplog: pytest.LogCaptureFixture) -> None:
    load(SOURCE)
    cache.chmod(0o555)
    try:
        assert load(SOURCE).not_kept is None
        assert caplog.messages == [LABEL]
        assert load(OTHER).not_kept is not None
    finally:
        cache.chmod(0o755)


FULL = 'echo "/tmp/x.s: fatal error: error writing to /tmp/x.s: No space left on device" >&2; exit 1'


def test_a_full_disk_is_left_for_another(cache, tmp_path: Path) -> None:
    full = compiler(tmp_path, f'case "$out" in {cache}/*) {FULL};; esac\n{GOOD}')
    found = load(SOURCE, full, "-x", "c++")
    assert answer(found) == 42
    assert found.not_kept == f"`{cache}` (No space left on device)"
    assert not list(cache.glob("*.so"))


def test_no_disk_with_room_is_said(cache, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        load(SOURCE, compiler(tmp_path, FULL), "-x", "c++")
    assert f"`{cache}` (No space left on device), nor in a temporary folder" in error.value.reason
    assert "make room" in error.value.remedy


@pytest.mark.in_turn(0)
@pytest.mark.parametrize(
    ("build", "reason", "remedy"),
    [
        (
            'echo "x.cpp:1: error: no OpenMP here" >&2; exit 1',
            "does not compile: x.cpp:1: error: no OpenMP here",
            "CXX",
        ),
        ("exit 3", "does not compile: exit status 3", "CXX"),
        ("kill -9 $$", "was killed by signal 9", "memory"),
        ("exit 0", "made no library", "CXX"),
        ('echo garbage > "$out"', "its own does not load", "XDG_CACHE_HOME"),
        ("sleep 9", "took more than 1 s", "CXX"),
    ],
    ids=["an error", "silent", "killed", "nothing made", "garbage made", "endless"],
)
def test_a_compiler_that_fails_halfway_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, reason: str, remedy: str
) -> None:
    if "sleep" in build:
        monkeypatch.setattr(module, "_SECONDS", 1)
    with pytest.raises(BuildError) as error:
        load(SOURCE, compiler(tmp_path, build), "-x", "c++")
    assert reason in error.value.reason
    assert remedy in error.value.remedy
    assert answer(load(SOURCE)) == 42, "another compiler is not kept from it"


def test_49_a_compilers_own_programs_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 1)
    started = tmp_path / "started"
    with pytest.raises(BuildError, match="took more than 1 s"):
        load(SOURCE, compiler(tmp_path, f"sleep 60 & echo $! > {started}; wait"), "-x", "c++")
    with suppress(psutil.NoSuchProcess):
        own, end = psutil.Process(int(started.read_text())), monotonic() + 10
        while own.status() != psutil.STATUS_ZOMBIE:  # a killed process may have to wait for a core before it ends
            assert monotonic() < end
            sleep(0.01)


def test_a_compiler_that_goes_away_halfway_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cc"
    path.write_text('#!/bin/sh\nrm "$0"\nexec g++ "$@"\n')
    path.chmod(0o755)
    with pytest.raises(BuildError, match=f"no C\\+\\+ compiler `{path}`"):
        load(SOURCE, str(path), "-x", "c++")


def test_a_compiler_that_is_no_program_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cc"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    with pytest.raises(BuildError, match="does not run: Exec format error"):
        load(SOURCE, str(path), "-x", "c++")


@pytest.mark.parametrize(("tool", "words"), [("apk", "`apk add g++`"), (None, "install one, or name one with CXX")])
def test_the_remedy_is_this_system_s(monkeypatch: pytest.MonkeyPatch, tool: str | None, words: str) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/sbin/{name}" if name == tool else None)
    with pytest.raises(BuildError) as error:
        load(SOURCE, "no-such-compiler", "-x", "c++")
    assert error.value.reason == "no C++ compiler `no-such-compiler`"
    assert words in error.value.remedy


def test_a_compiler_that_has_gone_leaves_what_it_built(tmp_path: Path) -> None:
    gone = compiler(tmp_path, GOOD)
    assert answer(load(SOURCE, gone, "-x", "c++")) == 42
    Path(gone).unlink()
    assert answer(load(SOURCE, gone, "-x", "c++", may_lack_compiler=True)) == 42
    with pytest.raises(BuildError):
        load(SOURCE, gone, "-x", "c++")
    with pytest.raises(BuildError):
        load(OTHER, gone, "-x", "c++", may_lack_compiler=True)


def test_another_processor_s_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compiler(tmp_path, GOOD)
    load(SOURCE, gone, "-x", "c++")
    Path(gone).unlink()
    monkeypatch.setattr(module, "processor", lambda: "another one")
    with pytest.raises(BuildError):
        load(SOURCE, gone, "-x", "c++", may_lack_compiler=True)


PLANTED = 'extern "C" long answer() { return 666; }'
ALONE = "for this run alone: it cannot be kept in"


def plant(cache: Path) -> Path:
    """A library of somebody else's under the name that this source's has, with the digest of its bytes."""
    load(SOURCE)
    (kept,) = cache.glob("*.so")
    planted = foreign(kept)
    kept.unlink()
    (cache / "other.so").unlink()
    path = cache / f"{kept.stem.rpartition('-')[0]}-{module._digest(planted)}.so"
    path.write_bytes(planted)
    path.chmod(0o755)
    return path


def test_49_20_the_cache_is_ours_alone(cache: Path) -> None:
    mask = os.umask(0)
    try:
        load(SOURCE)
    finally:
        os.umask(mask)
    (kept,) = cache.glob("*.so")
    assert [path.stat().st_mode & 0o777 for path in (cache, kept)] == [0o700, 0o700]


@pytest.mark.skipif(sys.platform == "darwin" or os.getuid() != os.getgid(), reason="a group of one's own")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722, 0o1777])
@pytest.mark.parametrize("place", ["folder", "parent"])
def test_49_20_a_library_where_others_may_write_is_not_loaded(
    cache: Path, caplog: pytest.LogCaptureFixture, mode: int, place: str
) -> None:
    plant(cache)
    assert answer(load(SOURCE)) == 7, "it would have been loaded"
    caplog.clear()
    folder = cache if place == "folder" else cache.parent
    folder.chmod(mode)
    if place == "parent" and mode in (0o1777, 0o775):  # as in /tmp, and with umask 002 and a group of one's own
        assert answer(load(SOURCE)) == 7
        return
    found = load(SOURCE)
    assert answer(found) == 42
    said = "others may write there" if place == "folder" else f"others may write into {folder}"
    assert found.not_kept == f"`{cache}` ({said})"
    assert len(caplog.messages) == 1
    assert ALONE in caplog.messages[0]
    with pytest.raises(BuildError):
        load(SOURCE, "no-such-compiler", "-x", "c++", may_lack_compiler=True)


def test_49_20_a_library_in_a_folder_of_somebody_else_s_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(cache)
    caplog.clear()
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    found = load(SOURCE)
    assert answer(found) == 42
    assert found.not_kept == f"`{cache}` (it belongs to another user)"
    assert ALONE in caplog.messages[0]


def test_49_20_a_link_is_neither_loaded_nor_written_through(cache: Path, tmp_path: Path) -> None:
    path = plant(cache)
    elsewhere = tmp_path / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert answer(load(SOURCE)) == 42
    precious = tmp_path / "precious"
    precious.write_text("text")
    lock = cache / "building.lock"
    lock.unlink()
    lock.symlink_to(precious)
    cache.chmod(0o777)
    load(SOURCE)
    assert precious.read_text() == "text"


def test_49_20_a_file_that_others_may_write_is_built_again(cache: Path) -> None:
    plant(cache).chmod(0o775)
    assert answer(load(SOURCE)) == 42
    (kept,) = cache.glob("*.so")
    assert kept.stat().st_mode & 0o777 == 0o700


def test_49_20_a_link_to_a_folder_of_ours_is_a_cache(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "own")
    assert load(SOURCE).not_kept is None
    (tmp_path / "own").chmod(0o777)
    assert load(SOURCE).not_kept == f"`{cache}` (others may write there)"


def test_folders_of_builds_that_a_signal_ended_are_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the cache and of the temporary folder that are older than any build; nothing else that is there."""
    temporary = tmp_path / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    places = [cache / "building-old", temporary / "specdec-building-old"]
    others = [cache / "building-now", cache / "other", temporary / "specdec-gguf-old", temporary / "building-old"]
    link = temporary / "specdec-building-link"
    for place in (*places, *others):
        place.mkdir(parents=True, mode=0o700)
        (place / "made.so").write_text("half")
        if place.name != "building-now":
            os.utime(place, (0, 0))
    link.symlink_to(others[-1])
    assert answer(load()) == 42
    assert [place for place in (*places, *others, link) if not place.exists()] == places
