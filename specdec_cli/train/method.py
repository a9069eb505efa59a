"""The protocol of a training method: which hidden states it reads, the network, its loss, and the folder it writes.

A method is one class in `train/methods/` and one line in the table there. The loop knows nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Tap
from specdec_cli.train.losses import MeanLoss

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Train
    from specdec_cli.train.samples import Sample, TrainingBatch
    from specdec_cli.train.target import TrainingTarget


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a batch.

    Args:
        value: a scalar, which is minimized; several processes have a part each, and minimize their sum.
        matches: [depths] float32 without gradient: at each depth, the share of counted positions at which the draft's
            most likely token is the target's, the tokens before it being the text's.
        num_counted: [depths] float32, the positions that each share was taken over.
    """

    value: Tensor
    matches: Tensor
    num_counted: Tensor


class DraftModule(nn.Module, ABC):
    """A network that is trained: `forward` gives a batch's loss, so that it runs inside accelerate's wrapper.

    Attributes:
        loss: of positions; its denominators count those of all processes.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = MeanLoss(loss)

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> BatchLoss:
        """The loss of a batch and how often the draft guesses right."""


OWN_SETTINGS = frozenset(
    {
        *("depth_decay", "layers", "num_layers", "draft_vocab_size", "intermediate_size", "num_anchors"),
        *("hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("sample_from_anchor", "mask_token", "position_weights", "start_from"),
    }
)
"""Settings of the `train` section that some methods alone read."""


_RATE, _RATE_WIDTH = 3e-3, 160  # found on the built-in target; other widths follow the rule of 1 / width


def _check_layers(layers: Sequence[int] | None, num: int) -> None:
    """Refuse layers that the target does not have."""
    wrong = next((layer for layer in layers or () if layer >= num), None)
    if wrong is not None:
        message = f"there are no hidden states of layer `{wrong}`: the target has {num} layers, counted from 0"
        raise UsageError(message, f"name layers from 0 to {num - 1} with --layers")


class TrainingMethod(ABC):
    """How one kind of draft is trained.

    Attributes:
        name: in recipes and on the command line.
        drafts_with: the drafting method that runs the folder; None for a folder with a plain language model.
        own_settings: those of `OWN_SETTINGS` that it reads.
        starts_trained: whether the network begins as a trained model.
        usual_loss: the loss that it trains with unless the settings name one.
        has_confidence: whether the draft predicts what is accepted, in DSpark's format.

    Raises:
        UsageError: the settings have one that it does not read.
    """

    name: ClassVar[str]
    drafts_with: ClassVar[str | None]
    own_settings: ClassVar[frozenset[str]] = frozenset()
    starts_trained: ClassVar[bool] = False
    usual_loss: ClassVar[str] = "kl"
    has_confidence: ClassVar[bool] = False

    def __init__(self, settings: Train, target: TrainingTarget) -> None:
        self.check(settings)
        size, most = settings.draft_vocab_size, target.lm.vocab_size
        if size is not None and size > most:
            raise UsageError(
                f"`--draft-vocab-size {size}` is more than the target's {most} tokens", "give fewer tokens"
            )
        _check_layers(settings.layers, target.num_layers)
        self.settings, self.target = settings, target

    @classmethod
    def check(cls, settings: Train) -> None:
        """Refuse settings that the method does not read, whatever the target is.

        Raises:
            UsageError: there is such a setting.
        """
        usual = type(settings)()
        for name in sorted(OWN_SETTINGS - cls.own_settings):
            if getattr(settings, name) != getattr(usual, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"`train.{name}` has no meaning for the method `{cls.name}`", f"leave out {flag}")

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: the settings', or 3e-3 at a width of 160 and less in proportion for wider targets.

        A tenth of it for a model that is trained already. It stays between 1e-5 and 3e-3.
        """
        usual = _RATE * min(1.0, _RATE_WIDTH / self.target.hidden_size) / (10 if self.starts_trained else 1)
        return self.settings.learning_rate or max(1e-5, usual)

    @property
    def loss(self) -> str:
        """The loss's name: the settings', or the method's usual one."""
        return self.settings.loss or self.usual_loss

    @property
    def taps(self) -> Sequence[Tap]:
        """Hidden states of the target that a batch must bring, in this order; none by default.

        Raises:
            UsageError: the target has no such layers.
        """
        return ()

    @property
    def drafted(self) -> Tensor | None:
        """Tokens [D] int64 that the draft can draft, once `prepare` has seen the samples; None for all."""
        return None

    @property
    @abstractmethod
    def depth(self) -> int:
        """Tokens that the draft learns to draft one behind the other; k of the evaluation."""

    @property
    def rows_per_token(self) -> float:
        """Rows that the network computes for each token of a sample, at most; 1 by default."""
        return 1.0

    def operations_per_token(self, num_trained: int) -> float:
        """Floating-point operations of the network forward and back for each token of a sample, at most."""
        return 6.0 * num_trained * self.rows_per_token

    def prepare(self, samples: Sequence[Sample]) -> None:  # noqa: B027 - most methods need no look
        """Look at all samples once before `build`, for example to count tokens for a draft vocabulary."""

    @abstractmethod
    def build(self) -> DraftModule:
        """The network with its first weights, in float32 on the target's device; the same for the same seed."""

    @abstractmethod
    def save(self, module: DraftModule, folder: Path) -> None:
        """Write the draft in its published format: configuration, safetensors, tokenizer files where it needs them.

        Args:
            module: as `build` made it, without accelerate's wrapper.
            folder: exists.
        """

    def settled(self) -> dict[str, Any]:
        """The settings that the method chose by itself, such as sizes, for the model card and `--dry-run`."""
        return {}
