"""The bridge: one engine thread, a bounded queue, deltas on the event loop, and what happens when things break."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from toy_engine import TableLM, toy_engine
from typed import not_none, stand_in

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.jobs import outbox
from specdec_cli.engine.jobs.bridge import Bridge
from specdec_cli.engine.jobs.records import Delta, Job, JobRecord
from specdec_cli.engine.jobs.ticket import MAX_BEHIND, Placed, Ticket, TicketGroup, merged
from specdec_cli.engine.scoring import score_prompt
from specdec_cli.errors import QueueFull, Unavailable
from specdec_cli.events import Emitted, Failed
from specdec_cli.sampling.params import SamplingParams

SECONDS = 20.0


class GatedLM(TableLM):
    """A target whose steps wait for a gate, and may be told to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.is_turnstile = False  # lets one step through each time
        self.faults: list[BaseException] = []

    def score(self, rows):
        assert self.gate.wait(SECONDS), "a test left the gate shut"
        if self.is_turnstile:
            self.gate.clear()
        if self.faults:
            raise self.faults.pop()
        return super().score(rows)


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def queued(self, num_waiting: int) -> None:
        self.told.append(("queued", num_waiting))

    def stepped(self, event, num_queued: int) -> None:
        self.told.append(("stepped", event.num_running, num_queued))

    def emitted(self, record: JobRecord, num_tokens: int, seconds_since_last) -> None:
        self.told.append(("emitted", num_tokens, seconds_since_last is None))

    def ended(self, record: JobRecord) -> None:
        self.told.append(("ended", record.finish_reason, record.num_output_tokens))


def job(length: int = 12, prompt: str = "abcab", **settings) -> Job:
    tokens = tuple("\0abcdefgh .\n".index(letter) for letter in prompt)
    return Job("r", tokens, SamplingParams(max_new_tokens=length, ignore_eos=True), **settings)


def serving(test: Callable[..., Any], engine: Engine | None = None, **settings):
    """Run an async test with a bridge that is stopped afterwards."""

    async def run():
        bridge = Bridge(engine or toy_engine(), **settings)
        bridge.start()
        try:
            return await asyncio.wait_for(test(bridge), SECONDS)
        finally:
            assert await asyncio.get_running_loop().run_in_executor(None, bridge.stop)

    return asyncio.run(run())


async def read(ticket: Ticket) -> Delta:
    return merged([delta async for delta in ticket])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def alone(one: Job) -> list[int]:
    return toy_engine().generate([list(one.token_ids)], one.params, one.num_speculative_tokens)[0].token_ids


def test_tokens_are_the_engines_alone_and_in_company() -> None:
    jobs = [job(length, prompt) for length, prompt in ((5, "abc"), (17, "abcab"), (1, "h"), (30, "hgfed"))] * 5

    async def test(bridge: Bridge):
        tickets = [bridge.submit(one) for one in jobs]
        found = await asyncio.gather(*map(read, tickets))
        assert bridge.num_open == 0
        return found, tickets

    found, tickets = serving(test, toy_engine(max_num_seqs=3))
    assert [list(one.token_ids) for one in found] == [alone(one) for one in jobs]
    assert [one.finish_reason for one in found] == ["length"] * 20
    record = tickets[1].record
    assert record.arrived <= record.scheduled <= record.first_token <= record.last_token <= record.finished
    assert (record.num_prompt_tokens, record.num_output_tokens, record.finish_reason) == (5, 17, "length")
    assert record.speculative.num_emitted_tokens == 16  # the first token belongs to no step


def test_what_is_read_whole_is_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.engine.jobs.outbox.HAND_OVER_SECONDS", 0.0)
    received: list[int] = []
    receive = outbox._receive
    monkeypatch.setattr(
        outbox, "_receive", lambda posted: received.append(sum(map(len, posted.values()))) or receive(posted)
    )

    async def test(bridge: Bridge):
        whole = await read(bridge.submit(job(40, whole=True)))
        num_calls = len(received)
        streamed = await asyncio.gather(read(bridge.submit(job(40))), read(bridge.submit(job(40, whole=True))))
        return whole, num_calls, streamed

    whole, num_calls, streamed = serving(test)
    assert num_calls == 1 < len(received) - 1
    assert received[0] == 1, "as one delta, however many steps it was"
    assert {list(one.token_ids) == alone(job(40)) for one in (whole, *streamed)} == {True}
    steps = [[replace(step, sequence_id=0) for step in one.steps] for one in (whole, *streamed)]
    assert steps == [steps[0]] * 3


def test_a_step_is_one_delta_with_its_drafts_counted() -> None:
    async def test(bridge: Bridge):
        return [delta async for delta in bridge.submit(job(24))]

    deltas = serving(test)
    assert sum(len(delta.token_ids) for delta in deltas) == 24
    assert len(deltas) < 24, "the toy's n-gram draft is accepted now and then"
    assert all(delta.num_accepted <= min(delta.num_drafted, len(delta.token_ids)) for delta in deltas)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_quick_steps_share_a_word_to_the_loop_and_stay_deltas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.engine.jobs.outbox.HAND_OVER_SECONDS", 60.0)

    async def test(bridge: Bridge):
        loop, words = asyncio.get_running_loop(), []
        said = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: words.append(given) or said(*given))
        return [delta async for delta in bridge.submit(job(24, num_speculative_tokens=0))], len(words)

    deltas, num_words = serving(test)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 24
    assert num_words == 2, "the first token and the last one are told at once, and all others with the last"


def test_a_requests_own_k_is_its_own() -> None:
    async def test(bridge: Bridge):
        return await read(bridge.submit(job(24, num_speculative_tokens=0)))

    assert serving(test).num_drafted == 0


async def read_all(group: TicketGroup) -> list[Placed]:
    pairs = group.take()
    while not group.is_done:
        await group.wake.wait()
        pairs += group.take()
    return pairs


def test_choices_are_read_together() -> None:
    async def test(bridge: Bridge):
        return await read_all(TicketGroup(bridge.submit_all([job(9), job(3), job(14)])))

    pairs = serving(test)
    lengths = [sum(len(delta.token_ids) for place, delta in pairs if place == one) for one in range(3)]
    assert lengths == [9, 3, 14]


def test_chunks_hold_as_many_tokens_as_wanted() -> None:
    async def test(bridge: Bridge):
        return [delta for _, delta in await read_all(TicketGroup([bridge.submit(job(25))], 6))]

    chunks = serving(test)
    assert all(len(chunk.token_ids) >= 6 for chunk in chunks[:-1])
    assert sum(len(chunk.token_ids) for chunk in chunks) == 25


def test_cancel_frees_the_place_within_a_step() -> None:
    target = GatedLM()
    target.is_turnstile = True
    engine = toy_engine(max_num_seqs=1, target=target)

    async def test(bridge: Bridge):
        first, second = bridge.submit(job(400)), bridge.submit(job(3))
        await anext(first)
        calls = target.num_calls
        first.cancel()
        target.is_turnstile = False
        target.gate.set()
        assert (await read(first)).finish_reason == "abort"
        assert (await read(second)).finish_reason == "length"
        assert stand_in(engine.target).num_calls - calls < 20, "the cancelled job went on"
        first.cancel()
        return bridge.num_open

    assert serving(test, engine) == 0
    assert not engine.has_work


def test_a_waiting_job_is_cancelled_before_it_runs() -> None:
    target = GatedLM()

    async def test(bridge: Bridge):
        target.gate.clear()
        running, waiting = bridge.submit(job(4)), bridge.submit(job(4))
        waiting.cancel()
        target.gate.set()
        assert (await read(waiting)).finish_reason == "abort"
        assert waiting.record.scheduled is None or waiting.record.num_output_tokens < 4
        return (await read(running)).finish_reason

    assert serving(test, toy_engine(max_num_seqs=1, target=target)) == "length"


def test_a_full_queue_refuses_all_choices_or_none() -> None:
    target = GatedLM()

    async def test(bridge: Bridge):
        target.gate.clear()
        tickets = bridge.submit_all([job(2)] * 3)
        with pytest.raises(QueueFull):
            bridge.submit_all([job(2)] * 2)
        tickets.append(bridge.submit(job(2)))
        with pytest.raises(QueueFull):
            bridge.submit(job(2))
        target.gate.set()
        assert [(await read(ticket)).finish_reason for ticket in tickets] == ["length"] * 4
        return await read(bridge.submit(job(2)))

    assert serving(test, toy_engine(max_num_seqs=2, target=target), max_waiting=2).finish_reason == "length"


def test_quick_steps_are_deltas_of_their_own_however_many_are_handed_over_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec_cli.engine.jobs.outbox.HAND_OVER_SECONDS", SECONDS)

    async def test(bridge: Bridge):
        return [delta async for delta in bridge.submit(job(300))]

    assert [len(delta.token_ids) for delta in serving(test, toy_engine(k=0))] == [1] * 300


def test_a_slow_reader_neither_blocks_nor_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.engine.jobs.outbox.HAND_OVER_SECONDS", 0.0)

    async def test(bridge: Bridge):
        slow, quick = bridge.submit(job(300)), bridge.submit(job(300, "h"))
        assert len((await read(quick)).token_ids) == 300
        await until(lambda: bridge.num_open == 0)
        await asyncio.sleep(0)
        deltas = [delta async for delta in slow]
        assert len(deltas) <= MAX_BEHIND
        return merged(deltas)

    found = serving(test, toy_engine(k=0))
    assert list(found.token_ids) == alone(job(300, num_speculative_tokens=0))
    assert found.finish_reason == "length"


def test_a_fault_in_a_step_ends_one_request_and_the_rest_goes_on() -> None:
    target = GatedLM()

    async def test(bridge: Bridge):
        old = bridge.submit(job(40))
        await anext(old)
        target.gate.clear()
        new = bridge.submit(job(40, "hg"))
        await until(lambda: bridge.busy_seconds > 0)
        target.faults.append(MemoryError("no memory in this step"))
        target.gate.set()
        found = await asyncio.gather(read(old), read(new))
        again = await read(bridge.submit(job(5)))
        return found, again

    found, again = serving(test, toy_engine(target=target))
    failed = [one for one in found if one.error is not None]
    assert len(failed) <= 1
    assert again.finish_reason == "length"
    assert all(one.error is not None or one.finish_reason == "length" for one in found)


def test_a_fault_in_a_step_does_not_end_a_request_that_waits_for_blocks() -> None:
    target = GatedLM()
    target.num_blocks = 4  # for two of three

    async def test(bridge: Bridge):
        target.gate.clear()
        tickets = bridge.submit_all([job(40), job(40, "hg"), job(3, "abc")])
        await until(lambda: bridge.busy_seconds > 0)
        target.faults.append(MemoryError("no memory in this step"))
        target.gate.set()
        return await asyncio.gather(*map(read, tickets))

    found = serving(test, toy_engine(target=target))
    assert [one.error is not None for one in found] == [False, True, False]
    assert [found[0].finish_reason, found[2].finish_reason] == ["length"] * 2


def test_a_request_the_engine_refuses_fails_alone() -> None:
    async def test(bridge: Bridge):
        return await asyncio.gather(read(bridge.submit(job(4, "a" * 600))), read(bridge.submit(job(4))))

    refused, fine = serving(test)
    assert "context" in str(refused.error)
    assert fine.finish_reason == "length"


def test_a_dead_thread_fails_every_ticket_and_says_so() -> None:
    target, told = GatedLM(), []

    async def run():
        bridge = Bridge(toy_engine(max_num_seqs=1, target=target), on_death=told.append)
        bridge.start()
        target.gate.clear()
        tickets = bridge.submit_all([job(4)] * 3)
        target.faults.append(SystemExit("the thread ends"))
        target.gate.set()
        found = await asyncio.wait_for(asyncio.gather(*map(read, tickets)), SECONDS)
        await until(lambda: not bridge.is_alive)
        with pytest.raises(Unavailable) as refused:
            bridge.submit(job())
        return found, refused.value.code, bridge

    found, code, bridge = asyncio.run(run())
    assert [type(one.error) for one in found] == [Unavailable] * 3
    assert code == "engine_dead"
    assert isinstance(bridge.death, SystemExit)
    assert told == [bridge.death]


def test_drain_lets_the_running_finish_and_takes_no_more() -> None:
    async def test(bridge: Bridge):
        ticket = bridge.submit(job(100))
        drained = asyncio.create_task(bridge.drain(SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            bridge.submit(job())
        assert (await read(ticket)).finish_reason == "length"
        return await drained

    assert serving(test)


def test_drain_gives_up_in_time_and_stop_fails_what_is_left() -> None:
    target = GatedLM()

    async def test(bridge: Bridge):
        target.gate.clear()
        ticket = bridge.submit(job(100))
        assert not await bridge.drain(0.05)
        stopping = asyncio.get_running_loop().run_in_executor(None, bridge.stop)
        await until(lambda: bridge._is_stopping)  # or the job may end before it
        target.gate.set()
        assert await stopping
        return await read(ticket)

    assert isinstance(serving(test, toy_engine(target=target)).error, Unavailable)


def test_a_hanging_step_shows_and_an_idle_thread_sleeps() -> None:
    target = GatedLM()

    async def test(bridge: Bridge) -> None:
        assert bridge.busy_seconds == 0
        target.gate.clear()
        ticket = bridge.submit(job(2))
        await until(lambda: bridge.busy_seconds > 0.05)
        target.gate.set()
        await read(ticket)
        await until(lambda: bridge.busy_seconds == 0)

    serving(test, toy_engine(target=target))


def test_an_idle_engine_waits_for_company_if_told_to() -> None:
    watcher = Watcher()

    async def test(bridge: Bridge) -> None:
        first = bridge.submit(job(2))
        await asyncio.sleep(0.02)
        second = bridge.submit(job(2))
        await asyncio.gather(read(first), read(second))

    serving(test, toy_engine(max_num_seqs=2), observers=[watcher], max_queue_delay_seconds=SECONDS)
    assert next(told for told in watcher.told if told[0] == "stepped")[1] == 2


def test_observers_see_it_all_and_one_that_fails_is_left_out() -> None:
    watcher, broken = Watcher(), Watcher()
    broken.stepped = stand_in(lambda *_: 1 / 0)

    async def test(bridge: Bridge) -> None:
        await read(bridge.submit(job(10)))

    serving(test, toy_engine(k=0), observers=[broken, watcher])
    kinds = [told[0] for told in watcher.told]
    assert kinds[:3] == ["queued", "stepped", "emitted"]
    assert watcher.told[-1] == ("ended", "length", 10)
    assert sum(told[1] for told in watcher.told if told[0] == "emitted") == 10
    assert [told[2] for told in watcher.told if told[0] == "emitted"] == [True] + [False] * 9
    assert len(broken.told) == 1


def test_a_draft_that_raises_costs_no_text() -> None:
    engine = toy_engine()
    engine.drafter.propose = stand_in(lambda rows: 1 / 0)

    async def test(bridge: Bridge):
        return await read(bridge.submit(job(20)))

    assert list(serving(test, engine).token_ids) == alone(job(20, num_speculative_tokens=0))
    assert sum(engine.drafters.num_failures.values()) > 0


def test_a_prompt_is_scored_and_decoded_or_not() -> None:
    async def test(bridge: Bridge):
        both = [bridge.submit(replace(job(5), prompt_logprobs=2, decodes=decodes)) for decodes in (True, False)]
        return await asyncio.gather(*map(read, both))

    engine = toy_engine()
    decoded, scored = serving(test, engine)
    assert [one.token_id for one in scored.prompt_logprobs] == list(job().token_ids[1:])
    assert decoded.prompt_logprobs == scored.prompt_logprobs
    first = stand_in(engine.target).table[job().token_ids[0], job().token_ids[1]].log_softmax(dim=-1)
    assert scored.prompt_logprobs[1].logprob == pytest.approx(float(first[job().token_ids[2]]))
    assert scored.prompt_logprobs[1].top[0][1] == pytest.approx(float(first.max()))
    assert (scored.finish_reason, scored.token_ids) == ("length", ())
    assert list(decoded.token_ids) == alone(job(5))


def test_a_requests_copies_of_a_prompt_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(*given):
        asked.append(given)
        return score_prompt(*given)

    monkeypatch.setattr("specdec_cli.engine.jobs.bridge.score_prompt", counting)

    async def test(bridge: Bridge):
        copies = [replace(job(5), prompt_logprobs=2) for _ in range(3)]
        others = [replace(copies[0], request_id="other"), replace(copies[0], prompt_logprobs=1)]
        return await asyncio.gather(*map(read, bridge.submit_all([*copies, *others])))

    first, *rest = serving(test)
    assert len(asked) == 3, "another request's is scored again, and so are other alternatives"
    assert first.prompt_logprobs
    assert all(one.prompt_logprobs == first.prompt_logprobs for one in rest[:3])


def test_many_random_cancels_leave_nothing() -> None:
    engine = toy_engine(max_num_seqs=4)

    async def test(bridge: Bridge):
        for i in range(100):
            ticket = bridge.submit(job(50, "abcdefgh"[i % 8]))
            if i % 3:
                await anext(ticket)
            if i % 5 == 0:
                await asyncio.sleep(0)
            ticket.cancel()
        await until(lambda: bridge.num_open == 0)
        return (await read(bridge.submit(job(5)))).finish_reason

    begin = time.monotonic()
    assert serving(test, engine, max_waiting=1000) == "length"
    assert not engine.has_work
    assert time.monotonic() - begin < SECONDS


def test_what_was_cached_is_said_once_even_behind_a_scored_prompt() -> None:
    first, second = Emitted(0, (1,), "a", 0, 0, True, num_cached_tokens=16), Emitted(0, (2,), "b", 0, 0, False)
    parts = [Delta(prompt_logprobs=()), Delta((first,)), Delta((second,))]
    assert merged(parts).num_cached_tokens == 16
    assert merged(parts[2:]).num_cached_tokens is None


def test_scoring_prompts_stands_in_nobodys_way() -> None:
    """Between two prompts that are only scored, those that run take a step."""
    watcher, target = Watcher(), GatedLM()
    scored: list[int] = []

    class Counting(Watcher):
        def ended(self, record: JobRecord) -> None:
            scored.append(sum(one[0] == "stepped" for one in watcher.told))

    async def test(bridge: Bridge) -> None:
        target.is_turnstile = True
        running = bridge.submit(job(400))
        await anext(running)
        only = [bridge.submit(replace(job(5), prompt_logprobs=1, decodes=False)) for _ in range(4)]
        target.is_turnstile = False
        target.gate.set()
        await asyncio.gather(*map(read, only))
        running.cancel()

    serving(test, toy_engine(target=target), observers=[watcher, Counting()])
    assert len(set(scored[:4])) == 4


def test_a_request_that_fails_is_logged_with_its_id_unless_it_is_its_own_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = GatedLM()

    async def test(bridge: Bridge):
        own = await read(bridge.submit(job(4, "a" * 600)))
        target.faults.append(MemoryError("no memory in this step"))
        return own, await read(bridge.submit(job(4)))

    own, failed = serving(test, toy_engine(target=target))
    assert own.error is not None
    assert isinstance(failed.error, MemoryError)
    said = [one for one in caplog.records if one.message == "a request failed"]
    assert [vars(one)["request_id"] for one in said] == ["r"]
    assert "no memory" in str(not_none(said[0].exc_info)[1])


def test_a_request_that_failed_twice_in_a_step_ends_once() -> None:
    engine = toy_engine()
    step, steps = engine._step, []

    def failing():
        steps.append(1)
        if len(steps) != 2:
            return step()
        engine._failed.append(Failed(max(engine._sequences), RuntimeError("fenced")))
        raise MemoryError("and the forward failed too")

    engine._step = failing

    async def test(bridge: Bridge):
        return await read(bridge.submit(job(40))), await read(bridge.submit(job(5)))

    failed, after = serving(test, engine)
    assert isinstance(failed.error, MemoryError)
    assert after.finish_reason == "length"


def test_49_18_four_requests_of_many_choices_do_not_make_another_client_wait() -> None:
    """Turns share the places; a text is the same however often its sequence gave its place up."""
    crowd = [job(100, turn=f"request-{i}") for i in range(4) for _ in range(64)]

    async def test(bridge: Bridge):
        tickets = bridge.submit_all(crowd)
        await until(lambda: tickets[0].record.first_token is not None)
        plain = bridge.submit(job(4, "hgfed", turn="plain"))
        assert len((await read(plain)).token_ids) == 4
        num_ended = sum(ticket.record.finished is not None for ticket in tickets)
        for ticket in tickets[32:]:
            ticket.cancel()
        return num_ended, await asyncio.gather(*map(read, tickets[:8]))

    num_ended, found = serving(test)
    assert num_ended < 64, "the newcomer waited for a request of another client"
    assert [list(one.token_ids) for one in found] == [alone(crowd[0])] * 8


def test_49_18_turns_are_taken_in_admission() -> None:
    """Of two turns with many jobs each, none has a second place while the other has none."""
    first: list[str] = []

    async def test(bridge: Bridge):
        tickets = bridge.submit_all([job(30, turn=turn) for turn in ["a"] * 10 + ["b"] * 10])
        await asyncio.gather(*map(read, tickets))
        first.extend(one.job.turn for one in sorted(tickets, key=lambda one: one.record.scheduled or 0.0)[:4])

    serving(test, toy_engine(max_num_seqs=2))
    assert sorted(first) == ["a", "a", "b", "b"]
