"""EAGLE-3's loss against the head's formulas in plain torch, and a head that knows one text by heart."""

from pathlib import Path

import pytest
import torch
from tiny_heads import EPSILON, Reference
from tiny_training import PROMPTS, ignore, never, session, tiny_target
from torch import Tensor

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Train
from specdec_cli.train.answers import TrainingPrompt
from specdec_cli.train.features import TargetFeatures
from specdec_cli.train.methods.eagle3 import Eagle3Module, Eagle3Training
from specdec_cli.train.samples import Sample, TrainingBatch
from specdec_cli.train.session import TrainingData
from specdec_cli.train.target import TrainingTarget

SAMPLES = [
    Sample([(11 * i * i + 5 * i + 3) % 97 for i in range(14)], 4),
    Sample([(7 * i * i + 2 * i + 1) % 97 for i in range(9)], 2),
]
DEPTH, DECAY = 3, 0.8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name = tiny_target(tmp_path_factory.mktemp("target"), rms_norm_eps=EPSILON)
    return Engine.load(name, None, max_num_seqs=4)


def parts(engine: Engine, **settings: object) -> tuple[Eagle3Training, Eagle3Module, TrainingBatch]:
    """A method, its network and a batch; the network's weights are no longer the first ones."""
    train = Train(depth=DEPTH, **settings)  # type: ignore[arg-type]
    method = Eagle3Training(train, TrainingTarget.of(engine.target))
    method.prepare(SAMPLES)
    module = method.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in module.weights.values():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return method, module, TargetFeatures(engine.target, method.taps, method.drafted).batch(SAMPLES)


def expected(method: Eagle3Training, module: Eagle3Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss by the formulas, sample by sample, and the weights that it was computed with."""
    batch = TargetFeatures(method.target.lm, method.taps).batch(SAMPLES)
    weights = {name: one.detach().clone().requires_grad_() for name, one in module.weights.items()}
    reference = Reference(weights | {"embed_tokens.weight": method.target.embedding()})
    ids, sums, nums = method.vocabulary.ids, [torch.zeros(()) for _ in range(DEPTH)], [0] * DEPTH
    assert batch.features is not None
    for row, sample in enumerate(SAMPLES):
        tokens, num = torch.tensor(sample.tokens), len(sample.tokens)
        follow = torch.cat([tokens, torch.zeros(DEPTH, dtype=torch.int64)])
        forced = torch.stack([follow[step + 2 : step + 1 + num] for step in range(DEPTH)], 1)
        logits, _ = reference.draft(batch.features[row, : num - 1], tokens[1:], DEPTH, forced)
        for step in range(DEPTH):
            for anchor in range(num - 1):
                predicted = anchor + step + 2
                if not sample.num_prompt_tokens <= predicted < num:
                    continue
                target = batch.logits[row, predicted - 1]
                if int(target.argmax()) not in ids.tolist():
                    continue
                p = target[ids].softmax(-1)
                q = logits[anchor, step].softmax(-1)
                sums[step] = sums[step] + (p * (p.log() - q.log())).sum()
                nums[step] += 1
    return sum(
        (DECAY**i * one / max(1, num) for i, (one, num) in enumerate(zip(sums, nums, strict=True))), torch.zeros(())
    ), weights


@pytest.mark.parametrize("drafted", [None, 40])
def test_loss_and_gradients_are_those_of_the_formulas(engine: Engine, drafted: int | None) -> None:
    method, module, batch = parts(engine, draft_vocab_size=drafted)
    loss = module(batch).value
    loss.backward()
    wanted, weights = expected(method, module)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    for name, weight in module.weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, weights[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_prompts_and_padding_change_nothing(engine: Engine) -> None:
    _, module, batch = parts(engine)
    alone = TargetFeatures(engine.target, (0, 2, 3)).batch([SAMPLES[1]])
    padded = torch.nn.functional.pad(alone.tokens, (0, 5), value=7)
    assert alone.features is not None
    longer = TrainingBatch(
        padded,
        torch.nn.functional.pad(alone.is_counted, (0, 5)),
        torch.nn.functional.pad(alone.features, (0, 0, 0, 0, 0, 5), value=3.0),
        torch.nn.functional.pad(alone.logits, (0, 0, 0, 5), value=1.0),
    )
    found, with_padding = module(alone), module(longer)
    torch.testing.assert_close(found.value, with_padding.value, rtol=1e-4, atol=1e-5)
    assert found.num_counted.tolist() == with_padding.num_counted.tolist() == [7.0, 6.0, 5.0]
    assert batch.num_counted == 17


def test_49_depths_behind_the_longest_sample_add_no_loss(engine: Engine) -> None:
    found = []
    for depth in (max(len(sample.tokens) for sample in SAMPLES), 64):
        method = Eagle3Training(Train(depth=depth), TrainingTarget.of(engine.target))
        method.prepare(SAMPLES)
        found.append(method.build()(TargetFeatures(engine.target, method.taps).batch(SAMPLES)))
    assert found[0].value.item() == found[1].value.item() > 0
    assert found[1].num_counted.tolist() == found[0].num_counted.tolist() + [0] * (64 - len(found[0].num_counted))


def test_a_target_without_enough_layers_is_refused(tmp_path: Path) -> None:
    engine = Engine.load(tiny_target(tmp_path, layers=2), None)
    method = Eagle3Training(Train(), TrainingTarget.of(engine.target))
    with pytest.raises(UsageError, match="reads three layers of its target, which has 2"):
        _ = method.taps
    with pytest.raises(UsageError, match="layer `7`"):
        TargetFeatures(engine.target, Eagle3Training(Train(layers=(0, 7)), method.target).taps)


def test_a_head_that_knows_its_text_by_heart_is_accepted_whole(tmp_path: Path) -> None:
    found = session(
        tiny_target(tmp_path / "target"),
        tmp_path / "head",
        epochs=160,
        learning_rate=4e-3,
        max_grad_norm=2.0,
        evaluate_every=80,
    )
    prompt = TrainingPrompt(PROMPTS[1], 0)
    found.data = TrainingData([prompt], [prompt], 0)
    run = found.start(found.answer(ignore, never), is_resumed=False)
    for _ in run.run(never):
        pass
    assert run.progress.best_length == 4.0
