"""Two trained checkpoints: stories260K drafts for bitstories-3M, as the issue's numbers say."""

import json
from pathlib import Path

import pytest
import torch
from tiny_engine import Checked, drafter, tokens

from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
TARGET, DRAFT = (DATA / "checkpoints" / name for name in ("bitstories-3M", "stories260K"))
PROMPTS = DATA / "prompts" / "tinystories_dev_300.jsonl"
NUM_PROMPTS, NUM_TOKENS = 40, 100

pytestmark = pytest.mark.skipif(
    not (TARGET.is_dir() and DRAFT.is_dir() and PROMPTS.is_file()), reason="needs the shared checkpoints and prompts"
)


@pytest.fixture(scope="module")
def pair():
    return tuple(load_lm(str(path), dtype="float32", max_num_seqs=NUM_PROMPTS) for path in (TARGET, DRAFT))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    with PROMPTS.open(encoding="utf-8") as lines:
        return [json.loads(line)["turns"][0][:200] for line, _ in zip(lines, range(NUM_PROMPTS), strict=False)]


def run(pair, prompts, params, k=1):
    tokenizer = Tokenizer(load_tokenizer(str(TARGET)))
    options = EngineOptions(num_speculative_tokens=k, max_num_seqs=NUM_PROMPTS)
    engine = Checked(pair[0], drafter(pair[1], tokenizer.num_tokens), tokenizer, options, pair[0].eos_token_ids)
    outputs = engine.generate(prompts, params)
    accepted = sum(output.speculative.num_accepted_tokens for output in outputs)
    return outputs, accepted / sum(output.speculative.num_draft_tokens for output in outputs)


@pytest.mark.slow
def test_greedy_acceptance_and_text(pair, prompts) -> None:
    outputs, rate = run(pair, prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert rate == pytest.approx(0.80, abs=0.03)
    found = tokens(outputs)
    assert found == batched_transformers([output.prompt_token_ids for output in outputs])


@pytest.mark.slow
def test_acceptance_at_temperature_one(pair, prompts) -> None:
    """The mean of three seeds: one of them alone has a standard error of 0.015."""
    rates = [run(pair, prompts, SamplingParams(NUM_TOKENS, temperature=1.0, seed=seed))[1] for seed in (1, 2, 3)]
    assert sum(rates) / len(rates) == pytest.approx(0.77, abs=0.03)


def batched_transformers(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy text by transformers' generate, prompts of one length together so that nothing is padded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ends = set(model.generation_config.eos_token_id)
    found: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[i] for i in rows])
        texts = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=min(ends),
        )
        for i, text in zip(rows, texts[:, length:].tolist(), strict=True):
            stop = next((place + 1 for place, token in enumerate(text) if token in ends), len(text))
            found[i] = text[:stop]
    return [found[i] for i in range(len(prompts))]
