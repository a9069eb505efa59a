"""Every command on the kinds of models that people run: hybrid, latent, mixture, multimodal, quantized and GGUF.

The default suite runs each command on one kind, and all of them on every kind are marked slow.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from every_type import save_noisy, save_tiny
from live_server import live
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny
from tiny_quantized import make_quantized
from typed import not_none

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.measure.bench import sweep
from specdec_cli.sampling.params import SamplingParams

TYPES = {"hybrid": "qwen3_next", "latent": "deepseek_v3", "mixture": "qwen3_moe", "multimodal": "qwen3_vl"}
KINDS = (*TYPES, "quantized", "gguf")
PROMPTS = ["the cat sat on the mat and the cat sat on the hat", "one two one two one two three one two"]
COMMANDS = ("doctor", "generate", "bench", "sweep-k", "audit", "serve")
ROTATION = [
    ("generate", "hybrid", "itself", ""),
    ("generate", "latent", "itself", "2,1"),
    ("doctor", "mixture", "itself", ""),
    ("bench", "multimodal", "itself", ""),
    ("audit", "hybrid", "itself", "2,1"),
    ("sweep-k", "gguf", "ngram", ""),
    ("audit", "quantized", "itself", ""),
    ("serve", "hybrid", "itself", ""),
]
CROSS = [
    (command, kind, draft, tree)
    for kind in KINDS
    for command in COMMANDS
    for draft in ("itself", "ngram", "none")
    for tree in ("", "2,1")
    if not (tree and draft == "none")
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target of a kind, and a draft of the same kind that is right now and then."""
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: _pair(kind, folder / kind))


def _pair(kind: str, folder: Path) -> tuple[str, str]:
    folder.mkdir()
    if kind == "gguf":
        pytest.importorskip("gguf", reason="needs gguf")
        from tiny_gguf import SIZES, write_gguf

        plain = make_tiny("llama", folder / "plain", **SIZES)
        write_gguf(plain, folder / "target.gguf", "Q4_K_M")
        write_gguf(save_noisy(plain, folder / "noisy"), folder / "draft.gguf", "Q8_0")
        return str(folder / "target.gguf"), str(folder / "draft.gguf")
    if kind == "quantized":
        target = make_quantized("gptq", folder)
        letter_tokenizer().save_pretrained(target)
        return str(target), str(shutil.copytree(target, folder / "draft"))
    target = save_tiny(TYPES[kind], folder / "target")
    letter_tokenizer().save_pretrained(target)
    return str(target), str(save_noisy(target, folder / "draft"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of steps are profiled no longer than they must."""
    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))


def words(pair: tuple[str, str], draft: str, tree: str) -> list[str]:
    drafts = {"itself": pair[1], "ngram": "ngram:min=1", "none": "none"}
    return ["-t", pair[0], "-d", drafts[draft], *(["--tree", tree] if tree else [])]


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The JSON of a command; of one that fails, what it says."""
    capsys.readouterr()
    assert run([*arguments, "--json", "--quiet"]) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 else err


def works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pair: tuple[str, str], command: str, draft: str, tree: str
) -> None:
    """A command does its work on a pair, and its tokens are those of the target alone."""
    models, prompts = words(pair, draft, tree), tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    workload = ["--dataset", str(prompts), "--num-prompts", "1", "-n", "6"]
    if command == "doctor":
        assert document(capsys, command, *models, "--max-model-len", "96")["verdict"] == "ok"
    elif command == "generate":
        ways = models, words(pair, "none", "")
        found = [document(capsys, command, *PROMPTS, "-n", "8", *one)["outputs"] for one in ways]
        texts = [[output["token_ids"] for output in outputs] for outputs in found]
        assert texts[0] == texts[1]
        assert found[0][0]["speculative"]["num_draft_tokens"] > 0 or draft != "itself"
    elif command in ("bench", "sweep-k"):
        more = ["--repeats", "1"] if command == "bench" else ["--k-max", "2"]
        lossless = document(capsys, command, *models, *workload, *more)["lossless"]
        assert lossless["checked_tokens"] > 0
        assert lossless["mismatches"] == 0
    elif command == "audit":
        short = ["--time-limit", "0", "--k-values", "2", "--batch-sizes", "2", "--prompt-file", str(prompts), "-n", "6"]
        assert document(capsys, command, *models, *short, "--mode", "greedy")["verdict"] == "pass"
    else:
        serves(pair, draft, tree)


def serves(pair: tuple[str, str], draft: str, tree: str) -> None:
    """A server answers as the target alone does, and shares the prompt of the second request."""
    name = {"itself": pair[1], "ngram": "ngram", "none": None}[draft]
    engine = Engine.load(pair[0], name, prefix_caching=True, tree=tree or None)
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "model": "toy"}
    right = Engine.load(pair[0], None).generate([PROMPTS[0]], SamplingParams(max_new_tokens=8))[0].text
    with live(engine) as server:
        answers = [server.post("/v1/completions", body)[1] for _ in range(2)]
    assert [answer["choices"][0]["text"] for answer in answers] == [right, right]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize(("command", "kind", "draft", "tree"), ROTATION)
def test_each_command_works_on_one_kind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: Any, command: str, kind: str, draft: str, tree: str
) -> None:
    works(capsys, tmp_path, pairs(kind), command, draft, tree)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "kind", "draft", "tree"), CROSS)
def test_every_command_works_on_every_kind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: Any, command: str, kind: str, draft: str, tree: str
) -> None:
    if draft == "none" and command in ("bench", "sweep-k", "audit"):
        assert "there is no draft" in document(capsys, command, *words(pairs(kind), draft, tree), code=2)
    elif command == "sweep-k" and draft == "ngram" and tree:
        assert "bench --tree" in document(capsys, command, *words(pairs(kind), draft, tree), code=2)
    else:
        test_each_command_works_on_one_kind(capsys, tmp_path, pairs, command, kind, draft, tree)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: Any, kind: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    drafts = [*words(pairs(kind), "itself", ""), "-d", "ngram:min=1"]
    workload = ["--dataset", str(prompts), "--num-prompts", "1", "-n", "6", "--k-max", "2", "--repeats", "1"]
    found = document(capsys, "compare-drafts", *drafts, *workload)
    assert {row["draft"] for row in found["rows"]} == {pairs(kind)[1], "ngram:min=1"}
    assert found["lossless"]["mismatches"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_server_s_command_serves_every_kind(pairs: Any, kind: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "specdec_cli.cli.main", "serve", *words(pairs(kind), "itself", ""), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(not_none(process.stderr))
            serving = next(line for line in lines if line.startswith("serving"))
            port = not_none(re.search(r":(\d+)\s*$", serving))[1]
            body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
            with httpx.Client(trust_env=False, timeout=60) as client:
                url = f"http://127.0.0.1:{port}/v1/completions"
                answers = [client.post(url, json=body).json() for _ in range(2)]
            process.send_signal(signal.SIGTERM)
            "".join(lines)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
