"""Engines of tiny random checkpoints for tests: a target, a draft, and what transformers itself would decode."""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, make_tiny
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typed import stand_in

from specdec_cli import drafters
from specdec_cli.drafters.contract import Drafter, Resources
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.outputs import Output, Outputs
from specdec_cli.events import Event, Noticed, Stepped
from specdec_cli.lm.files.lengths import long_rope_threshold
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.recipe.values import Quantize
from specdec_cli.sampling.params import SamplingParams

# What an n-gram draft finds something in: the last tokens stood before.
PROMPTS = [
    [5, 17, 80],
    [3, 9, 27, 81, 52, 60, 3, 9, 27],
    [44, 2, 71, 44, 2, 71, 44, 2, 71, 44, 2, 71, 13, 44, 2],
    [(7 * i * i + 3 * i) % 89 + 2 for i in range(29)],
]


def tiny_lm(
    folder: str | Path,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "auto",
    quantize: Quantize = "none",
    **shape: int,
) -> TransformersLM:
    """A tiny random checkpoint, saved and loaded."""
    name = Path(folder) / f"{family}-{seed}-{'-'.join(map(str, shape.values()))}"
    return load_lm(str(make_tiny(family, name, seed, **shape)), dtype=dtype, quantize=quantize)


def step_of(engine: Engine) -> Stepped:
    """What the engine's next step told."""
    stepped = engine.step()[0]
    assert isinstance(stepped, Stepped)
    return stepped


def drafter(draft: TransformersLM | str | None, num_tokens: int = VOCAB, **options: int) -> Drafter:
    """A loaded drafter: a draft model, a method's name, or none."""
    if draft is None or isinstance(draft, str):
        method, given = draft or "none", dict[str, Any](options)
    else:
        method, given = "model", {"model": draft.name}
    made = drafters.create(method, given)
    made.load(Resources(stand_in(lambda _: draft), None, num_tokens))
    return made


def self_draft(target: TransformersLM, spec: str, num_tokens: int = VOCAB) -> Drafter:
    """A loaded draft that is made of its target, with as much room as the target has."""
    made = drafters.from_fields(drafters.parse_spec(spec))

    made.load(
        Resources(
            stand_in(None),
            None,
            num_tokens,
            target,
            plan_cache=lambda lm: lm.hold(target.num_blocks, 8, 64),
        )
    )
    return made


def ngram() -> Drafter:
    """A prompt lookup that guesses as often as it can."""
    return drafter("ngram", min=1, max=3)


class Checked(Engine):
    """An engine that looks at the books of both models after every step, and that all is given back when idle."""

    def _step(self) -> list[Event]:
        events = super()._step()
        check_books(self)
        return events


def check_books(engine: Engine) -> None:
    models = [engine.target, getattr(engine.drafter, "_loaded", None)]
    for lm in models:
        if isinstance(lm, TransformersLM):
            lm.check_integrity()
            assert engine.has_work or lm.num_free_blocks == lm.num_blocks, "an idle engine holds blocks"


def tiny_engine(
    target: TransformersLM,
    draft: TransformersLM | Drafter | str | None = None,
    k: int = 4,
    eos_token_ids: Sequence[int] = (),
    goes_ahead: bool = True,
    **options: Any,
) -> Engine:
    """A checked engine without a tokenizer."""
    made = drafter(draft) if draft is None or isinstance(draft, str | TransformersLM) else draft
    spec = EngineOptions(num_speculative_tokens=k, **options)
    return Checked(target, made, None, spec, eos_token_ids, goes_ahead=goes_ahead)


def decode(
    target: TransformersLM,
    draft: TransformersLM | Drafter | str | None = None,
    k: int = 4,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> list[Output]:
    """Decode prompts together."""
    return tiny_engine(target, draft, k, **options).generate(
        [list(prompt) for prompt in prompts], params or SamplingParams(max_new_tokens=24)
    )


def preempted(
    engine: Engine,
    params: SamplingParams | Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **wishes: Any,
) -> tuple[list[Output], int]:
    """The outputs of prompts that run together, and how often one was preempted; no draft fails meanwhile."""
    driver, outputs, num_preemptions = Driver(engine), Outputs(), 0
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for prompt, one in zip(prompts, each, strict=True):
        outputs.add(driver, list(prompt), params=one, **wishes)
    for event in (event for events in driver.steps() for event in events):
        outputs.observe(event)
        assert not isinstance(event, Noticed), "a draft that ran out of blocks would say so"
        num_preemptions += event.num_preemptions if isinstance(event, Stepped) else 0
    check_books(engine)
    return outputs.finished(), num_preemptions


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def alone(params: SamplingParams, index: int) -> SamplingParams:
    """The sampling parameters that a prompt has in company, as one of a list."""
    return replace(params, index=index)


def transformers_greedy(
    folder: str | Path, prompts: Sequence[Sequence[int]], max_new_tokens: int = 24, **options: Any
) -> list[list[int]]:
    """What transformers' own `generate(do_sample=False)` gives each prompt alone, in float32.

    Before transformers 5.23 its kernel leaves out soft-capped scores (Gemma 2), so attention is named, and its cache
    keeps short keys in a long text (Phi-3), so long rope goes without.
    """
    model = AutoModelForCausalLM.from_pretrained(
        os.fspath(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    is_cached = long_rope_threshold(model.config) is None
    settings = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": 0,
        "use_cache": is_cached,
        **options,
    }
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    return found


def letter_tokenizer(*, without: str = "") -> PreTrainedTokenizerFast:
    """A small BPE: letters, digits, a few marks and a few merges; 87 tokens, the first three special."""
    letters = [*string.ascii_letters, *string.digits, *" .,!?'-\n"]
    merges = ["th", "the", "an", "and", "in", "on", "er", "he", "re", "st", " a", " t", "ou", "en"]
    known = ["<s>", "</s>", "<unk>", *letters, *(merge for merge in merges if merge != without)]
    vocabulary = {token: i for i, token in enumerate(known)}
    pairs = [(merge[:-1], merge[-1]) for merge in merges if merge != without]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>"))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
