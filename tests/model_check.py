"""Decodes one checkpoint every way and compares each with transformers' own text and logits.

`benchmarks/every_model.py` runs it over all model types, `tests/test_every_model.py` over a dozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from every_type import VOCAB, load_reference, save_noisy
from tiny_engine import ngram, tiny_engine, tiny_lm, tokens
from torch import Tensor

from specdec_cli.errors import SpecdecError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.sampling.params import SamplingParams

NUM_NEW = 24
# Ragged, the longest beyond every window (11) and chunk (16), the second one a repetition that an n-gram draft finds.
PROMPTS = [
    [5, 17, 80],
    [44, 12, 71, 44, 12, 71, 44, 12, 71, 44, 12, 71, 13, 44, 12],
    [(7 * i * i + 3 * i) % 89 + 5 for i in range(41)],
]
# Logits this near to each other may swap places by a rounding.
NEAR = {"float32": 2e-4, "bfloat16": 0.15}
MOST_ERROR = 5e-3
DRAFTS = ("random", "itself", "noisy", "ngram")


@dataclass
class Outcome:
    """The result for one model type.

    Args:
        plain: `equal`, `near tie`, `wrong`, `refused` or `crash`.
        draft: the same of the model as draft of itself and of its noisy copy.
        bfloat16: `equal` where speculative text is plain text, `near tie`, `wrong`, or why it was not run.
        reason: of a refusal, or what differs.
        decoder: whose forward ran.
        error: the largest relative error of whole texts' logits, float32.
        acceptance: rate of drafted tokens accepted, by draft.
        against_bfloat16: tokens per text before transformers' bfloat16 text takes another way; None where it does not.
        has_checkpoint: a checkpoint could be made here; otherwise the configuration alone was tried.
    """

    plain: str = "crash"
    draft: str = ""
    bfloat16: str = ""
    reason: str = ""
    decoder: str = ""
    error: float | None = None
    acceptance: dict[str, float] = field(default_factory=dict)
    against_bfloat16: list[int | None] = field(default_factory=list)
    has_checkpoint: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            key: value for key, value in asdict(self).items() if value not in ("", None, [], {}) and value is not True
        }


def check(folder: Path, has_bfloat16: bool = True) -> Outcome:
    """Load, decode and compare a checkpoint; `every_type.save_tiny` made it.

    Args:
        folder: with the checkpoint; one without weights is asked for its refusal alone.
        has_bfloat16: compare plain and speculative text in bfloat16 as well.
    """
    found = Outcome()
    try:
        target = load_lm(str(folder), dtype="float32", max_num_seqs=8)
    except SpecdecError as error:
        found.plain, found.reason = "refused", error.message
        doctors = doctors_words(folder)
        if doctors != error.message:
            found.plain, found.reason = "wrong", f"{error.message}; doctor says: {doctors}"
        return found
    assert doctors_words(folder) == "it runs", "doctor refuses what loads"
    found.decoder = target.decoder
    reference = load_reference(folder, torch.float32)
    plain = decoded(target, None)[0]
    texts, parts = right_texts(reference, plain)
    found.error = logits_error(reference, target, texts)
    drafts = drafts_of(folder, "float32")
    found.plain, said = compare(reference, texts, plain, "float32")
    parts += [f"plain: {said}"] if said else []
    if found.error > MOST_ERROR:
        found.plain = "wrong"
        parts.append(f"logits differ by {found.error:.2g}")
    verdicts = []
    for name, draft in drafts.items():
        one, found.acceptance[name] = decoded(target, draft, is_repeated=name == "noisy")
        verdict, said = compare(reference, texts, one, "float32")
        verdicts.append(verdict)
        parts += [f"{name}: {said}"] if said else []
    if found.acceptance["itself"] < 0.9:
        parts.append(f"of its own drafts {found.acceptance['itself']:.2f} are accepted")
        verdicts.append("wrong")
    found.draft = worst(verdicts)
    if has_bfloat16:
        found.bfloat16, said, found.against_bfloat16 = in_bfloat16(folder)
        parts += [f"bfloat16: {said}"] if said else []
    found.reason = "; ".join(parts)
    return found


def right_texts(reference: Any, plain: Sequence[list[int]]) -> tuple[list[list[int]], list[str]]:
    """What transformers continues the prompts with, and a note where that is not its `generate`.

    Where its `generate` fails, or differs from ours, its forward over whole texts is asked.
    """
    try:
        texts = [greedy(reference, prompt) for prompt in PROMPTS]
    except AttributeError:
        return [greedy_of_whole_texts(reference, prompt) for prompt in PROMPTS], ["transformers' generate fails"]
    if plain != texts and (whole := [greedy_of_whole_texts(reference, prompt) for prompt in PROMPTS]) != texts:
        return whole, ["transformers' generate differs from its own logits of whole texts"]
    return texts, []


def doctors_words(folder: Path) -> str:
    """The refusal of `doctor`, or that it would run the model."""
    try:
        describe(str(folder), dtype="float32")
    except SpecdecError as error:
        return error.message
    return "it runs"


def drafts_of(folder: Path, dtype: str, names: Sequence[str] = DRAFTS) -> dict[str, Any]:
    """Drafts for a target: a stranger, itself, itself with noise, and n-grams."""
    beside = folder.parent / f"{folder.name}-drafts"
    made: dict[str, Callable[[], Any]] = {
        "random": lambda: tiny_lm(beside, "llama", seed=9, dtype=dtype),
        "itself": lambda: load_lm(str(folder), dtype=dtype),
        "noisy": lambda: load_lm(str(save_noisy(folder, beside / "noisy")), dtype=dtype),
        "ngram": lambda: "ngram",
    }
    return {name: made[name]() for name in names}


def decoded(
    target: TransformersLM, draft: Any, k: int = 4, *, is_repeated: bool = True
) -> tuple[list[list[int]], float]:
    """Text of each prompt, in company and once more from cached prefixes, and the share of drafted tokens accepted.

    Prompts come in chunks of eight tokens; an engine of its own begins with an empty cache.

    Raises:
        AssertionError: the second time gives another text.
    """
    made = ngram() if draft == "ngram" else draft
    engine = tiny_engine(target, made, k, max_num_batched_tokens=24, prefill_chunk=8, prefix_caching=True)
    params = SamplingParams(max_new_tokens=NUM_NEW)
    first = engine.generate([list(prompt) for prompt in PROMPTS], params)
    if is_repeated:
        again = engine.generate([list(prompt) for prompt in reversed(PROMPTS)], params)
        assert tokens(again)[::-1] == tokens(first), "a cached prefix gives another text"
    counts = [output.speculative for output in first]
    drafted = sum(one.num_draft_tokens for one in counts)
    return tokens(first), sum(one.num_accepted_tokens for one in counts) / drafted if drafted else 0.0


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """What transformers' `generate(do_sample=False)` continues a prompt with."""
    ids = torch.tensor([list(prompt)])
    settings = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0, "eos_token_id": -1}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return list(found[0, len(prompt) :].tolist())


def greedy_of_whole_texts(model: Any, prompt: Sequence[int]) -> list[int]:
    """The same by one forward of the whole text for each token, without a cache."""
    text = list(prompt)
    for _ in range(NUM_NEW):
        text.append(int(whole_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def whole_logits(model: Any, text: Sequence[int]) -> Tensor:
    """Logits [n, V] of a whole text by transformers' forward without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].float()
    return logits


def logits_error(reference: Any, target: TransformersLM, texts: Sequence[Sequence[int]]) -> float:
    """The largest relative error over whole texts, which our side reads in ragged pieces, cut back in between."""
    contexts = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    found: list[list[Tensor]] = [[] for _ in contexts]
    stops = [0] * len(contexts)
    for turn in range(64):
        rows = []
        for i, context in enumerate(contexts):
            count = min(1 + (turn + 2 * i) % 5, len(context) - stops[i])
            if count:
                stops[i] += count
                rows.append((i, count))
        if not rows:
            break
        # Wrong tokens first, as a draft would have them; the next forward cuts them back.
        target.score([Row(i, [*contexts[i][: stops[i] - n], *[(7 * turn + i) % VOCAB] * n], n) for i, n in rows])
        parts = target.score([Row(i, contexts[i][: stops[i]], n) for i, n in rows]).split([n for _, n in rows])
        for (i, _), part in zip(rows, parts, strict=True):
            found[i].append(part)
    for i in range(len(contexts)):
        target.release(i)
    pairs = zip(found, contexts, strict=True)
    return max(relative_error(torch.cat(parts), whole_logits(reference, context)) for parts, context in pairs)


def compare(reference: Any, right: Sequence[list[int]], found: Sequence[list[int]], dtype: str) -> tuple[str, str]:
    """`equal`, `near tie` or `wrong`, and where texts part."""
    verdicts, said = [], []
    for i, (one, other) in enumerate(zip(right, found, strict=True)):
        if one == other:
            continue
        place = next((j for j, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            verdicts.append("wrong")
            said.append(f"text {i} has {len(other)} tokens instead of {len(one)}")
            continue
        logits = whole_logits(reference, [*PROMPTS[i], *one[:place]])[-1]
        gap = float(logits[one[place]] - logits[other[place]]) / max(float(logits.std()), 1e-9)
        verdicts.append("near tie" if abs(gap) < NEAR[dtype] else "wrong")
        said.append(f"text {i} parts at token {place} by {gap:.2g} standard deviations")
    return worst(verdicts), ", ".join(said)


def worst(verdicts: Sequence[str]) -> str:
    """The worst of some verdicts."""
    return next((one for one in ("wrong", "near tie") if one in verdicts), "equal")


def in_bfloat16(folder: Path) -> tuple[str, str, list[int | None]]:
    """Whether speculative text is plain text, and where plain text leaves transformers' own."""
    try:
        target = load_lm(str(folder), dtype="bfloat16")
    except SpecdecError as error:
        return "refused", error.message, []
    reference = load_reference(folder, torch.bfloat16)
    plain, _ = decoded(target, None, is_repeated=False)
    verdicts, parts = [], []
    for name, draft in drafts_of(folder, "bfloat16", ("noisy", "ngram")).items():
        verdict, said = compare(reference, plain, decoded(target, draft, is_repeated=False)[0], "bfloat16")
        verdicts.append(verdict)
        parts += [f"{name}: {said}"] if said else []
    ways = [greedy(reference, prompt) for prompt in PROMPTS]
    verdict, said = compare(reference, ways, plain, "bfloat16")
    if verdict == "wrong":
        parts.append(f"against transformers: {said}")
    parted = [
        next((j for j, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        for one, other in zip(ways, plain, strict=True)
    ]
    return worst(verdicts), "; ".join(parts), parted


def has_weights(folder: Path) -> bool:
    """Whether a checkpoint could be made here."""
    return bool(list(folder.glob("*.safetensors")))
