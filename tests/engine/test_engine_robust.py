"""The engine stays usable after a request that cannot go on, and refuses options that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import ngram, tiny_lm
from typed import stand_in

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.events import Failed
from specdec_cli.sampling.chain import LogitsError
from specdec_cli.sampling.params import SamplingParams


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tiny_lm(tmp_path), ngram(), None, EngineOptions(), ())


def test_a_request_whose_tokens_are_all_banned_is_ended_alone(engine: Engine) -> None:
    one = engine
    everything = tuple(range(one.num_tokens))
    one.add([1, 2], SamplingParams(min_tokens=3, stop_token_ids=everything))
    neighbour = one.add([3, 4], SamplingParams(max_new_tokens=5))
    first = one.step()
    failed = first[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, LogitsError)
    assert "banned" in failed.error.message
    tokens: list[int] = []
    tokens += [token for event in first[:1] for emitted in stand_in(event).emitted for token in emitted.tokens]
    while one.has_work:
        for event in one.step():
            for emitted in getattr(event, "emitted", ()):
                assert emitted.sequence_id == neighbour
                tokens += emitted.tokens
    assert tokens == one.generate([3, 4], SamplingParams(max_new_tokens=5))[0].token_ids
    assert one.target.num_free_blocks == one.target.num_blocks


def test_an_abandoned_stream_leaves_nothing_running(engine: Engine) -> None:
    one = engine
    stream = one.stream([[1, 2], [3, 4]])
    next(stream)
    assert one.has_work
    stand_in(stream).close()
    assert not one.has_work
    assert one.target.num_free_blocks == one.target.num_blocks


@pytest.mark.parametrize(
    "change",
    [
        {"num_speculative_tokens": -3},
        {"verify": "maybe"},
        {"p_min": 2.0},
        {"p_min": float("nan")},
        {"disable_by_batch_size": -1},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"prefill_chunk": 0},
    ],
)
def test_options_out_of_range_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        EngineOptions(**change)


def test_token_ids_may_come_as_arrays(engine: Engine) -> None:
    one = engine
    params = SamplingParams(max_new_tokens=4)
    expected = one.generate([5, 6, 7], params)[0].token_ids
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
        assert one.generate(prompt, params)[0].token_ids == expected  # type: ignore[arg-type]


def test_a_broken_number_of_tokens_is_refused() -> None:
    with pytest.raises(SpecdecError, match="whole number"):
        SamplingParams(max_new_tokens=2.5)  # type: ignore[arg-type]
