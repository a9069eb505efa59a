import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_server import LiveServer, live
from schemas import assert_fits
from toy_engine import LETTERS, LetterTokenizer, TableLM, toy_engine

from specdec_cli.cli.main import run
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.measure.documents.replayed import AcceptanceDocument
from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.predict import engine_rules, recorded, remote_trace
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import Trace
from specdec_cli.recipe.schema import Sampling
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES

PROMPTS = ["abc abc ab", "head.\nbad", "a bag, a cab", "fed a hag"]


class NearLM(TableLM):
    """A draft that is often right: the target's table with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.table += torch.randn(self.table.shape, generator=torch.Generator().manual_seed(5)) * 1.5


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[LiveServer, LiveServer]]:
    with live(toy_engine(target=TableLM())) as target, live(toy_engine(target=NearLM())) as draft:
        yield target, draft


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": prompt, "category": "toy"}) for prompt in PROMPTS]
    Path("prompts.jsonl").write_text("\n".join(rows))


def url(server: LiveServer) -> str:
    host, port = server.listener.getsockname()[:2]
    return f"http://{host}:{port}"


def swept(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    line = ["sweep-k", "--dataset", "prompts.jsonl", "-n", "24", "--k-max", "4", "--json", "--quiet", *words]
    assert run(line) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_fits(found, AcceptanceDocument)
    return found


def lengths(found: dict[str, Any], rule: str) -> list[float]:
    return [row["acceptance_length"]["median"] for row in found["rows"] if row["rule"] == rule]


def local_trace(trace: Trace, sampling: Sampling) -> remote_trace.ModelTrace:
    """The draft's scores of a trace's text, without a server."""
    draft, log_q, top = NearLM(), [], []
    for prompt in trace.prompts:
        whole = [*prompt.token_ids, *prompt.output]
        logits = draft.score([Row(0, whole[:-1], len(prompt.output))])
        scores = torch.log_softmax(logits, dim=-1)
        log_q += [float(scores[i, token]) for i, token in enumerate(prompt.output)]
        top += [int(scores[i].argmax()) == token for i, token in enumerate(prompt.output)]
    return remote_trace.ModelTrace(
        np.array(log_q, dtype=np.float32), np.array(top), np.zeros(len(top), dtype=bool), None
    )


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_servers_say_what_the_models_would(
    servers: tuple[LiveServer, LiveServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    temperature: str,
) -> None:
    kept: list[Trace] = []
    whole = remote_trace.RemoteTracer.trace_target

    async def keeping(self: remote_trace.RemoteTracer, watch: Any) -> Trace:
        kept.append(await whole(self, watch))
        return kept[-1]

    monkeypatch.setattr(remote_trace.RemoteTracer, "trace_target", keeping)
    target, draft = servers
    found = swept(
        capsys, "--target-endpoint", url(target), "--draft-endpoint", url(draft), "--temperature", temperature
    )
    trace = kept[0]
    assert [LETTERS[token] for token in trace.prompts[0].token_ids] == list(PROMPTS[0])
    (remote,) = trace.drafts.values()
    assert isinstance(remote, remote_trace.ModelTrace)
    local = local_trace(trace, Sampling())
    assert np.allclose(remote.log_q, local.log_q, atol=1e-4)
    assert (remote.is_argmax == local.is_argmax).all()
    trace.drafts["local"] = local
    for rule in ("greedy",) if temperature == "0" else ("rejection", "block", "one-hot", "exact-match"):
        expected = [one.acceptance_length().median for one in replay(trace, "local", rule, 4)]
        assert lengths(found, rule) == pytest.approx(expected, rel=1e-4)
    assert found["source"]["requests"] == 2 * len(PROMPTS)
    assert found["tokens"] == trace.num_output_tokens


_NOT_FIGURES: list[tuple[str, Any]] = [
    ("token_logprobs", float("nan")),
    ("token_logprobs", 0.5),
    ("token_logprobs", "x"),
    ("token_logprobs", None),
    ("top_logprobs", ["a"]),
    ("token_ids", "5"),
    ("token_ids", -5),
    ("token_ids", 2**70),
    ("logprobs", ["a"]),
]
_OF_THE_OTHER = {False: "top_logprobs", True: "token_ids"}
"""Figures that only the other server gives."""


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(
    ("of_draft", "name", "value"),
    [(of_draft, *one) for of_draft in (False, True) for one in _NOT_FIGURES if one[0] != _OF_THE_OTHER[of_draft]],
)
def test_answers_without_figures_are_refused(
    servers: tuple[LiveServer, LiveServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    of_draft: bool,
    name: str,
    value: Any,
) -> None:
    def damaged(choice: dict[str, Any]) -> None:
        if name in choice:
            choice[name] = value if isinstance(value, list) else [value] * len(choice[name])
        else:
            choice["logprobs"][name] = [value] * len(choice["logprobs"][name])

    _change_answers(monkeypatch, damaged, of_draft)
    target, draft = servers
    asked = ["--target-endpoint", url(target), "--draft-endpoint", url(draft), "--temperature", "1"]
    assert run(["sweep-k", "--dataset", "prompts.jsonl", "-n", "24", "--k-max", "4", *asked]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert url(draft if of_draft else target) in said
    assert "that are none" in said or "does not score" in said


def test_a_target_that_answers_nothing_is_an_error(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--target-endpoint", url(servers[0]), "-d", "ngram"]
    assert run(["sweep-k", "--dataset", "prompts.jsonl", "-n", "1", "--k-max", "4", *asked]) == 1
    assert "gave no answer of two tokens or more, so nothing can be predicted" in capsys.readouterr().err


def test_a_draft_with_another_tokenizer_is_refused(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(choice: dict[str, Any]) -> None:
        choice["logprobs"]["tokens"] = [chr(ord(text[0]) + 1) for text in choice["logprobs"]["tokens"]]

    _change_answers(monkeypatch, shifted, of_draft=True)
    target, draft = servers
    asked = ["--target-endpoint", url(target), "--draft-endpoint", url(draft)]
    assert run(["sweep-k", "--dataset", "prompts.jsonl", "-n", "24", "--k-max", "4", *asked]) == 1
    assert f"`{url(draft)}` has another tokenizer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("shown", ["bytes:\\xc3", "token_id:7", "\ufffd", " {}", ""])
def test_servers_that_show_tokens_in_their_own_way_are_compared(
    servers: tuple[LiveServer, LiveServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
) -> None:
    def changed(choice: dict[str, Any]) -> None:
        choice["logprobs"]["tokens"] = [shown.format(text) for text in choice["logprobs"]["tokens"]]

    _change_answers(monkeypatch, changed, of_draft=True)
    target, draft = servers
    assert swept(capsys, "--target-endpoint", url(target), "--draft-endpoint", url(draft))["rows"]


def _change_answers(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None], of_draft: bool) -> None:
    whole = Endpoint.whole

    async def changed(self: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
        found = await whole(self, path, body)
        if ("echo" in body) is of_draft:
            change(found["choices"][0])
        return found

    monkeypatch.setattr(Endpoint, "whole", changed)


@pytest.mark.parametrize(
    ("option", "words"),
    [("--target-endpoint", "check --target-endpoint and --target"), ("--draft-endpoint", "check --draft-endpoint")],
)
def test_a_refusal_names_the_commands_own_options(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    asked = {"--target-endpoint": url(servers[0]), option: f"{url(servers[1])}/elsewhere"}
    line = ["sweep-k", "--dataset", "prompts.jsonl", *(word for pair in asked.items() for word in pair)]
    assert run([*line, *([] if len(asked) == 2 else ["-d", "ngram"])]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"hint: {words}")


def test_prediction_is_what_an_engine_counts(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str]
) -> None:
    found = swept(capsys, "--target-endpoint", url(servers[0]), "-d", "ngram:min=1")
    engine = toy_engine(k=3)
    tokenizer = LetterTokenizer()
    for prompt in PROMPTS:
        engine.add(tokenizer.encode(prompt), SamplingParams(max_new_tokens=24))
    accepted = drafts = 0
    while engine.has_work:
        for event in engine.step():
            for emitted in getattr(event, "emitted", ()):
                drafts += emitted.num_drafted > 0
                accepted += emitted.num_accepted
    assert lengths(found, "greedy")[2] == pytest.approx(1 + accepted / drafts)


def test_an_engine_that_drafts_past_the_end_is_asked_for_more(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--target-endpoint", url(servers[0]), "-d", "ngram:min=1", "--set", "sampling.ignore_eos=true"]
    short = swept(capsys, *words)
    monkeypatch.setattr(engine_rules, "DRAFTS_PAST_END", {"specdec"})
    found = swept(capsys, *words)
    assert found["tokens"] == short["tokens"] == 24 * len(PROMPTS)
    drafted = [[sum(row["acceptance_histogram"]) for row in one["rows"]] for one in (short, found)]
    assert drafted[1] >= drafted[0], "the last step drafts too"


def test_a_build_that_does_not_sample_from_the_target_is_named(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = replace(engine_rules.engine_rule("vllm", is_cpu=True), engine="specdec", version="99")
    monkeypatch.setattr(engine_rules, "ENGINE_RULES", (fault,))
    words = ["--target-endpoint", url(servers[0]), "-d", "ngram:min=1"]
    assert swept(capsys, *words)["notices"] == []
    assert "uninitialized memory" in swept(capsys, *words, "--temperature", "1")["notices"][0]


def test_the_report_says_who_verifies_so_and_what_it_took(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target-endpoint", url(servers[0]), "--draft-endpoint", url(servers[1]), "--temperature", "1"]
    assert (
        run(["sweep-k", "--dataset", "prompts.jsonl", "-n", "8", "--k-max", "2", "--quiet", "--details", *words]) == 0
    )
    shown = capsys.readouterr().out
    assert f"exact-match: {RULES['exact-match'].meaning} (mlx 0.32.2)" in shown
    assert "vllm 0.33.0 with draft_sample_method probabilistic" in shown
    assert f"{2 * len(PROMPTS)} requests, 0.0" in shown


def test_messages_are_asked_as_a_chat(
    servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str]
) -> None:
    found = swept(capsys, "--target-endpoint", url(servers[0]), "--draft-endpoint", url(servers[1]), "--chat")
    assert len(lengths(found, "greedy")) == 4


def test_recorded_answers_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    story = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat."
    rows: list[dict[str, Any]] = [
        {"prompt": "Tell a story.", "answer": story},
        {"request": {"prompt": "Again."}, "response": {"choices": [{"text": story}]}},
        {"prompt": "Short", "output": "a"},
    ]
    Path("log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["sweep-k", "-t", "builtin:target", "--trace-from", "log.jsonl", "--k-max", "3", "--json", "--quiet"]
    for draft in ("ngram", "suffix"):
        assert run([*words, "-d", draft]) == 0
        found = json.loads(capsys.readouterr().out)
        assert_fits(found, AcceptanceDocument)
        assert lengths(found, "greedy")[2] > 2, "it repeats itself"
    assert run([*words, "-d", "builtin:draft"]) == 2
    assert "needs a model" in capsys.readouterr().err


_BROKEN_ANSWERS = ('["x"]', '{"a": 1}', '[{"message": "x"}]', "[[]]")


@pytest.mark.parametrize(
    "content",
    [
        *("", "nonsense", "[1]", '{"prompt": "a"}', '{"answer": "a"}', '{"prompt": "a", "answer": 3}', "{}"),
        *(f'{{"request": {{"prompt": "a"}}, "response": {{"choices": {one}}}}}' for one in _BROKEN_ANSWERS),
        '{"prompt": "a", "answer": "b \\udfff c"}',
        '{"prompt": "\\ud800", "answer": "a b c"}',
    ],
)
def test_logs_without_answers_are_refused(capsys: pytest.CaptureFixture[str], content: str) -> None:
    Path("log.jsonl").write_text(content)
    assert run(["sweep-k", "-t", "builtin:target", "-d", "ngram", "--trace-from", "log.jsonl"]) == 2
    assert capsys.readouterr().out == ""


def test_a_line_of_a_log_may_hold_other_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    row = json.dumps(
        {"prompt": "Tell\u2028a story.", "answer": "The cat\x85 The cat\u2029 The cat"}, ensure_ascii=False
    )
    Path("log.jsonl").write_text(f"{row}\r\n{row}\n", encoding="utf-8")
    assert run(["sweep-k", "-t", "builtin:target", "-d", "ngram", "--trace-from", "log.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 2


def test_a_chat_ends_with_its_answer() -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
    assert recorded._pair(row, "") == ([{"role": "user", "content": "Hi"}], "Hello there")


def test_a_message_is_text_as_a_whole_or_in_parts() -> None:
    parts = [{"type": "text", "text": "Read this:"}, {"type": "text", "text": "a page"}]
    row = {"messages": [{"role": "user", "content": parts}], "answer": "I did."}
    assert recorded._pair(row, "") == ([{"role": "user", "content": "Read this:\na page"}], "I did.")
    parts.append({"type": "image_url", "image_url": "http://x/y.png"})
    with pytest.raises(UsageError, match="row 3 has a message that is not text alone"):
        recorded._pair(row, "row 3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "0.7"], "at temperature 1"),
        (["--temperature", "1", "--top-p", "0.9"], "before `sampling.top_p` applies"),
        (["--tree", "2,1"], "`--tree` has no effect with --target-endpoint"),
        (["-d", "builtin:draft"], "needs a model"),
        (["-d", "mtp"], "reads the target's hidden states, which no server gives"),
        (["--trace-from", "x.jsonl", "-d", "ngram"], "two sources of one text"),
    ],
)
def test_what_cannot_be_told_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert run(["sweep-k", "--target-endpoint", "http://127.0.0.1:9", "-t", "a/b", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--temperature", "1"], ["--chat"], ["--dataset", "x"], ["-n", "4"], ["--prompt-file", "x"], ["--api-key", "k"]],
)
def test_recorded_answers_leave_nothing_to_decode(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(["sweep-k", "--trace-from", "x.jsonl", "-d", "ngram", "--dry-run", *words]) == 2
    assert "has no effect with --trace-from" in capsys.readouterr().err


def test_a_drafts_server_is_the_draft(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9"
    assert run(["sweep-k", "--target-endpoint", url, "--draft-endpoint", url, "-d", "ngram", "--dry-run"]) == 2
    assert "no effect with --draft-endpoint" in capsys.readouterr().err


def test_a_plan_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep-k", "--target-endpoint", "http://127.0.0.1:9", "-t", "a/b", "--dry-run"]
    assert run([*words, "-d", "ngram"]) == 0
    assert "k = 1 to 8 over at most 24 prompts through http://127.0.0.1:9" in capsys.readouterr().out
    assert run([*words, "-d", "builtin:draft"]) == 2
    assert run(["sweep-k", "--trace-from", "x.jsonl", "-d", "suffix", "--dry-run"]) == 0
    assert "recorded answers in x.jsonl" in capsys.readouterr().out


def test_options_about_servers_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep-k", "--draft-endpoint", "http://127.0.0.1:9"]) == 2
    assert "no effect without --target-endpoint" in capsys.readouterr().err
    assert run(["sweep-k", "--target-endpoint", "127.0.0.1", "-d", "ngram"]) == 2
    assert "`--target-endpoint` must be an http" in capsys.readouterr().err
    assert run(["sweep-k", "--target-endpoint", "http://127.0.0.1:9", "-t", "a/b", "-d", "ngram"]) == 1
    assert "no server" in capsys.readouterr().err


def test_a_server_without_token_ids_is_refused() -> None:
    from specdec_cli.errors import RunError

    with pytest.raises(RunError, match="gives no token ids"):
        remote_trace._read_answer({"choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.0]}}]}, "http://x")
    with pytest.raises(RunError, match="gives 0 log-probabilities for 2 tokens"):
        remote_trace._read_answer({"choices": [{"token_ids": [1, 2], "prompt_token_ids": [3]}]}, "http://x")
