"""The memory that loading a model takes, by its plan, before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.quantization import is_dequantized
from specdec_cli.lm.files.weights_files import stored_bytes
from specdec_cli.lm.int4_blocks import int4_bytes
from specdec_cli.lm.machine.device_memory import check_room
from specdec_cli.lm.reference import CHECKED_ROWS, OUTPUTS

if TYPE_CHECKING:
    from specdec_cli.lm.plan import ModelPlan


def load_bytes(plan: ModelPlan) -> int:
    """Memory of a CPU that loading takes at the least, beside files that are mapped.

    The numbers of a GGUF file or of a form that is undone are all there before one matrix after another moves into
    the decoder's layout. The check at load of weights that are not in blocks widens a part of them to float32.
    """
    num_bytes = stored_bytes(plan.name, plan.folder)
    dtype, quantize = plan.settings.dtype, plan.settings.quantize
    if plan.header is not None or plan.is_in_blocks:
        vocab_size, width = map(int, plan.outline.get_input_embeddings().weight.shape)
        plain = (dummy.num_parameters(plan.outline) + vocab_size * width) * plan.dtype.itemsize
        if plan.is_in_blocks:
            return _bytes_in_blocks(plan) + (0 if plan.is_native or plan.is_mapped else plain)
        return plain + 4 * min(vocab_size, OUTPUTS) * width + 4 * vocab_size * CHECKED_ROWS
    if not plan.is_plain_torch and (plan.undone is not None or is_dequantized(plan.config)):
        num_bytes = dummy.num_parameters(plan.outline) * (4 if dtype != "auto" else plan.dtype.itemsize)
    if quantize != "none":
        return num_bytes // 4  # the files may be float32
    return num_bytes if dtype == "auto" else num_bytes * plan.dtype.itemsize // 4


def block_bytes(plan: ModelPlan) -> Mapping[str, int]:
    """Bytes of the weights of a model in blocks that are not in its dtype, by transformers' names."""
    if not plan.is_native:
        return int4_bytes(plan.outline)
    if plan.header is None:
        return plan.integers.num_bytes
    from specdec_cli.lm import gguf_blocks

    return gguf_blocks.block_bytes(plan.header, plan.outline)


def _bytes_in_blocks(plan: ModelPlan) -> int:
    """Memory for the weights of a model in blocks, without an embedding that stays in a GGUF file."""
    sizes, itemsize = block_bytes(plan), plan.dtype.itemsize
    table = plan.outline.get_input_embeddings().weight
    has_own_head = plan.outline.get_output_embeddings().weight is not table
    left = table if plan.is_native and plan.header is not None and has_own_head else None
    weights = plan.outline.named_parameters()
    return sum(sizes.get(name, weight.numel() * itemsize) for name, weight in weights if weight is not left)


def check_plan_room(plan: ModelPlan) -> None:
    """Refuse a model that cannot be loaded into the RAM, whatever of its files' dtype is kept.

    Raises:
        RunError: it cannot.
    """
    if plan.is_dummy or not plan.is_complete or plan.device.type != "cpu":
        return
    dtype, quantize = plan.settings.dtype, plan.settings.quantize
    kept = "its file's blocks" if plan.is_native else "its own dtype" if dtype == "auto" else dtype
    what, hint = kept if quantize == "none" else quantize, "choose a smaller model or dtype"
    check_room(plan.name, load_bytes(plan), what, plan.device, hint)
