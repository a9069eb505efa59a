"""The size of a training run by arithmetic: parameters, memory, tokens and operations, before any weight is read.

The method builds its network as it will, of tensors that have shapes and no numbers (torch's `meta` device).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch
from pydantic import ConfigDict
from torch import Tensor

from specdec_cli.document import Count, Result
from specdec_cli.lm.door import LM
from specdec_cli.lm.facts import ModelFacts
from specdec_cli.lm.files.hub import is_cached
from specdec_cli.lm.files.names import SHAPE, is_local
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.train.methods import training_method
from specdec_cli.train.target import TrainingTarget

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe
    from specdec_cli.train.method import DraftModule, TrainingMethod
    from specdec_cli.train.session import TrainingData

_STATE_BYTES = {"draft": 4, "gradients": 4, "optimizer": 8}  # of a trained parameter: float32, and AdamW's two moments


class TrainingPlan(Result):
    """The size of a run, and the least time that it takes where the device's speed is known."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    num_samples: Count
    """Answers to train on."""
    num_held_out: Count
    """Prompts that acceptance is measured on."""
    num_steps: Count
    num_prompt_tokens: Count
    """Tokens of the prompts of all samples."""
    num_answer_tokens: Count
    """Tokens of all answers, each as long as it may be."""
    num_trained: Count
    """Parameters that are trained."""
    num_target: Count
    """Parameters of the target."""
    memory_bytes: dict[str, Count]
    """By use: the target's weights, the draft's in float32, their gradients, AdamW's moments, frozen copies of the
    target's embedding and output layer, and a batch's hidden states and logits."""
    disk_bytes: dict[str, Count]
    """By use: hidden states, where they are kept, and two checkpoints."""
    operations: float
    """Floating-point operations of all steps: 2 for each of the target's parameters and token, 6 for each of the
    draft's and row."""
    answer_operations: float
    """Floating-point operations of the answers: 2 for each of the target's parameters and token."""
    answer_bytes: float
    """Bytes of the target's weights, as all steps of decoding the answers read them."""
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    """Speed of the device; null where it is not on this machine."""
    answer_seconds: float | None = None
    step_seconds: float | None = None

    def at_speed(self, flops_per_second: float, bytes_per_second: float) -> Self:
        """The plan with its times on a device."""
        times = {
            "flops_per_second": flops_per_second,
            "bytes_per_second": bytes_per_second,
            "answer_seconds": max(self.answer_bytes / bytes_per_second, self.answer_operations / flops_per_second),
            "step_seconds": self.operations / flops_per_second,
        }
        return self.model_copy(update=times)

    @classmethod
    def of_recipe(cls, recipe: Recipe, facts: ModelFacts, data: TrainingData, trust_remote_code: bool) -> TrainingPlan:
        """The plan of a recipe.

        Raises:
            UsageError: the settings do not fit the method or the target.
            RunError: the target's configuration cannot be read, or a model that the method begins with is not there.
        """
        settings = recipe.train
        target = TrainingTarget.of(cast("LM", _MetaLM(facts)), recipe.target.revision, trust_remote_code)
        method = training_method(settings.method)(settings, target)
        taps = (*method.taps, "final") if settings.cache_features else method.taps
        check_taps(facts.name, taps, method.target.config, facts.max_context)
        method.prepare([])
        with torch.device("meta"):
            module = method.build()
        num_trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        texts = _Texts.of(recipe, data, min(facts.max_context, recipe.engine.max_model_len or facts.max_context))
        scored = texts.num_tokens if settings.cache_features else texts.num_seen
        of_features = 2 * texts.num_tokens * len(taps) * method.target.hidden_size if settings.cache_features else 0
        are_answered = not settings.keep_answers
        together = min(texts.num_samples, recipe.engine.max_num_seqs)
        return cls(
            num_samples=texts.num_samples,
            num_held_out=len(data.held_out),
            num_steps=texts.num_steps,
            num_prompt_tokens=texts.num_tokens - texts.num_answer_tokens,
            num_answer_tokens=texts.num_answer_tokens,
            num_trained=num_trained,
            num_target=facts.num_parameters,
            memory_bytes=_memory(method, module, facts, settings.batch_size * texts.longest),
            disk_bytes={"checkpoints": 2 * 12 * num_trained, "hidden_states": of_features},
            operations=2.0 * facts.num_parameters * scored + method.operations_per_token(num_trained) * texts.num_seen,
            answer_operations=2.0 * facts.num_parameters * texts.num_tokens * are_answered,
            answer_bytes=facts.read_bytes * texts.num_answer_tokens / together * are_answered,
        )


def is_here(name: str) -> bool:
    """Whether a model's files are on this machine: its configuration at least."""
    return name.startswith(("builtin:", SHAPE)) or is_local(name) or is_cached(name)


def _memory(method: TrainingMethod, module: DraftModule, facts: ModelFacts, num_tokens: int) -> dict[str, int]:
    """Bytes by their use; a batch has so many tokens."""
    num_trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    copies = 2 + method.rows_per_token  # of logits: the target's twice, and the draft's
    return {
        "target": facts.weights_bytes,
        **{use: size * num_trained for use, size in _STATE_BYTES.items()},
        "frozen": sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        "hidden_states": 4 * num_tokens * len(method.taps) * method.target.hidden_size,
        "logits": int(4 * num_tokens * facts.embedding_size * copies),
    }


@dataclass(frozen=True, slots=True)
class _Texts:
    """How long the samples are, each answer as long as it may be.

    Args:
        num_samples: answers to train on.
        num_tokens: of the samples.
        num_answer_tokens: of these, those of answers.
        longest: tokens of the longest sample.
        num_steps: of the run.
        num_seen: tokens that all steps see.
    """

    num_samples: int
    num_tokens: int
    num_answer_tokens: int
    longest: int
    num_steps: int
    num_seen: float

    @classmethod
    def of(cls, recipe: Recipe, data: TrainingData, max_context: int) -> _Texts:
        """Sizes of a run's samples."""
        settings, lengths = recipe.train, _lengths(data, recipe.sampling.max_new_tokens, max_context)
        num, tokens = len(lengths), sum(map(sum, lengths))
        steps = settings.max_steps or settings.epochs * -(-num // settings.batch_size)
        seen = tokens * steps * min(settings.batch_size, num) / num
        return cls(num, tokens, sum(answer for _, answer in lengths), max(map(sum, lengths)), steps, seen)


def _lengths(data: TrainingData, max_new_tokens: int, max_context: int) -> list[tuple[int, int]]:
    """Maximum tokens of each sample's prompt and answer."""
    lengths = []
    for prompt in data.train:
        if prompt.given is None:
            lengths.append((len(prompt.tokens), min(max_new_tokens, max_context - len(prompt.tokens))))
        else:
            lengths += [(len(sample.tokens) - sample.num_counted, sample.num_counted) for sample in prompt.given]
    return lengths


class _MetaLM:
    """A target without numbers: the sizes and tensors that methods ask for while they build a network."""

    def __init__(self, facts: ModelFacts) -> None:
        self.name, self.vocab_size, self.max_context = facts.name, facts.embedding_size, facts.max_context
        self.device, self.dtype = torch.device("meta"), torch.float32
        self._hidden_size = int(facts.hidden_size or 0)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Input embeddings [n, hidden]."""
        return torch.empty(len(tokens), self._hidden_size, device=self.device)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, V]."""
        return torch.empty(len(hidden), self.vocab_size, device=self.device)
