"""Trees of single requests over HTTP: the text stays the target's, nodes are counted, what does not fit is a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from requests_for_tests import completion, facts, planner
from toy_engine import END, LETTERS, LetterTokenizer
from toy_server import ToyClient, served_engine, toy_client
from typed import stand_in

from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.serve.errors import ApiError
from specdec_cli.serve.models import Model, Models, _longest_context

BODY = {"prompt": "abcab", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
PATHS = ("/v1/completions", "/v1/chat/completions")


def engine(**options: Any) -> Engine:
    """A table model for a target, another for a draft, and n-gram beside it."""
    size = len(LETTERS)
    target = TableLM.random(size, order=2, scale=2.0)
    draft = TableLM(lambda context: target._function(context) + 2 * np.sin(np.arange(size)), size, order=2)
    drafter, ngram, prediction = (
        create("model", {"model": "x"}),
        create("ngram", {"min": 1}),
        create("prediction", {"per_request": True}),
    )
    for one in (drafter, ngram, prediction):
        one.load(Resources(lambda _: draft, None, size))
    given = EngineOptions(**({"num_speculative_tokens": 4} | options))
    others = {"ngram": ngram, "prediction": prediction}
    return Engine(target, drafter, stand_in(LetterTokenizer()), given, (END,), others)


@pytest.fixture(scope="module")
def client() -> Iterator[ToyClient]:
    with toy_client(engine()) as made:
        yield made


def ask(client: ToyClient, path: str = PATHS[0], **speculative: Any) -> dict[str, Any]:
    body = dict(BODY)
    if path == PATHS[1]:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    answer = client.post(path, json=body | {"speculative": speculative})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def words(document: dict[str, Any]) -> str:
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tree", ["4,2,1", "2,2,1,1,1,1", "dynamic:16", "dynamic:32"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_tree_gives_plain_decodings_text(client: ToyClient, draft: str | None, tree: str, path: str) -> None:
    plain = ask(client, path, enabled=False)
    found = ask(client, path, tree=tree, draft=draft)
    assert words(found) == words(plain)
    figures = found["metrics"]["speculative_decoding"]
    assert figures["num_draft_nodes"] > figures["num_draft_tokens"] >= figures["num_accepted_draft_tokens"] > 0
    assert max(figures["acceptance_by_rank"]) > 0


def test_a_chain_has_no_figures_of_trees(client: ToyClient) -> None:
    figures = ask(client)["metrics"]["speculative_decoding"]
    assert not {"num_draft_nodes", "acceptance_by_rank"} & figures.keys()
    assert figures["num_draft_tokens"] > 0


def test_a_static_tree_brings_its_depth_as_k(client: ToyClient) -> None:
    def k(**speculative: Any) -> int:
        return int(ask(client, **speculative)["metrics"]["speculative_decoding"]["num_spec_tokens"])

    assert (k(), k(tree="3,1"), k(tree="2,1,1,1,1,1"), k(tree="dynamic:8")) == (4, 2, 6, 4)
    assert k(tree="3,1", num_speculative_tokens=5) == 5


@pytest.mark.parametrize("per_token", [False, True])
def test_a_stream_says_how_many_nodes_each_step_drafted(client: ToyClient, per_token: bool) -> None:
    logprobs = {"logprobs": 0} if per_token else {}
    body = BODY | logprobs | {"stream": True, "speculative": {"tree": "4,2,1", "details": True}}
    lines = [line for line in client.post(PATHS[0], json=body).text.split("\n\n") if line.startswith("data: {")]
    said = [json.loads(line[6:])["choices"][0]["speculative"] for line in lines]
    nodes = sum(one.get("num_draft_nodes", one["num_drafted"]) for one in said)
    figures = ask(client, tree="4,2,1")["metrics"]["speculative_decoding"]
    assert nodes == figures["num_draft_nodes"]
    assert sum(one["num_drafted"] for one in said) == figures["num_draft_tokens"]


def test_the_servers_tree_holds_unless_a_request_says_otherwise() -> None:
    model = Model(
        "toy", lambda: served_engine(engine(tree="4,2,1")), Serve(), draft="x", num_speculative_tokens=4, tree="4,2,1"
    )
    models = Models([model], 60)
    model.load()
    assert model.drafting == "draft x, k = 4, tree 4,2,1"
    with toy_client(models=models) as client:
        assert client.get("/v1/models").json()["data"][0]["speculative"]["tree"] == "4,2,1"
        ours, chain, other = ask(client), ask(client, tree=None), ask(client, tree="dynamic:8")
        none, prediction = ask(client, draft="none"), client.post(PATHS[0], json=BODY | {"prediction": PREDICTION})
    assert prediction.status_code == 200  # a drafter that builds no trees decodes chains
    assert words(ours) == words(chain) == words(other) == words(none)
    nodes = [one["metrics"]["speculative_decoding"].get("num_draft_nodes") for one in (ours, chain, other, none)]
    assert [one is None for one in nodes] == [False, True, False, True]
    assert nodes[0] != nodes[2]


PREDICTION = {"type": "content", "content": "abcabd"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tree": "4,x"},
        "must be children per depth such as `4,2,1` or `3,2+1`, or `dynamic:N`, of at most 64 nodes, not `4,x`",
    ),
    ({"tree": ""}, "not ``"),
    ({"tree": "none"}, "must be children per depth"),
    ({"tree": "0,2"}, "must be children per depth"),
    ({"tree": "dynamic:65"}, "of at most 64 nodes, not `dynamic:65`"),
    ({"tree": "dynamic:" + "9" * 5000}, "of at most 64 nodes"),
    ({"tree": "8,8"}, "of at most 64 nodes, not `8,8`"),
    ({"tree": "dynamic:33"}, "must have at most 32 nodes, not `33`"),
    ({"tree": "4,2,2,1"}, "must have at most 32 nodes, not `44`"),
    ({"tree": "3,2,1", "num_speculative_tokens": 2}, "is `3` deep, and num_speculative_tokens is `2`"),
    ({"tree": "3,2", "draft": "prediction"}, "the draft `prediction` builds no trees"),
    ({"tree": "3,2", "draft": "none"}, "the draft `none` builds no trees"),
    ({"tree": ["4", "2"]}, "string"),
    ({"tree": 4}, "string"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"speculative": {"num_speculative_tokens": 4}}, "speculative.num_speculative_tokens", "not `4`"),
        ({"speculative.n_max": 9}, "speculative.n_max", "not `9`"),
        ({"speculative": {"tree": "2,1,1,1,1"}}, "speculative.tree", "not `5`"),
        ({"speculative": {"tree": "2,1", "num_speculative_tokens": 3}}, None, None),
        ({"speculative": {"tree": "dynamic:8"}}, None, None),
        ({"speculative": {"num_speculative_tokens": 9, "draft": "ngram"}}, None, None),
        ({}, None, None),
    ],
)
def test_a_request_deeper_than_its_draft_goes_is_a_400(
    fields: dict[str, Any], param: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine()
    monkeypatch.setattr(type(made.drafter), "most_depth", 3)
    with toy_client(made) as client:
        answer = client.post(PATHS[0], json=BODY | fields)
    assert answer.status_code == (200 if param is None else 400), answer.text
    if param is not None:
        error = answer.json()["error"]
        assert error["param"] == param
        assert f"must be at most 3 tokens deep with the draft `model`, {message}" in error["message"]


@pytest.mark.parametrize(("speculative", "message"), REFUSED)
def test_a_tree_that_does_not_fit_is_a_400_that_names_the_field(
    client: ToyClient, speculative: dict[str, Any], message: str
) -> None:
    prediction = {"prediction": PREDICTION} if speculative.get("draft") == "prediction" else {}
    for stream in (False, True):
        answer = client.post(PATHS[0], json=BODY | prediction | {"stream": stream, "speculative": speculative})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "speculative.tree")
        assert message in error["message"]
        assert "\n" not in error["message"]
        assert "--" not in error["message"]


@pytest.mark.parametrize(
    ("server", "fields", "message"),
    [
        ({"verify": "block"}, {"temperature": 0.8}, "`block` judges chains alone, and this draft builds trees"),
        ({"verify": "typical"}, {"temperature": 0.8}, "`typical` judges chains alone"),
        ({"depth_policy": "adaptive"}, {}, "the depth policy `adaptive` does not fit the tree `4,2`"),
        ({"scores_trees": False}, {}, "this model cannot score a drafted tree"),
    ],
)
def test_a_server_whose_rule_or_model_has_no_trees(
    server: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    over = facts(planner=planner(**server))
    with pytest.raises(ApiError) as refused:
        completion(over=over, speculative={"tree": "4,2"}, **{"temperature": 0.0, **fields})
    assert (refused.value.status, refused.value.param) == (400, "speculative.tree")
    assert message in refused.value.message


def test_a_rule_for_chains_takes_trees_at_temperature_0() -> None:
    over = facts(planner=planner(verify="block"))
    assert completion(over=over, speculative={"tree": "4,2"}, temperature=0).jobs[0].tree == "4,2"


def test_how_a_tree_travels() -> None:
    def job(**speculative: Any) -> tuple[str | None, int | None]:
        made = completion(speculative=speculative).jobs[0]
        return made.tree, made.num_speculative_tokens

    assert job() == (None, None)
    assert job(tree=None) == ("none", None)
    assert job(tree="4,2") == ("4,2", 2)
    assert job(tree="dynamic:9") == ("dynamic:9", None)
    assert job(tree="dynamic:9", num_speculative_tokens=2) == ("dynamic:9", 2)
    assert job(tree="4,2", num_speculative_tokens=0) == ("4,2", 0)  # a k of 0 asks for no draft
    assert job(tree="4,2", enabled=False) == (None, 0)


def test_a_tree_where_nothing_would_be_drafted_is_refused() -> None:
    over = facts(num_speculative_tokens=0, planner=planner(num_speculative_tokens=0))
    with pytest.raises(ApiError) as refused:
        completion(over=over, speculative={"tree": "dynamic:8"})
    assert refused.value.param == "speculative.tree"
    assert completion(over=over, speculative={"tree": "4,2"}).jobs[0].num_speculative_tokens == 2


def test_the_limit_is_the_servers_or_its_own_trees() -> None:
    limits = Serve(max_speculative_tokens=8)
    with pytest.raises(ApiError, match="at most 8 nodes, not `20`"):
        completion(over=facts(serve=limits), speculative={"tree": "dynamic:20"})
    over = facts(serve=limits, planner=planner(tree="dynamic:20"))
    assert completion(over=over, speculative={"tree": "dynamic:20"}).jobs[0].tree == "dynamic:20"


def test_metrics_count_nodes_and_ranks() -> None:
    with toy_client(engine()) as client:
        found = ask(client, tree="4,2,1")["metrics"]["speculative_decoding"]
        lines = client.get("/metrics").text.splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    name, label = "specdec:spec_decode_num_", 'model_name="toy"'
    assert values[f"{name}draft_nodes_total{{{label}}}"] == found["num_draft_nodes"]
    assert values[f"{name}draft_tokens_total{{{label}}}"] == found["num_draft_tokens"]
    rates = [
        values[f'{name}accepted_tokens_per_rank_total{{{label},rank="{rank}"}}']
        / values[f'{name}alternatives_per_rank_total{{{label},rank="{rank}"}}']
        for rank in range(1, 5)
    ]
    assert rates == found["acceptance_by_rank"]


def test_openapi_describes_the_tree(client: ToyClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert "null drafts chains" in schemas["Speculative"]["properties"]["tree"]["description"]
    assert "null drafts chains" in client.get("/docs").text


@pytest.mark.parametrize("num_blocks", [8, 4])
def test_a_context_leaves_the_cache_room_for_the_servers_tree(num_blocks: int) -> None:
    size = len(LETTERS)
    target = TableLM(
        TableLM.random(size)._function, size, order=2, num_blocks=num_blocks, block_size=16, max_context=128
    )
    tight = Engine(target, engine().drafter, options=EngineOptions(num_speculative_tokens=4, tree="dynamic:40"))
    longest = _longest_context(tight, 32)
    assert longest == num_blocks * 16 - 40
    tight.add([1] * (longest - 5), SamplingParams(max_new_tokens=5))
    while tight.has_work:
        tight.step()
