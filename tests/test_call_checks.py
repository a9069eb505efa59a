"""Calls from Python: unknown parameters and values of another type are refused by the name of the right one."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest
from typed import not_none, stand_in

import specdec_cli
from specdec_cli import AsyncEngine, Engine, EngineOptions, LoadSettings, ModelSettings, SamplingParams
from specdec_cli.call_checks import fits
from specdec_cli.errors import UsageError

HI = {"role": "user", "content": "Hi"}


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
def test_d24_an_unknown_parameter_is_answered_with_the_right_one(
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
def test_d24_requests_name_the_right_parameter(engine: Engine, method: str, named: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"`Engine.{method}` has no parameter `{named}`") as caught:
        getattr(engine, method)("Hi", **{named: 3})
    assert hint in not_none(caught.value.hint)
    assert not engine.has_work


@pytest.mark.parametrize(
    "prompt",
    [5, None, 5.5, b"Hi", {"prompt": "Hi"}, [5.5], [None], [["Hi"]], [True], [{"prompt": "Hi"}], [[{"role": "user"}]]],
    ids=repr,
)
def test_d24_what_is_no_prompt_is_refused(engine: Engine, prompt: object) -> None:
    for method in (engine.generate, lambda given: list(engine.stream(given)), engine.trace):
        with pytest.raises(UsageError) as caught:
            method(stand_in(prompt))
        assert "a prompt is text" in not_none(caught.value.hint)
    assert not engine.has_work


def test_d24_the_async_engine_refuses_the_same(engine: Engine) -> None:
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
def test_d24_what_are_no_sampling_parameters_is_refused(engine: Engine, params: object) -> None:
    with pytest.raises(UsageError, match="params must be SamplingParams"):
        engine.generate("Hi", stand_in(params))
    with pytest.raises(UsageError, match="params must be SamplingParams"):
        engine.trace("Hi", stand_in(params))


@pytest.mark.parametrize("k", [100, 65, -1, 2.5, "4", True], ids=repr)
def test_d24_k_out_of_range_is_refused_everywhere(engine: Engine, k: object) -> None:
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
        ({"draft_quantize": "int4"}, "quantize must be `none`"),
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
def test_d24_load_refuses_values_by_name(named: dict[str, Any], said: str) -> None:
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
def test_d24_sampling_parameters_are_refused_by_name(named: dict[str, Any], said: str) -> None:
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


def test_d24_the_events_of_a_stream_are_exported_and_described(engine: Engine) -> None:
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
