"""transformers as an arm: the same tokens as called by hand, alone, together, assisted, continuously batched."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import PROMPTS, transformers_greedy
from tiny_models import make_tiny
from tiny_quantized import make_quantized
from transformers import AutoModelForCausalLM
from typed import stand_in
from versions import needs_transformers

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.peers import load_peer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("peers")
    return make_tiny("llama", root / "target", 0), make_tiny("llama", root / "draft", 1, num_hidden_layers=1)


def test_alone_and_together(folders) -> None:
    expected = transformers_greedy(folders[0], PROMPTS)
    peer = load_peer(str(folders[0]))
    alone = [peer.generate([prompt], 24, ()) for prompt in PROMPTS]
    assert [run.token_ids[0] for run in alone] == expected
    assert all(0 < run.first_seconds < run.total_seconds and run.num_first == 1 for run in alone)
    assert peer.generate(PROMPTS, 24, ()).token_ids == expected
    assert peer.version.startswith("transformers 5.")


def test_an_end_token_ends_an_output(folders) -> None:
    expected = transformers_greedy(folders[0], PROMPTS)
    end = expected[1][6]
    runs = load_peer(str(folders[0])).generate(PROMPTS, 24, (end,)).token_ids
    assert runs[1] == expected[1][: expected[1].index(end) + 1]


def test_assisted(folders) -> None:
    peer = load_peer(str(folders[0]), str(folders[1]), num_assistant_tokens=3)
    run = peer.generate([PROMPTS[2]], 24, ())
    assert run.token_ids == transformers_greedy(folders[0], [PROMPTS[2]])
    assert 1 <= run.num_first <= 4


continuously = needs_transformers("batches continuously in another way")


@pytest.fixture
def continuous(folders):
    peer = load_peer(str(folders[0]), is_continuous=True)
    yield peer
    peer.close()


@continuously
def test_continuous_batching_alone_and_together(folders, continuous) -> None:
    expected = transformers_greedy(folders[0], PROMPTS)
    together = continuous.generate(PROMPTS, 24, ())
    assert together.token_ids == expected
    assert together.num_first == len(PROMPTS), "one step takes all prompts"
    alone = [continuous.generate([prompt], 24, ()) for prompt in PROMPTS]
    assert [run.token_ids[0] for run in alone] == expected
    assert all(0 < run.first_seconds < run.total_seconds and run.num_first == 1 for run in alone)


@continuously
def test_continuous_batching_stops_at_end_tokens(folders, continuous) -> None:
    expected = transformers_greedy(folders[0], PROMPTS)
    end = expected[1][6]
    runs = continuous.generate(PROMPTS, 24, (end,)).token_ids
    assert runs == [row[: row.index(end) + 1] if end in row else row for row in expected]


@continuously
def test_continuous_batching_grows_and_leaves_no_thread(folders) -> None:
    before = threading.active_count()
    peer = load_peer(str(folders[0]), is_continuous=True)
    small = peer.generate([PROMPTS[0]], 2, ()).token_ids[0]
    first = stand_in(peer)._manager
    assert peer.generate([PROMPTS[0]], 2, ()).token_ids[0] == small
    assert stand_in(peer)._manager is first, "what is large enough is kept"
    assert peer.generate(PROMPTS, 24, ()).token_ids == transformers_greedy(folders[0], PROMPTS)
    assert stand_in(peer)._manager is not first
    assert threading.active_count() == before + 1
    peer.close()
    peer.close()
    assert threading.active_count() == before


@continuously
def test_continuous_batching_that_fails_is_an_error(folders, continuous, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_, **__) -> None:
        raise ValueError("no such step")

    monkeypatch.setattr(continuous._model, "forward", broken)
    with pytest.raises(RunError, match=r"continuous batching failed: .*no such step"):
        continuous.generate([PROMPTS[0]], 4, ())


def test_an_older_continuous_batching_is_refused(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.generation.continuous_batching.ContinuousBatchingManager.pause", raising=False)
    with pytest.raises(RunError, match="has another continuous batching"):
        load_peer(str(folders[0]), is_continuous=True)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no `config.json`|does not load|does not exist|no weights"):
        load_peer(str(tmp_path))


def gguf(folder: Path) -> tuple[Path, Path]:
    """A file in 4 bits, and a folder with the numbers in it."""
    pytest.importorskip("gguf", reason="needs gguf")
    from tiny_gguf import SIZES, write_gguf

    made = make_tiny("llama", folder / "made", **SIZES)
    weights = write_gguf(made, folder / "made.gguf", "Q4_0")
    save_file(load_file(made / "model.safetensors") | weights, made / "model.safetensors", metadata={"format": "pt"})
    return folder / "made.gguf", made


def adapter(folder: Path) -> tuple[Path, Path]:
    pytest.importorskip("peft", reason="needs peft")
    from peft import PeftModel
    from tiny_adapters import make_adapter

    base = make_tiny("llama", folder / "base")
    made = make_adapter(base, folder / "adapter")
    with quiet():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), str(made))
        model.merge_and_unload().save_pretrained(folder / "merged")
    return made, folder / "merged"


def pickled(folder: Path) -> tuple[Path, Path]:
    plain, made = (make_tiny("llama", folder / name) for name in ("plain", "made"))
    torch.save(load_file(made / "model.safetensors"), made / "pytorch_model.bin")
    (made / "model.safetensors").unlink()
    return made, plain


def quantized(folder: Path, form: str) -> tuple[Path, Path]:
    return make_quantized(form, folder), folder / "reference"


FORMS = {"gguf": gguf, "adapter": adapter, "pickled": pickled}
FORMS |= {form: partial(quantized, form=form) for form in ("gptq", "nvfp4 modelopt", "torchao int8", "w8a8")}


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("form", FORMS)
def test_39_a_peer_decodes_with_the_numbers_that_we_decode_with(tmp_path: Path, form: str) -> None:
    made, right = FORMS[form](tmp_path)
    peer, plain = (load_peer(str(folder), dtype="float32") for folder in (made, right))
    prompts = [[5, 17, 3, 40], [9, 77]]
    found, expected = (one.generate(prompts, 12, []) for one in (peer, plain))
    assert found.token_ids == expected.token_ids
    assert peer._model.config._attn_implementation == plain._model.config._attn_implementation
