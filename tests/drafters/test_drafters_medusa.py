"""Medusa heads as they are published: guesses against the formulas, and whole texts against the target's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_drafts import CHANCE, FEATURE_FAULTS, GREEDY, TEXT, check_depth_trace, features_of, loaded, row
from safetensors.torch import save_file
from table_loop import Table
from tiny_engine import PROMPTS, Checked, decode, letter_tokenizer, preempted, tokens
from tiny_heads import HIDDEN
from tiny_medusa import NUM_HEADS, converted, medusa_logits, publish_medusa, random_medusa_weights
from tiny_models import VOCAB, make_tiny
from torch import Tensor
from tree_loop import sampled_p_value
from typed import stand_in

from specdec_cli import drafters
from specdec_cli.drafters.contract import DraftRow, Guesses
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.heads.draft_sequences import Ahead
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

FINAL = ("final",)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("target"), 1, num_hidden_layers=3)
    letter_tokenizer().save_pretrained(folder)
    return load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)


@pytest.mark.parametrize("params", [GREEDY, CHANCE])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("form", ["pt", "safetensors", "vllm"])
def test_rounds_draw_from_what_the_formulas_say(lm, form: str, num_layers: int, params, tmp_path: Path) -> None:
    weights = random_medusa_weights(num_layers=num_layers, seed=3)
    keys = {"num_hidden_layers" if form == "vllm" else "medusa_num_layers": num_layers}
    given = converted(weights) if form == "vllm" else weights
    drafter = loaded(lm, publish_medusa(tmp_path / "draft", given, form, **keys))
    assert (drafter.taps, drafter.one_pass, drafter.most_depth) == (FINAL, True, NUM_HEADS)
    states, known = features_of(lm, TEXT, FINAL), 0
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end, k in ((9, 4), (14, 8), (16, 4), (17, 3), (17, 2)):
        features = states[known : end - 1] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, k, params)])[0]
        known, num = end - 1, min(k, NUM_HEADS)
        logits = medusa_logits(weights, states[end - 2 : end - 1, 0], num_layers)[0, :num]
        assert len(guess.drafted) == num, "as many as there are heads"
        if params is GREEDY:
            assert logits.argmax(-1).tolist() == list(guess.drafted.tokens)
            assert guess.q is None
        else:
            torch.testing.assert_close(guess.q, logits.softmax(-1), atol=2e-5, rtol=0)


def test_an_authors_folder_has_the_heads_of_its_file_and_a_converted_one_those_it_names(lm, tmp_path: Path) -> None:
    weights = random_medusa_weights()
    assert loaded(lm, publish_medusa(tmp_path / "two", weights, medusa_num_heads=2)).most_depth == NUM_HEADS
    cut = loaded(lm, publish_medusa(tmp_path / "cut", converted(weights), "vllm", num_heads=2))
    assert cut.most_depth == 2
    assert cut.sizes[0] == 2 * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN), "the others are not kept"


def test_biases_of_a_converted_folder(lm, tmp_path: Path) -> None:
    """They are added where they are stored, as in training, unless the configuration denies them."""
    weights, states = random_medusa_weights(seed=7), features_of(lm, TEXT, FINAL)
    plain = {name: torch.zeros_like(one) if name.endswith("bias") else one for name, one in weights.items()}
    for case, keys, expected in (("unsaid", {}, weights), ("denied", {"medusa_fc_bias": False}, plain)):
        folder = publish_medusa(tmp_path / case, converted(weights), "vllm", **keys)
        if case == "unsaid":
            config = json.loads((folder / "config.json").read_text())
            del config["medusa_fc_bias"]
            (folder / "config.json").write_text(json.dumps(config))
        guess = loaded(lm, folder).propose([row(TEXT[:9], states[:8], params=CHANCE)])[0]
        torch.testing.assert_close(guess.q, medusa_logits(expected, states[7:8, 0])[0].softmax(-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("is_cut", [True, False])
def test_heads_that_share_one_output_layer_over_some_tokens(lm, is_cut: bool, tmp_path: Path) -> None:
    weights, ids = random_medusa_weights(seed=9), torch.tensor([5, 3, 50, 96, 17])
    given = {name: one for name, one in converted(weights).items() if "lm_head" not in name}
    given["lm_heads.0.weight"] = weights["0.1.weight"][ids] if is_cut else weights["0.1.weight"]
    given["token_map"] = ids
    folder = publish_medusa(
        tmp_path / "draft", given, "vllm", original_lm_head=True, truncated_vocab_size=len(ids), num_heads=NUM_HEADS
    )
    states = features_of(lm, TEXT, FINAL)
    guess = loaded(lm, folder).propose([row(TEXT[:9], states[:8], params=CHANCE)])[0]
    shared = {name: weights["0.1.weight"] if name.endswith(".1.weight") else one for name, one in weights.items()}
    q = torch.zeros(NUM_HEADS, VOCAB)
    q[:, ids] = medusa_logits(shared, states[7:8, 0])[0][:, ids].softmax(-1)
    torch.testing.assert_close(guess.q, q, atol=2e-5, rtol=0)


@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:10"])
def test_a_trees_siblings_are_the_likeliest_of_their_depth(lm, tree: str, tmp_path: Path) -> None:
    weights = random_medusa_weights(seed=4)
    drafter, states = loaded(lm, publish_medusa(tmp_path / "draft", weights)), features_of(lm, TEXT, FINAL)
    drafted = drafter.propose([row(TEXT[:9], states[:8], tree=TreeShape.parse(tree))])[0].drafted
    logits = medusa_logits(weights, states[7:8, 0])[0]
    assert len(drafted) > 4
    for node in range(-1, len(drafted)):
        children = [drafted.tokens[one] for one in drafted.children(node)]
        depth = 0 if node < 0 else drafted.depth(node)
        if children:
            assert children == logits[depth].topk(len(children)).indices.tolist()


@pytest.fixture(scope="module")
def fitted(lm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Heads that were fitted to one text in the layout of training, and the text."""
    params = SamplingParams(max_new_tokens=40)
    text = [*PROMPTS[1], *tokens(decode(lm, None, 0, [PROMPTS[1]], params=params))[0]]
    weights = {name: one.requires_grad_() for name, one in random_medusa_weights(seed=8).items()}
    ends = range(len(PROMPTS[1]) - 1, len(text) - 1 - NUM_HEADS)
    states = features_of(lm, text, FINAL)[ends.start : ends.stop, 0]
    wanted = torch.tensor([text[t + 2 : t + 2 + NUM_HEADS] for t in ends])
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(medusa_logits(weights, states).flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    return publish_medusa(tmp_path_factory.mktemp("fitted") / "draft", weights), text


def test_overfitted_heads_are_always_right(lm, fitted) -> None:
    (folder, text), prompt = fitted, PROMPTS[1]
    [found] = decode(lm, loaded(lm, folder), NUM_HEADS, [prompt], params=SamplingParams(max_new_tokens=30))
    assert found.token_ids == text[len(prompt) : len(prompt) + 30]
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


@pytest.mark.parametrize("fault", FEATURE_FAULTS)
def test_planted_faults_are_seen(lm, fitted, fault: str) -> None:
    drafter, prompt = loaded(lm, fitted[0]), PROMPTS[1]
    propose = drafter.propose

    def faulty(rows: Sequence[DraftRow]) -> list[Guesses]:
        found: list[Guesses] = propose([FEATURE_FAULTS[fault](one) for one in rows])
        return found

    drafter.propose = faulty
    [found] = decode(lm, drafter, NUM_HEADS, [prompt], params=SamplingParams(max_new_tokens=30))
    assert found.token_ids == fitted[1][len(prompt) : len(prompt) + 30], "faults cost acceptance alone"
    assert found.speculative.num_accepted_tokens < found.speculative.num_draft_tokens


def test_a_cached_prefix_drafts_as_a_new_one(lm, fitted) -> None:
    drafter, prompt = loaded(lm, fitted[0]), fitted[1][:30]
    first, again = (
        decode(lm, drafter, 4, [prompt], params=SamplingParams(max_new_tokens=12), prefix_caching=True)[0]
        for _ in range(2)
    )
    assert first.token_ids == again.token_ids
    assert first.speculative.acceptance_histogram == again.speculative.acceptance_histogram
    assert drafter.adopt(99, prompt, "") == len(prompt) - 2, "heads need the last state alone"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_sequences_go_on_as_before(lm, fitted, prefix_caching: bool) -> None:
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=18, check=False)
    expected = tokens(decode(lm, None, 0, params=GREEDY))
    drafter = loaded(tight, fitted[0])
    engine = Checked(tight, drafter, None, EngineOptions(max_num_seqs=4, prefix_caching=prefix_caching))
    found, num = preempted(engine, GREEDY)
    assert num > 0
    assert tokens(found) == expected
    assert drafter.sizes[1] == drafter.sequences.weight_bytes, "ended sequences are forgotten"


class TableHeads:
    """Heads by a table: logits by the last token and depth."""

    def __init__(self, table: Any) -> None:
        self.table, self.tokens = torch.tensor(table, dtype=torch.float32), dict[int, int]()
        self.most_tokens, self.is_recorded = 2, False

    def can_draft(self, handle: int) -> bool:
        return True

    def release(self, handle: int) -> None:
        pass

    def feed(self, new: object, depths: object) -> None:
        pass

    def ahead(self, ends: Sequence[tuple[int, int, int]]) -> Ahead:
        return Ahead([self.table[self.tokens[handle], :depth] for handle, _, depth in ends])


class TableDrafter(drafters.get("medusa")):  # type: ignore[misc]
    taps: Any = ()
    is_wrong = False

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        held: Any = self.sequences
        held.tokens = {one.handle: one.context[-1] for one in rows}
        found: list[Guesses] = super().propose(rows)
        for guess in found:
            if self.is_wrong and guess.q is not None:
                guess.q = guess.q.roll(1, -1)
        return found


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(("tree", "verify"), [(None, "rejection"), (None, "block"), ("2,2", "auto")])
def test_sampled_text_follows_the_target(tree: str | None, verify: str, is_wrong: bool) -> None:
    table = Table.random(num_tokens=4, seed=1, sharpness=2.0)
    drafter = TableDrafter("table")
    drafter.is_wrong = is_wrong
    drafter._sequences = stand_in(TableHeads(table.q))
    drafter._num_tokens, drafter._max_context = 4, 1 << 20
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    p_value, length = sampled_p_value(table, drafter, params, 1_500, verify, tree)
    assert length > 1.05
    assert (p_value > 1e-6) is not is_wrong


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_a_trace_foretells_the_engines_counts(lm, fitted, rule: str) -> None:
    params = GREEDY if rule == "greedy" else replace(CHANCE, temperature=0.5)
    check_depth_trace(lm, loaded(lm, fitted[0]), params, 6, rule)


def test_doctor_says_what_the_folder_holds(lm, tmp_path: Path) -> None:
    def found(form: str, weights: dict[str, Tensor], **keys: Any):
        folder = publish_medusa(tmp_path / f"{form}-{'-'.join(keys)}", weights, form, **keys)
        return preflight(resolve(sets=[f"target.model={lm.name}", f"draft.model={folder}"]).recipe, look())

    weights = random_medusa_weights()
    pair = found("pt", weights)
    said = "read the final hidden states; draft up to 4 tokens in one pass; 97 of 97 tokens"
    assert pair.head == f"Medusa heads: {said}"
    assert (pair.draft, pair.draft_method, pair.taps, pair.errors) == (None, "medusa", FINAL, [])
    assert pair.memory["draft"].weights == 4 * sum(one.numel() for one in weights.values())
    assert pair.memory["draft"].kv_planned == 0
    assert found("vllm", converted(weights)).head == f"Medusa heads, vLLM format: {said}"
    [problem] = found("vllm", converted(weights), hidden_size=64).errors
    assert "reads hidden states of width 64" in problem.message


OUTPUTS = [f"{i}.1.weight" for i in range(NUM_HEADS)]
BAD: dict[str, tuple[str, Any, str]] = {
    "a missing tensor": ("pt", lambda c, w: w.pop("1.0.linear.bias"), "lacks the tensor `blocks.1.layers.0.bias`"),
    "a missing head": ("pt", lambda c, w: c.update(medusa_num_heads=5), "lacks the tensor `blocks.4"),
    "a missing block": ("pt", lambda c, w: c.update(medusa_num_layers=2), r"lacks the tensor `blocks.0.layers.1"),
    "a wrong shape": ("pt", lambda c, w: w.update({"2.1.weight": torch.ones(7, HIDDEN)}), r"shape \[7, 32\]"),
    "a stranger": ("safetensors", lambda c, w: w.update({"proj.weight": torch.ones(7)}), "`proj.weight`"),
    "Hydra's input": ("pt", lambda c, w: w.update({"0.0.linear.weight": torch.ones(HIDDEN, 2 * HIDDEN)}), "32, 64"),
    "another width": ("vllm", lambda c, w: c.update(hidden_size=64), "states of width 64, and .* has 32"),
    "another vocabulary": ("vllm", lambda c, w: c.update(vocab_size=500), "made for 500 tokens"),
    "other tokens": ("pt", lambda c, w: w.update(dict.fromkeys(OUTPUTS, torch.ones(50, HIDDEN))), "made for 50 tokens"),
    "no numbers": ("pt", lambda c, w: w["3.1.weight"].fill_(torch.nan), "`lm_heads.3.weight` .* not finite"),
    "no heads": ("pt", lambda c, w: (w.clear(), c.update(medusa_num_heads=0)), "has no heads"),
    "no tokens": ("vllm", lambda c, w: c.update(truncated_vocab_size=5), "lacks the tensor `token_map`|expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence(lm, case: str, tmp_path: Path) -> None:
    form, spoil, said = BAD[case]
    weights = random_medusa_weights(seed=2)
    weights = converted(weights) if form == "vllm" else weights
    folder = publish_medusa(tmp_path / "draft", weights, form)
    config = json.loads((folder / "config.json").read_text())
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    if form == "pt":
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / ("model.safetensors" if form == "vllm" else "medusa_lm_head.safetensors"))
    with pytest.raises(UsageError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_broken_file_is_one_sentence(lm, form: str, tmp_path: Path) -> None:
    folder = publish_medusa(tmp_path / "draft", random_medusa_weights(), form)
    path = folder / f"medusa_lm_head.{form}"
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(RunError, match=f"medusa_lm_head.{form}` cannot be read"):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_an_engine_loads_the_heads_by_their_folder(lm, tmp_path: Path) -> None:
    folder = publish_medusa(tmp_path / "draft", random_medusa_weights())
    engine = Engine.load(lm.name, str(folder), num_speculative_tokens=3, max_num_seqs=2, max_model_len=32, check=False)
    prompts = [[one % 80 + 3 for one in TEXT[:20]], [one % 80 + 3 for one in TEXT[5:26]]]
    found = engine.generate(prompts, SamplingParams(max_new_tokens=12))
    assert engine.drafters.num_failures["medusa"] == 0
    assert sum(one.speculative.num_draft_tokens for one in found) > 0
