"""Our engine as an arm: what a run gives, and what a stop leaves."""

from test_decoding import PROMPTS, never, requests
from toy_engine import toy_engine
from typed import not_none

from specdec_cli.engine.arms import Arm, ArmRun, EngineArm
from specdec_cli.events import Stepped
from specdec_cli.timing import Timing


def arm(k: int | None, engine=None) -> Arm:
    return EngineArm(f"k = {k}", engine or toy_engine(k=3), k)


def test_a_run_has_tokens_times_and_events_in_the_order_of_the_requests() -> None:
    one = arm(3)
    one.start()
    asked = requests()[::-1]
    run = one.run(asked, never)
    one.stop()
    assert not_none(run).lengths == (30,) * len(PROMPTS)
    assert not_none(run).num_first_tokens == len(PROMPTS)
    assert not_none(not_none(run).timing.decode_tokens_per_second) > 0
    emitted = [one for event in not_none(run).events if isinstance(event, Stepped) for one in event.emitted]
    for sequence_id, tokens in zip(not_none(run).sequence_ids, not_none(not_none(run).token_ids), strict=True):
        assert sum(len(e.tokens) for e in emitted if e.sequence_id == sequence_id) == len(tokens) == 30
    alone = [not_none(not_none(arm(0).run([request], never)).token_ids)[0] for request in asked]
    assert list(not_none(not_none(run).token_ids)) == alone


def num_drafted(run: ArmRun) -> int:
    return sum(one.num_drafted for event in run.events if isinstance(event, Stepped) for one in event.emitted)


def test_arms_of_one_engine_differ_in_k() -> None:
    engine = toy_engine(k=3)
    without, own, default = (num_drafted(not_none(arm(k, engine).run(requests(), never))) for k in (0, 3, None))
    assert (without, own) == (0, default)
    assert own > 0


def test_a_stopped_run_is_none_and_leaves_an_idle_engine() -> None:
    engine = toy_engine()
    assert arm(3, engine).run(requests(), lambda: True) is None
    assert not engine.has_work


def test_an_arm_that_counts_without_telling_tokens() -> None:
    run = ArmRun(None, Timing(), 2, counted=(4, 5))
    assert run.lengths == (4, 5)
