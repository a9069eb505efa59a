"""`bench --engine vllm` with a stand-in for vLLM: figures, counters, differences, and engines that fail."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import command_of
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.machine import interruption
from specdec_cli.measure.machine.interruption import MachineUsage

pytestmark = pytest.mark.usefixtures("nothing_left")
COMMAND = shlex.join(command_of(os.getpid()))
ARGUMENTS = ["bench", "--engine", "vllm", "--engine-command", COMMAND, "-n", "9", "-k", "3", "--quiet"]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setenv("FAKE_VLLM", text)


def measured(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert run([*ARGUMENTS, "--num-prompts", "2", "--repeats", "1", "--json", *more]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(document, BenchDocument)
    return document


def test_both_arms_are_measured_and_counted_as_the_engine_counts(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("")
    found = measured(capsys)
    # 9 tokens: one from the prompt's pass, then 3 + 3 + 2 in three steps that drafted 3 each
    counts = found["draft"]["speculative"]
    assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (6, 18, 10)
    assert counts["acceptance_length"] == pytest.approx(1 + 10 / 6)
    assert counts["num_emitted_tokens"] == 16
    assert found["plain"]["speculative"]["num_drafts"] == 0
    assert sum(task["draft"]["speculative"]["num_drafts"] for task in found["by_task"].values()) == 6
    assert found["speedup"]["decode"]["pairs"] == 2
    assert found["plan"]["order"] == "A A B B"
    assert found["lossless"]["checked_tokens"] == 18
    assert found["lossless"]["mismatches"] == 0
    assert found["engine"]["version"] == "0.33.0"
    assert "--speculative-config" in found["engine"]["commands"]["with the draft"]
    assert "--speculative-config" not in found["engine"]["commands"]["without a draft"]
    assert any("one after the other" in notice for notice in found["notices"])
    assert found["workload"]["prompt_tokens"] is None


ACCEPTANCE = "serve.per_request_spec_decode_metrics"


def test_acceptance_is_that_of_the_answers_not_of_other_clients(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    """The stand-in's /metrics count the drafts of other clients, too: twice as many."""
    ways("shared")
    found = measured(capsys)
    counts, own = found["draft"]["speculative"], found["engine"]["acceptance_from"]
    assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (6, 18, 10)
    assert counts["per_position_acceptance_rates"] == pytest.approx([1, 4 / 6, 0])
    assert own == "answers"
    assert "--per-request-spec-decode-metrics summary" in found["engine"]["commands"]["with the draft"]
    assert "per-request" not in found["engine"]["commands"]["without a draft"]
    found = measured(capsys, "--set", f"{ACCEPTANCE}=none")
    counts, own = found["draft"]["speculative"], found["engine"]["acceptance_from"]
    assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (12, 36, 20)
    assert own == "counters"
    assert "per-request" not in found["engine"]["commands"]["with the draft"]


def test_steps_that_are_listed_give_rates_by_position_for_drafts_of_any_length(
    capsys: pytest.CaptureFixture[str], ways: Any
) -> None:
    ways("ragged")
    summary, detailed = (measured(capsys, "--set", f"{ACCEPTANCE}={level}") for level in ("summary", "detailed"))
    # three steps for each prompt, which drafted 3, 3 and 2 tokens and accepted 2, 2 and 1
    for found in (summary, detailed):
        counts = found["draft"]["speculative"]
        assert (counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]) == (6, 16, 10)
    assert summary["draft"]["speculative"]["per_position_acceptance_rates"] == []
    assert detailed["draft"]["speculative"]["per_position_acceptance_rates"] == pytest.approx([1, 4 / 6, 0])
    by_task = [task["draft"]["speculative"] for task in detailed["by_task"].values()]
    assert all(task["conditional_acceptance_rates"] for task in by_task)


def test_a_difference_is_named_with_its_gap(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("differs,gap=0.01")
    found = measured(capsys)
    assert found["lossless"]["mismatches"] == 2
    assert [one["position"] for one in found["engine"]["differences"]] == [8, 8]
    assert all(one["near_tie"] and one["gap_nats"] == pytest.approx(0.01) for one in found["engine"]["differences"])
    ways("differs,gap=1")
    assert run([*ARGUMENTS, "--num-prompts", "1", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert "NO near tie, the two tokens are 1.0000 nats apart" in said
    assert "the notes say how far apart the two tokens are" in said


def test_a_pass_beside_other_programs_is_decoded_again(
    capsys: pytest.CaptureFixture[str], ways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first pass of the plain server that counts, other programs take 3 of 10 seconds on two cores."""
    looks = iter([0.0, 3.0])

    def look(server_seconds: float) -> MachineUsage:
        assert server_seconds > 0
        asked.append(1)
        is_first = len(asked) in (3, 4)  # the warm-up asks first
        others = next(looks) if is_first else 0.0
        return MachineUsage(10.0 * len(asked), 20.0 * len(asked) - others, 0.0, 2)

    asked: list[int] = []
    ways("")
    monkeypatch.setattr(interruption, "look_at_machine", look)
    machine = measured(capsys)["machine"]
    assert (machine["num_discarded_passes"], machine["num_interrupted_passes"]) == (1, 0)
    assert machine["lost_share"] == pytest.approx(0.0)


def test_an_unchecked_release_is_named(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("version=0.99.1")
    assert any(notice.startswith("vLLM 0.99.1 answers, and") for notice in measured(capsys)["notices"])


def test_an_engine_that_does_not_start_is_one_sentence(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("die")
    assert run([*ARGUMENTS, "--num-prompts", "1"]) == 1
    said = capsys.readouterr().err
    assert "vLLM ended before it was ready (exit code 1): ValueError: the weights of `model` are torn" in said
    Path(said.split("its whole log is in ")[1].strip()).unlink()


def test_an_engine_that_is_never_ready_is_ended(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("never")
    assert run([*ARGUMENTS, "--num-prompts", "1", "--engine-timeout", "0.5"]) == 1
    said = capsys.readouterr().err
    assert "vLLM was not ready after 0.5 s" in said
    assert "raise --engine-timeout" in said
    Path(said.split("its whole log is in ")[1].strip()).unlink()


def test_an_engine_that_dies_during_the_run_is_one_sentence(capsys: pytest.CaptureFixture[str], ways: Any) -> None:
    ways("crash=3")
    assert run([*ARGUMENTS, "--num-prompts", "2"]) == 1
    said = capsys.readouterr().err
    assert "vLLM ended while it was needed (killed by SIGKILL): torch.OutOfMemoryError: no room left" in said
    Path(said.split("its whole log is in ")[1].strip()).unlink()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_engine_too(number: signal.Signals, code: int, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    environment = os.environ | {"FAKE_VLLM": f"stuck,seen={seen}"}
    words = [sys.executable, "-m", "specdec_cli", *ARGUMENTS]
    ours = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not seen.exists():
        assert ours.poll() is None
    ours.send_signal(number)
    assert ours.wait(timeout=200) == code


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "--against", "transformers"]) == 2
    assert "`--against` has no effect with --engine vllm" in capsys.readouterr().err
    assert run(["bench", "--engine-command", "x"]) == 2
    assert "`--engine-command` has no effect without another engine" in capsys.readouterr().err
    assert run(["bench", "--engine", "vllm", "--engine-command", "/no/vllm", "--quiet"]) == 1
    assert "`/no/vllm` is no program that can be run" in capsys.readouterr().err


def test_arguments_may_not_make_the_plain_arm_speculate(
    capsys: pytest.CaptureFixture[str], ways: Any, tmp_path: Path
) -> None:
    ways(f"seen={tmp_path / 'seen'}")
    for given in ("--speculative-config '{\"num_speculative_tokens\": 3}'", "--enable-prefix-caching"):
        assert run([*ARGUMENTS, "--num-prompts", "1", "--engine-args", given]) == 2
        said = f"`--engine-args` must not hold `{given.split()[0]}`: specdec chooses it"
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "seen").exists()


def test_a_dry_run_shows_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--engine", "vllm", "-k", "3", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "without a draft: vllm serve" in said
    assert '"num_speculative_tokens": 3' in said
