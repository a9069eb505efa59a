"""Memory of a pair on each device: weights, logits, and the KV caches that the engine would plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specdec_cli.engine.build import engine_options, given_cache_bytes
from specdec_cli.errors import RunError
from specdec_cli.lm.cache.cache_plan import (
    CacheNeed,
    Room,
    blocks_wanted,
    check_draft_room,
    draft_blocks_wanted,
    logits_bytes,
    plan_caches,
)
from specdec_cli.lm.cache.snapshots import num_snapshots
from specdec_cli.lm.plan import DTYPES

if TYPE_CHECKING:
    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.facts import ModelFacts
    from specdec_cli.measure.machine.machine import Device
    from specdec_cli.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a model on a device, in bytes.

    Args:
        device: where it would run.
        weights: of the model.
        kv_per_token: keys and values of one token; None where only loading tells.
        kv_wanted: for max_num_seqs sequences of the whole context; None as for the others.
        tokens_wanted: these contexts' tokens.
        states: that recurrent layers keep of max_num_seqs sequences: after each of their last k+1 tokens.
        prefix_state: a snapshot of such a state, by which a cached prefix is shared; 0 without a state.
        logits: float32 logits of one step: max_num_seqs × (k+1) × V for a target, max_num_seqs × k × V for a draft.
        kv_planned: what the engine gives the cache; None where that is not known, or nothing fits.
        kv_planned_tokens: tokens that it holds.
        prefix_states_planned: snapshots that there is room for; None where that is not known, or prefixes are not
            shared.
        tokens_apart: tokens between two snapshots of a text; None without any.
        taps_per_token: a target's hidden states of one token that the draft reads; None where it reads none.
        taps_most: the same of max_num_seqs prompts of the whole context, which wait until the draft reads them.
        tokens_per_token: a draft's for one of the target's.
    """

    device: str
    weights: int
    kv_per_token: int | None
    kv_wanted: int | None
    tokens_wanted: int
    states: int
    prefix_state: int
    logits: int
    kv_planned: int | None = None
    kv_planned_tokens: int | None = None
    prefix_states_planned: int | None = None
    tokens_apart: int | None = None
    taps_per_token: int | None = None
    taps_most: int | None = None
    tokens_per_token: Annotated[float, Field(exclude=True)] = 1.0

    @property
    def least(self) -> int:
        """The least memory that it runs with: weights and logits."""
        return self.weights + self.logits


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Sizes of a draft head, which runs as its target does.

    Args:
        dtype: the target's.
        weights_bytes: of its own weights.
        kv_bytes_per_token: of one token's keys and values.
        max_context: the target's.
        embedding_size: width of its logits.
    """

    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    max_context: int
    embedding_size: int
    state_bytes: int = 0
    prefix_state_bytes: int = 0
    hidden_size: int | None = None


def pair_memory(
    models: Mapping[str, ModelFacts | HeadFacts],
    places: Mapping[str, Device],
    recipe: Recipe,
    max_context: int,
    taps: Sequence[Tap] = (),
    tokens_per_token: float = 1.0,
) -> dict[str, Memory]:
    """Memory of each model, without a plan for its cache.

    Args:
        models: by role.
        places: where each would run.
        recipe: resolved.
        max_context: the longest context that the engine decodes.
        taps: the target's hidden states that the draft reads.
        tokens_per_token: the draft's for one of the target's.
    """
    options = engine_options(recipe)
    num_seqs, k = options.max_num_seqs, options.most_nodes
    rows = {"target": k + 1, "draft": max(k, 1)}
    memory = {}
    for role, facts in models.items():
        each, block_size = facts.kv_bytes_per_token, recipe.engine.kv_block_size
        states = len(taps) * (facts.hidden_size or 0) * DTYPES[facts.dtype].itemsize if role == "target" else 0
        num_blocks = blocks_wanted(num_seqs, max_context, k, block_size)
        if role == "draft":
            sizes = num_seqs, facts.max_context, max_context, k, block_size
            num_blocks = draft_blocks_wanted(*sizes, tokens_per_token)
        num_tokens = num_blocks * block_size
        memory[role] = Memory(
            device=places[role].name,
            weights=facts.weights_bytes,
            kv_per_token=each,
            kv_wanted=None if each is None else num_tokens * each,
            tokens_wanted=num_tokens,
            states=num_seqs * num_snapshots(k) * facts.state_bytes,
            prefix_state=facts.prefix_state_bytes,
            logits=logits_bytes(num_seqs, rows[role], facts.embedding_size),
            taps_per_token=states or None,
            taps_most=num_seqs * max_context * states or None,
            tokens_per_token=tokens_per_token if role == "draft" else 1.0,
        )
    return memory


def plan_memory(memory: dict[str, Memory], device: Device, recipe: Recipe) -> None:
    """Fill in what the engine would give the caches on a device.

    Args:
        memory: by role; where bytes per token are not known, nothing is planned.
        device: this one.
        recipe: resolved.

    Raises:
        RunError: weights and logits do not fit, or no cache beside them.
        UsageError: a share of the memory that the weights fill.
    """
    parts = {role: part for role, part in memory.items() if part.device == device.name}
    least, free = sum(part.least for part in parts.values()), device.free_bytes
    if least > free:
        raise RunError(
            f"weights and logits take {_gigabytes(least)} of `{device.name}`, and {_gigabytes(free)} are free",
            "choose a smaller model, a smaller dtype or another device",
        )
    needs = {role: _need(role, part, recipe) for role, part in parts.items() if part.kv_per_token is not None}
    if len(needs) < len(parts):
        return
    whole = free if device.name == "cpu" else device.memory_bytes
    room = Room(free - least, whole, sum(part.weights for part in parts.values()))
    planned = plan_caches(list(needs.values()), room, recipe.engine.max_num_seqs, given_cache_bytes(recipe.engine))
    block_size = recipe.engine.kv_block_size
    for (role, need), plan in zip(needs.items(), planned, strict=True):
        memory[role] = replace(
            memory[role],
            kv_planned=plan.num_blocks * need.block_bytes,
            kv_planned_tokens=plan.num_blocks * block_size,
            prefix_states_planned=plan.num_prefix_states if need.prefix_state_bytes else None,
            tokens_apart=plan.blocks_apart * block_size if plan.num_prefix_states else None,
        )


def check_rooms(memory: Mapping[str, Memory], recipe: Recipe) -> None:
    """Refuse a draft whose planned cache holds less than the target's."""
    target, draft = memory.get("target"), memory.get("draft")
    if target is None or draft is None or target.kv_planned_tokens is None or draft.kv_planned_tokens is None:
        return
    size = recipe.engine.kv_block_size
    least = _need("draft", draft, recipe).least_beside(target.kv_planned_tokens // size) * size
    check_draft_room(least, draft.kv_planned_tokens, draft.tokens_wanted)


def _need(role: str, memory: Memory, recipe: Recipe) -> CacheNeed:
    assert memory.kv_per_token is not None, "only what is known is planned"
    block_bytes = memory.kv_per_token * recipe.engine.kv_block_size
    model = recipe.target.model if role == "target" else recipe.draft.model or recipe.draft.method
    num_blocks = memory.tokens_wanted // recipe.engine.kv_block_size
    each = memory.prefix_state if recipe.engine.enable_prefix_caching else 0
    return CacheNeed(str(model), block_bytes, num_blocks, memory.states, each, memory.tokens_per_token)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
