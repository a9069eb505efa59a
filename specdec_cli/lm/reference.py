"""transformers' forward of 16-bit weights in float32, layer by layer, and the same forward rounded to 16 bits.

Each layer's weights are float32 while that layer computes and no longer, the output layer's a part at a time: a second
copy of the weights is never whole. Both texts are read twice in one batch. The second time what goes into and comes out
of modules is rounded, as a forward in the weights' own dtype does: of the first text to the nearest number, of the
second after a jitter of half a unit in the last place, as another order of its sums would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_cli.lm.kernels.packing import is_linear

_HALVES = (torch.bfloat16, torch.float16)
OUTPUTS = 2**14
"""Outputs of the output layer that are float32 together."""
CHECKED_ROWS = 120
"""Rows of float32 logits that the check at load takes memory for: both texts twice, and copies of them."""
_SEED = 5


def reference_logits(model: Any, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, n, V] float32 of texts [B, n], and of the same texts by the rounded forward."""
    with _in_float32(model), _rounded(model, len(texts), texts.shape[1]):
        logits: Tensor = model(input_ids=texts.repeat(2, 1), use_cache=False).logits.float()
    return logits[: len(texts)], logits[len(texts) :]


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Have a model's layers compute in float32."""
    head: Any = model.get_output_embeddings()
    layers = {layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module}
    inside = {module for layer in layers for module in layer.modules()}
    widened = Widened()
    with ExitStack() as stack:
        stack.callback(widened.restore)
        for module in model.modules():
            if module is head and type(head) is nn.Linear and is_linear(head):
                vars(head)["forward"] = partial(_in_parts, head)
                stack.callback(vars(head).pop, "forward")
            elif isinstance(module, nn.Embedding) and module not in inside:  # looked up, and not widened whole
                stack.callback(module.register_forward_hook(lambda _, __, output: output.float()).remove)
            elif module in layers or module not in inside:
                tensors = list(_tensors_of(module, layers))
                stack.callback(module.register_forward_pre_hook(partial(widened.widen, tensors)).remove)
                stack.callback(module.register_forward_hook(partial(widened.restore_after, tensors)).remove)
        yield


class Widened:
    """16-bit tensors that are float32 for now."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def widen(self, tensors: list[Tensor], *_: Any) -> None:
        """Make tensors float32; a module's hook before its forward."""
        for tensor in tensors:
            if tensor.dtype in _HALVES:
                self._kept[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.float()

    def restore_after(self, tensors: list[Tensor], *_: Any) -> None:
        """Give tensors their 16 bits back; a module's hook behind its forward."""
        for tensor in tensors:
            if id(tensor) in self._kept:
                tensor.data = self._kept.pop(id(tensor))[1]

    def restore(self) -> None:
        """Give all of them back, those of a forward that failed, too."""
        self.restore_after([tensor for tensor, _ in self._kept.values()])


def _tensors_of(module: nn.Module, layers: set[nn.Module]) -> Iterator[Tensor]:
    """A module's own 16-bit parameters and buffers; of a layer all but those of layers in it."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    yield from (tensor for tensor in tensors if tensor.dtype in _HALVES)
    if module in layers:
        for child in module.children():
            if child not in layers and not isinstance(child, nn.ModuleList):
                yield from _tensors_of(child, {*layers, child})


def _in_parts(head: Any, x: Tensor) -> Tensor:
    """The output layer's product in float32, of some of its outputs at a time."""
    logits = torch.cat([F.linear(x, weight.float()) for weight in head.weight.split(OUTPUTS)], -1)
    return logits if head.bias is None else logits + head.bias.float()


@contextmanager
def _rounded(model: Any, num_texts: int, num_tokens: int) -> Iterator[None]:
    """Round what modules take and return of the second half of a batch's texts."""
    dtype, generator = model.dtype, torch.Generator(model.device).manual_seed(_SEED)

    def rounded(x: Any) -> Any:
        is_rows = isinstance(x, Tensor) and x.dtype == torch.float32 and x.dim() > 1
        if not is_rows or len(x) not in (2 * num_texts, 2 * num_texts * num_tokens):
            return x
        half, each = len(x) // 2, len(x) // (2 * num_texts)
        jitter = torch.rand(x[half + each :].shape, generator=generator, device=x.device).sub_(0.5)
        shaken = torch.addcmul(x[half + each :], x[half + each :], jitter, value=torch.finfo(dtype).eps)
        return torch.cat((x[:half], *(part.to(dtype).float() for part in (x[half : half + each], shaken))))

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(rounded, given))

    def behind(_: nn.Module, __: Any, output: Any) -> Any:
        return tuple(map(rounded, output)) if type(output) is tuple else rounded(output)

    head = model.get_output_embeddings()
    with ExitStack() as stack:
        for module in model.modules():
            is_leaf = not [*module.children()] and bool([*module.parameters()])
            if is_leaf:
                stack.callback(module.register_forward_pre_hook(before).remove)
            if (is_leaf and module is not head) or type(module).__name__.endswith("Layer"):
                stack.callback(module.register_forward_hook(behind).remove)
        yield
