"""Models without weights: shapes have the published sizes, random numbers give finite logits, memory is asked first."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from shortened import mostly_slow
from tiny_models import EXTRA_FAMILIES, FAMILIES, VOCAB, make_tiny

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files import dummy, names
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.text.tokenizer import Tokenizer

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen2-0.5b": 494_032_768,
    "qwen2-72b": 72_706_203_648,
}


def config_only(folder, family: str = "llama", **overrides):
    """A folder with nothing but a configuration."""
    made = make_tiny(family, folder / "whole", **overrides)
    empty = folder / f"{family}-config"
    empty.mkdir()
    (empty / "config.json").write_text((made / "config.json").read_text())
    return str(empty)


@pytest.mark.parametrize("shape", mostly_slow(PUBLISHED, list(PUBLISHED)[:1]))
def test_a_shape_has_the_published_number_of_parameters(shape) -> None:
    facts = describe(f"shape:{shape}")
    assert facts.num_parameters == PUBLISHED[shape]
    assert facts.load_format == "dummy"
    assert not facts.is_complete
    whole = describe(f"shape:{shape}", dtype="float32")
    is_tied = shape == "qwen2-0.5b"
    assert (whole.read_bytes < whole.weights_bytes) is not is_tied


def test_every_shape_is_listed_and_says_where_its_numbers_are_from() -> None:
    assert set(names.shape_names()) == set(PUBLISHED)
    for name in PUBLISHED:
        config = json.loads((dummy.shape_folder(f"shape:{name}") / "config.json").read_text())
        assert config["source"].startswith("model card of ")


def test_layers_are_cut_by_name() -> None:
    whole, cut = describe("shape:llama-2-7b"), describe("shape:llama-2-7b?layers=2")
    per_layer = (whole.num_parameters - cut.num_parameters) / 30
    assert cut.num_parameters == pytest.approx(2 * per_layer + 2 * 32000 * 4096 + 4096)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shape:llama-9", "unknown shape `shape:llama-9`"),
        ("shape:", "unknown shape `shape:`"),
        ("shape:../load", "unknown shape"),
        ("shape:llama-2-7b?layers=0", "`layers=0` of"),
        ("shape:llama-2-7b?", "`` of `shape:llama-2-7b?` is not layers=N"),
        ("shape:llama-2-7b?hidden=64", "`hidden=64` of"),
    ],
)
def test_a_wrong_shape_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match="shape") as error:
        describe(name)
    assert said in error.value.message


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_every_family_gives_finite_logits_of_random_weights(tmp_path: Path, family) -> None:
    lm = load_lm(config_only(tmp_path, family), dtype="bfloat16", load_format="dummy")
    assert {p.dtype for p in lm.model.parameters() if p.dim() > 1} == {torch.bfloat16}
    logits = lm.score([Row(0, list(range(2, 30)), 4)])
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert not torch.equal(logits[0], logits[1])


def test_equal_configurations_get_equal_weights_and_no_file_is_read(tmp_path: Path) -> None:
    name = config_only(tmp_path)
    first, again = (load_lm(name, load_format="dummy", decoder="transformers") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    whole = load_lm(str(tmp_path / "whole"), load_format="dummy", decoder="transformers")
    assert torch.equal(whole.model.lm_head.weight, first.model.lm_head.weight)
    matrix = first.model.model.layers[0].mlp.gate_proj.weight
    assert not torch.equal(matrix, first.model.model.layers[1].mlp.gate_proj.weight)
    assert len({tuple(row.tolist()) for row in matrix}) == len(matrix)
    assert first.eos_token_ids == ()


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    lm = load_lm(config_only(tmp_path, tie_word_embeddings=True), load_format="dummy")
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight


def test_too_little_memory_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=5 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(RunError) as error:
        load_lm("shape:llama-2-70b", dtype="bfloat16")
    assert "`shape:llama-2-70b` in bfloat16 needs 138.0 GB" in error.value.message
    assert "`5.0` GB of cpu memory are free" in error.value.message


def test_a_dummy_tokenizer_stands_in_for_none(tmp_path: Path) -> None:
    name = config_only(tmp_path, vocab_size=300)
    with pytest.raises(RunError, match="has no tokenizer"):
        load_tokenizer(name)
    tokenizer = Tokenizer(load_tokenizer(name, load_format="dummy"))
    assert tokenizer.name == "dummy"
    assert tokenizer.num_tokens == 300
    text = "Grüße, \n\t世界 🙂"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([ids[0], 299]) == "G<299>"


def test_a_small_vocabulary_has_fewer_bytes_and_refuses_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(load_tokenizer(config_only(tmp_path), load_format="dummy"))
    assert tokenizer.num_tokens == VOCAB
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"
    assert max(tokenizer.encode("Grüße")) < VOCAB


def test_padding_of_a_shape_is_no_token() -> None:
    target, draft = (load_tokenizer(f"shape:qwen2-{size}") for size in ("72b", "0.5b"))
    assert len(target) == len(draft) == 151646
