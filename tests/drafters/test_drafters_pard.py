"""PARD drafts as they are published: their guesses against transformers' forward, whole texts against the target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import CHANCE, GREEDY, TEXT
from table_loop import Table
from tiny_engine import PROMPTS, Checked, decode, letter_tokenizer, preempted, tokens
from tiny_models import VOCAB, make_tiny
from tiny_pard import MASK, MORE, depth_logits, publish_pard, train_pard
from tree_loop import ALL, sampled_p_value
from typed import not_none

from specdec_cli import drafters
from specdec_cli.drafters import pard
from specdec_cli.drafters.contract import DraftRow, Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.drafts import read_draft
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import LM, Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.measure.audit.table import LMWithoutWeights
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.measure.predict.draft_trace import DepthTrace
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import load
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_pard(tmp_path_factory.mktemp("pard") / "draft")


def loaded(folder: Path, decoder: str = "auto", kind: type = pard.Drafter) -> Any:
    made = kind(str(folder))
    made.load(
        Resources(lambda name: load_lm(name, block_size=4, max_num_seqs=4, check=False, decoder=decoder), None, VOCAB)
    )
    return made


def row(context: Sequence[int], k: int = 4, params: SamplingParams = GREEDY, **more: Any) -> DraftRow:
    return DraftRow(0, list(context), 3, k, params, frozenset(), params.temperature > 0, False, 0.0, **more)


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("params", [GREEDY, CHANCE])
@pytest.mark.parametrize(("family", "decoder"), [("llama", "auto"), ("qwen3", "transformers"), ("gpt2", "auto")])
def test_rounds_draw_from_what_transformers_says(family: str, decoder: str, params, tmp_path: Path) -> None:
    folder = publish_pard(tmp_path / "draft", family)
    drafter = loaded(folder, decoder)
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end in (9, 14, 16, 17, 17):
        guess = drafter.propose([row(TEXT[:end], params=params)])[0]
        expected = depth_logits(folder, TEXT[:end], 4)
        assert len(guess.drafted) == 4
        if params is GREEDY:
            assert list(guess.drafted.tokens) == expected.argmax(-1).tolist()
            assert guess.q is None
        else:
            torch.testing.assert_close(guess.q, expected.softmax(-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:10"])
def test_a_trees_siblings_are_the_likeliest_of_their_depth(folder: Path, tree: str) -> None:
    drafter = loaded(folder)
    guess = drafter.propose([row(TEXT[:9], tree=TreeShape.parse(tree))])[0]
    expected, drafted = depth_logits(folder, TEXT[:9], 4), guess.drafted
    assert len(drafted) > 4
    for node in range(-1, len(drafted)):
        children = [drafted.tokens[one] for one in drafted.children(node)]
        if children:
            assert children == expected[drafted.depth(node)].topk(len(children)).indices.tolist()


def test_a_dynamic_tree_has_the_likeliest_paths(folder: Path) -> None:
    guess = loaded(folder).propose([row(TEXT[:9], 3, tree=TreeShape.parse("dynamic:12"))])[0].drafted
    logs = depth_logits(folder, TEXT[:9], 3).log_softmax(-1)
    scored: list[tuple[tuple[int, ...], float]] = [((a,), float(logs[0, a])) for a in range(VOCAB)]
    scored += [((*path, b), one + float(logs[1, b])) for path, one in list(scored) for b in range(VOCAB)]
    scored += [((*path, c), one + float(logs[2, c])) for path, one in scored[VOCAB:] for c in range(VOCAB) if one > -8]
    best = sorted(scored, key=lambda pair: -pair[1])[:12]
    assert {guess.tokens_to(node) for node in range(12)} == {path for path, _ in best}


@pytest.mark.parametrize("p_min", [0.0, 0.05])
def test_a_dynamic_tree_is_searched_as_if_depth_by_depth(folder: Path, p_min: float) -> None:
    drafter = loaded(folder)
    for seed in range(8):
        wish = replace(row([*TEXT[seed : seed + 9]], 6, tree=TreeShape.parse("dynamic:20")), p_min=p_min)
        plain, edited = (
            drafter.propose([replace(wish, params=replace(GREEDY, logit_bias=bias))])[0].drafted
            for bias in ({}, {0: 0.0})  # a bias of 0 changes nothing but the way
        )
        assert plain == edited


def trained(lm, folder: Path, k: int, num: int = 32, prompts: Sequence[list[int]] = PROMPTS[1:2]) -> list[list[int]]:
    """Fit a draft to what the target says to a prompt; that text."""
    params = SamplingParams(max_new_tokens=num + k + 2)
    texts = [
        [*prompt, *text] for prompt, text in zip(prompts, tokens(decode(lm, None, 0, prompts, params)), strict=True)
    ]
    publish_pard(folder)
    train_pard(folder, texts[0], len(prompts[0]), k)
    return texts


@pytest.fixture(scope="module")
def fitted(lm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("fitted") / "draft"
    return folder, trained(lm, folder, 4)[0]


def test_an_overfitted_draft_is_always_right(lm, fitted) -> None:
    (folder, text), prompt = fitted, PROMPTS[1]
    [found] = decode(lm, loaded(folder), 4, [prompt], params=SamplingParams(max_new_tokens=32))
    assert found.token_ids == text[len(prompt) : len(prompt) + 32]
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


def test_preempted_sequences_go_on_as_before(lm, fitted) -> None:
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=18, check=False)
    expected = tokens(decode(lm, None, 0, params=GREEDY))
    for prefix_caching in (False, True):
        engine = Checked(tight, loaded(fitted[0]), None, EngineOptions(max_num_seqs=4, prefix_caching=prefix_caching))
        found, num = preempted(engine, GREEDY)
        assert num > 0
        assert tokens(found) == expected


class Marginals(LMWithoutWeights):
    """Logits by the last real token and the depth alone, of a table; the mask is the token behind the vocabulary."""

    name, vocab_size, max_context, num_blocks, block_size, num_free_blocks = "marginals", 6, 1 << 20, 1, 1, 1

    def __init__(self, table) -> None:
        self.table = torch.tensor(table, dtype=torch.float32)

    def score(self, rows: Sequence[Row]) -> torch.Tensor:
        found = [self.table[one.context[-1], depth] for one in rows for depth in range(one.num_logits)]
        padding = torch.full((len(found), 2), 9.0)  # what the target has not is likelier than all the rest
        return torch.cat([torch.stack(found), padding], -1)

    def release(self, handle: int) -> None:
        pass


class Chance(pard.Drafter):
    def load_lm(self, resources: Resources) -> LM:
        self._mask = 5
        return resources.load_lm(self.model)


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize(("tree", "verify"), [(None, "rejection"), (None, "block"), ("2,2", "auto"), ("2,2", "gumbel")])
def test_sampled_text_follows_the_target(tree: str | None, verify: str) -> None:
    table = Table.random(num_tokens=4, seed=1, sharpness=2.0)
    drafter = Chance("marginals")
    drafter.load(Resources(lambda _: Marginals(table.q), None, table.num_tokens))
    p_value, length = sampled_p_value(table, drafter, ALL, 1_200, verify, tree)
    assert 1.2 < length < 2.9
    assert p_value > 1e-6


class KeepsMasks(pard.Drafter):
    """Reads its masks as if they were text."""

    def propose(self, rows):
        for one in rows:
            one.context = [*one.context[:-1], MASK, one.context[-1]]
        return super().propose(rows)


class ShiftsDepths(pard.Drafter):
    """Takes the first mask's row for the first token."""

    def _logits(self, rows, depths):
        return [one[1:] for one in super()._logits(rows, [depth + 1 for depth in depths])]


@pytest.mark.parametrize("fault", [KeepsMasks, ShiftsDepths])
def test_planted_faults_are_seen(lm, fitted, fault: type) -> None:
    prompt = PROMPTS[1]
    for kind, is_right in ((pard.Drafter, True), (fault, False)):
        made = loaded(fitted[0], kind=kind)
        [found] = decode(lm, made, 4, [prompt], params=SamplingParams(max_new_tokens=32))
        stats = found.speculative
        assert (stats.num_accepted_tokens == stats.num_draft_tokens) == is_right
        guess = made.propose([row(TEXT[:9])])[0]
        assert (list(guess.drafted.tokens) == depth_logits(fitted[0], TEXT[:9], 4).argmax(-1).tolist()) == is_right


def test_tokens_that_the_target_has_not_are_never_drafted(folder: Path) -> None:
    params = replace(CHANCE, temperature=50.0)
    drafter = loaded(folder)
    for seed in range(20):
        guess = drafter.propose([row(TEXT[:9], 8, replace(params, seed=seed))])[0]
        assert max(guess.drafted.tokens) < VOCAB < MORE
        assert not_none(guess.q).shape == (8, VOCAB)


def test_a_trace_foretells_the_engines_counts(lm, fitted, tmp_path: Path) -> None:
    drafter = loaded(fitted[0])
    for params, rule in ((GREEDY, "greedy"), (replace(CHANCE, temperature=0.5), "gumbel")):
        requests = [Request(PromptRow(i, ""), prompt, replace(params, index=i)) for i, prompt in enumerate(PROMPTS)]
        engine = Engine(lm, drafter, None, EngineOptions(max_num_seqs=4))
        trace = trace_target(engine, requests)
        trace.drafts["pard"] = trace_draft(trace, drafter, 4, target=lm)
        trace.save(tmp_path / rule)
        assert isinstance(load(tmp_path / rule).drafts["pard"], DepthTrace)
        for one in replay(load(tmp_path / rule), "pard", rule, 4):
            outputs = decode(lm, drafter, one.k, params=[request.params for request in requests], verify=rule)
            counts = [found.speculative for found in outputs]
            assert one.num_steps.sum() == sum(each.num_steps for each in counts)
            assert one.num_accepted_tokens.sum() == sum(each.num_accepted_tokens for each in counts)
        assert one.acceptance_length().median > 1
        assert trace.ranks("pard").shape == (trace.num_output_tokens, 4)


def test_a_sampled_trace_has_log_q_by_depth(lm, folder: Path) -> None:
    requests = [Request(PromptRow(0, ""), PROMPTS[1], CHANCE)]
    trace = trace_target(Engine(lm, drafters.create("none", {}), None, EngineOptions()), requests)
    found = trace_draft(trace, loaded(folder), 3)
    assert isinstance(found, DepthTrace)
    [prompt] = trace.prompts
    for start in (1, 2, 9):
        q = depth_logits(folder, [*prompt.token_ids, *prompt.output[:start]], 3).log_softmax(-1)
        expected = [float(q[j, prompt.output[start + j]]) for j in range(3)]
        assert found.log_q[start].tolist() == pytest.approx(expected, abs=1e-4)
    assert found.log_q[len(prompt.output) - 1, 1:].tolist() == [-float("inf")] * 2
    for rule in ("rejection", "block", "exact-match", "gumbel", "one-hot"):
        assert (
            replay(trace, "pard", rule, 3)[-1].num_accepted_tokens.sum() >= 0
            if trace.drafts.setdefault("pard", found)
            else False
        )


def _chance(rule: str, log_q: float, log_p: float) -> float:
    """What a token's place brings to the chance that all up to it are accepted."""
    return {"rejection": min(1.0, exp(log_q - log_p)), "block": exp(log_q - log_p), "exact-match": exp(log_q)}[rule]


def test_an_engine_recognizes_a_pard_draft(lm, folder: Path) -> None:
    for spec in (str(folder), f"pard:model={folder}"):
        engine = Engine.load(lm.name, spec, kv_cache_bytes=1 << 20, check=False)
        assert engine.drafters.own_name == "pard"
        assert engine.drafter.one_pass
    quantized = LoadSettings(draft=ModelSettings(quantize="int8"))
    assert read_draft({"model": str(folder)}, ModelPlan(lm.name), quantized).published, "it is a model of its own"


def test_doctor_says_what_the_folder_holds(lm, folder: Path) -> None:
    pair = preflight(resolve(sets=[f"target.model={lm.name}", f"draft.model={folder}"]).recipe, look())
    assert pair.head == "PARD draft: a `llama` model that drafts all tokens in one pass, by mask token 100"
    assert (pair.draft_method, pair.taps, pair.errors) == ("pard", (), [])
    assert not_none(pair.draft).name == str(folder)
    outlook = not_none(pair.outlook)
    assert outlook.ceiling == pytest.approx((outlook.k + 1) / (1 + outlook.cost_ratio)), "k tokens cost one pass"


@pytest.mark.parametrize(("keys", "said"), [
    ({"pard_token": None}, "has no `pard_token`"),
    ({"pard_token": "mask"}, "has no `pard_token`"),
    ({"pard_token": 500}, "is `500`, and its `vocab_size` is `105`"),
    ({"vocab_size": None}, "`vocab_size` is `None`"),
])  # fmt: skip
def test_a_bad_folder_is_one_sentence(lm, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = publish_pard(tmp_path / "draft", **keys)
    with pytest.raises(UsageError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_another_folder_is_no_pard_draft(lm, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no PARD draft"):
        Engine.load(lm.name, f"pard:model={lm.name}", kv_cache_bytes=1 << 20, check=False)
    other = publish_pard(tmp_path / "other")
    letter_tokenizer(without="the").save_pretrained(other)
    with pytest.raises(UsageError, match=r"tokenizers of target .* differ"):
        Engine.load(lm.name, str(other), kv_cache_bytes=1 << 20, check=False)
    config = json.loads((folder / "config.json").read_text()) | {"spd_type": "another"}
    (other / "config.json").write_text(json.dumps(config))
    assert read_draft({"model": str(other)}, ModelPlan(lm.name), LoadSettings()).published is None
