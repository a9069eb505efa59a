"""A prompt's log-probabilities are the target's own, whatever the pieces, and leave nothing behind."""

from pathlib import Path

import pytest
import torch
from tiny_engine import PROMPTS, drafter, tiny_lm
from transformers import AutoModelForCausalLM

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.scoring import score_prompt
from specdec_cli.errors import UsageError


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_prompt_is_scored_as_transformers_would(tmp_path: Path, chunk: int) -> None:
    lm = tiny_lm(tmp_path, dtype="float32")
    engine = Engine(lm, drafter(None), options=EngineOptions(prefill_chunk=chunk))
    model = AutoModelForCausalLM.from_pretrained(next(tmp_path.iterdir()), dtype=torch.float32)
    tokens = PROMPTS[3]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    found = score_prompt(engine, tokens, 2)
    assert [one.token_id for one in found] == tokens[1:]
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[i, tokens[i + 1]]), abs=1e-4)
        assert [token for token, _ in one.top] == expected[i].topk(2).indices.tolist()
        assert all(value == one.logprob for token, value in one.top if token == one.token_id)
    assert lm.num_free_blocks == lm.num_blocks


def test_a_prompt_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    engine = Engine(tiny_lm(tmp_path), drafter(None))
    for tokens in ([10**6], [3] * 1000):
        with pytest.raises(UsageError):
            score_prompt(engine, tokens, 1)
