"""Drafts that read a text which a server decoded: what they load here, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import command_of
from live_server import live
from tiny_engine import letter_tokenizer
from tiny_heads import publish, random_weights
from tiny_models import VOCAB, make_tiny

from specdec_cli.cli.draft_reader import draft_reader, reader_without_models
from specdec_cli.cli.main import run
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.endpoint.address import parse_address
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.predict.draft_trace import DepthTrace, ModelTrace
from specdec_cli.measure.predict.remote_trace import RemoteTracer
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams

K, NUM = 3, 12
PROMPTS = ["the den", "one gnu, two gnus", "so it goes"]


@dataclass
class Pair:
    """A target's folder and a head's."""

    target: Path
    head: Path

    def recipe(self, **draft: Any) -> Recipe:
        """The pair, or the target with another draft, for vLLM."""
        given = {"target": {"model": str(self.target)}, "draft": draft or {"model": str(self.head)}}
        return Recipe.model_validate(given | {"engine": {"name": "vllm", "kv_cache_memory": "90%"}})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny("llama", folder / "target", 1, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(target)
    head = publish(folder / "head", random_weights(True, drafted=VOCAB, seed=8), "speculators")
    return Pair(target, head)


def served(engine: Engine) -> Trace:
    """The target's text as its server gives it."""

    async def ask(url: str) -> Trace:
        async with Endpoint(parse_address(url), None, 20.0, 2) as server:
            rows = [PromptRow(place, text) for place, text in enumerate(PROMPTS)]
            sampling = Sampling(max_new_tokens=NUM, ignore_eos=True)
            tracer = RemoteTracer(server, await server.choose_model(""), rows, sampling, False, 2)
            return await tracer.trace_target(lambda _done, _total: None)

    with live(engine) as server:
        host, port = server.listener.getsockname()[:2]
        return asyncio.run(ask(f"http://{host}:{port}"))


def test_a_head_reads_a_servers_text_as_it_reads_our_own(pair: Pair) -> None:
    trace = served(Engine.load(str(pair.target), None, prefix_caching=False))
    told: list[tuple[int, int]] = []
    reader = draft_reader(pair.recipe())
    reader.check()
    reader.read(trace, K, lambda done, total: told.append((done, total)))
    assert told[-1] == (len(PROMPTS), len(PROMPTS))

    engine = Engine.load(str(pair.target), str(pair.head), num_speculative_tokens=K)
    params = SamplingParams(max_new_tokens=NUM, ignore_eos=True)
    requests = [Request(PromptRow(i, text), engine.encode(text), params) for i, text in enumerate(PROMPTS)]
    expected = trace_target(engine, requests)
    assert [one.output for one in trace.prompts] == [one.output for one in expected.prompts]
    ours, own = trace.drafts[reader.name], trace_draft(expected, engine.drafter, K, target=engine.target)
    assert isinstance(ours, DepthTrace)
    assert isinstance(own, DepthTrace)
    assert (ours.is_argmax == own.is_argmax).all()
    assert np.array_equal(ours.rank, own.rank)  # type: ignore[arg-type]
    assert trace.num_tokens == engine.num_tokens


def test_a_model_takes_its_own_vocabulary(pair: Pair) -> None:
    """The text's highest token tells nothing about those that the draft may choose."""
    trace = served(Engine.load(str(pair.target), None, prefix_caching=False))
    assert trace.num_tokens < VOCAB
    reader = draft_reader(pair.recipe(model=str(pair.target)))
    reader.read(trace, K, lambda _done, _total: None)
    assert trace.num_tokens == VOCAB
    found, lm = trace.drafts[reader.name], load_lm(str(pair.target))
    assert isinstance(found, ModelTrace)
    whole = [[*prompt.token_ids, *prompt.output[:-1]] for prompt in trace.prompts]
    likeliest = torch.cat([lm.score([Row(i, one, NUM)]).argmax(-1) for i, one in enumerate(whole)])
    emitted = [token for prompt in trace.prompts for token in prompt.output]
    assert (found.is_argmax == (likeliest.numpy() == emitted)).all()


def test_a_text_with_tokens_that_the_target_here_lacks_is_refused(pair: Pair) -> None:
    trace = Trace("other", VOCAB + 1, (), None, [], np.zeros(0, np.float32))
    with pytest.raises(UsageError, match=f"the target's text has token {VOCAB}"):
        draft_reader(pair.recipe()).read(trace, K, lambda _done, _total: None)


def test_a_head_needs_its_target_here(pair: Pair, tmp_path: Path) -> None:
    apart = Recipe.model_validate({"target": {"model": str(tmp_path / "none")}, "draft": {"model": str(pair.head)}})
    reader = draft_reader(apart)
    with pytest.raises(Exception, match="reads the target's hidden states, so both must load here"):
        reader.check()
    with pytest.raises(UsageError, match="reads the target's hidden states, which no server gives"):
        reader_without_models(pair.recipe())
    with pytest.raises(UsageError, match="needs a model, which is not loaded here"):
        reader_without_models(pair.recipe(model=str(pair.target)))


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ({"method": "none"}, "there is no draft to sweep"),
        ({"method": "prediction"}, "reads one prompt's text"),
        ({"method": "universal", "model": "some/draft"}, "has another tokenizer"),
    ],
)
def test_drafts_that_no_text_tells_are_refused(pair: Pair, draft: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        draft_reader(pair.recipe(**draft))


@pytest.mark.slow
def test_a_head_is_swept_on_another_engine(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    words = ["sweep-k", "--engine", "vllm", "--engine-command", shlex.join(command_of(os.getpid()))]
    words += ["-t", str(pair.target), "-d", str(pair.head), "--dataset", "prompts.jsonl", "-n", "6", "--k-max", "2"]
    assert run([*words, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine_sweep"]["speculative_config"]["method"] == "eagle3"
    assert found["recipe"]["draft"]["model"] == str(pair.head)
    assert [row["k"] for row in found["by_batch_size"][0]["rows"]] == [1, 2]
    lengths = [row["acceptance_length"] for row in found["by_batch_size"][0]["rows"]]
    assert all(1 <= length <= k for k, length in zip((2, 3), lengths, strict=True))


def test_a_head_for_another_target_starts_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", f"seen={tmp_path / 'seen'}")
    small = make_tiny("llama", tmp_path / "small", 2, num_hidden_layers=2)
    letter_tokenizer().save_pretrained(small)
    words = ["sweep-k", "--engine", "vllm", "--engine-command", shlex.join(command_of(os.getpid()))]
    assert run([*words, "-t", str(small), "-d", str(pair.head), "--quiet"]) == 2
    assert "reads the target's hidden states, so both must load here" in capsys.readouterr().err
    assert not (tmp_path / "seen").exists()
