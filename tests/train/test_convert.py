"""Drafts in another format: the same tensors and settings after a round trip, and the same drafted tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import LAYERS, TEXT, features_of, loaded, row
from safetensors.torch import load_file
from tiny_dflash import publish_dflash, random_block_weights
from tiny_engine import letter_tokenizer
from tiny_heads import publish, random_weights
from tiny_medusa import publish_medusa, random_medusa_weights
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.errors import UsageError
from specdec_cli.lm.load import load_lm
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.convert import convert_draft


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)


def drafted(lm, folder: Path) -> tuple[tuple[int, ...], torch.Tensor]:
    """Tokens that a draft samples behind a text, and their q."""
    drafter = loaded(lm, folder)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    states = features_of(lm, TEXT, drafter.taps)
    guess = drafter.propose([row(TEXT[:9], states[:8], params=params)])[0]
    return guess.drafted.tokens, not_none(guess.q)


def same(lm, *folders: Path) -> bool:
    first, *others = [drafted(lm, folder) for folder in folders]
    return all(one[0] == first[0] and torch.allclose(one[1], first[1], atol=1e-6) for one in others)


VARIANTS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_eagle3_head_comes_back_as_it_was(lm, variant: dict[str, bool], tmp_path: Path) -> None:
    weights = random_weights(True, seed=3, **{key: value for key, value in variant.items() if key != "norm_output"})
    source = publish(tmp_path / "official", weights, "specforge", LAYERS, **variant)
    weights = load_file(source / "model.safetensors")
    speculators, back = tmp_path / "speculators", tmp_path / "back"
    assert "speculators 0.9.0 format" in str(convert_draft(str(source), "speculators", speculators, lm.name, 4))
    assert "EAGLE-3 head:" in str(convert_draft(str(speculators), "official", back))
    assert same(lm, source, speculators, back)
    content = json.loads((speculators / "config.json").read_text())
    assert content["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    assert content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    verifier = {"name_or_path": lm.name, "architectures": ["LlamaForCausalLM"]}
    assert content["speculators_config"]["verifier"] == verifier
    assert not [key for key in content["transformer_layer_config"] if "eagle" in key or "draft" in key]
    returned = load_file(back / "model.safetensors")
    assert set(returned) == set(weights)
    assert all(torch.equal(value, weights[name]) for name, value in returned.items())
    assert json.loads((back / "config.json").read_text())["base_model_name_or_path"] == lm.name


def test_a_head_that_names_no_layers_gets_the_targets(lm, tmp_path: Path) -> None:
    source = publish(tmp_path / "official", random_weights(True, seed=3), "official", LAYERS)
    with pytest.raises(UsageError, match=r"which of the target's layers .* depends on the target"):
        convert_draft(str(source), "official", tmp_path / "unnamed")
    convert_draft(str(source), "speculators", tmp_path / "speculators", lm.name)
    content = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3], "of 6 layers those that 2, 3 and 3 enter"


BLOCKS: dict[str, dict[str, Any]] = {
    "full": {},
    "from the anchor": {"sample_from_anchor": True},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
    "sliding both ways": {"use_swa": True, "swa_window_size": 6, "causal": False},
}


@pytest.mark.parametrize("case", BLOCKS)
def test_a_dflash_draft_comes_back_as_it_was(lm, case: str, tmp_path: Path) -> None:
    weights = random_block_weights(seed=3)
    source = publish_dflash(tmp_path / "z-lab", weights, "z-lab", **BLOCKS[case])
    speculators, back = tmp_path / "speculators", tmp_path / "back"
    convert_draft(str(source), "speculators", speculators, lm.name)
    convert_draft(str(speculators), "z-lab", back)
    assert same(lm, source, speculators, back)
    content = json.loads((speculators / "config.json").read_text())
    assert content["aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert content["sliding_window_non_causal"] is (case != "sliding"), "vLLM has layers causal where it is false"
    returned = load_file(back / "model.safetensors")
    assert set(returned) == set(weights)
    assert all(torch.equal(value, weights[name]) for name, value in returned.items())


def test_the_built_in_target_is_named_by_its_folder(tmp_path: Path) -> None:
    source = publish_dflash(tmp_path / "z-lab", random_block_weights(seed=3), "z-lab")
    convert_draft(str(source), "speculators", tmp_path / "speculators", "builtin:target")
    content = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert (Path(content["speculators_config"]["verifier"]["name_or_path"]) / "config.json").is_file()


def test_what_a_format_cannot_say_is_refused(lm, tmp_path: Path) -> None:
    def refused(said: str, source: Path, to: str, **more: Any) -> None:
        with pytest.raises(UsageError, match=said):
            convert_draft(str(source), to, tmp_path / "new", **more)
        assert not (tmp_path / "new").exists()

    head = publish(tmp_path / "head", random_weights(True, seed=3), "speculators", LAYERS)
    blocks = publish_dflash(tmp_path / "blocks", random_block_weights(), "z-lab")
    reduced = publish_dflash(tmp_path / "reduced", random_block_weights(drafted=40), "speculators")
    dspark = publish_dflash(tmp_path / "dspark", random_block_weights(dspark="vanilla"), "dspark")
    scaled = publish_dflash(tmp_path / "scaled", random_block_weights(), "z-lab", output_multiplier=0.5)
    masked = random_weights(True, masked=True)
    parallel = publish(tmp_path / "parallel", masked, "peagle", LAYERS, mask_token_id=5)
    several = random_weights(True, layers=2)
    several.pop("mask_hidden", None)
    refused("there is no format `gguf`", head, "gguf")
    refused("of the method `eagle3`, which has official and speculators", head, "z-lab")
    refused("the speculators format names the target", blocks, "speculators")
    refused("drafts 40 of 97 tokens, and z-lab's format drafts all", reduced, "z-lab")
    refused("parts of DSpark", dspark, "speculators", target=lm.name)
    refused("scaled embeddings or logits", scaled, "speculators", target=lm.name)
    refused("of the method `p-eagle`, which has one format alone", parallel, "official")
    refused("2 decoder layers", publish(tmp_path / "several", several, "speculators", LAYERS), "official")
    medusa = publish_medusa(tmp_path / "medusa", random_medusa_weights())
    refused("of the method `medusa`, which has one format alone", medusa, "speculators")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    with pytest.raises(UsageError, match="full` already exists"):
        convert_draft(str(head), "official", tmp_path / "full")
