"""`suffix` and pairs of drafts through the whole engine: what plain decoding says, token for token and by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import feature_drafter
import pytest
import torch
from table_loop import PROMPT, Table
from tiny_engine import PROMPTS, Checked, decode, drafter, ngram, preempted, tiny_engine, tokens
from tiny_models import make_tiny
from tree_loop import masked_probs, table_lm
from typed import stand_in

from specdec_cli.drafters import create, from_fields, suffix
from specdec_cli.drafters.contract import Drafter, Resources
from specdec_cli.drafters.fallback import DraftWithFallback
from specdec_cli.drafters.model import Drafter as ModelDrafter
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.audit.chisquare import chi_square, enumerate_joint
from specdec_cli.sampling.params import SamplingParams

NAMES = ("suffix", "ngram+stranger", "suffix+itself", "ngram+features")
GREEDY = SamplingParams(max_new_tokens=24)
TABLE = Table.random(num_tokens=4, seed=1, sharpness=2.0)
LENGTH, ALARM = 3, 1e-6
SAMPLED = SamplingParams(temperature=1.3, top_k=3, frequency_penalty=0.2, ignore_eos=True)
EAGER = {"min_prob": 0.01, "min_expected": 0.0}


def eager(num_tokens: int) -> Drafter:
    """A suffix draft that guesses as often as it can."""
    made = create("suffix", EAGER)
    made.load(Resources(stand_in(lambda _: None), None, num_tokens))
    return made


@pytest.fixture
def draft(target: Any, stranger: Any, itself: Any) -> Callable[[str], Drafter]:
    def made(name: str) -> Drafter:
        first, _, second = name.partition("+")
        one = ngram() if first == "ngram" else eager(target.vocab_size)
        if not second:
            return one
        if second != "features":
            return DraftWithFallback(one, drafter({"stranger": stranger, "itself": itself}[second]))
        other = feature_drafter.Drafter()
        other.load(Resources(stand_in(lambda _: None), None, target.vocab_size, target))
        return DraftWithFallback(one, other)

    return made


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [{"k": 1}, {"k": 6}, {"k": 2, "tree": "3,2"}, {"k": 4, "tree": "dynamic:9"}], ids=str)
def test_greedy_text_is_that_of_plain_decoding(target: Any, draft: Any, name: str, shape: dict[str, Any]) -> None:
    """Prompts of different lengths, together and with company that changes; a second pass knows the first one's."""
    plain = tokens(decode(target, None, 0, params=GREEDY))
    engine = tiny_engine(target, draft(name), max_num_seqs=3, prefix_caching=True, **shape)
    for _ in range(2):
        outputs = engine.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        assert tokens(outputs) == plain
    assert not engine.drafters.num_failures[engine.drafters.own_name], "no guess broke the contract"
    lengths = [output.speculative.acceptance_length or 1 for output in outputs]
    assert min(lengths) > (1.4 if name.startswith("suffix") else 0.9), "outputs of the first pass are guessed"


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("name", NAMES[:3])
def test_gumbel_text_does_not_depend_on_the_draft(target: Any, draft: Any, name: str) -> None:
    params = replace(GREEDY, temperature=0.9, seed=11, top_k=40, presence_penalty=0.4)
    plain = tokens(decode(target, None, 0, params=params, verify="gumbel"))
    for shape in ({"k": 4}, {"k": 3, "tree": "2,2,1"}):
        engine = tiny_engine(target, draft(name), verify="gumbel", max_num_seqs=3, prefix_caching=True, **shape)
        for _ in range(2):
            assert tokens(engine.generate([list(prompt) for prompt in PROMPTS], params)) == plain


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("spec", ["suffix:min_expected=0,min_prob=0.05", "ngram:max=3,min=1+model"])
def test_a_preempted_text_is_the_same(folder: Path, spec: str, prefix_caching: bool) -> None:
    checkpoint = str(make_tiny("llama", folder / "pairs", 1))

    def run(num_blocks: int, made: Drafter | None, **options: Any) -> tuple[list[list[int]], int]:
        target = load_lm(checkpoint, max_num_seqs=4, block_size=4, kv_cache_bytes=256 * 4 * num_blocks)
        engine = Checked(target, made or drafter("none"), None, EngineOptions(max_num_seqs=4, **options))
        found, num_preemptions = preempted(engine, GREEDY)
        return tokens(found), num_preemptions

    def loaded() -> Drafter:
        first, _, second = spec.partition("+")
        fields = {"first": first, "model": "draft"} if second else None
        made = from_fields(fields) if fields else create("suffix", EAGER)
        lm = load_lm(checkpoint, max_num_seqs=4, block_size=4, kv_cache_bytes=256 * 4 * 18)
        made.load(Resources(stand_in(lambda _: lm), None, lm.vocab_size))
        return made

    plain, _ = run(200, None)
    tight, some = run(18, loaded(), prefix_caching=prefix_caching)
    assert tight == plain
    assert some > 0


def pair(first: str, **options: Any) -> Engine:
    """An n-gram or suffix draft before a model that draws, on tables."""
    made = create(first, EAGER if first == "suffix" else {"min": 1})
    other = ModelDrafter("table")
    both = DraftWithFallback(made, other)
    both.load(Resources(lambda _: table_lm(TABLE.q), None, TABLE.num_tokens))
    return Engine(table_lm(TABLE.p), both, options=EngineOptions(max_num_seqs=256, **options))


def drawn(engine: Engine, num: int, salts: bool = False) -> tuple[Counter[tuple[int, ...]], SpeculativeCounts]:
    """The first tokens of so many requests."""
    params, counts = replace(SAMPLED, max_new_tokens=LENGTH + 4), SpeculativeCounts()
    with Driver(engine) as driver:
        texts: dict[int, list[int]] = {}
        for i in range(num):
            salt = str(i) if salts else ""
            texts[driver.add([*PROMPT, *PROMPT], replace(params, index=i), cache_salt=salt)] = []
        for event in (event for events in driver.steps() for event in events):
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                counts.add(emitted)
                texts[emitted.sequence_id] += emitted.tokens
    return Counter(tuple(text[:LENGTH]) for text in texts.values()), counts


def p_value(found: Counter[tuple[int, ...]]) -> float:
    prompt = (*PROMPT, *PROMPT)
    return chi_square(found, enumerate_joint(lambda text: masked_probs(TABLE, SAMPLED, text), prompt, LENGTH)).p_value


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize(("first", "options"), [
    ("ngram", {"num_speculative_tokens": 3}),
    ("ngram", {"num_speculative_tokens": 2, "tree": "2,2"}),
    ("suffix", {"num_speculative_tokens": 3, "tree": "dynamic:4"}),
    ("suffix", {"num_speculative_tokens": 3, "verify": "rejection"}),
])  # fmt: skip
def test_samples_of_a_pair_follow_the_target(first: str, options: dict[str, Any]) -> None:
    """Some guesses come with q, some are one-hot, in one batch and one after the other."""
    found, counts = drawn(pair(first, **options), 1_500)
    assert 1.1 < (counts.acceptance_length or 0) < 3.9
    assert p_value(found) > ALARM


class EverythingDrawn(DraftWithFallback):
    """Guesses of the first draft are judged as if the second one had drawn them."""

    def propose(self, rows: Any) -> Any:
        guesses = super().propose(rows)
        others = self.second.propose(rows)
        for guess, other in zip(guesses, others, strict=True):
            if guess.q is None and len(guess.drafted) == len(other.drafted) and other.q is not None:
                its = other.q.gather(1, torch.tensor(guess.drafted.tokens)[:, None])
                guess.q = other.q if its.all() else None
        return guesses


def test_a_one_hot_guess_with_the_other_drafts_q_is_seen() -> None:
    engine = pair("ngram", num_speculative_tokens=3, verify="rejection")
    engine.drafters.by_name["ngram+model"].__class__ = EverythingDrawn
    assert p_value(drawn(engine, 1_500)[0]) < ALARM


def repeated(num: int) -> float:
    """Requests that come again with their seeds: the second texts' p-value."""
    made = eager(TABLE.num_tokens)
    options = EngineOptions(num_speculative_tokens=3, max_num_seqs=256, prefix_caching=True, verify="rejection")
    engine = Engine(table_lm(TABLE.p), made, options=options)
    drawn(engine, num, salts=True)
    return p_value(drawn(engine, num, salts=True)[0])


@pytest.mark.slow
def test_an_output_of_the_same_noise_is_not_guessed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated(1_500) > ALARM
    monkeypatch.setattr(suffix._Outputs, "of", _whatever_noise)
    assert repeated(1_500) < ALARM


def _whatever_noise(outputs: Any, salt: str | None, _: Any) -> Any:
    shared = outputs._by_salt.get(salt)
    return None if shared is None else shared.index


class FeaturesOfSkippedSteps(DraftWithFallback):
    """Features of steps in which the first draft guessed are lost."""

    def _keep_features(self, row: Any) -> None:
        self._features.pop(row.handle, None)
        super()._keep_features(row)


def test_lost_features_are_seen(target: Any, draft: Any) -> None:
    engine = tiny_engine(target, draft("ngram+features"), 4)
    engine.drafters.by_name[engine.drafters.own_name].__class__ = FeaturesOfSkippedSteps
    engine.generate([list(prompt) for prompt in PROMPTS], replace(GREEDY, temperature=1.0))
    assert engine.drafters.num_failures[engine.drafters.own_name]
