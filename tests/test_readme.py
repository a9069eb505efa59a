"""README.md and docs/ are true: commands run, the Python example runs, the tree exists, the numbers are measured."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from real_files import real_file

from specdec_cli.cli import main
from specdec_cli.errors import ExitCode
from specdec_cli.recipe import shipped

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BUILTIN = ROOT / "specdec_cli" / "builtin" / "target"

# The shared options of the interface contract that are built; `--tree` is not.
SHARED = shlex.split("""
--recipe --set --json --output --quiet --target --draft --num-speculative-tokens --depth-policy --p-min --verify
--dtype --quantize --device --draft-device --draft-dtype --draft-quantize --tensor-parallel-size
--draft-tensor-parallel-size --seed --max-new-tokens --temperature --top-k --top-p --min-p --repetition-penalty
--presence-penalty --frequency-penalty --logit-bias --stop --stop-token-id --ignore-eos --min-tokens --logprobs
--disable-by-batch-size --trust-remote-code
""")
SHORT = {
    "-r": "--recipe",
    "-t": "--target",
    "-d": "--draft",
    "-k": "--num-speculative-tokens",
    "-n": "--max-new-tokens",
}
ALIASES = shlex.split("""
--model --speculative-model --speculative-draft-tensor-parallel-size --speculative-disable-by-batch-size --max-num-seqs
--max-model-len --gpu-memory-utilization --served-model-name
""")
CROWD_ALIASES = {"--speculative-disable-by-batch-size"}
# What has no meaning for a command that decodes: an audit looks at tokens and at batch sizes of its own.
LEFT_OUT = {
    "chat": {"--logprobs", "--disable-by-batch-size", "--max-num-seqs", "--served-model-name", *CROWD_ALIASES},
    "generate": {"--served-model-name"},  # of a server
    "audit": {"--logprobs", "--disable-by-batch-size", "--depth-policy", "--p-min"},
    "bench": {"--logprobs"},
    "compare-drafts": {"--logprobs", "--num-speculative-tokens"},
    "serve": {"--logprobs"},  # which requests ask for
    "sweep-k": {"--logprobs", "--disable-by-batch-size", "--num-speculative-tokens"},
}
STRUCTURED = {"--json-schema", "--regex", "--choice"}
ALIASED = {"chat", "generate", "serve"}
NOT_DECODING = {"recipe", "doctor", "export", "import", "train-draft"}


def fenced(language: str, page: str = README) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def command_lines() -> list[str]:
    lines = [line for block in fenced("console") for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ specdec")]


def program():
    return typer.main.get_command(main._app())


def parse(command, name: str, words: list[str], parent=None):
    """Parse a command line as far down as commands go, without running it; the last context."""
    context = command.make_context(name, list(words), parent=parent)
    if not hasattr(command, "commands"):
        return context
    rest = [*context._protected_args, *context.args]
    found = command.commands.get(rest[0])
    assert found is not None, f"there is no command `{rest[0]}`"
    return parse(found, rest[0], rest[1:], context)


def words_of(line: str) -> list[str]:
    """A shell line's words, without its comment and what stands after a redirection or a pipe."""
    words = shlex.split(line, comments=True)
    ends = [i for i, word in enumerate(words) if word in (">", "|", "2>", "<")]
    return words[1 : min(ends, default=len(words))]


def shown() -> dict[str, str]:
    """Each command line of a console block, and the output below it."""
    found, last = {}, ""
    for line in "".join(fenced("console")).replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            last = line.removeprefix("$ ")
            found[last] = ""
        else:
            found[last] += line + "\n"
    return found


def cells(output: str) -> set[str]:
    """What every run prints: the cells of tables and the text, without the measured numbers."""
    found = {cell for line in output.splitlines() for cell in re.split(r"\s{2,}", line.strip())}
    depends_on_the_machine = {"in use", "recommended"}  # which row a sweep marks
    found -= {"", "–", "…"} | depends_on_the_machine
    return {cell for cell in found if not re.search(r"\d|^─+$", cell)}


def test_the_quick_start_is_five_commands_with_their_output() -> None:
    assert [words_of(line)[0] for line in command_lines()] == ["generate", "generate", "bench", "sweep-k", "serve"]
    assert len(fenced("console")) == 5
    for line, output in shown().items():
        assert output, line


MEASURED = [
    pytest.param(line, marks=() if place == 0 else pytest.mark.slow) for place, line in enumerate(command_lines()[:4])
]


@pytest.mark.skipif(not BUILTIN.is_dir(), reason="the built-in pair's weights are not here")
@pytest.mark.parametrize("line", MEASURED)
def test_a_command_prints_what_the_readme_shows(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"\./(\S+\.gguf)", line):
        Path(name).symlink_to(real_file(name))
    assert main.run(words_of(line)) == 0
    printed = capsys.readouterr()
    assert len(cells(shown()[line])) >= 3
    assert cells(shown()[line]) <= cells(printed.out) | cells(printed.err)


TUNED = """
target: {model: builtin:target}
draft: {model: builtin:draft, quantize: int8}
speculation: {num_speculative_tokens: 4}
"""


@pytest.mark.slow
@pytest.mark.skipif(not BUILTIN.is_dir(), reason="the built-in pair's weights are not here")
def test_the_served_recipe_answers_as_the_readme_shows(tmp_path: Path) -> None:
    (serve, ready), (curl, answer) = list(shown().items())[-2:]
    (tmp_path / "tuned.yaml").write_text(TUNED, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec_cli", *words_of(serve), "--port", str(port)]
    curl = curl.replace(":8000", f":{port}") + " --silent --fail --retry 120 --retry-delay 1 --retry-all-errors"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            got = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True).stdout
        finally:
            server.terminate()
        log = " ".join(server.communicate()[1].replace(f":{port}", ":8000").split())
    assert [line for line in ready.splitlines() if line != "…" and line not in log] == []
    pieces = [piece.strip("\n,{}]") for piece in re.split("…", answer.replace("\n", "…"))]
    assert len([piece for piece in pieces if piece]) >= 3
    assert [piece for piece in pieces if piece not in got] == []


def test_the_install_lines_name_what_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install = README[README.index("## Install") : README.index("## Quick start")]
    assert f"`{project['name']}`" in install
    for extras in re.findall(r"(?:\.|whl)\[([\w,]+)\]", install):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    wheel = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"
    assert set(re.findall(r"dist/([\w.-]+\.whl)", install)) == {wheel}
    lines = [line for block in fenced("bash") for line in block.splitlines()]
    assert {line.split()[0] for line in lines} == {"uv", "pipx", "pip"}
    assert "make demo" in install
    assert re.search(r"^demo:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert ". .venv/bin/activate" in install


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 190
    assert len(re.findall(r"\S*\w\S*", README)) <= 1200


def test_the_picture_is_there() -> None:
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    assert pictures
    assert [name for _, name in pictures if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_parses(line: str) -> None:
    context = parse(program(), "specdec", words_of(line))
    recipe = context.params.get("shared_recipe")
    written = {
        words[words.index("--write-recipe") + 1]
        for words in map(words_of, command_lines())
        if "--write-recipe" in words
    }
    assert recipe is None or recipe in {found.name for found in shipped.list_recipes()} | written


def test_a_line_with_an_unknown_option_does_not_parse() -> None:
    with pytest.raises(main._UsageProblem):
        parse(program(), "specdec", words_of("specdec generate --no-such-option x  # comment"))


def test_every_command_is_shown_and_every_shown_one_exists() -> None:
    listed = re.findall(r"^\| `specdec ([\w-]+)` \|", README, re.MULTILINE)
    assert sorted(listed) == sorted(program().commands)
    assert {words_of(line)[0] for line in command_lines()} <= set(listed)


def test_every_exit_code_is_named() -> None:
    sentence = re.search(r"Exit codes: (.*?)\.\s", README, re.DOTALL)
    assert sentence
    assert {int(code) for code in re.findall(r"\b\d+\b", sentence[1])} == set(ExitCode)


def test_the_shared_options_of_every_decoding_command_are_looked_at() -> None:
    assert set(LEFT_OUT) == set(program().commands) - NOT_DECODING


def options_in_help(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main.run([command, "--help-all"]) == 0
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))


@pytest.mark.parametrize("command", sorted(LEFT_OUT))
def test_help_lists_the_shared_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listed = options_in_help(command, capsys)
    short = {name for name, long in SHORT.items() if long not in LEFT_OUT[command]}
    aliases = set(ALIASES) if command in ALIASED else set()
    wanted = (set(SHARED) | aliases) - LEFT_OUT[command] | short
    assert wanted <= listed
    assert not LEFT_OUT[command] & listed
    assert listed & STRUCTURED == (STRUCTURED if command == "generate" else set())
    assert not re.findall(r"\blater\b", README, re.IGNORECASE), "the README tells what is there"


@pytest.mark.parametrize("command", sorted(LEFT_OUT))
def test_help_names_every_option_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    own = {name for option in program().commands[command].params for name in option.opts if name.startswith("-")}
    assert own <= options_in_help(command, capsys)


@pytest.mark.skipif(not BUILTIN.is_dir(), reason="the built-in pair's weights are not here")
@pytest.mark.parametrize("example", fenced("python"), ids=lambda text: text.split("\n")[0])
def test_a_python_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    out = capsys.readouterr().out
    assert "Traceback" not in out
    assert re.search(r"\d\.\d", out), "it prints an acceptance rate"


def tree() -> list[tuple[str, str]]:
    """What the tree in docs/architecture.md names: path from the root, and the words beside it."""
    block = next(block for block in fenced("text", ARCHITECTURE) if block.startswith("specdec_cli/"))
    parts = [line.partition(" ") for line in block.splitlines()]
    return [(name.rstrip("/"), words.strip()) for name, _, words in parts]


def test_the_tree_names_what_is_there() -> None:
    assert [path for path, _ in tree() if not (ROOT / path).exists()] == []
    assert {"recipes", "tests", "benchmarks", "scripts", "docs"} <= {path for path, _ in tree()}
    assert [path for path, words in tree() if not words] == []


def test_every_room_stands_with_its_first_line_on_the_architecture_page() -> None:
    package = ROOT / "specdec_cli"
    first_lines = {
        str(file.parent.relative_to(package)): file.read_text(encoding="utf-8").split("\n")[0].strip('"')
        for file in package.glob("*/**/__init__.py")
    }
    rooms = dict(re.findall(r"^\| ?\d? \| `([\w/]+)/` \| (.*?) \|$", ARCHITECTURE, re.MULTILINE))
    assert rooms == first_lines


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link.split("#")[0]).exists()] == []


def tables_script():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert "<!-- table:what-pays -->" in README.partition("\n## ")[0]
    assert tables_script().main(["--check"]) == 0, capsys.readouterr().err


def test_the_pages_have_every_table_once() -> None:
    tables = tables_script()
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES if page.name != "README.md"]
    named = [name for page in pages for _, name, _, _ in tables.MARKED.findall(page)]
    assert sorted(named) == sorted(tables.TABLES)
    for name in tables.TABLES:
        assert tables.table(name), f"`{name}` has a result"


def test_49_14_the_start_page_gives_the_gain_with_a_quiet_and_a_busy_cache() -> None:
    quiet, busy = (
        f"{row['speedup_decode']['median']:.2f}"
        for name in ("builtin_pair_zen4", "builtin_pair")
        for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]["rows"]
        if row["k"] == 4
    )
    begun = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert f"{busy} times as fast while" in begun.replace("\n", " ")
    assert f"{quiet} times as fast while it is quiet" in begun.replace("\n", " ")


MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "threads": 1,
    "load_average_1m": 0.25,
    "commit": "abc1234",
    "measured": "2026-01-02T03",
}
ROW = {
    "k": 4,
    "acceptance_rate": 0.71239,
    "acceptance_length": 3.8,
    "speedup_decode": {"median": 1.6789, "ci95": [1.5, 1.9], "pairs": 12},
    "plain_tokens_per_second": 101.25,
    "prompts_with_other_tokens": 0,
}


def keep(file: Path, found: dict[str, Any] | list[Any]) -> None:
    file.write_text(json.dumps({"machine": MACHINE, "load_average_after_1m": 1.5, "results": found}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    keep(tmp_path / "builtin_pair.json", {"prompts": 12, "max_new_tokens": 128, "rows": [ROW]})
    return tmp_path


def test_a_table_is_written_from_its_result(results: Path) -> None:
    text = tables_script().filled("a\n<!-- table:builtin -->\nold\n<!-- /table -->\nb\n", results)
    assert text == (
        "a\n<!-- table:builtin -->\n"
        "12 story prompts, one at a time, greedy, 128 tokens each. The draft changes no token. "
        "A CPU, 1 of 2 cores, load 0.2 before and 1.5 after, commit abc1234, 2026-01-02.\n\n"
        "| k | acceptance rate | acceptance length | tokens/s without draft | speed-up [95 % interval] |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| 4 | 0.712 | 3.80 | 101.2 | 1.68 [1.50, 1.90] |\n"
        "<!-- /table -->\nb\n"
    )


def test_other_tokens_are_not_hidden(results: Path) -> None:
    document = json.loads((results / "builtin_pair.json").read_text())
    document["results"]["rows"].append(ROW | {"prompts_with_other_tokens": 3})
    (results / "builtin_pair.json").write_text(json.dumps(document))
    assert "3 prompts gave other tokens with the draft." in tables_script().table("builtin", results)


def test_the_caption_names_int8_draft_weights(results: Path) -> None:
    document = json.loads((results / "builtin_pair.json").read_text())
    document["results"]["draft_quantize"] = "int8"
    (results / "builtin_pair.json").write_text(json.dumps(document))
    assert ", int8 draft weights in our runs. " in tables_script().table("builtin", results)


def test_what_pays_stands_by_draft_and_work_the_best_in_bold(tmp_path: Path) -> None:
    def draft(median: float) -> dict[str, Any]:
        return {"k": 4, "speed-up": {"median": median, "ci95": [median - 0.5, median + 0.5]}}

    machine = {key: MACHINE[key] for key in ("cpu", "load_average_1m", "commit", "measured")}
    work = {"machine": machine, "prompts": 6, "plain tokens/s": 99.6}
    few = {"k": 1, "speed-up": {"median": 3.0, "ci95": None}}
    workloads = {
        "chat": work | {"drafts": {"ngram": draft(1.25), "suffix": draft(1.5)}},
        "edit": work | {"drafts": {"ngram": draft(4.0), "suffix": draft(3.5), "small": few}},
    }
    keep(tmp_path / "what_pays_qwen.json", {"target": "T", "instructions": "AVX2", "workloads": workloads})
    said, _, *lines = tables_script().table("what-pays", tmp_path).splitlines()
    assert (
        said == "`T`, AVX2, A CPU, 1 of 2 cores, 6 prompts of each kind, load 0.2 to 0.2, commit abc1234, 2026-01-02."
    )
    assert lines == [
        "| speed-up [95 % interval], best k | editing code | chat |",
        "| --- | ---: | ---: |",
        "| no draft, tokens/s | 100 | 100 |",
        "| `ngram` | **4.00** [3.50, 4.50], k = 4 | 1.25 [0.75, 1.75], k = 4 |",
        "| `suffix` | 3.50 [3.00, 4.00], k = 4 | **1.50** [1.00, 2.00], k = 4 |",
        "| `small` | – | – |",
    ]


def test_adaptive_stands_by_draft_and_by_how_many_run_together(tmp_path: Path) -> None:
    def row(draft: str, batch: int, cold: bool, total: float) -> dict[str, Any]:
        figures = {"adaptive": {"total": total, "ci95": [total - 0.1, total + 0.1]}, "fixed": {"total": 0.5}}
        figures |= {"plain_again": {"total": total - 0.3}}
        figures |= {"measured_on": {"cpu": "A CPU", "load_average_1m": total, "commit": f"c{batch}"}}
        return {"draft": draft, "batch": batch, "cold": cold, "tokens": 96 + 32 * cold, "fixed_k": 3, **figures}

    rows = [row("D", 4, False, 1.2), row("D", 1, False, 1.5), row("D", 1, True, 1.1), row("ngram", 4, False, 0.99)]
    keep(tmp_path / "adaptive.json", rows)
    said, *lines = tables_script().table("adaptive", tmp_path).splitlines()
    assert said == (
        "A CPU, 1 of 2 cores, load 1.0 to 1.5 before each run, commit c1, c4, 2026-01-02. "
        "Plain decoding against plain decoding in the same runs: 0.69 to 1.20."
    )
    assert lines[1:] == [
        "| speed-up: adaptive [95 % interval] (fixed k = 3) | 1 sequence | 4 sequences |",
        "| --- | ---: | ---: |",
        "| D | 1.50 [1.40, 1.60] (0.50) | 1.20 [1.10, 1.30] (0.50) |",
        "| D, first 128 tokens | 1.10 [1.00, 1.20] (0.50) |  |",
        "| ngram |  | 0.99 [0.89, 1.09] (0.50) |",
    ]


def test_streams_stand_by_policy(tmp_path: Path) -> None:
    point = {"streams": 1, "none": 800.4, "adaptive / none": 1.8, "ci95": {"adaptive / none": [1.7, 1.9]}}
    point["of_starts"] = {"adaptive / none": [1.7, 1.9]}
    points = [point, point | {"streams": 4, "none": 2000.0, "adaptive / none": 1.01}]
    keep(tmp_path / "serve_load.json", {"points": points})
    said, *lines = tables_script().table("streams", tmp_path).splitlines()
    assert said.startswith(
        "Every server was started 2 times. The brackets hold the range of the starts' medians. A CPU, "
    )
    assert lines[1:] == [
        "| speed-up | 1 stream | 4 streams |",
        "| --- | ---: | ---: |",
        "| adaptive | 1.80 [1.70, 1.90] | 1.01 [1.70, 1.90] |",
        "| tokens/s without a draft | 800 | 2000 |",
    ]


def test_other_engines_stand_beside_ours_and_their_other_texts_are_told(tmp_path: Path) -> None:
    def peer(speed: float) -> dict[str, Any]:
        over = {"median": 100 / speed, "ci95": [1.0, 9.0]}
        return {"tokens_per_second": speed, "draft_over_it": over, "equal": {"mismatches": 0}}

    versioned = {"version": "2026.4.1.0-1-abc", "num_texts": 12}
    slow, fast = (
        versioned | {"plain_tokens_per_second": 40.0, "draft_tokens_per_second": 100.0, "texts_equal_to_its_plain": 12},
        versioned | {"plain_tokens_per_second": 60.0, "draft_tokens_per_second": 150.0, "texts_equal_to_its_plain": 9},
    )
    row = {
        "k": 5,
        "against": {"transformers": peer(20), "transformers-assisted": peer(50)},
        "plain_tokens_per_second": 40.0,
        "draft_tokens_per_second": 100.0,
        "speedup": {"median": 2.5, "ci95": [2.0, 3.0]},
        "lossless": {"mismatches": 0},
        "openvino": [slow, fast],
    }
    results = {"target": "T", "draft": "D", "dtype": "bfloat16", "num_prompts": 12, "tokens": 64, "best_k": 5}
    servers = [{"name": "llama.cpp", "k_before": 5, "timing": {"tpot_s": {"median": 0.02}}}]
    results |= {"rows": [row], "servers": [*servers, servers[0] | {"k_before": 3}]}
    keep(tmp_path / "peers_embedded.json", results)
    lines = tables_script().table("peers-embedded", tmp_path).splitlines()[4:]
    assert lines[2:5] == [
        "| llama.cpp | 50 | 2.00 | – |",
        "| OpenVINO GenAI 2026.4, no draft | 50 | 2.00 | – |",
        "| OpenVINO GenAI 2026.4, with the draft | 125 | 0.80 | equals its own plain text in 9 of 12 |",
    ]
    assert len(lines) == 7


def test_a_table_without_a_result_is_empty_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    tables = tables_script()
    assert tables.table("builtin", tmp_path) == ""
    with pytest.raises(SystemExit, match="names table `other`"):
        tables.filled("<!-- table:other -->\n<!-- /table -->", tmp_path)


def test_every_outdated_page_is_found_and_rewritten(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tables_script()
    pages = (tmp_path / "README.md", tmp_path / "performance.md")
    for page in pages:
        page.write_text("<!-- table:builtin -->\n| 9.99 |\n<!-- /table -->\n")
    monkeypatch.setattr(tables, "PAGES", pages)
    monkeypatch.setattr(tables.filled, "__defaults__", (results,))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().err.count("out of date") == 2
    assert all("9.99" in page.read_text() for page in pages)
    assert tables.main([]) == 0
    assert all("1.68 [1.50, 1.90]" in page.read_text() for page in pages)
    assert tables.main(["--check"]) == 0
