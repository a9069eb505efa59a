"""Does a row come out with the same bits in any company? What bit-for-bit exactness asks of a machine's kernels.

The same row is computed among different numbers of rows, by our own decoder with each kind of weights, by the linear
layers' kernels that others use (plain, packed, int8), and by attention as this package uses it; every answer must equal
the first one, bit for bit. `doctor` prints the checks. Where products keep a row's bits among fewer rows only (AMX: up
to 32), a forward is made in turns of so many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdec_cli.document import Count, computed
from specdec_cli.lm.cache.cache import LayerStore
from specdec_cli.lm.cache.layout import KEY_GRAIN, MOST_ROWS, Layout, Layouts, Span
from specdec_cli.lm.files.plain_config import PlainConfig
from specdec_cli.lm.forward.attention import RowMasks, attend, causal
from specdec_cli.lm.int4_blocks import quantize_model
from specdec_cli.lm.kernels.kinds import Kind, kind_for, pack
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.file_rows import FileRows
from specdec_cli.lm.llama.llama import LlamaDecoder
from specdec_cli.lm.llama.plain_modules import LlamaForCausalLM

DECODER: dict[str, Any] = {"vocab_size": 97, "hidden_size": 88, "intermediate_size": 150, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
DECODER |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}
EXPERTS |= {"layer_types": ["sliding_attention", "full_attention"]}
_WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_FORMS = {
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}
"""Types of blocks, one of each of a file's layouts: ggml's number, inputs and bytes of a block, where scales begin."""
_SCALE = 2.0**-10  # so that products neither vanish nor overflow
_Arm = tuple[str, LlamaForCausalLM, Kind]  # weights in words, their model, and their kind
LINEAR_SHAPES = ((160, 160), (432, 160), (160, 432), (1024, 1024), (1024, 3584), (2048, 2048))
ATTENTION_SHAPES = ((5, 5, 32), (12, 12, 64), (16, 8, 64), (8, 1, 64))
CONTEXTS = (20, 63, 200, 511, 700)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33, 48, MOST_ROWS)


@dataclass(frozen=True, slots=True)
class InvarianceCheck:
    """One kernel's answer.

    Args:
        kernel: what was computed, with its shape.
        dtype: float32, bfloat16 or float16.
        rows_tried: the numbers of rows that the row was computed among.
        rows_that_differ: those of them where its bits were others.
        needed: whether the bit-for-bit promise rests on it (a lone row in a linear layer never happens: it is padded;
            the plain product is beside a packed one for layers of a class of their own alone).
    """

    kernel: str
    dtype: str
    rows_tried: tuple[Count, ...]
    rows_that_differ: tuple[Count, ...]
    needed: bool

    @computed
    def holds(self) -> bool:
        """Whether every number of rows gave the same bits."""
        return not self.rows_that_differ


def row_invariance(dtype: torch.dtype = torch.bfloat16) -> list[InvarianceCheck]:
    """Check this machine's CPU kernels; takes some seconds."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        return [*_decoder_checks(dtype), *_linear_checks(dtype, generator), *_attention_checks(dtype, generator)]


@functools.cache
def rows_together(dtype: torch.dtype, kind: Kind) -> int:
    """Up to how many rows, of `MOST_ROWS`, a product gives each of them the same bits in any number from two on.

    `MOST_ROWS` where that holds for no number at all, which `doctor` then finds.
    """
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 2048, generator=generator).to(dtype) for n in (MOST_ROWS, 2048))
    with torch.inference_mode():
        product = pack(weight, None, kind)
        products = {n: product(rows[:n]) for n in ROWS[1:]}
    for most in (MOST_ROWS, 32, 16):
        if all(torch.equal(products[n], products[most][:n]) for n in products if n <= most):
            return most
    return MOST_ROWS


@functools.cache
def same_bits_on_one_thread(dtype: torch.dtype, kind: Kind) -> bool:
    """Whether products and attention give the same bits on one thread as on all of torch's."""
    before = torch.get_num_threads()
    try:
        some, others = (_some_of_a_forward(dtype, kind, threads) for threads in (1, before))
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(tensor, other) for tensor, other in zip(some, others, strict=True))


def _some_of_a_forward(dtype: torch.dtype, kind: Kind, num_threads: int) -> list[Tensor]:
    """Rows of each linear shape's product, and attention of one sequence, on so many threads."""
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    with torch.inference_mode():
        for num_outputs, num_inputs in LINEAR_SHAPES:
            rows, weight = (torch.randn(n, num_inputs, generator=generator).to(dtype) for n in (MOST_ROWS, num_outputs))
            product = pack(weight, None, kind)
            outputs += [product(rows[:n]) for n in (2, 5, MOST_ROWS)]
        for num_heads, num_key_heads, dim in ATTENTION_SHAPES:
            store, queries = _random_attention(num_heads, num_key_heads, dim, dtype, generator)
            outputs += [_attend(store, queries[:, :, :n], CONTEXTS[-1]) for n in (1, 5)]
    return outputs


def _in_turns(product: Callable[[Tensor], Tensor], most: int, rows: Tensor) -> Tensor:
    """A product of rows [n, in] as forwards make it, `most` at a time."""
    return torch.cat([product(some) for some in rows.chunk(-(-len(rows) // most))])


def _decoder_checks(dtype: torch.dtype) -> Iterator[InvarianceCheck]:
    """The last rows of a text computed again in our own decoder, random: Llama's weights and a mixture's."""
    if native.missing() is not None or dtype == torch.float16:
        return
    tokens = [(11 * i * i + 3 * i) % 97 for i in range(MOST_ROWS)]
    kinds: dict[str, Kind] = {_name(dtype): "plain", "int8": "int8"}
    arms: list[_Arm] = [
        (f"{words} weights{more}", _random(make(), dtype), kind)
        for (more, make), (words, kind) in itertools.product(_MODELS.items(), kinds.items())
    ]
    for what, model, kind in [*arms, *_block_arms(dtype)]:
        decoder = LlamaDecoder(model, kind, Layouts(len(tokens)))
        decoder.allocate(num_blocks=1)

        def last(num_rows: int, decoder: LlamaDecoder = decoder) -> Tensor:
            start = len(tokens) - num_rows
            spans = [Span(0, num_rows, len(tokens), 0, None, start)]
            places = range(start, len(tokens))
            layout = Layout(tokens[start:], [*places], spans, [(0, num_rows, start)], [*range(num_rows)], num_rows)
            return decoder.run(layout)

        whole = last(len(tokens))
        differ = tuple(n for n in ROWS if not torch.equal(last(n), whole[-n:]))
        yield InvarianceCheck(f"own decoder, {what}", _name(dtype), ROWS, differ, needed=True)


class GptOssForCausalLM(LlamaForCausalLM):
    """The weights of a small gpt-oss by transformers' names: experts, biases, sinks and windows. It has no forward."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        layer: Any
        for layer in self.model.layers:
            attention, layer.mlp = layer.self_attn, _Experts(config)
            attention.sinks = _weight(config.num_attention_heads)
            for product in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                product.bias = _weight(product.out_features)


class _Experts(nn.Module):
    """A router and its experts, which have the activation with a limit."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        num_experts, hidden, width = config.num_local_experts, config.hidden_size, config.intermediate_size
        router: Any = nn.Module()
        experts: Any = nn.Module()
        router.weight, router.bias = _weight(num_experts, hidden), _weight(num_experts)
        router.num_experts, router.top_k = num_experts, config.num_experts_per_tok
        experts.alpha, experts.limit = 1.702, 7.0
        experts.gate_up_proj = _weight(num_experts, hidden, 2 * width)
        experts.gate_up_proj_bias = _weight(num_experts, 2 * width)
        experts.down_proj = _weight(num_experts, width, hidden)
        experts.down_proj_bias = _weight(num_experts, hidden)
        self.router, self.experts = router, experts


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


_MODELS: dict[str, Callable[[], LlamaForCausalLM]] = {
    "": lambda: LlamaForCausalLM(PlainConfig(**DECODER)),
    " and experts": lambda: GptOssForCausalLM(PlainConfig(**DECODER, **EXPERTS)),
}


def _block_arms(dtype: torch.dtype) -> Iterator[_Arm]:
    """Weights in blocks: those that `--quantize int4` makes, and a GGUF file's."""
    for words, make in _MODELS.items():
        yield f"int4 weights{words}", quantize_model("a random model", _random(make(), dtype), dtype), "int4"
    for form in _FORMS:
        yield f"a file's {form} blocks", _in_blocks(form, dtype), "blocks"


def _in_blocks(form: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with random blocks of a GGUF file's type in the places of all its matrices."""
    model = _random(LlamaForCausalLM(PlainConfig(**DECODER | _WHOLE_BLOCKS)), dtype)
    generator = np.random.default_rng(0)
    type_, num_inputs, num_bytes, scales = _FORMS[form]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            rows, inputs = module.weight.shape
            blocks = generator.integers(0, 256, (rows, inputs // num_inputs, num_bytes), np.uint8)
            for begin in scales:
                blocks[..., begin : begin + 2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
            data = blocks.reshape(rows, -1)
            taking: Any = module
            taking.file_rows = FileRows(name, "a random model", type_, inputs, data, torch.arange(rows))
    return model


def _random(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with random weights, around one in norms, and an output layer of its own."""
    model.lm_head.weight = _weight(*model.lm_head.weight.shape)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, empty in model.state_dict().items():
        numbers = torch.randn(empty.shape, generator=generator) * (0.1 if empty.dim() == 1 else empty.shape[-1] ** -0.5)
        weights[name] = (numbers + 1 if "norm" in name else numbers).to(dtype)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def _linear_checks(dtype: torch.dtype, generator: torch.Generator) -> Iterator[InvarianceCheck]:
    for num_outputs, num_inputs in LINEAR_SHAPES:
        weight = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
        rows = torch.randn(MOST_ROWS, num_inputs, generator=generator).to(dtype)
        forms = _forms(weight)
        for form, kind in forms.items():
            is_rare = kind == "plain" and "packed" in forms.values()
            product = functools.partial(_in_turns, pack(weight, None, kind), rows_together(dtype, kind))
            reference = product(rows)
            differ = [n for n in ROWS if not torch.equal(product(rows[:n]), reference[:n])]
            name = f"{form} {num_inputs}→{num_outputs}"
            together = tuple(n for n in ROWS if n > 1)
            yield InvarianceCheck(name, _name(dtype), together, tuple(n for n in differ if n > 1), not is_rare)
            yield InvarianceCheck(
                f"{name}, one row alone", _name(dtype), (1,), tuple(n for n in differ if n == 1), needed=False
            )


def _forms(weight: Tensor) -> dict[str, Kind]:
    """Every form in which a model's linear layers run here; layers of a class of their own stay plain beside packed."""
    forms: dict[str, Kind] = {"linear": "plain", "int8 linear": "int8"}
    if (kind := kind_for(weight.dtype, weight.device)) == "packed":
        forms["packed linear"] = kind
    return forms


def _attention_checks(dtype: torch.dtype, generator: torch.Generator) -> Iterator[InvarianceCheck]:
    """Every position computed alone, against the same position among up to 9 of its sequence."""
    for num_heads, num_key_heads, dim in ATTENTION_SHAPES:
        store, queries = _random_attention(num_heads, num_key_heads, dim, dtype, generator)
        differ = set()
        for context in CONTEXTS:
            whole = _attend(store, queries, context)
            for count in (1, 2, 3, 5, 8):
                for start in range(9 - count + 1):
                    part = _attend(store, queries[:, :, start : start + count], context + start)
                    if not torch.equal(part, whole[:, start : start + count]):
                        differ.add(count)
        name = f"attention {num_heads}/{num_key_heads} heads of {dim}"
        yield InvarianceCheck(name, _name(dtype), (1, 2, 3, 5, 8, 9), tuple(sorted(differ)), needed=True)


def _random_attention(
    num_heads: int, num_key_heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[LayerStore, Tensor]:
    """Keys and values of 1,024 positions, and nine queries [1, H, 9, D]."""
    keys, values = (torch.randn(1, num_key_heads, 1024, dim, generator=generator).to(dtype) for _ in range(2))
    store = LayerStore(keys, values, 1024)
    store.keys.copy_(keys)
    store.values.copy_(values)
    return store, torch.randn(1, num_heads, 9, dim, generator=generator).to(dtype)


def _attend(store: LayerStore, queries: Tensor, first: int) -> Tensor:
    """Attention as a forward does it, of queries at positions first, first + 1, ..."""
    spans, start = [], 0
    while start < queries.shape[2]:
        num_keys = ((first + start) // KEY_GRAIN + 1) * KEY_GRAIN
        stop = min(queries.shape[2], num_keys - first)
        spans.append(Span(start, stop, num_keys, 0, None))
        start = stop
    positions, is_bitwise = list(range(first, first + queries.shape[2])), store.keys.dtype != torch.float32
    layout = Layout([], positions, spans, [], wanted=[], num_written=0, is_bitwise=is_bitwise)
    return attend(torch.nn.Identity(), queries, store, store, RowMasks(layout, causal))[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
