"""What other engines accept, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec_cli.export import ENGINES
from specdec_cli.measure.predict.draft_trace import ModelTrace
from specdec_cli.measure.predict.engine_rules import (
    DRAFTS_PAST_END,
    ENGINE_RULES,
    engine_rule,
    engines_with,
    rule_rows,
    sampled_faults,
)
from specdec_cli.measure.predict.replay import REPLAYABLE, replay, replay_table
from specdec_cli.measure.predict.trace import Trace, TracedPrompt, load
from specdec_cli.sampling.params import SamplingParams

V = 8


def trace_of(output: list[int], is_argmax: list[bool], beyond: int = 0, temperature: float = 1.0) -> Trace:
    num = len(output)
    params = SamplingParams(max_new_tokens=num - beyond, temperature=temperature)
    prompt = TracedPrompt((1, 2), tuple(output), 2 + num + beyond, params, beyond=beyond)
    log_p = np.zeros(num, dtype=np.float32)
    draft = ModelTrace(np.full(num, -1.0, np.float32), np.array(is_argmax), np.zeros(num, bool), None)
    return Trace("t", V, (), None, [prompt], log_p, {"draft": draft})


def test_every_row_names_an_engine_of_export_and_a_rule_that_can_be_replayed() -> None:
    for one in ENGINE_RULES:
        assert one.engine in ENGINES
        assert one.rule in REPLAYABLE or (one.rule is None and one.fault)
    assert all(one in ENGINES for one in DRAFTS_PAST_END)


@pytest.mark.parametrize(
    ("engine", "given", "rule"),
    [
        ("vllm", {}, "one-hot"),
        ("vllm", {"needs": "probabilistic"}, "rejection"),
        ("vllm", {"needs": "rejection_sample_method block"}, "block"),
        ("vllm", {"is_cpu": True, "needs": "probabilistic"}, None),
        ("sglang", {}, "one-hot"),
        ("sglang", {"is_cpu": True}, "greedy"),
        ("trtllm", {"needs": "use_rejection_sampling"}, "rejection"),
        ("mlx", {}, "exact-match"),
        ("openvino", {}, None),
    ],
)
def test_the_rule_of_an_engine_as_it_is_set_up(engine: str, given: dict[str, Any], rule: str | None) -> None:
    assert engine_rule(engine, **given).rule == rule


def test_words_say_version_build_and_setting() -> None:
    assert engine_rule("vllm").words == "vllm 0.33.0"
    assert engine_rule("vllm", is_cpu=True).words == "vllm 0.32.0, CPU build"
    assert "mlx 0.32.2" in rule_rows(["exact-match"])[0]["engines"]
    assert rule_rows(["greedy", "greedy"]) == [{"rule": "greedy", "engines": ["every engine"]}]
    assert {one.engine for one in engines_with("one-hot")} == {"vllm", "sglang", "trtllm", "llamacpp"}


def test_an_engine_that_drafts_past_the_end_counts_what_is_accepted_there() -> None:
    """Of six tokens four are emitted: the first by prefill, three by the step that accepts two, one drafted beyond."""
    cut = trace_of([3] * 4, [True] * 4)
    whole = trace_of([3] * 6, [True] * 6, beyond=2)
    (its,) = replay(whole, "draft", "one-hot", 2)[1:]
    assert its.num_steps.tolist() == [1.0]
    assert its.num_accepted_tokens.tolist() == [2.0]
    longer = trace_of([3] * 7, [True] * 7, beyond=2)  # five are emitted, and the second step's two lie beyond
    (its,) = replay(longer, "draft", "one-hot", 2)[1:]
    assert its.num_steps.tolist() == [2.0]
    assert its.num_accepted_tokens.tolist() == [4.0]
    assert its.num_emitted.tolist() == [4.0]
    assert its.acceptance_length().median == 3.0
    assert replay(cut, "draft", "one-hot", 2)[1].num_accepted_tokens.tolist() == [2.0]
    assert replay_table(longer, "draft", "one-hot", {1: 2}, 1).num_steps.tolist() == [2.0]


def test_a_file_keeps_what_lies_beyond_the_end(tmp_path: Path) -> None:
    trace_of([3] * 6, [True] * 6, beyond=2).save(tmp_path / "t.safetensors")
    found = load(tmp_path / "t.safetensors")
    assert found.prompts[0].num_emitted == 4
    assert found.num_emitted_tokens == 4
    assert "beyond" not in json.dumps(trace_of([3] * 6, [True] * 6)._header())


def test_faults_are_named_for_the_versions_that_have_them() -> None:
    assert "uninitialized memory" in sampled_faults("vllm", "0.32.0+cpu")[0]
    assert sampled_faults("vllm", None)
    assert sampled_faults("vllm", "0.34.1") == []
    assert sampled_faults("specdec", "0.1.0") == []
    assert sampled_faults(None, None) == []
