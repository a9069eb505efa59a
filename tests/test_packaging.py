"""What an installed package brings with it: recipes, the built-in pair, the licence, one version."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

import specdec_cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILTIN = ROOT / "specdec_cli" / "builtin"
MAX_BYTES = 25_000_000


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == specdec_cli.__version__


def test_the_wheel_brings_the_recipes() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["specdec_cli"]
    assert wheel["force-include"] == {"recipes": "specdec_cli/recipes"}
    assert (ROOT / "recipes" / "builtin.yaml").is_file()


def test_the_source_archive_brings_what_the_tests_need() -> None:
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    needed = {"specdec_cli", "recipes", "tests", "scripts", "benchmarks", "README.md", "CONTRIBUTING.md", "LICENSE"}
    assert needed | {"CHANGELOG.md", "Makefile", "constraints.txt"} <= included


def test_the_script_and_the_extras() -> None:
    project = PROJECT["project"]
    assert project["name"] == "specdec-cli"
    assert project["scripts"] == {"specdec": "specdec_cli.__main__:main"}
    assert {"serve", "plots", "structured", "all"} <= set(project["optional-dependencies"])


def test_the_licence() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.skipif(not BUILTIN.is_dir(), reason="the built-in pair's weights are not here")
def test_the_built_in_pair_is_small_whole_and_readable() -> None:
    files = [path for path in BUILTIN.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parent.name for path in weights} == {"target", "draft"}
    assert sum(path.stat().st_size for path in weights) <= MAX_BYTES
    assert [path.name for path in files if not os.access(path, os.R_OK)] == []
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"


def test_the_tested_versions_are_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    assert {"torch", "transformers", "typer", "rich", "pydantic", "pytest", "ruff", "mypy"} <= pins
