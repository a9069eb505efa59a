"""Hidden states on disk: the same batches up to bfloat16, shards that are kept, and a disk without room."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_training import ignore, never
from training_cases import method_of, samples_of

from specdec_cli.errors import RunError
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.train import features
from specdec_cli.train.features import CachedFeatures, TargetFeatures
from specdec_cli.train.target import OutputLayer


def test_cached_batches_are_the_computed_ones(lm: TransformersLM, tmp_path: Path) -> None:
    method, samples = method_of(lm, "eagle3"), samples_of()
    cached = CachedFeatures(lm, method.taps, tmp_path / "features", samples)
    cached.prepare(ignore, never)
    found, wanted = cached.batch(samples), TargetFeatures(lm, method.taps).batch(samples)
    assert found.features is not None
    assert wanted.features is not None
    torch.testing.assert_close(found.features, wanted.features, rtol=0.01, atol=0.01)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0.05, atol=0.1)
    assert torch.equal(found.tokens, wanted.tokens)
    assert cached.num_bytes == sum(len(one.tokens) for one in samples) * 4 * 32 * 2


def test_a_reduced_vocabulary_has_the_logits_of_its_tokens(lm: TransformersLM, tmp_path: Path) -> None:
    method, samples = method_of(lm, "eagle3", draft_vocab_size=40), samples_of()
    method.prepare(samples)
    assert method.drafted is not None
    cached = CachedFeatures(
        lm, method.taps, tmp_path / "features", samples, OutputLayer.of(method.target, method.drafted)
    )
    cached.prepare(ignore, never)
    whole = TargetFeatures(lm, method.taps).batch(samples).logits
    for found in (cached.batch(samples), TargetFeatures(lm, method.taps, method.drafted).batch(samples)):
        assert found.is_drafted is not None
        torch.testing.assert_close(found.logits, whole[..., method.drafted], rtol=0.05, atol=0.1)
        wanted = found.logits.any(-1) & torch.isin(whole.argmax(-1), method.drafted)
        assert torch.equal(found.is_drafted, wanted)
        assert 0 < int(found.is_drafted.sum()) < int(found.logits.any(-1).sum())


def test_capped_logits_come_from_the_whole_layer(lm: TransformersLM) -> None:
    method = method_of(lm, "eagle3")
    method.target.config.final_logit_softcapping = 30.0
    ids, states = torch.tensor([3, 5]), torch.randn(4, method.target.hidden_size)
    layer = OutputLayer.of(method.target, ids)
    layer.weight.zero_()
    assert torch.equal(layer.logits(states), lm.head(states)[:, ids].float())


def test_a_stopped_run_keeps_its_shards(lm: TransformersLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_SHARD", 1)
    samples, folder = samples_of(), tmp_path / "features"
    asked = iter([False, True])
    CachedFeatures(lm, (0,), folder, samples).prepare(ignore, lambda: next(asked))
    assert [path.name for path in sorted(folder.iterdir())] == ["000000.safetensors"]
    written = (folder / "000000.safetensors").stat().st_mtime_ns
    CachedFeatures(lm, (0,), folder, samples).prepare(ignore, never)
    assert len(list(folder.iterdir())) == 2
    assert (folder / "000000.safetensors").stat().st_mtime_ns == written


def test_a_damaged_shard_is_written_again(lm: TransformersLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_SHARD", 1)
    samples, folder = samples_of(), tmp_path / "features"
    CachedFeatures(lm, (0,), folder, samples).prepare(ignore, never)
    paths = sorted(folder.iterdir())
    whole = [path.read_bytes() for path in paths]
    paths[0].write_bytes(whole[0][:-9])
    paths[1].write_bytes(whole[0])  # of another sample
    CachedFeatures(lm, (0,), folder, samples).prepare(ignore, never)
    assert [path.read_bytes() for path in paths] == whole


def test_a_disk_without_room_is_refused_before_anything_is_written(
    lm: TransformersLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: Callable[[object], object] = lambda _: type("Usage", (), {"free": 10})  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", full)
    with pytest.raises(RunError, match=r"hidden states take \d\.\d kB, and `.*` has 0\.0 kB left"):
        CachedFeatures(lm, (0,), tmp_path / "features", samples_of())


def test_a_disk_that_fills_up_ends_in_one_sentence(
    lm: TransformersLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features, "save_file", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        CachedFeatures(lm, (0,), tmp_path / "features", samples_of()).prepare(ignore, never)
    assert not list((tmp_path / "features").iterdir())
