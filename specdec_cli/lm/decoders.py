"""The choice of a model's forward: our own decoder, or transformers', eager or in graphs, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.cache.layout import MOST_ROWS, Layouts
from specdec_cli.lm.door import Recording
from specdec_cli.lm.files.architecture import carries_state
from specdec_cli.lm.files.lengths import follows_length
from specdec_cli.lm.forward.forward import Forward
from specdec_cli.lm.forward.implementations import NAME, attention_of
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.own_products import keep_bits
from specdec_cli.lm.kernels.packing import leave_files, pack_model
from specdec_cli.lm.llama.families import obstacle
from specdec_cli.lm.llama.file_rows import BLOCKS_HINT
from specdec_cli.lm.llama.llama import LlamaDecoder
from specdec_cli.lm.machine.threads import fixed_threads, most_threads, watched_forward
from specdec_cli.lm.self_draft import SelfDraft

if TYPE_CHECKING:
    from specdec_cli.lm.forward.eager import EagerForward
    from specdec_cli.lm.forward.packed import PackedForward

DECODERS = AUTO, TRANSFORMERS, GRAPHS = "auto", "transformers", "graphs"
_OBSTACLES = {TRANSFORMERS: "it is disabled", GRAPHS: "graphs record this one"}


def tries_graphs(decoder: str, device: torch.device) -> bool:
    """Whether a decoder records graphs where that works, and otherwise does without."""
    return decoder == AUTO and device.type == "cuda"


def recording_of(forward: Forward, decoder: str) -> Recording:
    """Whether a draft head on a model runs in graphs: as the model's own steps do."""
    if not forward.name.endswith("graphs"):
        return "none"
    return "required" if decoder == GRAPHS else "tried"


def graphs_obstacle(name: str, config: Any, device: torch.device) -> str | None:
    """Why no graph can hold a model's forward; None where none is known before it is tried."""
    try:
        check_recordable(name, config, device)
    except UsageError as error:
        return error.message
    return None


def own_obstacle(model: Any, decoder: str, device: torch.device | None = None) -> str | None:
    """Why transformers' forward decodes a model; None where our own decoder does."""
    return _OBSTACLES.get(decoder) or obstacle(model, device)


def forward_for(
    model: Any,
    name: str,
    decoder: str,
    kind: Kind,
    *,
    is_own: bool,
    weight_bytes: int,
    block_size: int,
    max_context: int,
) -> Forward:
    """The forward of a model, whose linear layers it takes or packs in place.

    Args:
        model: a transformers causal LM, in evaluation mode, on its device.
        name: of the model, for messages.
        decoder: one of DECODERS.
        kind: what the linear layers become.
        is_own: our own decoder runs it (`own_obstacle`).
        weight_bytes: of its weights, as they will lie in memory.
        block_size: tokens in a block of its cache.
        max_context: most tokens of a context.

    Raises:
        UsageError: the architecture does not run on a block cache.
    """
    if is_own:
        own = LlamaDecoder(model, kind, Layouts(block_size))
        if not own.has_rows_of_file():
            raise RunError(f"the weights of `{name}` are other numbers in our decoder than in its file", BLOCKS_HINT)
        leave_files(model)
        return own
    from specdec_cli.lm.families.patches import packed_forward  # transformers' models behind it take seconds to import

    packed = packed_forward(model, name)
    if kind != "plain":
        leave_files(model)
    pack_model(model, kind)
    if packed.is_bitwise:
        keep_bits(model)
    return _transformers_forward(packed, name, decoder, kind, weight_bytes, block_size, max_context)


def self_draft_forward(
    target: Forward,
    model: Any,
    draft: SelfDraft,
    decoder: str,
    kind: Kind,
    *,
    weight_bytes: int,
    block_size: int,
    max_context: int,
) -> Forward:
    """The forward of a draft that is made of its target's weights.

    Args:
        target: the target's forward.
        model: the draft's modules, which are the target's; our own decoder has taken their weights.
        draft: what it changes.
        decoder: the target's entry of DECODERS.
        kind: of the draft's linear layers.
        weight_bytes: that it reads.
        block_size: tokens in a block of its cache.
        max_context: most tokens of a context.

    Raises:
        UsageError: the first layers alone do not run.
    """
    if isinstance(target, LlamaDecoder):
        return target.self_draft(draft.layers, kind)
    from specdec_cli.lm.families.patches import packed_forward

    packed = packed_forward(model, draft.spec)
    return _transformers_forward(packed, draft.spec, decoder, kind, weight_bytes, block_size, max_context)


def _transformers_forward(
    packed: PackedForward, name: str, decoder: str, kind: Kind, weight_bytes: int, block_size: int, max_context: int
) -> Forward:
    """transformers' forward of a model whose linear layers are packed, and what it runs in."""
    from specdec_cli.lm.forward.eager import EagerForward
    from specdec_cli.lm.forward.recorded import RecordedForward
    from specdec_cli.lm.invariance import rows_together

    model, is_bitwise = packed.model, packed.is_bitwise
    threads = _threads(model, kind, weight_bytes, is_bitwise)
    layouts = Layouts(
        block_size,
        model.device,
        is_bitwise and not packed.patches.runs_apart,
        has_company=is_bitwise,
        rows_together=rows_together(model.dtype, kind) if is_bitwise and model.dtype == torch.bfloat16 else MOST_ROWS,
    )
    forward = EagerForward(packed, packed.probe(), layouts, threads)
    if tries_graphs(decoder, model.device):
        return _recorded_if_possible(forward, name, max_context)
    return RecordedForward(forward, max_context) if decoder == GRAPHS else forward


def _recorded_if_possible(forward: EagerForward, name: str, max_context: int) -> Forward:
    """A forward in graphs, or as it is, with the reason in `graphs_obstacle`."""
    from specdec_cli.lm.forward.recorded import RecordedForward

    forward.graphs_obstacle = graphs_obstacle(name, forward.model.config, forward.layouts.device)
    if forward.graphs_obstacle is not None:
        return forward
    recorded = RecordedForward(forward, max_context)
    try:
        recorded.try_out()
    except SpecdecError as error:
        forward.graphs_obstacle = error.message
        return forward
    return recorded


def _threads(model: Any, kind: Kind, weight_bytes: int, is_bitwise: bool) -> Callable[[], AbstractContextManager[None]]:
    """Threads of transformers' forward pass: one for each free core; a fixed number where bits depend on it."""
    from specdec_cli.lm.invariance import same_bits_on_one_thread

    if model.device.type != "cpu":
        return nullcontext
    is_fixed = is_bitwise and not same_bits_on_one_thread(model.dtype, kind)
    return partial(fixed_threads if is_fixed else watched_forward, most_threads(weight_bytes))


def check_decoder(name: str, decoder: str, config: Any, device: torch.device) -> None:
    """Refuse a decoder that a model cannot have, before its weights are read.

    Raises:
        UsageError: it cannot.
    """
    if decoder == GRAPHS:
        check_recordable(name, config, device)


def check_recordable(name: str, config: Any, device: torch.device) -> None:
    """Refuse what no graph of a GPU can hold.

    Raises:
        UsageError: another device, a family with an attention of its own or a recurrent state, or positions that depend
            on the length.
    """
    hint = "leave --decoder out"
    if device.type != "cuda":
        raise UsageError(f"`engine.decoder: graphs` is for a GPU, and `{name}` runs on `{device}`", hint)
    if attention_of(config) != NAME:
        raise UsageError(
            f"architecture `{config.model_type}` of `{name}` cannot be recorded: its attention is fixed", hint
        )
    if carries_state(config):
        raise UsageError(f"architecture `{config.model_type}` of `{name}` cannot be recorded: it carries a state", hint)
    text_config = config.get_text_config()
    if getattr(text_config, "kv_lora_rank", None):
        raise UsageError(f"`{name}` cannot be recorded: its keys and values are kept compressed", hint)
    values = getattr(text_config, "v_head_dim", None)
    if values is not None and values != getattr(text_config, "head_dim", values):
        raise UsageError(f"`{name}` cannot be recorded: its values are not as wide as its keys", hint)
    if follows_length(text_config):
        raise UsageError(f"`{name}` cannot be recorded: its rotary positions depend on the context's length", hint)
