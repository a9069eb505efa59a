"""Tiny cases of training: a target, batches of its text, and a few steps of a method that fit one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_engine import PROMPTS, decode, letter_tokenizer, tokens
from tiny_heads import EPSILON
from tiny_models import make_tiny

from specdec_cli.engine.outputs import Output
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.recipe.schema import Train
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.features import TargetFeatures
from specdec_cli.train.method import DraftModule, TrainingMethod
from specdec_cli.train.methods import training_method
from specdec_cli.train.samples import Sample, TrainingBatch
from specdec_cli.train.target import TrainingTarget

NUM_EMITTED = 40


def training_lm(folder: Path, num_layers: int = 6) -> TransformersLM:
    """A tiny random target with a tokenizer."""
    made = make_tiny("llama", folder, 1, num_hidden_layers=num_layers, rms_norm_eps=EPSILON)
    letter_tokenizer().save_pretrained(made)
    return load_lm(str(made), block_size=4, max_num_seqs=4, check=False)


def method_of(lm: TransformersLM, name: str, **settings: Any) -> TrainingMethod:
    """A training method for a target."""
    return training_method(name)(Train(method=name, **settings), TrainingTarget.of(lm))


def samples_of(lengths: Sequence[tuple[int, int]] = ((9, 23), (4, 15)), seed: int = 3) -> list[Sample]:
    """Random samples: of each, the prompt's length and the whole length."""
    generator = torch.Generator().manual_seed(seed)
    return [Sample(torch.randint(2, 90, (whole,), generator=generator).tolist(), num) for num, whole in lengths]


def batch_of(lm: TransformersLM, method: TrainingMethod, samples: Sequence[Sample]) -> TrainingBatch:
    """A batch with what the target says."""
    return TargetFeatures(lm, method.taps, method.drafted).batch(samples)


def own_sample(lm: TransformersLM) -> Sample:
    """A prompt with the target's own greedy answer."""
    prompt = PROMPTS[1]
    answer = tokens(decode(lm, None, 0, [prompt], params=SamplingParams(max_new_tokens=NUM_EMITTED)))[0]
    return Sample([*prompt, *answer], len(prompt))


def fitted(
    lm: TransformersLM, method: TrainingMethod, sample: Sample, folder: Path, steps: int = 100, rate: float = 0.01
) -> DraftModule:
    """A draft that was fitted to one sample and written to a folder.

    The target is random, and so nearly undecided everywhere: its logits are sharpened until they name its own answer.
    """
    method.prepare([sample])
    module, batch = method.build(), batch_of(lm, method, [sample])
    batch = replace(batch, logits=100 * batch.logits)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        module(batch).value.backward()
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    method.save(module, folder)
    return module


def drafted_text(lm: TransformersLM, drafter: Any, sample: Sample, k: int) -> Output:
    """The engine's greedy answer to a sample's prompt with a draft; shorter than the sample, so that k tokens fit."""
    prompt = list(sample.tokens[: sample.num_prompt_tokens])
    params = SamplingParams(max_new_tokens=NUM_EMITTED - k - 2)
    [found] = decode(lm, drafter, k, [prompt], params=params)
    assert found.token_ids == list(sample.tokens[len(prompt) : len(prompt) + NUM_EMITTED - k - 2])
    return found
