"""What the tests of serve's protocol share: facts over the built-in target's tokenizer, and requests in short."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from typed import not_none

import specdec_cli
from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.drafting import Drafters
from specdec_cli.engine.drafting_plan import DraftingPlanner
from specdec_cli.engine.jobs.records import Delta
from specdec_cli.engine.options import EngineOptions
from specdec_cli.events import Emitted, TokenLogprob
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.grammar import Grammar, TokenizerLike, compile_grammar
from specdec_cli.sampling.grammar_sandbox import Cancellation, GrammarCompiler
from specdec_cli.serve.protocol import ChatCompletionRequest, CompletionRequest
from specdec_cli.serve.request.prepare import ModelInfo, Prepared, prepare_chat, prepare_completion
from specdec_cli.serve.request.read import parse
from specdec_cli.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hello there"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
    "{% if enable_thinking %}think{% endif %}<|assistant|>"
)


@cache
def tokenizer(template: str | None = None) -> Tokenizer:
    hf = AutoTokenizer.from_pretrained(Path(specdec_cli.__file__).parent / "builtin" / "target")
    if template is not None:
        hf.chat_template = template
    return Tokenizer(hf)


def planner(scores_trees: bool = True, **options: Any) -> DraftingPlanner:
    """Of an engine with the drafters of `facts`."""
    draft, ngram, prediction = create("model", {"model": "small"}), create("ngram", {}), create("prediction", {})
    draft.load(Resources(lambda _: TableLM.random(100), None, 100))
    drafters = Drafters(draft, {"builtin:draft": draft, "ngram": ngram, "prediction": prediction}, 100)
    return DraftingPlanner(EngineOptions(**({"num_speculative_tokens": 3} | options)), drafters, scores_trees)


def facts(template: str | None = None, **given: Any) -> ModelInfo:
    text = tokenizer(template)
    known: dict[str, Any] = {
        "num_tokens": text.num_tokens,
        "max_context": 512,
        "names": ("demo",),
        "planner": planner(),
        "num_speculative_tokens": 3,
        "drafters": ("builtin:draft", "ngram", "prediction"),
        "serve": Serve(max_body_bytes=100_000, max_messages=200),
    }
    return ModelInfo(text, **(known | given))


class CompilerHere(GrammarCompiler):
    """Compiles without a trial, which takes a process."""

    def __init__(self) -> None:
        pass

    def compile(self, kind: str, source: str, tokenizer: TokenizerLike, *_: Any) -> Grammar:
        return compile_grammar(kind, source, tokenizer)


def compiled(prepared: Prepared, known: ModelInfo) -> Prepared:
    """With the grammar that the server would compile for it."""
    if prepared.constraint is None:
        return prepared
    grammar = prepared.constraint.compile(not_none(known.tokenizer), CompilerHere(), Cancellation())
    return prepared.constrained(grammar)


def step_delta(
    text: str,
    token_ids: Sequence[int],
    drafted: int = 0,
    accepted: int = 0,
    logprobs: Sequence[TokenLogprob] = (),
    **last: Any,
) -> Delta:
    """A step's delta; one that drafted nothing gives the first tokens."""
    is_first = not drafted
    step = Emitted(0, tuple(token_ids), text, drafted, accepted, is_first, tuple(logprobs), num_nodes=drafted)
    return Delta((step,), **last)


def completion(given: Any = None, over: ModelInfo | None = None, **fields: Any) -> Prepared:
    known = over or facts()
    body = given if isinstance(given, bytes) else json.dumps({"prompt": "hello there", **fields}).encode()
    request, _ = parse(CompletionRequest, body, known.serve)
    return compiled(prepare_completion(request, known, "r1"), known)


def chat(given: Any = None, over: ModelInfo | None = None, **fields: Any) -> Prepared:
    known = over or facts()
    body = given if isinstance(given, bytes) else json.dumps({"messages": USER, **fields}).encode()
    request, _ = parse(ChatCompletionRequest, body, known.serve)
    return compiled(prepare_chat(request, known, "r1"), known)
