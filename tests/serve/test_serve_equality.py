"""What comes out over HTTP is the engine's output: with each drafter, alone and in company, whole and streamed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from live_server import JSON, LiveServer, live
from tiny_engine import letter_tokenizer, transformers_greedy
from tiny_models import make_tiny

from specdec_cli.engine.engine import Engine
from specdec_cli.sampling.params import SamplingParams

NUM_TOKENS = 20
VOCAB = 87
PROMPTS = (
    "Once upon a time",
    "the end",
    "and then, and then, and",
    "A red ball in the sand",
    "he",
    "Where is it? Where is",
    "one two three one two three one",
    "The rest of the other",
    "a",
    "Tom and Ann met on the street",
    "3 and 4 and 5",
    "no no no no no no no",
)
DRAFTS = ("model", "ngram", "prediction", "none")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Folders of a target and a draft with one tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, (name, num_layers) in enumerate({"target": 2, "draft": 1}.items()):
        make_tiny("llama", folder / name, seed, vocab_size=VOCAB, num_hidden_layers=num_layers)
        letter_tokenizer().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def engine_of(pair, verify: str = "auto"):
    return Engine.load(
        *pair,
        max_num_seqs=8,
        prefix_caching=True,
        verify=verify,
        num_speculative_tokens=3,
        others=("ngram", "prediction"),
    )


@pytest.fixture(scope="module")
def expected(pair):
    """Each prompt's greedy text by transformers."""
    tokenizer = letter_tokenizer()
    found = transformers_greedy(pair[0], [tokenizer.encode(prompt) for prompt in PROMPTS], NUM_TOKENS)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]


@pytest.fixture(scope="module")
def server(pair):
    with live(engine_of(pair)) as server:
        yield server


def ask(server: LiveServer, draft: str, streams: bool, body: dict[str, Any]) -> tuple[str, int]:
    """The text of a completion, and how many tokens were drafted for it."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "speculative": {"draft": draft}} | body
    if not streams:
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    connection = server.connect()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body | options), JSON)
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"]


def greedy(server: LiveServer, draft: str, streams: bool, place: int, expected: list[str]) -> tuple[str, int]:
    """The greedy text of a prompt; what is predicted for it is true but for its beginning."""
    predicted = (
        {"prediction": {"type": "content", "content": "No, " + expected[place]}} if draft == "prediction" else {}
    )
    return ask(server, draft, streams, {"prompt": PROMPTS[place], **predicted})


def test_greedy_text_is_that_of_transformers_and_of_generate(pair, expected) -> None:
    outputs = engine_of(pair).generate(list(PROMPTS), SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [output.text for output in outputs] == expected
    assert len(set(expected)) > len(PROMPTS) // 2


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_alone(server, expected, draft, streams: bool) -> None:
    found = [greedy(server, draft, streams, place, expected) for place in range(len(PROMPTS))]
    assert [text for text, _ in found] == expected
    assert (sum(drafted for _, drafted in found) > 0) == (draft != "none")


def test_greedy_text_in_company(server, expected) -> None:
    asked = list(product(range(len(PROMPTS)), DRAFTS, (False, True)))
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda one: greedy(server, one[1], one[2], one[0], expected)[0], asked))
    wrong = [one for one, text in zip(asked, found, strict=True) if text != expected[one[0]]]
    assert not wrong


@pytest.mark.in_turn(0, every=4)
@pytest.mark.parametrize("verify", ["rejection", "block", "gumbel", "exact-match"])
def test_a_seed_gives_one_text_alone_and_in_company(pair, verify: str) -> None:
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.9, top_k=5, seed=7)
    alone = [engine_of(pair, verify).generate(prompt, params)[0].text for prompt in PROMPTS[:4]]
    # Rows' last bits depend on their number: of few tokens hardly ever does a draw fall on a border.
    body = {"temperature": 0.9, "top_k": 5, "seed": 7}
    with live(engine_of(pair, verify)) as server, ThreadPoolExecutor(24) as pool:
        asked = [(place, streams) for place in range(len(PROMPTS)) for streams in (False, True)]
        first = [ask(server, "model", False, body | {"prompt": prompt})[0] for prompt in PROMPTS[:4]]
        found = list(pool.map(lambda one: ask(server, "model", one[1], body | {"prompt": PROMPTS[one[0]]})[0], asked))
    assert first == alone
    assert found[: 2 * len(first)] == [text for text in alone for _ in range(2)]
    assert found[::2] == found[1::2]
    assert len(set(found)) > len(PROMPTS) // 2
