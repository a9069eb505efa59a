"""The precision of matrix products: what `auto` means, what a step computes in it, and losses that stay exact in it."""

from pathlib import Path

import pytest
import torch
from tiny_training import ignore, never, session, tiny_target

from specdec_cli.train.events import Trained
from specdec_cli.train.losses import forward_kl
from specdec_cli.train.precision import product_precision


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    cpu = torch.device("cpu")
    assert product_precision("auto", cpu) == ("bfloat16" if has_bfloat16 else "float32")
    assert product_precision("auto", torch.device("meta")) == "float32"
    assert [product_precision(name, cpu) for name in ("float32", "bfloat16")] == ["float32", "bfloat16"]


def test_a_step_in_bfloat16_rounds_products_and_keeps_float32_weights(tmp_path: Path) -> None:
    target, losses = tiny_target(tmp_path / "target"), []
    for precision in ("float32", "bfloat16"):
        its = session(target, tmp_path / precision, max_steps=2, evaluate_every=9, precision=precision)
        run = its.start(its.answer(ignore, never), is_resumed=False)
        losses.append(next(event.loss for event in run.run(never) if isinstance(event, Trained)))
        assert {parameter.dtype for parameter in run.module.parameters()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_forward_kl_and_its_gradient_are_those_of_torch() -> None:
    scores, target = torch.randn(5, 11, requires_grad=True), torch.randn(5, 11)
    target[:, 3] = -torch.inf
    p, weights = target.log_softmax(-1), torch.rand(5)
    wanted = torch.nn.functional.kl_div(scores.log_softmax(-1), p, reduction="none", log_target=True)
    wanted = wanted.nan_to_num(0.0).sum(-1)
    found = forward_kl(scores.log_softmax(-1), p)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((weights * loss).sum(), scores)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients)
