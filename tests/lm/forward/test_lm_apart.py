"""Attention that runs for each span: what refused drafts and trees leave behind, its bits, its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import save_tiny
from invariance import holds
from test_lm_state_rollback import difference
from test_lm_state_trees import play
from tiny_models import VOCAB
from torch import Tensor
from versions import IS_OLDER

from specdec_cli.drafted import Drafted
from specdec_cli.lm.cache.cache import LayerStore
from specdec_cli.lm.cache.span_cache import SpanLayer
from specdec_cli.lm.door import Row
from specdec_cli.lm.forward import apart, registration
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM

FAMILIES = ("deepseek_v4", "minimax_m3_vl_text", "gpt_neo")
FRESH = 99
TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(60)]
TREE = Drafted((5, 6, 7, 8, 9, 10, 11, 12, 13), (-1, -1, 0, 0, 2, 1, 4, 6, 6))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param) / request.param)


def load(folder: Path, dtype: str = "float32") -> TransformersLM:
    return load_lm(str(folder), dtype=dtype, num_blocks=60, block_size=4, extra_tokens=9, check=False)


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_nodes_and_accepted_paths_are_those_of_fresh_forwards(folder: Path) -> None:
    assert play(load(folder), 20, has_states=False) < 1e-3


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_in_bfloat16_a_node_has_the_bits_of_one_token_after_another(folder: Path) -> None:
    if not holds(torch.bfloat16):
        pytest.skip("this machine's bfloat16 kernels are not row-invariant")
    if IS_OLDER and folder.name == "deepseek_v4":
        pytest.skip("oneDNN has no such product in bfloat16 as older versions of transformers ask for")
    lm = load(folder, "bfloat16")
    lm.score([Row(0, TEXT[:20], 0)])
    logits = lm.score([Row(0, TEXT[:21], len(TREE) + 1, TREE), Row(1, TEXT[5:9], 1)])
    for node in (4, 8):
        lm.score([Row(FRESH, TEXT[:20], 0)])
        path = [*TEXT[:21], *TREE.tokens_to(node)]
        ones = [lm.score([Row(FRESH, path[:length], 1)]) for length in range(21, len(path) + 1)]
        assert torch.equal(logits[node + 1], ones[-1][0]), node
        lm.release(FRESH)


def test_compressed_keys_and_their_inputs_are_counted(tmp_path: Path) -> None:
    lm = load(save_tiny("deepseek_v4", tmp_path / "model"))
    config = lm.config
    compressed = 2 * (2 * config.head_dim) + config.head_dim  # two series with their weights, and an entry
    indexer = 2 * (2 * config.index_head_dim) + config.index_head_dim
    heavily = 2 * config.head_dim + config.head_dim
    numbers = 3 * config.head_dim + compressed + indexer + heavily  # keys are the values
    assert lm.kv_bytes_per_token == numbers * 4


def _one_late(right: Callable[..., slice]) -> Callable[..., slice]:
    def windows(layer: SpanLayer, name: str) -> slice:
        found, rate = right(layer, name), layer._compressor(name).compress_rate
        return slice(min(found.start + rate, found.stop), found.stop)

    return windows


def _plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "a window's entry is left as a refused draft made it":
        monkeypatch.setattr(SpanLayer, "_new_windows", _one_late(SpanLayer._new_windows))
    elif fault == "the window before is forgotten":
        monkeypatch.setattr(SpanLayer, "update_overlap_state", lambda *_: (None, None))
    elif fault == "the accepted path is not moved":
        monkeypatch.setattr(LayerStore, "move", lambda *_: None)
    else:
        right = apart.attend_span

        def attend(*given: Any, block_indices: Tensor | None = None, **named: Any) -> Any:
            return right(*given, **named)

        monkeypatch.setitem(registration.AttentionInterface._global_mapping, registration.APART, attend)


def test_a_choice_of_blocks_that_is_ignored_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(save_tiny("minimax_m3_vl_text", tmp_path / "model"))
    right = lm.score([Row(0, TEXT, 1)])
    lm.release(0)
    _plant(monkeypatch, "blocks are ignored")
    assert difference(lm.score([Row(0, TEXT, 1)]), right) > 1e-3


FAULTS = [
    "a window's entry is left as a refused draft made it",
    "the window before is forgotten",
    "the accepted path is not moved",
]


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    lm = load(save_tiny("deepseek_v4", tmp_path / "model"))
    _plant(monkeypatch, fault)
    assert play(lm, 8, has_states=False) > 1e-2
