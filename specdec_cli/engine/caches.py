"""Share out the memory of each device among the caches of the models that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specdec_cli.lm.cache.budget import DraftCache, device_room
from specdec_cli.lm.cache.cache_plan import (
    CacheNeed,
    KVCacheBytes,
    check_draft_room,
    logits_bytes,
    plan_caches,
)
from specdec_cli.lm.transformers_lm import TransformersLM

if TYPE_CHECKING:
    from specdec_cli.engine.options import EngineOptions


def share_out(
    target: TransformersLM, drafts: Sequence[DraftCache], options: EngineOptions, kv_cache_bytes: KVCacheBytes
) -> None:
    """Recreate the caches of a target and its drafts after all weights are loaded.

    Raises:
        RunError: there is no room, or less for a draft than for the target.
    """
    num_seqs, k = options.max_num_seqs, options.most_nodes
    models: list[DraftCache] = [target, *drafts]
    for device in dict.fromkeys(lm.device for lm in models):
        group = [lm for lm in models if lm.device == device]
        for lm in group:
            lm.hold(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows = [k + 1 if lm is target else max(k, 1) for lm in group]
        logits = sum(logits_bytes(num_seqs, num, lm.vocab_size) for num, lm in zip(rows, group, strict=True))
        room = device_room(device, sum(lm.weight_bytes for lm in group))
        room = replace(room, left_bytes=room.left_bytes - logits)
        needs = [
            target.cache_need(num_seqs, k) if lm is target else lm.draft_cache_need(num_seqs, k, target.max_context)
            for lm in group
        ]
        needs = [_shared(need, options) for need in needs]
        for lm, plan in zip(group, plan_caches(needs, room, num_seqs, kv_cache_bytes), strict=True):
            lm.hold(plan.num_blocks, num_seqs, k, plan.num_prefix_states)
    for draft in drafts:
        need = draft.draft_cache_need(num_seqs, k, target.max_context)
        rooms = need.least_beside(target.num_blocks), draft.num_blocks, need.num_blocks
        check_draft_room(*(num * draft.block_size for num in rooms))


def hold_beside(draft: DraftCache, max_context: int, options: EngineOptions) -> None:
    """Make the cache of a draft that is loaded beside an engine, from the memory that is still free.

    Raises:
        RunError: there is no room.
    """
    need = _shared(draft.draft_cache_need(options.max_num_seqs, options.most_nodes, max_context), options)
    room = device_room(draft.device, draft.weight_bytes)
    (plan,) = plan_caches([need], room, options.max_num_seqs)
    draft.hold(plan.num_blocks, options.max_num_seqs, options.most_nodes, plan.num_prefix_states)


def _shared(need: CacheNeed, options: EngineOptions) -> CacheNeed:
    """A need without snapshots of states where no prefixes are shared."""
    return need if options.prefix_caching else replace(need, prefix_state_bytes=0)
