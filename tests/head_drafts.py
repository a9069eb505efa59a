"""Drafters of tiny heads as an engine loads them, what they are given, and the formulas beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from tiny_engine import PROMPTS, decode
from tiny_heads import HIDDEN, Reference
from tiny_models import VOCAB
from torch import Tensor
from typed import not_none, stand_in

from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.drafts import read_draft
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.lm.door import Row, Tapped
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.measure.predict.draft_trace import DepthTrace
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.sampling.params import SamplingParams

LAYERS = (1, 2, 3)
TEXT = [(11 * i * i + 3 * i) % (VOCAB - 2) + 2 for i in range(60)]
GREEDY = SamplingParams(max_new_tokens=24)
CHANCE = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)


def changed(one: DraftRow, change: Callable[[Tensor], Tensor]) -> DraftRow:
    return one if one.features is None else replace(one, features=change(one.features))


FEATURE_FAULTS: dict[str, Callable[[DraftRow], DraftRow]] = {
    "features one position off": lambda one: changed(one, lambda states: states.roll(1, 0)),
    "stale features": lambda one: changed(one, lambda states: states[:1].expand_as(states)),
    "no features behind the prompt": lambda one: (
        one if len(one.context) <= len(PROMPTS[1]) + 1 else replace(one, features=None)
    ),
}


def loaded(lm, folder, **options):
    """A drafter of a head in a folder, as the engine loads it."""
    plan = read_draft({"model": str(folder)} | options, ModelPlan(lm.name), LoadSettings())
    assert plan.published is not None
    made = stand_in(plan.drafter())
    lm.tap(made.taps)
    made.load(Resources(lambda _: lm, None, VOCAB, lm))
    return made


def features_of(lm, text, taps):
    row = Row(-7, text, 0, tapped=Tapped())
    lm.tap(taps)
    lm.score([row])
    lm.release(-7)
    return not_none(not_none(row.tapped).states)[:, [lm.taps.index(tap) for tap in taps]]


def reference(weights, lm, **options) -> Reference:
    is_third = "lm_head.weight" in weights
    table = lm.embed(list(range(VOCAB)))
    return Reference(weights | ({"embed_tokens.weight": table} if options.pop("borrows", False) else {}), is_third,
                     None if is_third else lm.head(torch.eye(HIDDEN)).T.clone(), options)  # fmt: skip


def row(context, features, k=4, params=GREEDY, **more):
    return DraftRow(
        0, list(context), 3, k, params, frozenset(), params.temperature > 0, False, 0.0, features=features, **more
    )


def check_depth_trace(lm, drafter, params: SamplingParams, k_max: int, rule: str) -> None:
    """A draft's trace by depth foretells what the engine counts at every k, drafted tokens that it lacks included."""
    requests = [Request(PromptRow(i, ""), prompt, replace(params, index=i)) for i, prompt in enumerate(PROMPTS)]
    trace = trace_target(Engine(lm, drafter, None, EngineOptions(max_num_seqs=4)), requests)
    trace.drafts["draft"] = found = trace_draft(trace, drafter, k_max, target=lm)
    assert isinstance(found, DepthTrace)
    for one in replay(trace, "draft", rule, k_max):
        decoded = decode(lm, drafter, one.k, params=[request.params for request in requests], verify=rule)
        counts = [each.speculative for each in decoded]
        assert one.num_steps.sum() == sum(each.num_steps for each in counts)
        assert one.num_accepted_tokens.sum() == sum(each.num_accepted_tokens for each in counts)
        assert one.num_draft_tokens.sum() == sum(each.num_draft_tokens for each in counts)
