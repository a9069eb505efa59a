"""A name that leads nowhere is refused by every command before torch is imported, with exit 2 and a suggestion."""

import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.cli.main import run
from specdec_cli.errors import ExitCode

PROMPTED = ["generate", "Hi"]
DRAFTED = ["-d", "ngram"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(words) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-t", "./nope"], "model folder `./nope` does not exist"),
        (["-t", "/no/such/folder"], "model folder `/no/such/folder` does not exist"),
        (["-t", "model.gguf"], "the GGUF file `model.gguf` does not exist"),
        (["-t", "builtin:taget"], "unknown built-in model `builtin:taget`; did you mean `builtin:target`?"),
        (["-t", "buildin:target"], "model folder `buildin:target` does not exist; did you mean `builtin:target`?"),
        (["-t", "shape:llama-3.2-1"], "unknown shape `shape:llama-3.2-1`; did you mean `shape:llama-3.2-1b`?"),
        (["-d", "ngam"], "there is no model `ngam` here; did you mean `ngram`?"),
        (["-d", "sufix"], "there is no model `sufix` here; did you mean `suffix`?"),
        (["-d", "builtin:drafft"], "unknown built-in model `builtin:drafft`; did you mean `builtin:draft`?"),
        (["-d", "ngram-2"], "there is no model `ngram-2` here; did you mean `ngram`?"),
        (["-d", "suffix_3"], "there is no model `suffix_3` here; did you mean `suffix`?"),
        (["-d", "prompt-lookup"], "there is no model `prompt-lookup` here; did you mean `ngram`?"),
        (["-d", "Prompt_Lookup"], "there is no model `Prompt_Lookup` here; did you mean `ngram`?"),
        (["-d", "builtin:sufix"], "unknown built-in model `builtin:sufix`; did you mean `suffix`?"),
        (["-d", "builtin:ngram"], "unknown built-in model `builtin:ngram`; did you mean `ngram`?"),
        (["-d", "built-in:draft"], "did you mean `builtin:draft`?"),
        (["-t", "built_in:taget"], "model folder `built_in:taget` does not exist; did you mean `builtin:target`?"),
        (["-d", "built-in:sufix"], "did you mean `suffix`?"),
        (["-d", "prompt-lookup:max=3"], "there is no drafting method `prompt-lookup` in `prompt-lookup:max=3`"),
        (["-d", "ngram-2:max=3"], "did you mean `ngram`?"),
        (["-d", "./nope"], "model folder `./nope` does not exist"),
        (["-t", "hf.co/org/repo-GGUF:Q4_K_M"], "hint: give `org/repo-GGUF:Q4_K_M`\n"),
        (["-t", "https://huggingface.co/org/repo"], "hint: give `org/repo`\n"),
        (["-d", "https://huggingface.co/o/r/blob/main/a/x.gguf?download=true"], "hint: give `o/r:a/x.gguf`\n"),
        (["-t", "huggingface.co/o/r/resolve/v2/x.gguf"], "hint: give `o/r:x.gguf` and the revision `v2`\n"),
        (
            ["-t", "https://huggingface.co.example.org/o/r"],
            "model folder `https://huggingface.co.example.org/o/r` does",
        ),
        (["-r", "sweeep"], "there is no recipe `sweeep`"),
    ],
)
def test_49_23_a_name_that_leads_nowhere(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, *PROMPTED, *words)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("builtin:min", "builtin:mini"),
        ("mini", "builtin:mini"),
        ("storys", "builtin:stories"),
        ("humanevl", "humaneval"),
        ("mtbench", "mt-bench"),
    ],
)
def test_49_23_a_data_set_that_there_is_not(capsys: pytest.CaptureFixture[str], name: str, meant: str) -> None:
    assert f"data set `{name}`; did you mean `{meant}`?" in refused(capsys, "bench", "--dataset", name)


@pytest.mark.parametrize(
    "words",
    [
        ["chat"], ["serve"], ["doctor"], ["bench", *DRAFTED], ["sweep-k", *DRAFTED], ["audit", *DRAFTED],
        ["compare-drafts", *DRAFTED], ["train-draft", "--data", "builtin:stories", "--output", "head"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_every_command_that_loads_a_model(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "model folder `./nope` does not exist" in refused(capsys, *words, "-t", "./nope")
    assert "unknown built-in model `builtin:taget`" in refused(capsys, *words, "-t", "builtin:taget")


@pytest.mark.parametrize("template", [[], ["--chat-template", "{{ messages }}{% if thinking %}{% endif %}"]])
@pytest.mark.parametrize(
    "words",
    [["generate", "a", "--chat"], ["chat"], ["serve"], ["bench", "--chat", *DRAFTED], ["doctor"]],
    ids=lambda words: words[0],
)
def test_a_variable_that_no_template_reads(
    capsys: pytest.CaptureFixture[str], words: list[str], template: list[str]
) -> None:
    said = refused(capsys, *words, *template, "--set", "target.default_chat_template_kwargs={nope: 1}")
    assert "sets `nope`, which the chat template of `builtin:target` does not read" in said
    assert ("the template reads thinking" in said) == bool(template)


def test_49_23_torch_is_not_imported_to_refuse_a_name() -> None:
    script = (
        "import sys; from specdec_cli.cli.main import run; "
        "codes = [int(run(words.split())) for words in sys.argv[1:]]; "
        "print(codes, [name for name in ('torch', 'transformers', 'datasets', 'scipy') if name in sys.modules])"
    )
    lines = [
        "generate a -t ./nope", "generate a -d ngam", "generate a -t builtin:taget", "bench --dataset builtin:min",
        "bench -r sweeep", "doctor -t ./nope", "serve -t ./nope", "chat -t ./nope", "sweep-k -d builtin:drafft",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[2] * len(lines)} []"


def test_what_lies_beside_it_is_suggested(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama-small").mkdir()
    monkeypatch.chdir(tmp_path)
    said = "model folder `./models/lama-small` does not exist; did you mean `./models/llama-small`?"
    assert said in refused(capsys, *PROMPTED, "-t", "./models/lama-small")


def test_49_23_other_engines_names_for_keys(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in (
        ("speculation.k=4", "num_speculative_tokens"),
        ("k=4", "speculation.num_speculative_tokens"),
        ("sampling.max_tokens=5", "max_new_tokens"),
        ("max_tokens=5", "sampling.max_new_tokens"),
        ("draft_model=x", "draft.model"),
        ("speculation.draft_model=x", "draft.model"),
        ("temperature=1", "sampling.temperature"),
        ("engine.temperature=1", "sampling.temperature"),
        ("engine.n_ctx=512", "max_model_len"),
        ("sampling.temprature=1", "temperature"),
    ):
        assert f"; did you mean `{meant}`?" in refused(capsys, *PROMPTED, "--set", given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("speedup.decode => 50", "speedup.decode >= 50"),
        ("speedup.decode=>50", "speedup.decode >= 50"),
        ("speedup.decode =< 1", "speedup.decode <= 1"),
        ("lossless.mismatches = 0", "lossless.mismatches == 0"),
        ("lossless.mismatches <> 0", None),
        ("speedup.decode lt 1.2", "speedup.decode < 1.2"),
        ("speedup.decode >== 1", "speedup.decode >= 1"),
        ("recommended.verdict = inconclusive", "recommended.verdict == inconclusive"),
        ("recommended.verdict == speculat", "recommended.verdict == speculate"),
        ("recommended.verdict != Do_Not_Speculate", "recommended.verdict != do-not-speculate"),
    ],
)
def test_49_23_a_mistyped_comparison(capsys: pytest.CaptureFixture[str], given: str, meant: str | None) -> None:
    err = refused(capsys, "bench", "--fail-if", given)
    assert (f"not `{given}`; did you mean `{meant}`?" in err) is (meant is not None)


RECIPE = """target:
  model: builtin:taget
draft:
  model: builtin:drafft
workload:
  dataset: builtin:min
gates:
  fail_if:
    - lossless.mismatch > 0
    - speedup.decode < 1.2
    - rows.builtin:draft.speedup < 1.1
    - by_task.long.form.speedup.decode < 1
    - recommended.verdict == inconclusive
"""


def test_49_23_validate_checks_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    lines = [line.partition("my.yaml:")[2] for line in refused(capsys, "recipe", "validate", str(path)).splitlines()]
    assert [line for line in lines if line] == [
        "2:10: unknown built-in model `builtin:taget`; did you mean `builtin:target`?",
        "4:10: unknown built-in model `builtin:drafft`; did you mean `builtin:draft`?",
        "6:12: there is no built-in data set `builtin:min`; did you mean `builtin:mini`?",
        "9:7: `lossless.mismatch > 0`: `lossless` has no `mismatch`, but checked_tokens, mismatches, "
        "first_divergence, promised, verify; did you mean `mismatches`?",
    ]


def test_validate_takes_what_is_on_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("target: {model: /models/large}\ndraft: {model: org/draft}\nworkload: {dataset: data/mine.jsonl}\n")
    assert run(["recipe", "validate", str(path)]) == ExitCode.DONE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target:\n  model builtin:target\n  dtype: float32\n", "2:3: `model builtin:target` has no colon"),
        ("target:\n  model: builtin:target\ndraft\n  method: ngram\n", "3:1: `draft` has no colon"),
        ("target:\n  model: a/b\ndraft\nsampling:\n  temperature: 0\n", "3:1: `draft` has no colon"),
        ("speculation:\n  num_speculative_tokens: 4\n  p_min 0.5\n", "3:3: `p_min 0.5` has no colon"),
        ("target:\n  model builtin:target\n  # what it computes in\n\n  dtype: auto\n", "2:3: `model builtin:target`"),
    ],
)
def test_49_23_a_missing_colon_is_reported_on_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    err = refused(capsys, "recipe", "validate", str(path))
    assert f"my.yaml:{said}" in err
    assert err.count("has no colon") == 1
