"""`bench --endpoint --slo`: the number of users in words, what limits it, and what means nothing there."""

import json
from collections import Counter
from typing import Any

import pytest
from endpoint_runs import chunk, without_environment
from fake_server import Fake, serving
from schemas import assert_fits

from specdec_cli.cli.main import run
from specdec_cli.errors import UsageError
from specdec_cli.measure.documents.slo import SloDocument
from specdec_cli.measure.endpoint.answer import Answer
from specdec_cli.measure.endpoint.slo import UserLevel, find_capacity, level_of, parse_slo


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_environment(monkeypatch)


def bench(fake: Fake, *words: str) -> int:
    return int(run(["bench", "--endpoint", fake.url, "--num-prompts", "8", "-n", "8", *words]))


def level(users: int, met: float, **missed: int) -> UserLevel:
    return UserLevel(users, 10, 0, met, {}, missed)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 8, 13, 64, 100])
def test_the_largest_number_that_passes_is_found(limit: int) -> None:
    tried: list[int] = []

    def measure(users: int) -> UserLevel:
        tried.append(users)
        return level(users, 0.95 if users <= limit else 0.5, ttft=users)

    found = find_capacity(measure, 64)
    assert (found.users, found.is_bound) == (min(limit, 64), limit < 64)
    assert found.limited_by == ("ttft" if limit < 64 else None)
    assert len(tried) == len(set(tried)) <= 13


def answer(ttft: float, tpot: float, tokens: int = 11) -> Answer:
    return Answer(0.0, arrivals=[ttft, ttft + tpot * (tokens - 1)], end_s=9.0, completion_tokens=tokens, is_done=True)


def test_a_level_counts_what_meets_every_objective() -> None:
    objectives = parse_slo("ttft<500ms, tokens_per_second>20")
    answers = [answer(0.1, 0.04), answer(0.7, 0.04), answer(0.1, 0.1), answer(0.2, 0.0, tokens=1)]
    found = level_of(2, objectives, answers, 5)
    assert (found.met, found.failed) == (2 / 5, 1)
    assert found.missed == {"ttft<500ms": 1, "tokens_per_second>20": 1}
    assert found.reached["ttft<500ms"] == pytest.approx(0.55)
    assert found.reached["tokens_per_second>20"] == pytest.approx(13, rel=0.01)


@pytest.mark.parametrize(
    ("slo", "why"),
    [
        ("ttft", "no objective"),
        ("ttft<500", "ttft needs ms or s"),
        ("ttft>500ms", "ttft must be an upper bound"),
        ("tokens_per_second<5", "must be a lower bound"),
        ("tokens_per_second>5s", "has no unit"),
        ("speed>5", "names the figure `speed`"),
        ("ttft<1.2.3s", "holds the number"),
    ],
)
def test_objectives_that_mean_nothing_are_refused(slo: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_slo(slo)


def test_users_are_counted_with_the_draft_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    """A level sends ten requests. With the draft the third level, of four users, fails; without it the second."""
    num_asked = Counter[bool]()

    def script(body: dict[str, Any]) -> list[Any]:
        is_plain = body.get("speculative") == {"enabled": False}
        num_asked[is_plain] += not body["prompt"].startswith("Before the runners start")  # the warm-up
        fails = num_asked[True] > 10 if is_plain else 20 < num_asked[False] <= 30
        usage = {"choices": [], "usage": {"completion_tokens": 1}}
        return [chunk()] if fails else [chunk(), chunk("", "stop"), usage, "[DONE]"]

    with serving(Fake(script=script, owner="specdec", metrics=None)) as fake:
        words = ("--slo", "ttft<60s", "--concurrency", "8", "--fail-if", "draft.users < 2")
        assert bench(fake, *words, "--json", "--quiet") == 0
        found = json.loads(capsys.readouterr().out)
        num_asked.clear()
        assert bench(fake, "--slo", "ttft<60s", "--concurrency", "2", "--fail-if", "plain.users >= 1") == 3
    assert_fits(found, SloDocument)
    assert [(arm["users"], arm["limited_by"]) for arm in (found["draft"], found["plain"])] == [
        (3, "failures"),
        (1, "failures"),
    ]
    assert [level["users"] for level in found["draft"]["levels"]] == [1, 2, 3, 4]
    shown = capsys.readouterr().out
    assert "Users at once for 90% of requests with ttft<60s:" in shown
    assert "With the draft: at least 2 users at once; no more were tried" in shown
    assert "Without: 1 user at once. At 2, 10 of 10 requests failed." in shown


def test_what_limits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(owner="specdec", metrics=None)) as fake:
        assert bench(fake, "--slo", "tokens_per_second>1000000", "--concurrency", "4") == 0
    shown = capsys.readouterr().out
    assert "Without: 0 users at once. At 1, tokens_per_second>1000000 limits: 90 % of requests reach" in shown


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Fake(owner="vllm")) as fake:
        for words, why in (
            (["--slo", "ttft<1s", "--request-rate", "2"], "`--request-rate` has no effect with `--slo`"),
            (["--slo", "ttft<1s", "--repeats", "2"], "`--repeats` has no effect with `--slo`"),
            (["--slo", "ttft<1s", "--by", "category"], "`--by` has no effect with `--slo`"),
            (["--slo", "ttft<1s", "--csv", "x.csv"], "`--slo` writes JSON alone"),
            (["--plain-endpoint", "http://x"], "`--plain-endpoint` has no effect without `--slo`"),
        ):
            assert bench(fake, *words) == 2
            assert why in capsys.readouterr().err
        assert bench(fake, "--slo", "ttft<1s") == 1
        assert "--plain-endpoint URL" in capsys.readouterr().err
        assert bench(fake, "--slo", "ttft<9s", "--plain-endpoint", fake.url, "--concurrency", "1") == 0


def test_a_server_that_drafts_in_spite_of_the_switch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"num_draft_tokens": 3, "num_accepted_draft_tokens": 1, "num_spec_steps": 1}
    last = {"choices": [], "usage": {"completion_tokens": 2}, "metrics": {"speculative_decoding": figures}}
    with serving(Fake(script=[chunk(), chunk("", "stop"), last, "[DONE]"], owner="specdec", metrics=None)) as fake:
        assert bench(fake, "--slo", "ttft<60s", "--concurrency", "1") == 1
    assert "drafted 30 tokens for answers without a draft" in capsys.readouterr().err
