"""A transformers model's layers through torch.compile: one graph for all, in which attention is our own operator.

A layer becomes a graph for any number of tokens from two on, and every layer of its kind runs the same one; what
stands before the layers and behind them stays as it is. The operator files keys and values into the block cache and
attends as the eager forward does (`lm.attention`), so masks, blocks and packed rows stay outside the graph: it is
handed a layer's number and a mask's, and finds the cache of the forward that runs in `_running`.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from specdec_cli.errors import RunError, SpecdecError
from specdec_cli.lm.cache.cache import BlockCache
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout
from specdec_cli.lm.files.reading import first_line, quiet
from specdec_cli.lm.forward.attention import MaskFunction, RowMasks, attend
from specdec_cli.lm.forward.eager import EagerForward
from specdec_cli.lm.forward.taps import decoder_layers
from specdec_cli.lm.llama.native import compiler

NAME = "specdec-compiled"
_HINT = "leave --compile out, or engine.compile at auto"
# One for each kind of layer and of mask; beyond it torch would go on without compiling.
_MOST_GRAPHS = 32
_NO_MODULE = torch.nn.Identity()


@dataclass(eq=False)
class CompiledCache(BlockCache):
    """The block cache of compiled layers: the operator files keys and values, and `update` hands them on to it.

    Args:
        masks: of the forward that runs, in the order in which transformers asked for them.
    """

    masks: list[RowMasks] = field(default_factory=list)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """New keys and values as they are."""
        return key_states, value_states

    @contextmanager
    def running(self, layout: Layout) -> Iterator[None]:
        """Let the operator find this cache while a forward runs."""
        token = _running.set(self)
        self.masks.clear()
        try:
            with super().running(layout):
                yield
        finally:
            _running.reset(token)
            self.masks.clear()


_running: ContextVar[CompiledCache] = ContextVar("the cache of the forward that runs")


class CompiledForward(EagerForward):
    """transformers' forward, by torch once `compile` is called; until then it runs as it is."""

    _is_compiled = False

    @property
    def name(self) -> str:
        """Whose forward it is."""
        return super().name if self.compile_seconds is None else f"{super().name}, compiled"

    def compile(self, name: str) -> None:
        """Have torch compile the layers for one token (where that is another graph), two and any number."""
        began = perf_counter()
        compile_layers(self.model)
        self._is_compiled = True
        try:
            with quiet(), self._threads():
                for num_tokens in (2, 5) if self.layouts.has_company else (1, 2, 5):
                    self._packed.attempt(CompiledCache(num_tokens + KEY_GRAIN), num_tokens)
        except (SpecdecError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise compile_error(name, error) from error
        self.compile_seconds = perf_counter() - began

    def _new_cache(self) -> BlockCache:
        return CompiledCache(self.num_slots) if self._is_compiled else super()._new_cache()


def compile_layers(model: Any) -> None:
    """Have a model's layers compiled when they run next.

    Raises:
        RunError: torch finds no C++ compiler.
    """
    check_compiler(model.device)
    _register()
    model.config.get_text_config()._attn_implementation = NAME
    run = _compiled(lambda layer, *given, **named: type(layer).forward(layer, *given, **named), model.device)
    for layer in decoder_layers(model):
        layer.forward = partial(run, layer)


def _compiled(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function that torch compiles for each kind of arguments; their layers' numbers and sizes are no such kind."""
    dynamo: Any = torch._dynamo
    dynamo.config.allow_unspec_int_on_nn_module = True
    options: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": _MOST_GRAPHS}
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:  # before torch 2.13
        dynamo.config.recompile_limit = max(_MOST_GRAPHS, dynamo.config.recompile_limit)
        options = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        # Kernels begin while the one before them ends, as ours do (`few_rows.early`).
        options["options"] = {"triton.enable_pdl": True} if "triton.enable_pdl" in _inductor_options() else {}
    compiled: Callable[..., Any] = torch.compile(run, dynamic=True, **options)
    return compiled


def _inductor_options() -> Collection[str]:
    names: Any = torch._inductor
    return set(names.list_options())


def compile_error(name: str, error: Exception) -> RunError:
    """The error for something that torch could not compile."""
    return RunError(f"the forward of `{name}` does not compile: {first_line(error)}", _HINT)


def check_compiler(device: torch.device) -> None:
    """Refuse to compile for a CPU where torch would find no C++ compiler.

    Raises:
        RunError: it would not.
    """
    wanted = compiler()
    if device.type == "cpu" and shutil.which(wanted[0]) is None:
        raise RunError(
            f"`engine.compile: true` needs a C++ compiler, and there is no `{' '.join(wanted)}`",
            "install one (CXX names another), or leave --compile out",
        )


def _register() -> None:
    """Give torch the operator, and transformers its name; once."""
    if NAME in AttentionInterface():
        return
    torch_library: Any = torch.library
    library = torch_library.Library("specdec", "DEF")
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, SymInt layer, SymInt mask, float? scaling, float? softcap, "
        "Tensor? s_aux) -> Tensor"
    )
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    torch_library.register_fake("specdec::attend", _shape_of_attend, lib=library)
    _kept.append(library)
    AttentionInterface.register(NAME, _attend_in_graph)
    AttentionMaskInterface.register(NAME, _next_mask)


_kept: list[Any] = []  # torch takes an operator back when its library is let go


def _attend_in_graph(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend`, as transformers calls it inside the graph; the mask is its number."""
    assert position_bias is None, "attention with a position bias is not supported"
    operator = torch.ops.specdec.attend
    return operator(query, key, value, module.layer_idx, attention_mask, scaling, softcap, s_aux), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    mask: int,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """The operator: [1, n, H, D_v], contiguous."""
    cache = _running.get()
    store, _ = BlockCache.update(cache, key, value, layer)
    return attend(_NO_MODULE, query, store, store, cache.masks[mask], scaling, softcap, s_aux)[0].contiguous()


def _shape_of_attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def _next_mask(*, kv_length: Layout, mask_function: MaskFunction, **_: Any) -> int:
    """A mask's number among those of the forward that runs."""
    assert isinstance(kv_length, Layout), "the mask was asked for without the block cache"
    masks = _running.get().masks
    masks.append(RowMasks(kv_length, mask_function))
    return len(masks) - 1
