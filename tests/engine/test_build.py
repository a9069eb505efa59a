"""Engines from folders: the public API's five lines, tokenizers that differ, shares of memory, progress."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import letter_tokenizer, tokens, transformers_greedy
from tiny_models import make_tiny
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typed import not_none, stand_in

from specdec_cli import Engine, EngineOptions, SamplingParams, trace
from specdec_cli.engine.build import another_drafter, load_engines
from specdec_cli.engine.drafts import matching
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.errors import RunError, UsageError
from specdec_cli.events import Stepped
from specdec_cli.measure.bench.compare import Contender

REAL = 87


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Target and draft with one tokenizer and two padded vocabularies."""
    folder = tmp_path_factory.mktemp("pair")
    shapes = {"target": {"vocab_size": 96}, "draft": {"vocab_size": 128, "num_hidden_layers": 1}}
    for seed, (name, shape) in enumerate(shapes.items()):
        make_tiny("llama", folder / name, seed, **shape)
        letter_tokenizer().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def test_five_lines(pair) -> None:
    engine = Engine.load(*pair)
    output = engine.generate("Once upon a time", SamplingParams(max_new_tokens=30))[0]
    assert output.text == not_none(engine.tokenizer).decode(output.token_ids)
    assert output.prompt == "Once upon a time"
    assert 0 <= not_none(output.speculative.acceptance_rate) <= 1
    banned = list(range(REAL, 96))
    assert tokens([output]) == transformers_greedy(pair[0], [output.prompt_token_ids], 30, suppress_tokens=banned)
    json.dumps(output.as_dict())


def test_generate_takes_one_prompt_or_many(pair) -> None:
    engine = Engine.load(*pair, num_speculative_tokens=2)
    params = SamplingParams(max_new_tokens=8)
    text = "the other"
    ids = not_none(engine.tokenizer).encode(text)
    [one] = engine.generate(text, params)
    assert tokens(engine.generate(ids, params)) == [one.token_ids]
    assert tokens(engine.generate(stand_in([text, ids]), params)) == [one.token_ids] * 2
    assert engine.generate([text, "a"], params)[1].index == 1
    for prompts in (text, ids, [text]):
        emitted = [e for event in engine.stream(prompts, params) if isinstance(event, Stepped) for e in event.emitted]
        assert [token for e in emitted for token in e.tokens] == one.token_ids
    assert max(e.num_drafted for e in emitted) == 2


def test_a_trace_predicts_a_draft_that_is_loaded_later(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_cli.measure.bench import sweep

    monkeypatch.setattr(sweep.profile_workload, "__defaults__", (1e-9, lambda _: None))
    engine = Engine.load(pair[0], "ngram", check=False)
    traced = trace(engine, ["Once upon a time", "the other"], SamplingParams(max_new_tokens=12))
    before = engine.target.num_blocks
    own = trace(Engine.load(*pair, check=False), ["Once upon a time", "the other"], SamplingParams(max_new_tokens=12))
    found, wanted = traced.predict(pair[1], k=[1, 3]), own.predict(k=[1, 3])
    assert [row["acceptance_length"] for row in found] == [row["acceptance_length"] for row in wanted]
    assert engine.target.num_blocks == before
    with pytest.raises(RunError):
        traced.predict("no/such-model-anywhere")


def test_a_recipe_by_its_file(pair, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {{model: {pair[0]}}}\ndraft: {{model: {pair[1]}}}\nspeculation: {{verify: gumbel}}\n")
    engine = Engine.from_recipe(str(recipe))
    assert engine.options.verify == "gumbel"
    assert engine.generate("the end", SamplingParams(max_new_tokens=6))[0].speculative.num_drafts


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("draft", ["ngram", "ngram:max=3,min=1", "none", None, {"method": "ngram", "min": 1}])
def test_other_drafts(pair, draft) -> None:
    plain = Engine.load(pair[0], pair[1]).generate("the end, the end", SamplingParams(max_new_tokens=20))
    engine = Engine.load(pair[0], draft)
    assert tokens(engine.generate("the end, the end", SamplingParams(max_new_tokens=20))) == tokens(plain)


def test_a_mapping_names_a_draft_model(pair) -> None:
    engine = Engine.load(pair[0], {"model": pair[1]}, options=EngineOptions(num_speculative_tokens=1))
    assert engine.generate("a", SamplingParams(max_new_tokens=6))[0].speculative.num_draft_tokens > 0


@pytest.fixture
def stranger(tmp_path: Path) -> str:
    """A draft whose tokenizer has one merge less."""
    make_tiny("llama", tmp_path, 3, vocab_size=96)
    letter_tokenizer(without="he").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("match", ["auto", "text", "intersection"])
def test_a_draft_with_another_tokenizer_drafts_by_text_or_shared_tokens(pair, stranger, match: str) -> None:
    params = SamplingParams(max_new_tokens=20)
    plain = Engine.load(pair[0], None).generate("the end, the end", params)
    draft = stranger if match == "auto" else {"method": "universal", "model": stranger, "match": match}
    engine = Engine.load(pair[0], draft)
    assert tokens(engine.generate("the end, the end", params)) == tokens(plain)
    assert not_none(engine.drafter.shared_vocabulary).share_of_target == pytest.approx(86 / 87)
    [said] = matching(engine.drafter)
    how = {"auto": "by text at temperature 0, by the shared tokens above it", "text": "by text;"}
    assert how.get(match, "by the shared tokens;") in said
    assert matching(Engine.load(pair[0], pair[1]).drafter) == []


def test_the_context_limit_counts_the_targets_tokens(pair, stranger) -> None:
    engine = Engine.load(pair[0], stranger, max_model_len=40)
    assert (engine.target.max_context, engine.drafter.max_context) == (40, pytest.approx(128, abs=8))


def test_a_further_draft_may_have_another_tokenizer(pair, stranger) -> None:
    engine = Engine.load(pair[0], None)
    drafter = another_drafter(engine, {"model": stranger})
    assert drafter.shared_vocabulary is not None


def test_a_draft_with_next_to_no_tokens_in_common(pair, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, 3, vocab_size=96)
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {letter: 3 + i for i, letter in enumerate("ÄÖÜäöüß")}
    backend = Backend(BPE(vocabulary, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    engine = Engine.load(pair[0], str(tmp_path))
    assert "it drafts by text;" in matching(engine.drafter)[0]
    with pytest.raises(UsageError, match="too few tokens in common"):
        Engine.load(pair[0], {"method": "universal", "model": str(tmp_path), "match": "intersection"})


def test_an_unknown_way_to_match_is_refused(pair) -> None:
    with pytest.raises(UsageError, match="must be auto, text or intersection"):
        Engine.load(pair[0], {"method": "universal", "model": pair[1], "match": "words"})


def test_drafts_share_a_target_that_is_loaded_once(pair) -> None:
    said: list[Any] = []
    engines = load_engines(Engine, pair[0], [pair[1], "ngram", None], settings=LoadSettings(progress=said.append))
    assert said == [f"loading {what}" for what in (f"tokenizer of {pair[0]}", f"target {pair[0]}", f"draft {pair[1]}")]
    assert len({id(engine.target) for engine in engines}) == 1
    outputs = [engine.generate("the end, the end", SamplingParams(max_new_tokens=12)) for engine in engines]
    assert len({tuple(tokens(one)[0]) for one in outputs}) == 1
    model, ngram, none = (Contender("x", method, engine=one) for method, one in zip("abc", engines, strict=True))
    parameters, memory_bytes = model.sizes()
    assert not_none(memory_bytes) > 4 * not_none(parameters) > 0
    assert ngram.sizes() == none.sizes() == (0, 0)


def test_the_tokenizer_of_every_draft_is_looked_at(pair, stranger) -> None:
    engines = load_engines(Engine, pair[0], [pair[1], stranger, "ngram"])
    assert [engine.drafters.own_name for engine in engines] == ["model", "universal", "ngram"]


def test_a_draft_without_a_tokenizer_is_refused(pair, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, 3, vocab_size=96)
    with pytest.raises(RunError, match="no tokenizer"):
        Engine.load(pair[0], str(tmp_path))


def test_end_tokens_come_from_the_models_configuration(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "ends", 0, vocab_size=96)
    letter_tokenizer().save_pretrained(folder)
    plain = tokens(Engine.load(str(folder), "ngram").generate("in the end", SamplingParams(max_new_tokens=20)))[0]
    ends = [plain[11], plain[7]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = Engine.load(str(folder), "ngram")
    assert engine.eos_token_ids == tuple(ends)
    [output] = engine.generate("in the end", SamplingParams(max_new_tokens=20))
    first = min(plain.index(end) for end in ends)
    assert output.token_ids == plain[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", plain[first])
    assert output.text == not_none(engine.tokenizer).decode(plain[:first])


def test_settings_reach_both_models(pair) -> None:
    said: list[Any] = []
    settings = LoadSettings(
        target=ModelSettings(dtype="float32"),
        draft=ModelSettings(dtype="bfloat16"),
        max_model_len=50,
        block_size=8,
        progress=said.append,
    )
    engine = Engine.load(*pair, options=EngineOptions(max_num_seqs=2), settings=settings)
    draft = stand_in(engine.drafter)._loaded
    assert (engine.target.dtype, draft.dtype) == (torch.float32, torch.bfloat16)
    assert engine.target.max_context == draft.max_context == 50
    assert engine.target.block_size == draft.block_size == 8
    assert any(pair[0] in line for line in said)
    assert any(pair[1] in line for line in said)
    [output] = engine.generate("the end", SamplingParams(max_new_tokens=100))
    assert len(output.prompt_token_ids) + len(output.token_ids) == 50
    assert output.finish_reason == "length"


def test_a_cache_with_too_little_memory_is_refused(pair) -> None:
    with pytest.raises(RunError, match="KV cache"):
        Engine.load(*pair, settings=LoadSettings(kv_cache_bytes=1_000))


@pytest.mark.parametrize(
    ("draft", "words"),
    [("ngram:size=3", "size"), ("medusas:3", "medusas"), ("./nowhere", "nowhere"), ("parallel:2", "not available")],
)
def test_bad_drafts_are_named(pair, draft: str, words: str) -> None:
    with pytest.raises((UsageError, RunError), match=words):
        Engine.load(pair[0], draft)


def test_settings_by_keyword_reach_loading_and_unknown_ones_are_named(pair) -> None:
    assert Engine.load(*pair, max_model_len=32, num_speculative_tokens=2).target.max_context == 32
    with pytest.raises(UsageError, match="has no parameter `dtyp`"):
        stand_in(Engine).load(*pair, dtyp="float32")


def test_a_context_limit_above_the_targets_own_is_refused_before_it_is_loaded(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Engine.load(*pair).target.max_context
    assert Engine.load(*pair, max_model_len=own).target.max_context == own
    monkeypatch.setattr("specdec_cli.engine.build.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match=f"max_model_len is `{own + 1}`, and `.*` reads `{own}` tokens at most"):
        Engine.load(*pair, max_model_len=own + 1)
