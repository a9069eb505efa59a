"""The engine plans its caches by what is left, and doctor says the same without loading a weight."""

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from many_tokenizers import hf_tokenizer, tokenizer
from tiny_engine import letter_tokenizer
from tiny_heads import publish, random_weights
from tiny_hybrids import save_hybrid
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.drafters.contract import DraftRow
from specdec_cli.drafters.universal import Drafter as Universal
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.errors import RunError
from specdec_cli.events import Noticed, Stepped
from specdec_cli.lm.cache import budget
from specdec_cli.lm.machine import device_memory as device_memory_module
from specdec_cli.lm.machine.device_memory import DeviceMemory
from specdec_cli.measure.machine import machine
from specdec_cli.measure.machine.doctor import examine
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.text.shared_vocabulary import SAMPLE

MB = 1_000_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """A target of long contexts and a draft of them, and one of short ones."""
    folder = tmp_path_factory.mktemp("pair")
    for name, shape in (
        ("target", {"max_position_embeddings": 65_536, "num_hidden_layers": 3}),
        ("draft", {"max_position_embeddings": 65_536, "num_hidden_layers": 1}),
        ("short", {"max_position_embeddings": 128, "num_hidden_layers": 1}),
    ):
        make_tiny("llama", folder / name, seed=2, **shape)
        letter_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    """Sets how much memory is free before anything is loaded; weights take theirs."""
    loaded = weakref.WeakSet()
    monkeypatch.setattr(budget, "_LOADED", loaded)

    def set_free(num_bytes: int) -> None:
        def now(device: torch.device) -> DeviceMemory:
            return DeviceMemory(10 * num_bytes, num_bytes - sum(lm.weight_bytes for lm in loaded))

        for module in (budget, machine, device_memory_module):
            monkeypatch.setattr(module, "device_memory", now)

    return set_free


def taken(*models) -> int:
    return sum(lm.num_blocks * lm.block_size * lm.kv_bytes_per_token for lm in models)


def test_target_and_draft_share_half_of_what_is_left(pair, memory) -> None:
    memory(40 * MB)
    engine = Engine.load(str(pair / "target"), str(pair / "draft"))
    target, draft = stand_in(engine.target), stand_in(engine.drafter.lm)
    left = 40 * MB - target.weight_bytes - not_none(draft).weight_bytes
    assert target.num_blocks == not_none(draft).num_blocks
    assert 0.49 * left < taken(target, draft) <= left / 2
    text = engine.generate(["the end"] * 3, SamplingParams(max_new_tokens=20))
    alone = Engine.load(str(pair / "target"), "none").generate(["the end"] * 3, SamplingParams(max_new_tokens=20))
    assert [one.token_ids for one in text] == [one.token_ids for one in alone]
    target.check_integrity()


def test_a_draft_takes_no_more_than_it_reads(pair, memory) -> None:
    memory(40 * MB)
    engine = Engine.load(str(pair / "target"), str(pair / "short"))
    target, draft = engine.target, engine.drafter.lm
    assert not_none(draft).num_blocks == 8 * 12, "8 sequences of 128 tokens, and the largest tree behind each"
    assert taken(target, draft) <= 20 * MB


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("tree", ["dynamic:60", "2,2,2,2"])
def test_a_draft_of_short_contexts_has_room_for_the_trees_of_requests(pair, tree: str) -> None:
    engine = Engine.load(str(pair / "target"), str(pair / "short"), max_model_len=256, block_size=4, max_num_seqs=4)
    target, draft = stand_in(engine.target), stand_in(engine.drafter.lm)
    ids = [engine.add([i + 2] * 118, SamplingParams(max_new_tokens=8, ignore_eos=True), tree=tree) for i in range(4)]
    found: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Noticed), "the draft's cache is never full"
            for emitted in event.emitted if isinstance(event, Stepped) else ():
                found[emitted.sequence_id] += emitted.tokens
    plain = engine.generate([[i + 2] * 118 for i in range(4)], SamplingParams(max_new_tokens=8, ignore_eos=True), 0)
    assert list(found.values()) == [one.token_ids for one in plain]
    assert (target.num_free_blocks, draft.num_free_blocks) == (target.num_blocks, draft.num_blocks)


def test_many_drafts_share_with_one_target(pair, memory) -> None:
    memory(40 * MB)
    engines = load_engines(Engine, str(pair / "target"), [str(pair / "draft"), "none", str(pair / "draft")])
    models = [engines[0].target, engines[0].drafter.lm, engines[2].drafter.lm]
    assert len({not_none(lm).num_blocks for lm in models}) == 1
    assert taken(*models) <= 20 * MB


@pytest.mark.in_turn(5, every=7)
@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize("draft", ["draft", "short", "target", None])
@pytest.mark.parametrize("cache", ["auto", "60%", "3MB"])
def test_doctor_says_what_the_engine_plans(pair, memory, decoder: str, draft: str | None, cache: str) -> None:
    memory(40 * MB)
    named = "draft.method=none" if draft is None else f"draft.model={pair / draft}"
    engine = {"decoder": decoder, "kv_cache_memory": cache, "max_num_seqs": 4}
    sets = [f"target.model={pair / 'target'}", named, *(f"engine.{key}={value}" for key, value in engine.items())]
    recipe = resolve(sets=sets).recipe
    built = Engine.from_recipe(recipe)
    models = {"target": built.target} | ({} if draft is None else {"draft": built.drafter.lm})
    planned = {role: not_none(lm).num_blocks * not_none(lm).block_size for role, lm in models.items()}
    for lm in models.values():
        budget._LOADED.discard(stand_in(lm))
    found = examine(recipe).pair
    assert found is not None
    assert {role: one.kv_planned_tokens for role, one in found.memory.items()} == planned


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory):
    """Models of long contexts, each with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("others")
    for kind in ("byte-level", "characters"):
        shape = {"max_position_embeddings": 65_536, "vocab_size": tokenizer(kind).num_tokens}
        make_tiny("llama", folder / kind, seed=2, num_hidden_layers=2, **shape)
        hf_tokenizer(kind).save_pretrained(folder / kind)
    return folder


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(("target", "draft"), [("byte-level", "characters"), ("characters", "byte-level")])
@pytest.mark.parametrize("cache", ["auto", "60%", "3MB"])
def test_a_draft_of_other_tokens_has_room_for_as_much_text(others, memory, target: str, draft: str, cache: str) -> None:
    """One character is a token of the one, about three are one of the other."""
    memory(40 * MB)
    sets = [f"target.model={others / target}", f"draft.model={others / draft}", f"engine.kv_cache_memory={cache}"]
    recipe = resolve(sets=[*sets, "engine.max_num_seqs=2"]).recipe
    engine = Engine.from_recipe(recipe)
    ratio = not_none(engine.drafter.shared_vocabulary).draft_tokens_per_token
    assert max(ratio, 1 / ratio) > 1.5
    first, second = engine.target, stand_in(engine.drafter.lm).own
    if cache != "3MB":  # which is for each
        assert second.num_blocks == int(first.num_blocks * ratio)
        assert taken(first, second) <= 0.6 * 40 * MB
    for lm in (first, second):
        budget._LOADED.discard(stand_in(lm))
    found = not_none(examine(recipe).pair).memory
    planned = {"target": first.num_blocks * first.block_size, "draft": second.num_blocks * second.block_size}
    assert {role: one.kv_planned_tokens for role, one in found.items()} == planned


def test_every_text_that_the_target_has_room_for_is_drafted(others, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its cache is taken, and the draft's text is nearly twice as many tokens."""
    models = str(others / "byte-level"), str(others / "characters")
    engine = Engine.load(*models, max_model_len=192, block_size=4, max_num_seqs=3)
    prompt = not_none(engine.tokenizer).encode(SAMPLE, False)[-150:]
    rooms, before = list[list[bool]](), Universal._have_room

    def noted(self: Universal, rows: Sequence[DraftRow]) -> list[bool]:
        rooms.append(before(self, rows))
        return rooms[-1]

    monkeypatch.setattr(Universal, "_have_room", noted)
    engine.generate([prompt] * 3, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert rooms
    assert all(all(one) for one in rooms)
    lm = stand_in(engine.drafter.lm).own
    assert lm.num_free_blocks == lm.num_blocks


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("cache", ["auto", "60%", "3MB"])
@pytest.mark.parametrize("form", ["eagle", "official", "modelopt"])
def test_doctor_says_what_a_head_takes(pair, memory, tmp_path, form: str, cache: str) -> None:
    memory(40 * MB)
    head = publish(tmp_path / "head", random_weights(form != "eagle"), form, (0, 1, 2))
    sets = [f"target.model={pair / 'target'}", f"draft.model={head}", f"engine.kv_cache_memory={cache}"]
    if form == "official":
        sets += ["draft.method=eagle3", "draft.layers=0-1-2"]
    recipe = resolve(sets=[*sets, "engine.max_num_seqs=4"]).recipe
    built = Engine.from_recipe(recipe)
    sequences = stand_in(built.drafter)._sequences
    caches = {"target": built.target, "draft": sequences}
    for one in caches.values():
        budget._LOADED.discard(stand_in(one))
    found = not_none(examine(recipe).pair)
    assert not found.errors
    assert found.memory["draft"].weights == sequences.weight_bytes
    assert built.drafter.sizes[1] == found.memory["draft"].weights + not_none(found.memory["draft"].kv_planned)
    tokens = {role: one.num_blocks * one.block_size for role, one in caches.items()}
    assert {role: one.kv_planned_tokens for role, one in found.memory.items()} == tokens
    assert tokens["draft"] >= tokens["target"]


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("free", [40, 3])
@pytest.mark.parametrize("shares", [True, False])
def test_doctor_says_how_many_snapshots_the_engine_plans(memory, tmp_path: Path, shares: bool, free: int) -> None:
    hybrid = save_hybrid("qwen3_5_text", tmp_path)
    letter_tokenizer().save_pretrained(hybrid)
    memory(free * MB)
    sets = [f"target.model={hybrid}", f"draft.model={hybrid}", f"engine.enable_prefix_caching={shares}".lower()]
    recipe = resolve(sets=sets).recipe
    engine = Engine.from_recipe(recipe)
    models = {"target": stand_in(engine.target), "draft": stand_in(engine.drafter.lm)}
    for lm in models.values():
        budget._LOADED.discard(lm)
        assert lm.num_bytes <= lm.weight_bytes + free * MB // 2
    found = not_none(examine(recipe).pair).memory
    planned = {role: one.prefix_states_planned or 0 for role, one in found.items()}
    assert planned == {role: lm.num_prefix_states for role, lm in models.items()}
    assert all(planned.values()) == shares


def test_a_size_beyond_what_is_left_is_refused(pair, memory) -> None:
    memory(40 * MB)
    with pytest.raises(RunError, match=r"KV cache was to take 0\.10 GB, and 0\.04 GB are left beside"):
        Engine.load(str(pair / "target"), "none", settings=LoadSettings(kv_cache_bytes=100 * MB))


@pytest.mark.parametrize(
    ("cache", "num_seqs", "free"), [("100MB", 4, 40), ("1kB", 4, 40), ("auto", 64, 1), ("400kB", 4, 40)]
)
def test_doctor_refuses_in_the_engines_words(pair, memory, cache: str, num_seqs: int, free: int) -> None:
    memory(free * MB)
    sets = [f"target.model={pair / 'draft'}", f"draft.model={pair / 'target'}"]
    sets += [f"engine.kv_cache_memory={cache}", f"engine.max_num_seqs={num_seqs}"]
    recipe = resolve(sets=sets).recipe
    with pytest.raises(RunError) as error:
        Engine.from_recipe(recipe)
    budget._LOADED.clear()
    said = examine(recipe).error()
    assert said is not None
    assert said.message.split("`")[0] == error.value.message.split("`")[0]


def test_a_machine_without_room_is_said(pair, memory) -> None:
    memory(1 * MB)
    with pytest.raises(RunError, match="no room for the KV cache"):
        Engine.load(str(pair / "target"), "none", options=EngineOptions(max_num_seqs=64))
