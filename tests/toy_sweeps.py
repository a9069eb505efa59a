"""Runs of `sweep-k` over toys, and what they cost."""

import json
from typing import Any

import pytest
from schemas import assert_fits
from toy_clock import toy_clock
from toy_engine import TableLM, toy_engine

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.measure.bench import sweep
from specdec_cli.measure.documents.sweep_k import SweepDocument
from specdec_cli.measure.predict.evidence import Evidence


def toy_engines(monkeypatch: pytest.MonkeyPatch):
    """Engines that the command made, of toys, whose costs are profiled no longer than they must."""
    engines = []

    def load(recipe, *, trust_remote_code: bool = False, progress=None):
        speculation = recipe.speculation
        engines.append(toy_engine(speculation.num_speculative_tokens, recipe.engine.max_num_seqs, speculation.verify))
        return engines[-1]

    monkeypatch.setattr(Engine, "from_recipe", load)
    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return engines


def sweep_k(*arguments: str) -> int:
    words = ["sweep-k", "-d", "ngram:min=1", "-n", "12", "--num-prompts", "6", "--k-max", "4", *arguments]
    return int(run(words))


def checked(text: str) -> dict[str, Any]:
    document = json.loads(text)
    assert_fits(document, SweepDocument)
    return document


def slow_target(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> None:
    """A target that is dear by the call, so that an n-gram draft pays."""
    clock, score = toy_clock(monkeypatch), TableLM.score

    def slowly(self, rows):
        clock.sleep(seconds)
        return score(self, rows)

    monkeypatch.setattr(TableLM, "score", slowly)


def by_batch(monkeypatch: pytest.MonkeyPatch, best: dict[int, int], plain_seconds: float = 2.0) -> None:
    """Every k takes known seconds at every batch size: the best one's 1, another's 1.5; no trace foretells them."""
    from specdec_cli.engine.arms import ArmRun, EngineArm
    from specdec_cli.timing import Timing

    def run(arm, requests, stopped):
        k, num = arm.num_speculative_tokens, len(requests)
        seconds = plain_seconds if k == 0 else 1.0 if k == best[num] else 1.5
        tokens = tuple((1,) * 4 for _ in requests)
        return None if stopped() else ArmRun(tokens, Timing(0.1, seconds, seconds, None), num)

    monkeypatch.setattr(EngineArm, "run", run)
    monkeypatch.setattr(sweep.Sweep, "evidence", lambda _, measured: Evidence(measured.speedup))


def count_profiles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the pair was warm, for every profile that is taken from now on."""
    profiled, profile = [], sweep.profile

    def counted(*arguments, **named):
        profiled.append(named["is_warm"])
        return profile(*arguments, **named)

    monkeypatch.setattr(sweep, "profile", counted)
    return profiled
