"""Calls from Python: unknown parameters and values of another type are refused by the name of the right one."""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
from typed import not_none, stand_in

import specdec_cli
from specdec_cli import AsyncEngine, Engine, EngineOptions, LoadSettings, ModelSettings, SamplingParams
from specdec_cli.call_checks import fits
from specdec_cli.errors import UsageError
from specdec_cli.events import Finished

HI = {"role": "user", "content": "Hi"}
ANY: Any = specdec_cli
"""The package, whose wrong calls are no errors of the tests' types."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("call", "named", "hint"),
    [
        (SamplingParams, "max_tokens", "use `max_new_tokens`"),
        (SamplingParams, "max_completion_tokens", "use `max_new_tokens`"),
        (SamplingParams, "n", "once for each output"),
        (SamplingParams, "repeat_penalty", "use `repetition_penalty`"),
        (SamplingParams, "temprature", "did you mean `temperature`?"),
        (SamplingParams, "num_speculative_tokens", "of `EngineOptions`"),
        (SamplingParams, "xyzzy", "it has: max_new_tokens, "),
        (Engine.load, "k", "use `num_speculative_tokens`"),
        (Engine.load, "model", "use `target`"),
        (Engine.load, "speculative_model", "use `draft`"),
        (Engine.load, "speculative_config", "`num_speculative_tokens`"),
        (Engine.load, "enable_prefix_caching", "use `prefix_caching`"),
        (Engine.load, "gpu_memory_utilization", "use `kv_cache_bytes`"),
        (Engine.load, "tensor_parallel_size", "one device"),
        (Engine.load, "max_tokens", "`max_new_tokens` of `SamplingParams`"),
        (AsyncEngine.load, "k", "use `num_speculative_tokens`"),
        (EngineOptions, "k", "use `num_speculative_tokens`"),
        (ModelSettings, "torch_dtype", "use `dtype`"),
        (LoadSettings, "max_seq_len", "use `max_model_len`"),
    ],
)
def test_49_24_an_unknown_parameter_is_answered_with_the_right_one(
    call: Callable[..., Any], named: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=f"has no parameter `{named}`") as caught:
        call(**{named: 3})
    assert hint in not_none(caught.value.hint)


@pytest.mark.parametrize("method", ["generate", "stream", "add"])
@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("sampling_params", "use `params`"),
        ("max_tokens", "`max_new_tokens` of `SamplingParams`"),
        ("temperature", "`temperature` of `SamplingParams`"),
        ("k", "use `num_speculative_tokens`"),
    ],
)
def test_49_24_requests_name_the_right_parameter(engine: Engine, method: str, named: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"`Engine.{method}` has no parameter `{named}`") as caught:
        getattr(engine, method)("Hi", **{named: 3})
    assert hint in not_none(caught.value.hint)
    assert not engine.has_work


@pytest.mark.parametrize(
    "prompt",
    [5, None, 5.5, b"Hi", {"prompt": "Hi"}, [5.5], [None], [["Hi"]], [True], [{"prompt": "Hi"}], [[{"role": "user"}]]],
    ids=repr,
)
def test_49_24_what_is_no_prompt_is_refused(engine: Engine, prompt: object) -> None:
    for method in (engine.generate, lambda given: list(engine.stream(given)), partial(specdec_cli.trace, engine)):
        with pytest.raises(UsageError) as caught:
            method(stand_in(prompt))
        assert "a prompt is text" in not_none(caught.value.hint)
    assert not engine.has_work


def test_49_24_the_async_engine_refuses_the_same(engine: Engine) -> None:
    async def refused(prompt: object, **named: object) -> None:
        other = AsyncEngine(engine)
        with pytest.raises(UsageError):
            await other.generate(stand_in(prompt), **stand_in(named))
        with pytest.raises(UsageError):
            async for _ in other.stream(stand_in(prompt), **stand_in(named)):
                pass
        await other.close()

    asyncio.run(refused(5))
    asyncio.run(refused("Hi", max_tokens=5))
    asyncio.run(refused("Hi", params=5))


@pytest.mark.parametrize("params", [5, {"max_tokens": 5}, [5]], ids=repr)
def test_49_24_what_are_no_sampling_parameters_is_refused(engine: Engine, params: object) -> None:
    with pytest.raises(UsageError, match="params must be SamplingParams"):
        engine.generate("Hi", stand_in(params))
    with pytest.raises(UsageError, match="params must be SamplingParams"):
        specdec_cli.trace(engine, "Hi", stand_in(params))


@pytest.mark.parametrize("k", [100, 65, -1, 2.5, "4", True], ids=repr)
def test_49_24_k_out_of_range_is_refused_everywhere(engine: Engine, k: object) -> None:
    for call in (
        lambda: Engine.load(num_speculative_tokens=stand_in(k)),
        lambda: EngineOptions(num_speculative_tokens=stand_in(k)),
        lambda: engine.generate("Hi", num_speculative_tokens=stand_in(k)),
        lambda: engine.add("Hi", None, stand_in(k)),
    ):
        with pytest.raises(UsageError, match="num_speculative_tokens"):
            call()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"decoder": "x"}, "decoder must be `auto`"),
        ({"load_format": "safe"}, "load_format must be `auto`"),
        ({"draft_quantize": "int3"}, "quantize must be `none`"),
        ({"kv_cache_bytes": "2GiB"}, "kv_cache_bytes must be a whole number"),
        ({"others": "ngram"}, "others must be a list of strings"),
        ({"max_num_seqs": "3"}, "max_num_seqs must be a whole number"),
        ({"verify": "strict"}, "verify is out of range"),
        ({"tree": 5}, "tree must be a text"),
        ({"max_model_len": 0}, "max_model_len is out of range"),
        ({"block_size": 0}, "block_size is out of range"),
        ({"progress": 1}, "progress must be a function"),
        ({"chat_template": 5}, "chat_template must be a text"),
        ({"options": {"num_speculative_tokens": 3}}, "options must be EngineOptions"),
        ({"settings": 5}, "settings must be LoadSettings"),
        ({"target": 5}, "target must be a text"),
        ({"draft": 3}, "draft must be a text"),
    ],
)
def test_49_24_load_refuses_values_by_name(named: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Engine.load(**named)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"stop": "###"}, "stop must be a list of strings"),
        ({"stop": [5]}, "stop must be a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of whole numbers"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of whole numbers"),
        ({"logit_bias": {"50256": -100}}, "logit_bias must be a mapping of whole numbers to numbers"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"top_k": -1}, "top_k is out of range"),
    ],
)
def test_49_24_sampling_parameters_are_refused_by_name(named: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SamplingParams(**named)


@pytest.mark.parametrize(
    ("value", "kind", "is_right"),
    [
        (np.int64(3), int, True),
        (np.float32(0.5), float, True),
        (True, int, False),
        (1, float, True),
        (1, bool, False),
        (np.array([1, 2]), tuple[int, ...], True),
        ({1: 0.5}, Mapping[int, float], True),
        ([(1, 2)], tuple[tuple[int, int], ...], True),
        ([(1, 2, 3)], tuple[tuple[int, int], ...], False),
        ("none", Literal["none", "int8"], True),
        (print, Callable[[str], None] | None, True),
        (None, Callable[[str], None] | None, True),
    ],
)
def test_values_fit_their_annotations(value: object, kind: object, is_right: bool) -> None:
    assert fits(value, kind) is is_right


def test_49_24_the_events_of_a_stream_are_exported_and_described(engine: Engine) -> None:
    text, ends = "", []
    for event in engine.stream("Once upon a time", SamplingParams(max_new_tokens=8)):
        assert isinstance(event, specdec_cli.Event)
        assert getattr(specdec_cli, type(event).__name__) is type(event)
        if isinstance(event, specdec_cli.Stepped):
            text += "".join(emitted.text for emitted in event.emitted)
            assert all(isinstance(emitted, specdec_cli.Emitted) for emitted in event.emitted)
        elif isinstance(event, specdec_cli.Finished):
            text, ends = text + event.text, [*ends, event.finish_reason]
    assert ends == ["length"]
    assert text == engine.generate("Once upon a time", SamplingParams(max_new_tokens=8))[0].text
    for described in (
        specdec_cli.Stepped,
        specdec_cli.Emitted,
        specdec_cli.Finished,
        specdec_cli.Failed,
        specdec_cli.Noticed,
    ):
        documented = not_none(described.__doc__)
        assert all(f"    {name}: " in documented for name in described.__slots__)


@pytest.mark.parametrize(
    ("call", "words", "hint"),
    [
        (lambda engine: engine.add("Hi", grammar="x"), "grammar must be Grammar or none, not `'x'`", ""),
        (lambda engine: engine.add("Hi", grammar={}), "grammar must be Grammar or none, not `{}`", ""),
        (lambda engine: engine.add("Hi", tree=5), "tree must be a text or none, not `5`", ""),
        (lambda engine: engine.add("Hi", draft=5), "draft must be a text or none, not `5`", ""),
        (lambda engine: engine.add("Hi", cache_salt=5), "cache_salt must be a text or none, not `5`", ""),
        (lambda engine: engine.add("Hi", turn=5), "turn must be a text or none, not `5`", ""),
        (lambda engine: engine.add("Hi", prediction="x"), "prediction must be a list of whole numbers or none", ""),
        (lambda engine: engine.generate("Hi", progress=5), "progress must be a function or none, not `5`", ""),
        (lambda engine: engine.generate(), "`Engine.generate` needs `prompts`", ""),
        (lambda engine: engine.generate("Hi", prompts="Hi"), "given `prompts` twice", ""),
        (lambda engine: engine.generate("\ud800x"), "the prompt is not valid Unicode: character `0`", "UTF-8"),
        (lambda engine: engine.encode("a\ud800"), "the prompt is not valid Unicode: character `1`", "UTF-8"),
        (lambda engine: engine.encode([HI | {"content": "\ud800"}]), "a message is not valid Unicode", "UTF-8"),
        (lambda engine: engine.encode([HI | {"content": None}]), "is no chat message", "a prompt is text"),
        (lambda engine: engine.encode([HI | {"content": 5}]), "is no chat message", "a prompt is text"),
        (lambda engine: engine.abort("x"), "sequence_id must be a whole number, not `'x'`", ""),
        (lambda engine: engine.abort(float("nan")), "sequence_id must be a whole number, not `nan`", ""),
        (lambda engine: engine.has_room(-1), "num_tokens is out of range: `-1`", "at least 0"),
        (lambda engine: engine.has_room(None), "num_tokens must be a whole number, not `None`", ""),
        (lambda engine: engine.stream("Hi", progress=print), "no parameter `progress`", "of `Engine.generate`"),
        (
            lambda engine: engine.stream("Hi", use_tqdm=True),
            "no parameter `use_tqdm`",
            "`progress` of `Engine.generate`",
        ),
        (lambda engine: ANY.trace(None, ["x"]), "engine must be Engine, not `None`", ""),
        (lambda engine: ANY.AsyncEngine(5), "engine must be Engine, not `5`", ""),
        (lambda engine: ANY.AsyncEngine(engine, max_waiting=-1), "max_waiting is out of range: `-1`", "at least 0"),
        (lambda engine: ANY.AsyncEngine(engine, max_waiting="x"), "max_waiting must be a whole number or none", ""),
        (lambda _: ANY.AsyncEngine.load(max_waiting=3), "no parameter `max_waiting`", "of `AsyncEngine`"),
        (lambda _: ANY.Engine(), "`Engine` needs `target` and `drafter`", "`Engine.load`"),
        (lambda _: ANY.Engine(5, 5), "target must be loaded, not `5`", "`Engine.load`"),
        (lambda _: ANY.Engine.load("a", "b", 4), "takes 2 arguments without a name, not `3`", "`options=`"),
        (lambda _: ANY.Engine.load(""), "the target is empty", "builtin:target"),
        (lambda _: ANY.Engine.load(draft={"method": 5}), "the draft's method must be a text or none, not `5`", ""),
        (lambda _: ANY.Engine.load(draft={"model": 5}), "the draft's model must be a text or none, not `5`", ""),
        (lambda _: ANY.Engine.load(draft_dtype=5), "draft_dtype must be a text, not `5`", ""),
        (lambda _: ANY.Engine.load(draft_quantize="x"), "draft_quantize must be", ""),
        (lambda _: ANY.Engine.load(draft_revision="x"), "`x` has no meaning for `builtin:draft`", "leave it out"),
        (lambda _: ANY.Engine.load(revision="x"), "`x` has no meaning for `builtin:target`", "leave it out"),
        (lambda _: ANY.Engine.load(block_size=0), "block_size is out of range: `0`", "at least 1"),
        (lambda _: ANY.Engine.load(prefill_chunk=0), "prefill_chunk is out of range: `0`", "at least 1"),
        (lambda _: ANY.Engine.load(k_by_batch=((2, 3), (1, 2))), "k_by_batch is out of range", "ascending"),
        (
            lambda _: ANY.Engine.load(k_by_context=((0, 3),)),
            "k_by_context is out of range",
            "numbers of tokens, from 1",
        ),
        (
            lambda _: ANY.Engine.load(verify="synthetic"),
            "verify `synthetic` needs synthetic_acceptance_rates",
            "verify=",
        ),
        (
            lambda _: ANY.Engine.load(synthetic_acceptance_rates=(0.5,)),
            "verify `auto` takes no synthetic_acc",
            "synthetic",
        ),
        (lambda _: ANY.Engine.from_recipe(""), "the recipe is empty", "builtin"),
        (lambda _: ANY.SamplingParams(top_k=-1), "top_k is out of range: `-1`", "None keeps all tokens"),
        (lambda _: ANY.SamplingParams(min_new_tokens=2), "no parameter `min_new_tokens`", "use `min_tokens`"),
        (lambda _: ANY.SamplingParams(num_beams=4), "no parameter `num_beams`", "no beam search"),
        (lambda _: ANY.SamplingParams(bad_words=["a"]), "no parameter `bad_words`", "logit_bias"),
        (lambda _: ANY.SamplingParams(guided_json={}), "no parameter `guided_json`", "`grammar` of `Engine.add`"),
        (lambda _: ANY.SamplingParams(detokenize=False), "no parameter `detokenize`", "its text and its token ids"),
        (lambda _: ANY.SamplingParams(include_stop_str_in_output=True), "no parameter `include_", "stop_reason"),
    ],
)
def test_what_a_call_cannot_take_is_one_sentence(
    engine: Engine, call: Callable[[Any], Any], words: str, hint: str
) -> None:
    """Each of these was a bare Python error, a value accepted in silence, or a sentence about another parameter."""
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        call(engine)
    assert hint in (caught.value.hint or "")
    assert not engine.has_work


def test_a_prediction_of_a_trace_refuses_what_it_does_not_have(engine: Engine) -> None:
    traced = ANY.trace(engine, ["Hi"], SamplingParams(max_new_tokens=4))
    with pytest.raises(UsageError, match=r"`WorkloadTrace\.predict` has no parameter `foo`"):
        traced.predict(foo=1)


def test_none_is_a_request_without_salt_and_turn(engine: Engine) -> None:
    engine.abort(engine.add("Hi", cache_salt=None, turn=None))


def test_an_engine_ends_its_requests_at_the_end_of_a_block(engine: Engine) -> None:
    with engine as entered:
        stream = entered.stream("Hi", SamplingParams(max_new_tokens=40))
        next(stream)
        entered.add("Hi")
    assert not engine.has_work
    assert [event.finish_reason for event in stream if isinstance(event, Finished)] == ["abort"]
