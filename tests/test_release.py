"""What surrounds a release: version, links, containers, dashboard, the GitHub action."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typed import not_none

import specdec_cli

ROOT = Path(__file__).parents[1]
PROGRAM = r"""#!/usr/bin/env bash
printf '%s\n' "$@" > "$RUNNER_TEMP/words"
echo '| k |' > "$RUNNER_TEMP/specdec-bench.md"
echo '{}' > "$RUNNER_TEMP/specdec-bench.json"
exit "$CODE"
"""


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def links(monkeypatch: pytest.MonkeyPatch, home: str | None, origin: str = "") -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(not_none(spec))
    not_none(not_none(spec).loader).exec_module(hook)
    monkeypatch.setattr(hook, "_origin", lambda: origin)
    monkeypatch.delenv("SPECDEC_REPOSITORY_URL", raising=False)
    if home is not None:
        monkeypatch.setenv("SPECDEC_REPOSITORY_URL", home)
    metadata: dict[str, dict[str, str]] = {}
    hook.get_metadata_hook()(str(ROOT), {}).update(metadata)
    return metadata["urls"]


def test_a_release_links_to_the_repository_it_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links(monkeypatch, "https://example.org/a/specdec.git")["Issues"] == "https://example.org/a/specdec/issues"
    assert links(monkeypatch, None, "https://example.org/fork/")["Repository"] == "https://example.org/fork"
    assert links(monkeypatch, None, "git@example.org:a/specdec.git") == {}
    assert links(monkeypatch, None) == {}


def test_the_citation_names_this_version() -> None:
    assert read("CITATION.cff")["version"] == specdec_cli.__version__


def test_the_changelog_gives_each_version_a_date_and_about_twenty_lines() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert versions[0].startswith("Unreleased\n")
    assert re.match(rf"{re.escape(specdec_cli.__version__)} \(\d{{4}}-\d\d-\d\d\)\n", versions[1])
    for version in versions[1:]:
        assert 10 <= version.count("\n- ") <= 25, version.splitlines()[0]


def test_the_composed_services_find_each_other() -> None:
    services = read("compose.yaml")["services"]
    assert set(services) == {"specdec", "prometheus", "grafana"}
    target = read("deploy/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == ["specdec:8000"]
    assert read("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"][0]["uid"] == "prometheus"
    mounted = [volume.split(":")[0] for its in services.values() for volume in its.get("volumes", [])]
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()] == []


def test_49_22_actions_and_images_are_pinned_by_digest() -> None:
    """A tag can be moved to other code; the comment beside an action says which tag its commit was."""
    places = [
        *(ROOT / ".github/workflows").glob("*.yml"),
        ROOT / "action.yml",
        ROOT / "compose.yaml",
        ROOT / "Dockerfile",
    ]
    named = [line for path in places for line in re.findall(r"(?:uses:|image:|FROM) +(.*)", path.read_text("utf-8"))]
    assert len(named) > 15
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+|[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}( AS \w+)?")
    assert [line for line in named if not pinned.fullmatch(line)] == []


def test_49_22_the_action_installs_what_was_tested() -> None:
    installs = re.findall(r"pip\" install (.*)", (ROOT / "action.yml").read_text("utf-8"))
    assert len(installs) == 2
    assert all('--constraint "$CONSTRAINTS"' in words for words in installs)


def test_49_22_no_composed_service_can_take_all_memory() -> None:
    assert all("mem_limit" in its for its in read("compose.yaml")["services"].values())


def test_what_is_published_was_tried_on_every_python_that_is_tested() -> None:
    tried = read(".github/workflows/release.yml")["jobs"]["try"]["strategy"]["matrix"]["python"]
    assert tried == read(".github/workflows/check.yml")["jobs"]["check"]["strategy"]["matrix"]["python"]


@pytest.fixture
def runner(tmp_path: Path):
    """A runner on which `specdec` writes down its words and its Markdown and ends with the code it is given."""
    program = tmp_path / "specdec" / "bin" / "specdec"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)

    def run(code: int = 0, **inputs: str) -> tuple[list[str], str]:
        environment = {
            "PATH": os.environ["PATH"],
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            "CODE": str(code),
            "RECIPE": "builtin",
            "MAX_REGRESSION": "25%",
        }
        subprocess.run([ROOT / "scripts" / "ci_bench"], env=environment | inputs, check=True, timeout=30)
        assert (tmp_path / "summary").read_text() == "| k |\n"
        return (tmp_path / "words").read_text().splitlines(), (tmp_path / "output").read_text()

    return run


def test_the_action_hands_its_arguments_on_word_by_word(runner) -> None:
    words, output = runner(ARGUMENTS="--num-prompts 12 --fail-if 'speedup.decode < 1.2'")
    assert words[-4:] == ["--num-prompts", "12", "--fail-if", "speedup.decode < 1.2"]
    assert words[:3] == ["bench", "--recipe", "builtin"]
    assert "exit-code=0" in output
    assert "result=" in output


def test_the_action_reports_a_crossed_gate_after_the_summary(runner) -> None:
    words, output = runner(3, BASELINE="main.json", ARGUMENTS="")
    assert words[-4:] == ["--baseline", "main.json", "--max-regression", "25%"]
    assert "exit-code=3" in output


def test_the_actions_steps_use_the_inputs_it_declares() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(read("action.yml")["inputs"])


def recipe_of(target: str) -> str:
    """The commands of a target of the Makefile, in an environment that has nothing yet."""
    words = ["make", "--dry-run", "--no-print-directory", target, "VENV=no-environment"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_49_1_ci_runs_what_rounds_by_the_processor_as_without_avx512() -> None:
    jobs = read(".github/workflows/check.yml")["jobs"]
    assert "make test-avx2" in [step.get("run") for step in jobs["avx2"]["steps"]]
    words = recipe_of("test-avx2").replace("\\\n", " ").split()
    assert {"ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2"} <= set(words)
    assert {"tests/test_exact*.py", "tests/lm", "tests/drafters", "tests/engine"} <= set(words)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_ci_runs_the_decoder_for_arm() -> None:
    packages, run = (
        step["run"] for step in read(".github/workflows/check.yml")["jobs"]["arm"]["steps"] if "run" in step
    )
    assert {"g++-aarch64-linux-gnu", "qemu-user-static"} <= set(packages.split())
    assert run == "make test-arm"
    assert "tests/lm/llama/test_lm_llama_arm.py" in recipe_of("test-arm")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_49_2_ci_runs_with_the_newest_versions_and_prints_them() -> None:
    jobs = read(".github/workflows/check.yml")["jobs"]
    assert "make test-newest" in [step.get("run") for step in jobs["newest"]["steps"]]
    lines = recipe_of("test-newest").splitlines()
    upgrade, shown, tests = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("--upgrade", "pip list", "pytest")
    )
    assert upgrade < shown < tests


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_49_27_the_demo_says_what_it_installs_and_runs() -> None:
    lines = recipe_of("demo").splitlines()
    for num, line in enumerate(lines):
        if re.search(r" -m venv|/pip install|/specdec generate", line):
            assert lines[num - 1].startswith("echo "), f"{line} comes without a word"
            assert "--quiet" not in line
    assert sum("echo " in line for line in lines) == 5
