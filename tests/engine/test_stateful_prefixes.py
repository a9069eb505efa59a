"""Prefix caching of models with a state: the text is the same, plain and drafted, however much is shared."""

from pathlib import Path

import pytest
from shortened import mostly_slow
from test_engine_prefixes import BEGIN, PROMPTS, decoded
from tiny_engine import drafter, preempted, tiny_engine, tiny_lm, tokens, transformers_greedy
from tiny_hybrids import EXPERTS, HYBRIDS, save_hybrid

from specdec_cli.lm.load import load_lm
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.sampling.params import SamplingParams

DEFAULT = ["mamba2", "qwen3_5_text"]
REST = [pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS if family not in {*DEFAULT, *EXPERTS}]


@pytest.fixture(scope="module", params=[*DEFAULT, *REST])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, dtype: str = "float32") -> TransformersLM:
    return load_lm(str(folder), dtype=dtype, check=dtype == "float32")


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("method", ["itself", "ngram", "none"])
def test_text_is_the_same_however_much_is_shared(folder: Path, method: str, dtype: str) -> None:
    target = load(folder, dtype)
    draft = load(folder, dtype) if method == "itself" else drafter(method)
    expected, none, _ = decoded(tiny_engine(target, None), PROMPTS)
    assert none == [0] * len(PROMPTS)
    sharing = tiny_engine(target, draft, prefix_caching=True)
    assert decoded(sharing, PROMPTS)[0] == expected
    again, num_cached, num_fed = decoded(sharing, PROMPTS)
    assert again == expected
    assert num_cached == [48, 48, 32, 48, 48, 48], "as of any other model, and a token is left to feed"
    assert num_fed == sum(map(len, PROMPTS)) - sum(num_cached)
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert decoded(sharing, [prompt])[0] == [text]


def test_few_snapshots_change_no_token(folder: Path, tmp_path: Path) -> None:
    target, stranger = load(folder), tiny_lm(tmp_path, seed=3)
    expected = decoded(tiny_engine(target, None), PROMPTS)[0]
    target.hold(target.num_blocks, num_prefix_states=2)
    engine = tiny_engine(target, stranger, prefix_caching=True)
    assert [decoded(engine, PROMPTS)[0] for _ in range(2)] == [expected] * 2
    decoded(engine, [PROMPTS[1]])
    assert decoded(engine, [PROMPTS[1]])[1] == [48], "the newest two are kept"


def test_a_chat_goes_on_from_its_last_turn(folder: Path) -> None:
    engine, plain = tiny_engine(load(folder), load(folder), prefix_caching=True), tiny_engine(load(folder), None)
    (answer,), _, _ = decoded(engine, [BEGIN])
    turn = [*BEGIN, *answer, 3, 4, 5]
    text, (num_cached,), _ = decoded(engine, [turn])
    assert num_cached == (len(BEGIN) + len(answer) - 1) // 16 * 16
    assert text == decoded(plain, [turn])[0]
    assert decoded(engine, [BEGIN], "another salt")[1] == [0]


def test_preemption_and_abort_lose_no_snapshot(folder: Path) -> None:
    target, draft = (load_lm(str(folder), num_blocks=18, block_size=4) for _ in range(2))
    engine, num_preemptions = tiny_engine(target, draft, max_num_seqs=4, prefix_caching=True), 0
    prompts = [[*BEGIN[:20], last] for last in (3, 4, 5, 6)]
    for _ in range(2):
        found, num = preempted(engine, SamplingParams(max_new_tokens=24), prompts)
        num_preemptions += num
        assert tokens(found) == transformers_greedy(folder, prompts)
        engine.abort(engine.add(prompts[0], SamplingParams(max_new_tokens=24)))
        sequence = engine.add(prompts[1], SamplingParams(max_new_tokens=24))
        engine.step()
        engine.abort(sequence)
        target.check_integrity()
    assert num_preemptions > 0
    assert decoded(engine, prompts[:1])[1] == [20]
