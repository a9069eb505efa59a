"""`AsyncEngine`: concurrent streams share batches on one thread; leaving a stream aborts its request."""

import asyncio
import threading
import time

import pytest
from toy_engine import TableLM, toy_engine
from typed import not_none

from specdec_cli.engine.jobs.async_engine import AsyncEngine
from specdec_cli.errors import QueueFull, Unavailable, UsageError
from specdec_cli.events import Stepped
from specdec_cli.sampling.params import SamplingParams

LONG = SamplingParams(max_new_tokens=400)
SHORT = SamplingParams(max_new_tokens=30)


class SlowLM(TableLM):
    """Steps that last a while, and the threads that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def score(self, rows):
        self.threads.add(threading.current_thread().name)
        time.sleep(0.005)
        return super().score(rows)


async def text_of(engine, prompt, params=SHORT, **wishes):
    return "".join([delta.text async for delta in engine.stream(prompt, params, **wishes)])


async def until_idle(engine) -> None:
    deadline = time.monotonic() + 20
    while engine._bridge.num_open and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    assert not engine._bridge.num_open


def test_a_stream_is_what_generate_gives() -> None:
    expected = toy_engine().generate(["abc", "cab"], SHORT)

    async def go() -> None:
        async with AsyncEngine(toy_engine()) as engine:
            assert await text_of(engine, "abc") == expected[0].text
            found = await engine.generate(["abc", "cab"], SHORT)
            assert [one.text for one in found] == [one.text for one in expected]
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert [one.finish_reason for one in found] == ["length", "length"]
            assert [one.index for one in found] == [0, 1]
            assert found[0].prompt == "abc"
            assert found[0].speculative.outcomes == expected[0].speculative.outcomes
            assert not_none(found[0].timing.decode_tokens_per_second) > 0

    asyncio.run(go())


def test_concurrent_streams_batch_together_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowLM()
    decoder = toy_engine(target=target)
    most, step = [], decoder._step

    def watched():
        events = step()
        most.extend(event.num_running for event in events if isinstance(event, Stepped))
        return events

    monkeypatch.setattr(decoder, "_step", watched)

    async def go() -> None:
        async with AsyncEngine(decoder) as engine:
            await asyncio.gather(*(text_of(engine, prompt) for prompt in ("abc", "bca", "cab", "aab")))

    asyncio.run(go())
    assert max(most) == 4
    assert target.threads == {"specdec-engine"}


@pytest.mark.parametrize("how", ["break", "cancel", "error"])
def test_leaving_a_stream_aborts_its_request_and_no_other(how: str) -> None:
    async def go() -> None:
        async with AsyncEngine(toy_engine(target=SlowLM())) as engine:
            other = asyncio.create_task(engine.generate("cab", SHORT))
            started = asyncio.Event()

            async def read() -> None:
                async for delta in engine.stream("abc", LONG):
                    started.set()
                    if how == "break" and delta.text:
                        break
                    if how == "error":
                        raise ZeroDivisionError

            reader = asyncio.create_task(read())
            await started.wait()
            if how == "cancel":
                reader.cancel()
            [result] = await asyncio.gather(reader, return_exceptions=True)
            expected = {"break": type(None), "cancel": asyncio.CancelledError, "error": ZeroDivisionError}
            assert isinstance(result, expected[how])
            [found] = await other
            assert found.finish_reason == "length"
            await until_idle(engine)
            assert not engine.engine.has_work

    asyncio.run(go())


def test_cancelling_generate_aborts_all_its_requests() -> None:
    async def go() -> None:
        async with AsyncEngine(toy_engine(target=SlowLM(), max_num_seqs=2)) as engine:
            task = asyncio.create_task(engine.generate(["abc"] * 5, LONG))
            while not engine.engine.has_work:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_idle(engine)

    asyncio.run(go())


def test_a_wrong_request_raises_and_the_others_go_on() -> None:
    async def go() -> None:
        async with AsyncEngine(toy_engine()) as engine:
            for prompt, params, wishes in (
                ("", SHORT, {}),
                ([99999], SHORT, {}),
                ("abc", SHORT, {"draft": "nothing-of-the-kind"}),
                ("abc", SHORT, {"prediction": [1, 2]}),
                ("abc", SHORT, {"num_speculative_tokens": -1}),
            ):
                with pytest.raises(UsageError):
                    await text_of(engine, prompt, params, **wishes)
            assert await text_of(engine, "abc")

    asyncio.run(go())


def test_a_full_queue_and_a_closed_engine_refuse() -> None:
    async def go() -> None:
        engine = AsyncEngine(toy_engine(target=SlowLM(), max_num_seqs=1), max_waiting=0)
        running = asyncio.create_task(engine.generate("abc", LONG))
        while not engine.engine.has_work:
            await asyncio.sleep(0.005)
        with pytest.raises(QueueFull):
            await text_of(engine, "abc")
        await engine.close()
        await engine.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await running
        with pytest.raises(Unavailable, match="closed"):
            await text_of(engine, "abc")
        assert "closed" in repr(engine)

    asyncio.run(go())


def test_an_engine_that_decodes_is_refused() -> None:
    busy = toy_engine()
    busy.add("abc")
    with pytest.raises(UsageError, match="already decodes"):
        AsyncEngine(busy)


def test_several_event_loops_after_each_other() -> None:
    engine = AsyncEngine(toy_engine())
    assert asyncio.run(text_of(engine, "abc")) == asyncio.run(text_of(engine, "abc"))
    asyncio.run(engine.close())
