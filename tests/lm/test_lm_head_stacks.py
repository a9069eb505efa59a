"""A draft head's layers in compiled code: what they give is what torch's give, wherever their slots lie."""

from itertools import pairwise

import pytest
import torch
from planted import plant
from transformers import LlamaConfig, Qwen3Config

from specdec_cli.lm.heads.compiled_stack import CompiledProduct, CompiledStack
from specdec_cli.lm.heads.head_cache import HeadCache
from specdec_cli.lm.heads.head_layer import HeadLayer, LayerFeed
from specdec_cli.lm.heads.layer_stack import BlockLayer, LayerStack, TorchStack, positions_of
from specdec_cli.lm.heads.stacks import compiles

HIDDEN, BLOCK, CPU = 48, 4, torch.device("cpu")
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2,
         "rms_norm_eps": 1e-5, "vocab_size": 8}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=24),
}
IN_BLOCKS = (
    "a row of a block sees nothing ahead", "a row of a block sees beyond its window", "later layers file normed states",
)  # fmt: skip
WAYS = {
    "causal": BlockLayer(None, is_causal=True), "whole": BlockLayer(None, is_causal=False),
    "window": BlockLayer(5, is_causal=True), "both ways": BlockLayer(5, is_causal=False),
}  # fmt: skip


def weights_of(config, num_layers: int, width: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random ones; `width` is what the first layer's attention reads, and None leaves that to its norm."""
    generator, found = torch.Generator().manual_seed(num_layers), {}
    for i in range(num_layers):
        shapes = HeadLayer.shapes(config, width if width and not i else HIDDEN)
        if i or width is None:
            shapes |= {"input_layernorm.weight": (HIDDEN,)}
        for name, shape in shapes.items():
            made = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            found[f"layers.{i}.{name}"] = (1 + made if len(shape) == 1 and "norm" in name else made).to(dtype)
    return found


class Sequences:
    """Two sequences in a stack's own cache, with blocks side by side or not."""

    def __init__(self, stack: LayerStack, dtype: torch.dtype, is_scattered: bool) -> None:
        self.cache = HeadCache(stack.key_shape, stack.value_shape, dtype, CPU, BLOCK)
        self.cache.hold(64)
        if is_scattered:
            pool = self.cache.pool
            blocks = pool.allocate(pool.num_free)
            pool.free(blocks[1::3])

    def feeds(self, places: list[range]) -> list[LayerFeed]:
        found = []
        for handle, its in enumerate(places):
            held = self.cache.of(handle)
            self.cache.reserve(held, its.stop)
            found.append(LayerFeed(self.cache.keys, self.cache.values, held.slots, its, its.stop))
        return found


def stacks(config, dtype, num_layers=3, width=None, block_layers=None):
    """A compiled stack and torch's, of the same weights."""
    plain = TorchStack(config, weights_of(config, num_layers, width, dtype), block_layers)
    weights = weights_of(config, num_layers, width, dtype)
    compiled = CompiledStack.published(config, weights, BLOCK, block_layers)
    assert compiled.key_shape == plain.key_shape
    assert weights["layers.0.self_attn.q_proj.weight"].is_meta
    return compiled, plain


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = 1e-4 if found.dtype == torch.float32 else 0.1
    assert torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("width", [None, 2 * HIDDEN])
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_and_trees_have_torchs_outputs(name, width, num_layers, dtype, is_scattered) -> None:
    both = stacks(CONFIGS[name], dtype, num_layers, width)
    held = [Sequences(stack, dtype, is_scattered) for stack in both]
    generator = torch.Generator().manual_seed(7)
    # The tree's nodes: two children of the text's end, and a child of the second.
    tree = torch.ones(3, 24, dtype=torch.bool)
    tree[0, 22:], tree[1, [21, 23]], tree[2, 21] = False, False, False
    for rounds in ([range(19), range(9)], [range(19, 21), range(9, 10)], [range(21, 24)]):
        num = sum(map(len, rounds))
        hidden = torch.randn(num, HIDDEN, generator=generator).to(dtype)
        inputs = None if width is None else torch.randn(num, width, generator=generator).to(dtype)
        outputs = []
        for stack, its in zip(both, held, strict=True):
            feeds = its.feeds(rounds)
            positions = positions_of(feeds, CPU)
            if len(rounds) == 1:
                feeds[0].visible, positions = tree, torch.tensor([21, 21, 22])
            outputs.append(stack.run(hidden, positions, feeds, inputs))
        assert_close(*outputs)


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ways", [["causal"], ["whole"], ["both ways", "whole", "window"]])
def test_blocks_behind_a_remembered_context_have_torchs_outputs(ways, dtype, is_scattered) -> None:
    config = CONFIGS["qwen3"]
    both = stacks(config, dtype, len(ways), None, [WAYS[way] for way in ways])
    held = [Sequences(stack, dtype, is_scattered) for stack in both]
    generator = torch.Generator().manual_seed(7)
    for before, kept in pairwise([(0, 0), (17, 3), (18, 7)]):
        new = [range(*its) for its in zip(before, kept, strict=True)]
        context = torch.randn(sum(map(len, new)), HIDDEN, generator=generator).to(dtype)
        rows = torch.randn(2 * 9, HIDDEN, generator=generator).to(dtype)
        outputs = []
        for stack, its in zip(both, held, strict=True):
            feeds = its.feeds(new)
            stack.remember(context, positions_of(feeds, CPU), feeds)
            feeds = its.feeds([range(num, num + 9) for num in kept])
            outputs.append(stack.run(rows, positions_of(feeds, CPU), feeds))
        assert_close(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_BLOCKS)
def test_a_planted_fault_in_blocks_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, "-O0")
    with pytest.raises(AssertionError):
        test_blocks_behind_a_remembered_context_have_torchs_outputs(
            ["both ways", "whole", "window"], torch.float32, is_scattered=False
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a query sees the token behind it", "later layers read the inputs"])
def test_a_planted_fault_in_texts_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault)
    with pytest.raises(AssertionError):
        test_texts_and_trees_have_torchs_outputs("llama", HIDDEN, 3, torch.float32, is_scattered=False)


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_a_product_is_torchs(num_rows: int) -> None:
    x, weight, bias = torch.randn(num_rows, 50), torch.randn(37, 50), torch.randn(37)
    assert torch.allclose(CompiledProduct(weight, bias)(x), torch.nn.functional.linear(x, weight, bias), atol=1e-4)


def test_what_compiled_code_does_not_know_is_torchs() -> None:
    config = CONFIGS["llama"]
    assert compiles(config, torch.float32, CPU)
    assert not compiles(config, torch.float16, CPU)
    assert not compiles(config, torch.float32, torch.device("meta"))
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default", "partial_rotary_factor": 0.5}):
        other = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, **rope})
        assert not compiles(other, torch.float32, CPU)
    assert not compiles(LlamaConfig(**SHAPE, hidden_act="relu"), torch.float32, CPU)
