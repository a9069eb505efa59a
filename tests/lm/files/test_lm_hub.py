"""Hub ids without safetensors: the files that are fetched, and one sentence where none can be chosen."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refused import refusal
from safetensors.torch import load_file
from tiny_models import make_tiny

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.files import hub
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.lm.model_tokenizer import tokenizer_of
from specdec_cli.lm.plan import ModelPlan

TOKENS = [5, 17, 3, 40, 41, 9]


class Hub:
    """A hub of one model: its files, and a cache of links to what was fetched, as huggingface_hub keeps them."""

    def __init__(self, folder: Path) -> None:
        self.files, self.blobs, self.cache = (folder / name for name in ("files", "blobs", "cache"))
        for path in (self.files, self.blobs, self.cache):
            path.mkdir()
        self.revisions: list[str | None] = []
        self.is_reached = True

    def snapshot_download(
        self, name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        assert name == "org/repo"
        self.revisions.append(revision)
        for file in self.names() if self.is_reached else ():
            is_wanted = any(fnmatch(file, pattern) for pattern in allow_patterns)
            if is_wanted and not any(fnmatch(file, pattern) for pattern in ignore_patterns):
                blob, link = self.blobs / file.replace("/", "-"), self.cache / file
                shutil.copyfile(self.files / file, blob.with_suffix(".blob"))
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(blob.with_suffix(".blob"))
        return str(self.cache)

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        assert timeout < 10
        if not self.is_reached:
            raise ConnectionError("no hub")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.names()])

    def names(self) -> list[str]:
        return [str(path.relative_to(self.files)) for path in self.files.rglob("*") if path.is_file()]

    @property
    def fetched(self) -> set[str]:
        return {str(path.relative_to(self.cache)) for path in self.cache.rglob("*") if path.is_file()}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(hub.HfApi, "model_info", made.model_info)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    return made


def score(name: str, **options: Any) -> torch.Tensor:
    return load_lm(name, **options).score([Row(0, TOKENS, len(TOKENS))])


@pytest.fixture
def ggufs(remote: Hub, tmp_path: Path) -> Hub:
    pytest.importorskip("gguf", reason="needs gguf")
    from tiny_gguf import SIZES, write_gguf

    source = make_tiny("llama", tmp_path / "llama", **SIZES)
    for form in ("Q8_0", "Q4_0"):
        write_gguf(source, remote.files / f"tiny-{form}.gguf", form)
    (remote.files / "mmproj-tiny-F16.gguf").write_bytes(b"GGUF")
    (remote.files / "README.md").write_text("")
    return remote


@pytest.mark.parametrize("num_files", [1, 2])
def test_39_pickled_weights_are_fetched_where_there_are_no_others(remote: Hub, tmp_path: Path, num_files: int) -> None:
    plain = make_tiny("llama", tmp_path / "plain")
    shutil.copy(plain / "config.json", remote.files)
    weights = load_file(plain / "model.safetensors")
    (remote.files / "optimizer.bin").write_bytes(b"large")
    if num_files == 1:
        torch.save(weights, remote.files / "pytorch_model.bin")
    else:
        index = {key: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, key in enumerate(weights)}
        for file in {*index.values()}:
            torch.save({key: weights[key] for key in weights if index[key] == file}, remote.files / file)
        text = json.dumps({"metadata": {}, "weight_map": index})
        (remote.files / "pytorch_model.bin.index.json").write_text(text)
    facts = describe("org/repo")
    assert (facts.is_complete, facts.weights_counted_in) == (False, "configuration")
    assert not any(file.endswith(".bin") for file in remote.fetched)
    assert torch.equal(score("org/repo", revision="v1"), score(str(plain)))
    assert remote.revisions[-1] == "v1"
    assert "optimizer.bin" not in remote.fetched
    assert describe("org/repo").stored_as == "pickled tensors"
    remote.is_reached = False
    assert torch.equal(score("org/repo"), score(str(plain)))


def test_files_beside_a_drafts_weights_are_fetched(remote: Hub) -> None:
    wanted = {"config.json", "medusa_lm_head.pt", "mask_embedding.pt", "warp_model.bin", "pytorch_model.bin"}
    for file in (*wanted, "optimizer.bin", "training_args.pt"):
        (remote.files / file).write_bytes(b"")
    (remote.files / "config.json").write_text('{"medusa_num_heads": 2}')
    hub.fetch("org/repo", None, hub.Wanted(False, True, is_head=True, fetches_weights=True))
    assert remote.fetched == wanted


def test_39_safetensors_are_fetched_alone(remote: Hub, tmp_path: Path) -> None:
    plain = make_tiny("llama", tmp_path / "plain")
    shutil.copytree(plain, remote.files, dirs_exist_ok=True)
    for other in ("pytorch_model.bin", "tiny-Q8_0.gguf"):
        (remote.files / other).write_bytes(b"large")
    assert torch.equal(score("org/repo"), score(str(plain)))
    assert not any(file.endswith((".bin", ".gguf")) for file in remote.fetched)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("name", ["tiny-Q4_0.gguf", "Q4_0", "q4_0"])
def test_39_a_gguf_file_is_named_behind_the_id(ggufs: Hub, name: str) -> None:
    assert torch.equal(score(f"org/repo:{name}"), score(str(ggufs.files / "tiny-Q4_0.gguf")))
    assert ggufs.fetched == {"tiny-Q4_0.gguf"}
    tokens = len(load_tokenizer(str(ggufs.files / "tiny-Q4_0.gguf")))
    assert len(load_tokenizer(f"org/repo:{name}")) == tokens
    assert len(tokenizer_of(ModelPlan(f"org/repo:{name}", fetches_weights=False))) == tokens
    assert describe(f"org/repo:{name}").stored_as == "GGUF (Q4_0)"
    ggufs.is_reached = False
    assert describe(f"org/repo:{name}").decoder == load_lm(f"org/repo:{name}").decoder


@pytest.mark.parametrize("is_inside", [False, True])
def test_39_one_gguf_file_needs_no_name(ggufs: Hub, is_inside: bool) -> None:
    (ggufs.files / "tiny-Q8_0.gguf").unlink()
    if is_inside:
        (ggufs.files / "inside").mkdir()
        (ggufs.files / "tiny-Q4_0.gguf").rename(ggufs.files / "inside" / "tiny-Q4_0.gguf")
    assert load_lm("org/repo").generation.eos_token_ids
    assert ggufs.fetched == {"inside/tiny-Q4_0.gguf" if is_inside else "tiny-Q4_0.gguf"}


def test_39_gguf_files_that_cannot_be_told_apart_are_refused(ggufs: Hub) -> None:
    said = refusal("org/repo")
    assert isinstance(said, UsageError)
    assert said.message == "`org/repo` has 2 GGUF files: `tiny-Q4_0.gguf`, `tiny-Q8_0.gguf`"
    assert said.hint == "name one of them, such as `org/repo:tiny-Q4_0.gguf`"
    assert "has 2 GGUF files with `tiny` in their names: `tiny-Q4_0" in refusal("org/repo:tiny").message
    assert refusal("org/repo:Q5_K_M").message == "`org/repo` has no GGUF file `Q5_K_M`"
    assert refusal("org/repo:none.gguf").message == "`org/repo` has no GGUF file `none.gguf`"
    assert not ggufs.fetched


def test_39_doctor_fetches_no_gguf_file(ggufs: Hub) -> None:
    said = refusal("org/repo:Q4_0", describe)
    assert (
        said.message == "the GGUF file `tiny-Q4_0.gguf` of `org/repo` is not here yet, and its configuration is in it"
    )
    assert said.hint == "fetch it: `hf download org/repo tiny-Q4_0.gguf`"
    assert not ggufs.fetched


def test_39_a_model_without_weights_is_refused(remote: Hub, tmp_path: Path) -> None:
    shutil.copy(make_tiny("llama", tmp_path / "plain") / "config.json", remote.files)
    said = refusal("org/repo", load_lm)
    assert isinstance(said, RunError)
    assert "`org/repo` has no weights" in said.message
    assert "has no GGUF file `Q4_0`" in refusal("org/repo:Q4_0").message


@pytest.mark.parametrize("name", ["org/repo:", "repo:Q4_0", "org/repo:a:b", "org/repo:../x.gguf", "org/a/b:Q4_0"])
def test_39_other_names_are_no_hub_ids(remote: Hub, name: str) -> None:
    refusal(name)
    assert not remote.revisions
