"""What a configuration and headers say is what the loaded model turns out to be."""

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files import hub
from specdec_cli.lm.files.architecture import TYPES
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.plan import ModelPlan


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "falcon", "gemma3_text", "mixtral"])
def test_facts_are_the_loaded_models(tmp_path: Path, family: str) -> None:
    folder = str(make_tiny(family, tmp_path / family))
    found, lm = describe(folder), load_lm(folder)
    assert found.weights_bytes == lm.weight_bytes
    assert found.kv_bytes_per_token == lm.kv_bytes_per_token
    assert (found.max_context, found.embedding_size) == (lm.max_context, lm.vocab_size)
    assert found.dtype == "float32"
    assert found.is_mixture_of_experts == (family == "mixtral")


def test_another_dtype_takes_its_own_memory(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path / "m"))
    whole, half = describe(folder), describe(folder, dtype="bfloat16")
    assert half.weights_bytes * 2 == whole.weights_bytes
    assert not_none(half.kv_bytes_per_token) * 2 == whole.kv_bytes_per_token


def test_without_weights_the_configuration_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id whose weights are not here: nothing is loaded, the sum is the same."""
    folder = make_tiny("llama", tmp_path / "m")
    counted = describe(str(folder)).num_parameters
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(folder))
    found = describe("someone/some-model")
    assert not found.is_complete
    assert (found.num_parameters, found.weights_counted_in) == (counted, "configuration")


def test_a_hub_id_fetches_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(tmp_path))
    assert ModelPlan("gpt2", fetches_weights=False).folder == tmp_path
    assert not [pattern for pattern in asked[0][1]["allow_patterns"] if "safetensors" in pattern]


def test_end_tokens_are_the_generation_configurations(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", eos_token_id=5)
    assert describe(str(folder)).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert describe(str(folder)).eos_token_ids == (3, 4)


def test_a_local_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(RunError, match="no weights"):
        describe(str(folder))


def test_the_engine_and_doctor_refuse_the_same_types_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights are not read before")
    for model_type, reason in TYPES.items():
        if model_type.startswith("gemma4"):  # has no default configuration
            continue
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "is_decoder": True}))
        for look in (load_lm, describe):
            with pytest.raises(UsageError) as refused:
                look(str(tmp_path))
            assert refused.value.message.startswith(f"architecture `{model_type}` of `")
            assert refused.value.message.endswith(f" is not supported: it {reason}")
