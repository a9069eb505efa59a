"""`--engine llamacpp`: recipes in llama-server's words, and runs with a stand-in for the wheel `xllamacpp`.

SPECDEC_PYTHON_LLAMACPP names a Python that has the real wheel, and SPECDEC_GGUF a small model for it.
"""

import json
import os
import shlex
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from rich.console import Console
from schemas import assert_fits

from specdec_cli.cli.draft_reader import ModelReader
from specdec_cli.cli.main import run
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.shared import Shared
from specdec_cli.drafters.elsewhere import _after_match
from specdec_cli.errors import UsageError
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.documents.generate import GenerateDocument
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.endpoint import counters
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.report.sweep_k import print_sweeps
from specdec_cli.report.tuned_recipe import tuned_recipe

WHEEL = Path(__file__).parents[1] / "fake_wheel"
PYTHON = [sys.executable, "-S", "-X", f"fake-vllm-of={os.getpid()}"]
COMMAND = shlex.join(["env", f"PYTHONPATH={WHEEL}", *PYTHON])
ON_STAND_IN = ["--engine", "llamacpp", "--engine-command", COMMAND, "-t", "t.gguf", "-n", "9", "--quiet"]
RATES = ("speculation.synthetic_acceptance_rates=[0.9,0.5]", "speculation.num_speculative_tokens=2")
ONCE = ["--num-prompts", "2", "--repeats", "1", "--json"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> None:
    monkeypatch.setattr(counters, "_SETTLE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    Path("t.gguf").write_bytes(b"GGUF")


def ways(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FAKE_LLAMACPP", text)


def words(*sets: str, args: str | None = None) -> str:
    shared = Shared(sets=("engine.name=llamacpp", "target.model=a/b:Q4_0", *sets), takes_engine=True, engine_args=args)
    return shlex.join(OtherEngine.of(shared.resolve(), shared).words())


@pytest.mark.parametrize(
    ("draft", "option"),
    [
        (("method=ngram-simple", "size_n=3"), "ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5"),
        (("method=ngram", "max=4"), "ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 5"),
        (
            ("method=ngram-map-k", "min_hits=2"),
            "--spec-ngram-map-k-min-hits 2 --spec-ngram-map-k-size-n 12 --spec-ngram-map-k-size-m 5",
        ),
        (("method=ngram-map-k4v",), "ngram-map-k4v --spec-ngram-map-k4v-size-n 12"),
        (("method=ngram-mod",), "--spec-ngram-mod-n-match 24 --spec-ngram-mod-n-min 5 --spec-ngram-mod-n-max 5"),
        (("method=ngram-cache",), "--spec-type ngram-cache --spec-draft-n-max 5"),
        (("model=c/d:Q4_0",), "draft-simple --spec-draft-hf c/d:Q4_0 --spec-draft-n-max 5 --spec-draft-n-min 0"),
        (("method=eagle3", "model=c/d:Q4_0"), "--spec-type draft-eagle3 --spec-draft-hf c/d:Q4_0"),
        (("method=mtp",), "--spec-type draft-mtp --spec-draft-n-max 5"),
    ],
)
def test_a_draft_becomes_a_type_of_speculation(draft: tuple[str, ...], option: str) -> None:
    assert option in words(*(f"draft.{one}" for one in draft), "speculation.num_speculative_tokens=5")


def test_settings_become_options() -> None:
    made = words("draft.method=ngram-simple", *RATES, args="--threads 1")
    assert "--hf-repo a/b:Q4_0" in made
    assert "--spec-synth-rates 0.9,0.5" in made
    assert made.endswith("--metrics --parallel 8 --kv-unified --threads 1")
    assert "--spec-draft-p-min 0.4" in words(
        "draft.model=c/d:Q4_0", "speculation.depth_policy=confidence", "speculation.p_min=0.4"
    )
    assert "spec" not in words("draft.method=none")


@pytest.mark.parametrize(
    ("sets", "refusal"),
    [
        (("speculation.tree=2,1", "draft.method=ngram"), r"`speculation\.tree` has no effect with --engine llamacpp"),
        (("draft.method=suffix",), "llama.cpp has no draft like suffix decoding"),
        (("draft.method=self-int8",), "llama.cpp has no draft like an int8 copy of the target"),
        (("draft.method=none", "sampling.min_tokens=3"), r"llama.cpp has no `sampling\.min_tokens`"),
        (("draft.method=none", "sampling.skip_special_tokens=false"), r"no `sampling\.skip_special_tokens`"),
        (("draft.method=none", "target.model=some/model"), "llama.cpp runs GGUF files, and `some/model` is none"),
    ],
)
def test_what_it_has_not_is_refused_by_name(sets: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal):
        words(*sets)


@pytest.mark.parametrize("argument", ["--spec-type none", "-md x.gguf", "--no-cache-prompt", "--model y", "-np 2"])
def test_options_that_specdec_chooses_are_refused_by_name(argument: str) -> None:
    with pytest.raises(UsageError, match=f"must not hold `{argument.split()[0]}`: specdec chooses it"):
        words("draft.method=ngram-mod", args=argument)


@pytest.mark.parametrize("command", [["generate", "x"], ["bench"], ["bench", "--engine", "vllm"], ["chat"]])
def test_its_drafts_are_refused_elsewhere(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "-d", "ngram-mod"]) == 2
    assert "only llama.cpp has the draft `ngram-mod`" in capsys.readouterr().err


def test_options_of_its_drafts_have_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--engine", "llamacpp", "-d", "ngram-map-k:size_n=0"]) == 2
    assert "`size_n` of `ngram-map-k` must be from 1 to 1024, not `0`" in capsys.readouterr().err


def test_both_arms_are_measured_and_counted_as_the_server_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, "")
    assert run(["bench", *ON_STAND_IN, "-d", "ngram-mod", "-k", "3", *ONCE]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, BenchDocument)
    counts = found["draft"]["speculative"]
    assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (6, 18, 10)
    assert (found["lossless"]["checked_tokens"], found["lossless"]["mismatches"]) == (18, 0)
    assert found["lossless"]["verify"] == "greedy"
    assert (found["engine"]["version"], found["engine"]["acceptance_from"]) == ("b11549", "counters")
    assert "xllamacpp_server.py" in found["engine"]["commands"]["with the draft"]
    assert "--spec-type" not in found["engine"]["commands"]["without a draft"]
    assert any("`ngram-mod` drafts from earlier requests" in notice for notice in found["notices"])


def test_drafts_are_compared_and_a_difference_has_its_gap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, "differs")
    drafts = ["-d", "ngram-simple", "-d", "ngram-cache", "--set", "speculation.num_speculative_tokens=3"]
    assert run(["compare-drafts", *ON_STAND_IN, *drafts, *ONCE, "--chat"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, CompareDocument)
    assert {row["draft"] for row in found["rows"]} == {"ngram-simple", "ngram-cache"}
    differences = found["engine"]["differences"]
    assert len(differences) == 4
    assert {one["position"] for one in differences} == {8}


def test_it_generates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ways(monkeypatch, "")
    assert run(["generate", *ON_STAND_IN, "-d", "ngram-simple", "-k", "3", "--json", "the cat sat"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, GenerateDocument)
    only = found["outputs"][0]
    assert (only["completion_tokens"], only["prompt_tokens"], only["finish_reason"]) == (9, 3, "length")
    assert only["text"].split() == ["the", "cat", "sat"] * 3
    assert only["speculative"]["num_accepted_tokens"] == 5


def test_an_answer_whose_ids_it_withholds_keeps_its_text_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, "withholds")
    loud = [word for word in ON_STAND_IN if word != "--quiet"]
    assert run(["generate", *loud, "-d", "ngram-simple", "-k", "3", "--json", "the cat sat"]) == 0
    shown = capsys.readouterr()
    found: dict[str, Any] = json.loads(shown.out)
    only = found["outputs"][0]
    assert (only["token_ids"], only["completion_tokens"]) == ([], 9)
    assert only["text"].split()[:2] == ["the", "sat"]
    assert found["totals"]["speculative"]["num_emitted_tokens"] == 8  # without the first
    assert "llamacpp left out token ids, so `token_ids` is empty there" in " ".join(shown.err.split())


@pytest.mark.parametrize(
    ("way", "more", "reason"),
    [
        ("die", [], "llama.cpp ended before it was ready (exit code 1): failed to open GGUF file 'x.gguf'"),
        ("", ["--engine-args", "--no-such-option 3"], "(exit code 2): unrecognized arguments: --no-such-option 3"),
        ("crash=1", [], "llama.cpp ended while it was needed (killed by SIGKILL)"),
    ],
)
def test_its_refusal_is_one_sentence(
    way: str, more: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, way)
    assert run(["generate", *ON_STAND_IN, "-d", "none", *more, "the cat sat"]) == 1
    assert reason in " ".join(capsys.readouterr().err.split())


def test_k_is_swept_with_its_own_rule_of_lookup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, "")
    rows = ["a b c a b c a b c", "six of one and half a dozen of", "tell me a story", "one two three four"]
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    line = ["sweep-k", *ON_STAND_IN, "-d", "ngram:max=2", "--dataset", "prompts.jsonl", "--k-max", "3", "--json"]
    assert run(line) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, SweepDocument)
    sweep = found["engine_sweep"]
    assert (sweep["starts"][:3], sweep["rule"]) == ([0, 1, 3], "greedy")
    assert sweep["speculative_config"]["--spec-ngram-simple-size-m"] == "3"
    assert found["engine"]["version"] == "b11549"


def write_draft(architecture: str = "llama", tensor: str | None = None) -> None:
    """A GGUF file with an architecture and at most one tensor."""
    writer = GGUFWriter("d.gguf", architecture)
    if tensor is not None:
        writer.add_tensor(tensor, np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


HEADS = {
    ("eagle3", "fc.weight"): "draft-eagle3",
    ("dflash", "fc.weight"): "draft-dflash",
    ("dflash", "selector_hidden.weight"): "draft-dflash",
    ("dflash", "markov_w1.weight"): "draft-dspark",
    ("qwen35", "blk.4.nextn.eh_proj.weight"): "draft-mtp",
    ("gemma4-assistant", "token_embd.weight"): "draft-mtp",
}
"""llama.cpp's types of heads by architecture and a tensor of theirs."""


@pytest.mark.parametrize("head", HEADS)
def test_a_head_in_a_gguf_file_has_its_own_type(head: tuple[str, str]) -> None:
    write_draft(*head)
    assert f"--spec-type {HEADS[head]} --spec-draft-model {Path('d.gguf').resolve()} " in words("draft.model=d.gguf")


def test_a_model_with_mtp_modules_is_a_draft_model() -> None:
    write_draft("qwen35", "blk.0.nextn.eh_proj.weight")
    assert "--spec-type draft-simple" in words("draft.model=d.gguf")


@pytest.mark.parametrize(("draft", "refusal"), [("d.gguf", "runs an EAGLE-3 head"), ("mtp", "runs the target's MTP")])
def test_a_head_in_a_gguf_file_is_not_swept(draft: str, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_draft("eagle3", "fc.weight")
    assert run(["sweep-k", *ON_STAND_IN, "-d", draft]) == 2
    assert refusal in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_n_max_and_p_min_are_swept_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(reader: ModelReader, trace: Trace, k_max: int, watch: Any) -> None:
        """Every third token is another one than the draft's, which is sure of no such token."""
        num = trace.num_output_tokens
        is_argmax = np.arange(num) % 3 > 0
        confidence = np.where(is_argmax, 0.8, 0.5).astype(np.float32)
        rest = np.zeros(num, np.float32), is_argmax, is_argmax, None
        trace.drafts[reader.name] = ModelTrace(*rest, confidence=confidence)

    ways(monkeypatch, "")
    monkeypatch.setattr(ModelReader, "read", read)
    write_draft()
    rows = [f"{word} b c d e f" for word in ("one", "two", "three", "four", "five", "six")]
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    line = ["sweep-k", *ON_STAND_IN, "-d", "d.gguf", "--dataset", "prompts.jsonl", "--k-max", "3"]
    line += ["--set", "speculation.depth_policy=confidence", "--set", "speculation.p_min=0.7", "--csv", "sweep.csv"]
    assert run([*line, "--dry-run"]) == 0
    assert "each also with p-min 0.2, 0.4, 0.6, 0.7, 0.75, 0.9, over 6 prompts" in capsys.readouterr().out
    assert run([*line, "--json", "--write-recipe", "tuned.yaml"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, SweepDocument)
    sweep, at_size = found["engine_sweep"], found["by_batch_size"][0]
    assert (sweep["starts"][:4], sweep["p_mins"][:4]) == ([0, 1, 3, 3], [0, 0, 0, 0.9])
    assert len(sweep["starts"]) == 7
    assert (
        "--spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0.9"
        in found["engine"]["commands"]["k = 3 with p-min 0.9"]
    )
    assert "p-min" not in found["engine"]["commands"]["k = 3"]
    by_pair = {(row["k"], row["p_min"]): row["predicted"]["acceptance_length"] for row in at_size["by_p_min"]}
    assert len(by_pair) == 3 * 6
    assert by_pair[3, 0.7]["median"] > 2 > 1.9 > found["rows"][0]["acceptance_length"], "it drafts what is accepted"
    assert by_pair[3, 0.4] == found["rows"][2]["predicted"]["acceptance_length"]
    assert sum(bool(line.rpartition(",")[2]) for line in Path("sweep.csv").read_text().splitlines()) == 1 + 18
    page = Console(file=StringIO(), width=160)
    print_sweeps(page, found, details=True)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    assert "started at k = 0, 1, 3, 3 with p-min 0.9, " in shown
    assert "where p-min ends the draft" in shown
    at_size["recommended"] |= {"k": 2, "p_min": 0.6, "tree": None, "verdict": "speculate"}
    shared = Shared(sets=("engine.name=llamacpp", "target.model=t.gguf", "draft.model=d.gguf"), takes_engine=True)
    assert "p_min: 0.6" in tuned_recipe(shared.resolve(), found)
    Path("sweep.json").write_text(json.dumps(found))
    assert run(["export", "llamacpp", "-t", "t.gguf", "-d", "d.gguf", "--measured", "sweep.json"]) == 0
    script = capsys.readouterr().out
    assert "--spec-draft-n-max 2" in script
    assert "--spec-draft-p-min 0.6" in script
    assert run([*line[:-2], "--batch-sizes", "1,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "by_p_min" not in found["by_batch_size"][0]
    assert any("p-min was not swept" in notice for notice in found["notices"])


def test_k_is_swept_for_an_acceptance_that_no_draft_has_yet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, "")
    write_draft()
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{word} b c d"}) for word in "pqrstu"))
    line = ["sweep-k", *ON_STAND_IN, "--dataset", "prompts.jsonl", "--k-max", "6", "--json", "-n", "64"]
    line += [word for one in RATES for word in ("--set", one)]
    assert run([*line, "-d", "d.gguf"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    lengths = [row["predicted"]["acceptance_length"]["median"] for row in found["rows"]]
    assert lengths == pytest.approx([1.9, 2.4], rel=0.01), "but for the last steps, which draft less"
    commands = found["engine"]["commands"]
    assert [commands[name].partition("--spec-synth-rates ")[2].split()[0] for name in ("k = 1", "k = 2")] == [
        "0.9",
        "0.9,0.5",
    ]
    assert "k ends at 2, not at 6, because so many synthetic acceptance rates are given" in found["notices"]
    assert not any("left out" in notice for notice in found["notices"])
    assert run([*line, "-d", "ngram"]) == 2
    assert "synthetic acceptance leaves nothing to predict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["-d", "ngram-mod"], "no trace tells what the draft `ngram-mod` would guess"),
        (
            ["-d", "a/b:Q4_0", "--set", "speculation.depth_policy=adaptive"],
            "`speculation.depth_policy` has no effect here",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(more: list[str], refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep-k", *ON_STAND_IN, *more]) == 2
    assert refusal in " ".join(capsys.readouterr().err.split())


def test_a_lookup_of_more_tokens_than_k_is_shortened_with_a_warning() -> None:
    shared = Shared(
        sets=("engine.name=llamacpp", "target.model=a/b:Q4_0", "draft.method=ngram-simple"), takes_engine=True
    )
    made = OtherEngine.of(shared.resolve(), shared).server()
    assert "--spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 4" in " ".join(made.words)
    assert made.warnings == (
        "llama.cpp looks for n-grams of 4 tokens, not 12: it drafts nothing shorter than its n-gram",
    )


@pytest.mark.parametrize(
    ("context", "k", "drafted"),
    [
        ([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 5, [3, 4, 1]),  # from the latest place, not the newest token
        ([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 8, []),  # too short a text for a guess of 8
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 3, []),  # not at its beginning
        ([9, 8, 7, 6, 5, 4, 3, 1, 2, 1, 2], 3, []),  # fewer than what agrees
    ],
)
def test_a_lookup_drafts_as_llama_cpp_does(context: list[int], k: int, drafted: list[int]) -> None:
    """Each by hand after `common_ngram_simple_draft`; the slow test compares with the wheel's counters."""
    assert list(_after_match(context, 2, k)) == drafted


@pytest.mark.slow
def test_the_real_wheel_decodes_with_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    python, model = os.environ.get("SPECDEC_PYTHON_LLAMACPP"), os.environ.get("SPECDEC_GGUF")
    if python is None or model is None:
        pytest.skip("SPECDEC_PYTHON_LLAMACPP names a Python with xllamacpp, and SPECDEC_GGUF a model")
    texts = {}
    line = ["generate", "--engine", "llamacpp", "--engine-command", python, "--engine-args", "--threads 1", "-t", model]
    for draft in (
        "none",
        "ngram-simple:size_n=2",
        "ngram-map-k:size_n=2",
        "ngram-map-k4v:size_n=2",
        "ngram-mod:n_match=2",
    ):
        prompt = "one two three four one two three four one two three four one two"
        options = ["-d", draft, "-k", "4", "-n", "24", "--set", "engine.max_model_len=256", "--quiet", "--json"]
        assert run([*line, *options, prompt]) == 0
        found = json.loads(capsys.readouterr().out)
        texts[draft] = found["outputs"][0]["token_ids"]
        assert (found["totals"]["speculative"]["num_draft_tokens"] > 0) == (draft != "none")
    assert len(set(map(tuple, texts.values()))) == 1


@pytest.mark.slow
def test_predicted_lookups_are_those_that_the_real_wheel_counts(capsys: pytest.CaptureFixture[str]) -> None:
    python, model = os.environ.get("SPECDEC_PYTHON_LLAMACPP"), os.environ.get("SPECDEC_GGUF")
    if python is None or model is None:
        pytest.skip("SPECDEC_PYTHON_LLAMACPP names a Python with xllamacpp, and SPECDEC_GGUF a model")
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "one two three four five " * 4}))
    line = ["sweep-k", "--engine", "llamacpp", "--engine-command", python, "--engine-args", "--threads 1", "-t", model]
    options = [
        "-d",
        "ngram-simple:size_n=2",
        "--k-max",
        "3",
        "-n",
        "24",
        "--dataset",
        "prompts.jsonl",
        "--quiet",
        "--json",
    ]
    assert run([*line, *options, "--set", "engine.max_model_len=256", "--set", "engine.max_num_seqs=1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row in (row for row in rows if row["measured"] is not None):
        predicted = row["predicted"]["acceptance_length"]["median"]
        assert row["measured"]["acceptance_length"] == pytest.approx(predicted, rel=0.1)
