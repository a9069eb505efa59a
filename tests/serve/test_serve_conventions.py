"""What clients of other servers take for granted: random seeds, offsets, HEAD, several names of one model."""

from __future__ import annotations

import http.client
from typing import Any

import pytest
from live_server import live
from requests_for_tests import completion, facts, tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from toy_engine import toy_engine
from toy_server import served_engine, toy_client
from transformers import PreTrainedTokenizerFast
from typed import not_none

from specdec_cli.engine.jobs.records import Delta
from specdec_cli.events import TokenLogprob
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.answer.logprobs import CompletionLogprobs, TokenWords
from specdec_cli.serve.answer.respond import CompletionAnswer
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.request.parameters import Defaults
from specdec_cli.text.tokenizer import Tokenizer

SAMPLED = {"prompt": "abc", "max_tokens": 24, "temperature": 1.5}


@pytest.mark.parametrize("seed", [-1, -7, -(2**63)])
def test_a_negative_seed_is_a_random_one(seed: int) -> None:
    drawn = {completion(seed=seed).jobs[0].params.seed for _ in range(4)}
    assert len(drawn) == 4
    assert min(drawn) >= 0
    of_server = Defaults(named=frozenset({"seed"}))
    assert completion(over=facts(sampling=of_server)).jobs[0].params.seed == of_server.params.seed
    assert completion(over=facts(sampling=of_server), seed=seed).jobs[0].params.seed != of_server.params.seed


def test_texts_of_a_negative_seed_differ_and_those_of_a_seed_agree() -> None:
    with toy_client() as client:

        def texts(seed: int) -> set[str]:
            bodies = [SAMPLED | {"seed": seed} for _ in range(3)]
            return {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies}

        assert len(texts(-1)) > 1
        assert len(texts(5)) == 1


def offsets(**fields: Any) -> tuple[str, list[int], list[str]]:
    """The echoed text, where its tokens are said to begin, and the tokens."""
    prepared = completion(echo=True, max_tokens=0, logprobs=1, **fields)
    prompt = prepared.jobs[0].token_ids
    answer = CompletionAnswer(prepared)
    scored = tuple(TokenLogprob(token, -1.0, ()) for token in prompt[1:])
    answer.observe(0, Delta(finish_reason="length", prompt_logprobs=scored))
    choice = answer.document()["choices"][0]
    return choice["text"], choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]


@pytest.mark.parametrize("skips", [True, False, None])
@pytest.mark.parametrize(
    "prompt", ["the cat sat", "</s>the cat", "the</s> cat </s>sat", [1, *tokenizer().encode("a dog", False), 2, 2]]
)
def test_the_offset_of_an_echoed_prompt_is_where_its_token_stands(skips: bool | None, prompt: str | list[int]) -> None:
    special = {tokenizer().piece(token) for token in tokenizer().special_ids}
    text, found, tokens = offsets(prompt=prompt, skip_special_tokens=skips)
    assert len(found) == len(tokens)
    assert found == sorted(found)
    for offset, token in zip(found, tokens, strict=True):
        assert text.startswith(token, offset) or token in special, (text, offset, token)
    ends = [*found[1:], len(text)]
    assert "".join(text[begin:end] for begin, end in zip(found, ends, strict=True)) == text
    if isinstance(prompt, list):
        assert ("</s>" in text) is (skips is False), "ids are echoed as `skip_special_tokens` has it"


GET_ROUTES = [
    "/",
    "/health",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/models/toy",
    "/tokenizer_info",
    "/openapi.json",
]


@pytest.mark.parametrize("path", GET_ROUTES)
def test_head_answers_as_get_does_without_a_body(path: str) -> None:
    with toy_client() as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert "content-length" in head.headers
        assert client.head("/nowhere").status_code == 404
        assert client.head("/v1/completions").status_code == 405


def test_head_on_a_socket_leaves_the_connection_usable() -> None:
    with live(served_engine(toy_engine()), keys=("secret",)) as server:
        connection: http.client.HTTPConnection = server.connect()
        for path, status in [("/health", 200), ("/v1/models", 401), ("/health", 200)]:
            connection.request("HEAD", path)
            response = connection.getresponse()
            assert (response.status, response.read()) == (status, b"")
        connection.close()


def test_every_name_of_a_model_answers_and_the_first_is_reported() -> None:
    models = Models([Model("a", lambda: served_engine(toy_engine()), Serve(), aliases=("b", "org/c"))])
    models.all[0].load()
    with toy_client(models=models) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["a", "b", "org/c"]
        assert client.get("/v1/models/org/c").json() == listed[2]
        for name in ("a", "b", "org/c", None):
            answer = client.post("/v1/completions", json=SAMPLED | {"model": name}).json()
            assert answer["model"] == "a"
            assert client.post("/tokenize", json={"prompt": "abc", "model": name}).status_code == 200
        refused = client.post("/v1/completions", json=SAMPLED | {"model": "d"})
        assert refused.status_code == 404
        assert "`a`, `b`, `org/c`" in refused.json()["error"]["message"]
        assert 'model_name="a"' in client.get("/metrics").text


def test_a_context_that_the_kv_cache_does_not_hold_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    engine = served_engine(toy_engine())
    engine.target.num_blocks = 8
    with caplog.at_level(logging.WARNING, "specdec_cli"):
        model = Model("toy", lambda: engine, Serve())
        model.load()
    assert Models([model]).stop()
    assert not_none(model.max_model_len) < engine.target.max_context
    assert f"fewer than the context of `{engine.target.max_context}`" in caplog.text


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_stand_after_characters_of_several_bytes_and_names_in_the_text(skips: bool) -> None:
    """A sentencepiece tokenizer: bytes of a character, spaces after special tokens, names that are spelled out."""
    hf = byte_fallback()
    text = Tokenizer(hf)
    for prompt in ("a ü b", "ab</s>b a", "</s></s>a"):
        ids = text.encode(prompt)
        for echoed in (prompt, text.decode(ids, skips)):
            found = CompletionLogprobs(TokenWords(text, skip_special=skips)).prompt(ids, (), echoed)["text_offset"]
            assert found == sorted(found)
            for offset, token in zip(found, ids, strict=True):
                piece = text.piece(token)
                if token not in text.byte_tokens and token not in text.special_ids:
                    assert echoed[offset:].lstrip().startswith(piece.lstrip()), (echoed, offset, piece)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Letters, a space and every byte, as Llama's: a first space is stripped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    backend = Backend(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
