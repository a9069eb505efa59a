"""Bit for bit: in bfloat16 and int8 a draft changes nothing, not even where two logits nearly tie."""

from typing import ClassVar

import pytest
import torch
from invariance import known_invariance
from tiny_engine import PROMPTS, Checked, alone, decode, drafter, ngram, tiny_lm, tokens

from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.stepper import Stepper
from specdec_cli.sampling.params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module", autouse=True)
def _invariant_kernels() -> None:
    broken = [check.kernel for check in known_invariance(torch.bfloat16) if check.needed and not check.holds]
    if broken:
        pytest.skip(f"this machine's kernels are not row-invariant in bfloat16: {', '.join(broken)}")


@pytest.fixture(scope="module", params=["none", "int8"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bits")
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return tuple(tiny_lm(folder, "llama", seed=3, dtype="bfloat16", quantize=request.param, **shape) for _ in range(2))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory):
    """A draft whose guesses are nearly all refused."""
    return tiny_lm(tmp_path_factory.mktemp("stranger"), seed=9, dtype="bfloat16", num_hidden_layers=1)


@pytest.fixture(scope="module")
def plain(models):
    """Decoded alone, without a draft."""
    return [tokens(decode(models[0], None, 0, [prompt], PARAMS))[0] for prompt in PROMPTS]


class Recorded(Stepper):
    """Keeps the logits that every emitted token was chosen from, by sequence."""

    logits: ClassVar[dict[int, list[torch.Tensor]]] = {}

    @classmethod
    def of(cls, engine: Engine) -> "Recorded":
        cls.logits.clear()
        return cls(engine.target, engine.drafters.propose, engine.num_tokens)

    def verify(self, rows, logits, decided=()):
        super().verify(rows, logits, decided)
        for row in rows:
            first = row.first_place
            places = [first, *(first + node + 1 for node in row.verdict.path)][: row.sequence.room]
            self.logits.setdefault(row.sequence.id, []).append(logits[places].clone())


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize("size", range(1, 5))
@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_with_a_draft_is_the_plain_text(models, plain, k, size) -> None:
    target, itself = models
    for draft in (itself, ngram()):
        assert tokens(decode(target, draft, k, PROMPTS[-size:], PARAMS)) == plain[-size:]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_greedy_text_with_a_stranger_is_the_plain_text(models, stranger, plain, k: int) -> None:
    assert tokens(decode(models[0], stranger, k, PROMPTS, PARAMS)) == plain


def logits_of(target, draft, prompts, k: int, tree: str | None = None):
    """The logits that each prompt's tokens were chosen from."""
    engine = Checked(target, draft, None, EngineOptions(num_speculative_tokens=k, tree=tree))
    engine._stepper = Recorded.of(engine)
    engine.generate(prompts, PARAMS)
    return [torch.cat(rows) for rows in Recorded.logits.values()]


def check_bits(target, itself, ways) -> None:
    expected = [logits_of(target, drafter(None), [prompt], 0)[0] for prompt in PROMPTS]
    for way in ways:
        for draft in (drafter(itself), ngram()):
            found = logits_of(target, draft, PROMPTS, **way)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_logits_are_the_same_bits(models) -> None:
    target, itself = models
    check_bits(target, itself, [{"k": k} for k in (1, 4, 7)])


TREES = ("4,2,1", "2,2,2,1,1,1", "dynamic:16", "dynamic:60")


def test_logits_are_the_same_bits_with_trees(models) -> None:
    target, itself = models
    check_bits(target, itself, [{"k": 6, "tree": tree} for tree in TREES])


def test_logits_are_the_same_bits_with_trees_in_float32_on_our_own_decoder(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("float32")
    target, itself = (tiny_lm(folder, "qwen3", seed=3) for _ in range(2))
    if target.decoder != "own":
        pytest.skip("our own decoder does not run here")
    check_bits(target, itself, [{"k": 6, "tree": tree} for tree in TREES])


@pytest.mark.parametrize("mode", ["rejection", "block", "gumbel", "exact-match"])
def test_a_sampled_text_alone_and_in_company(models, mode: str) -> None:
    target, itself = models
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=2)
    together = tokens(decode(target, itself, 4, params=params, verify=mode))
    assert together == [
        tokens(decode(target, itself, 4, [prompt], [alone(params, i)], verify=mode))[0]
        for i, prompt in enumerate(PROMPTS)
    ]
