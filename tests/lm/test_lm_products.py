"""Products in whatever form a weight is kept: the numbers are those of `F.linear`."""

import pytest
import torch
import torch.nn.functional as F

from specdec_cli.lm import products
from specdec_cli.lm.linear import missing
from specdec_cli.lm.products import Product


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


# In float32 the second one has both forms, and the third one is above PACKED_BYTES.
@pytest.mark.parametrize("shape", [(24, 16), (1100, 160), (1100, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_linear(random, shape, dtype, with_bias):
    weight = (torch.randn(shape, generator=random) * shape[1] ** -0.5).to(dtype)
    bias = torch.randn(shape[0], generator=random).to(dtype) if with_bias else None
    product = Product(weight, bias)
    for num_rows in (1, 2, 3, 4, 5, 9, 40):
        x = torch.randn(num_rows, shape[1], generator=random).to(dtype)
        expected = F.linear(x, weight, bias).float()
        tolerance = {"atol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 2e-2}
        with torch.inference_mode():
            for out_dtype in {dtype, torch.float32}:
                out = torch.empty(num_rows, shape[0], dtype=out_dtype)
                assert product.into(x, out) is out
                assert torch.allclose(out.float(), expected, **tolerance)
            if bias is None:
                stream = torch.ones(num_rows, shape[0], dtype=dtype)
                product.add_to(stream, x)
                assert torch.allclose(stream.float(), expected + 1, **tolerance)


def test_forms_by_size():
    if missing("float32") is not None:
        pytest.skip("this torch cannot keep prepacked float32 weights")
    large = torch.zeros(1100, 1024)
    kept = {
        "small": Product(torch.zeros(24, 256)),
        "between": Product(torch.zeros(1100, 160)),
        "between and tied": Product(torch.zeros(1100, 160), keeps=True),
        "large": Product(large),
        "large and tied": Product(large, keeps=True),
        "large in half precision": Product(large.bfloat16()),
    }
    assert [name for name, product in kept.items() if product._linear is not None] == [
        "between",
        "between and tied",
        "large",
    ]
    assert [name for name, product in kept.items() if product._weight is None] == ["large"]
    assert kept["large and tied"]._weight.data_ptr() == large.data_ptr()


def test_without_the_private_operators(monkeypatch, random):
    monkeypatch.setattr(products, "missing", lambda kind: "not here")
    weight = torch.randn(1100, 1024, generator=random)
    product, x = Product(weight), torch.randn(5, 1024, generator=random)
    assert product._linear is None
    assert torch.allclose(product.into(x, torch.empty(5, 1100)), F.linear(x, weight), atol=1e-3)
