import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.recipe import DraftMethods, RecipeError, Resolved, resolve
from specdec_cli.recipe.present import json_schema, to_yaml, yaml_value
from specdec_cli.recipe.schema import EngineSection, Sampling
from specdec_cli.sampling.params import SamplingParams

OPTIONS: dict[str, dict[str, Any]] = {"none": {}, "ngram": {"max": 4, "min": 2}, "model": {"model": ...}}


def options(method: str) -> dict[str, Any]:
    if method not in OPTIONS:
        raise UsageError(f"there is no drafting method `{method}`")
    return OPTIONS[method]


def check(method: str, given: Any) -> None:
    if any(not isinstance(given[name], int) for name in given if method == "ngram"):
        raise UsageError("`max` of `ngram` must be a whole number")


def check_first(spec: str) -> None:
    if spec != "ngram":
        raise UsageError(f"the draft `{spec}` cannot come before another one")


METHODS = DraftMethods(tuple(OPTIONS), options, check, check_first)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("r.yaml").write_text(text)
        return "r.yaml"

    return write


def messages(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        resolve(*args, **{"methods": METHODS, **kwargs})
    return [str(problem) for problem in caught.value.problems]


def run(*args: Any, **kwargs: Any) -> Resolved:
    return resolve(*args, **{"methods": METHODS, **kwargs})


def test_nothing_named_is_the_built_in_pair() -> None:
    resolved = run()
    assert resolved.built_in_pair
    assert resolved.recipe.target.model == "builtin:target"
    assert resolved.recipe.draft_fields() == {"model": "builtin:draft"}
    assert set(resolved.origins.values()) == {"default"}


def test_the_keys_are_pointed_to_where_a_key_was_written(recipe) -> None:
    def hint(**given: Any) -> str | None:
        with pytest.raises(RecipeError) as caught:
            run(**given)
        return caught.value.hint

    assert hint(flags={"sampling.temperature": (-1, "--temperature")}) == "`--help-all` explains every option"
    assert "recipe schema" in str(hint(sets=["sampling.temperature=-1"]))
    assert "recipe schema" in str(hint(name=recipe("sampling: {temperature: -1}\n")))


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    least, most = "sampling.min_tokens=9", "sampling.max_new_tokens=4"
    assert "above max_new_tokens `4`" in messages(sets=[least, most])[0]
    assert run(sets=["sampling.min_tokens=4", most]).recipe.sampling.min_tokens == 4
    said = messages(environment={"SPECDEC_SAMPLING_MIN_TOKENS": "9"}, sets=[most])[0]
    assert "max_new_tokens" in said
    assert "below min_tokens `9`" in said


def test_a_target_alone_has_no_draft() -> None:
    resolved = run(sets=["target.model=x"])
    assert not resolved.built_in_pair
    assert resolved.recipe.draft_fields() == {"method": "none"}


def test_precedence_and_origins(recipe) -> None:
    name = recipe("sampling:\n  seed: 1\n  top_k: 1\n  top_p: 0.1\n  min_p: 0.1\n")
    resolved = run(
        name,
        sets=["sampling.top_p=0.3", "sampling.min_p=0.3"],
        environment={"SPECDEC_SAMPLING_TOP_K": "2", "SPECDEC_SAMPLING_TOP_P": "0.2", "SPECDEC_SAMPLING_MIN_P": "0.2"},
        flags={"sampling.min_p": (0.4, "--min-p")},
    )
    sampling = resolved.recipe.sampling
    assert (sampling.seed, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 2, 0.3, 0.4)
    wanted = {
        "sampling.seed": "recipe r.yaml:2",
        "sampling.top_k": "environment SPECDEC_SAMPLING_TOP_K",
        "sampling.top_p": "flag --set",
        "sampling.min_p": "flag --min-p",
        "sampling.temperature": "default",
    }
    assert {path: resolved.origins[path] for path in wanted} == wanted


def test_origins_cover_every_value() -> None:
    resolved = run()
    document = resolved.recipe.as_dict()
    assert set(resolved.origins) == {f"{section}.{key}" for section, keys in document.items() for key in keys}


def test_all_errors_at_once_in_order_of_position(recipe) -> None:
    name = recipe(
        "speculation:\n  num_speculative_token: 3\n  verify: blok\n  verify: block\n"
        "sampling: {temperature: -1, top_k: 0, seed: '1', ignore_eos: no}\ntarget: 3\nwrkload: {}\n"
    )
    found = messages(
        name,
        sets=["sampling.temperature=nan", "nonsense"],
        environment={"SPECDEC_SPECULATION_K": "4"},
        flags={"speculation.num_speculative_tokens": (-1, "--num-speculative-tokens")},
    )
    assert [message.split(": ")[0] for message in found[:8]] == [
        "r.yaml:2:3", "r.yaml:3:11", "r.yaml:4:3", "r.yaml:5:25", "r.yaml:5:36", "r.yaml:5:45", "r.yaml:5:62",
        "r.yaml:6:9",
    ]  # fmt: skip
    assert "did you mean `num_speculative_tokens`?" in found[0]
    assert "duplicate key `verify`" in found[2]
    assert "unknown key `wrkload`" in found[8]
    assert "`SPECDEC_SPECULATION_K`" in found[9]
    assert any("`--set nonsense`" in message for message in found[10:])
    assert any("`--set sampling.temperature` must be a finite number" in message for message in found[10:])
    assert any("`--num-speculative-tokens` must be at least 0, not `-1`" in message for message in found[10:])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("sampling: {temperature: .nan}", "finite"),
        ("sampling: {temperature: .inf}", "finite"),
        ("sampling: {logit_bias: {1: .nan}}", "finite"),
        ("sampling: {logit_bias: {a: 1}}", "whole number as its key"),
        ("sampling: {logit_bias: {'1.5': 1}}", "whole number as its key"),
        ("speculation: {num_speculative_tokens: 0, k_by_batch: '1:0,2:5'}", "drafts `5` tokens"),
        ("speculation: {num_speculative_tokens: 0, k_by_context: '1:2'}", "drafts `2` tokens"),
        ("sampling: {stop: x}", "must be a list"),
        ("sampling: {stop: ['']}", "must not be empty"),
        ("sampling: {stop: [1]}", "put it in quotes"),
        ("sampling: {top_k: true}", "whole number"),
        ("sampling: {temperature: true}", "a number"),
        ("sampling: {top_p: 0}", "above 0"),
        ("sampling: {seed: 9223372036854775808}", "at most"),
        ("speculation: {num_speculative_tokens: 65}", "at most 64"),
        ("speculation: {num_speculative_tokens: 1.0}", "whole number"),
        ("speculation: {p_min: 0.3}", "no effect with depth_policy `fixed`"),
        ("speculation: {depth_policy: clever}", "one of fixed, confidence"),
        ("target: {model: 123}", "put it in quotes"),
        ("target: {model: ''}", "must not be empty"),
        ("target: {device: gpu}", "auto, cpu, cuda or cuda:N"),
        ("target: {quantize: int5}", "must be one of none, int8"),
        ("target: {tensor_parallel_size: 0}", "at least 1"),
        ("target: {trust_remote_code: true}", "never taken from a recipe"),
        ("trust_remote_code: true", "never taken from a recipe"),
        ("draft: [{model: a}, {model: b}]", "compare-drafts"),
        ("draft: ngram", "must be a mapping"),
        ("draft: {method: ngrm}", "did you mean `ngram`?"),
        ("draft: {method: ngram, mx: 3}", "did you mean `max`?"),
        ("draft: {method: ngram, max: x}", "whole number"),
        ("draft: {method: ngram, model: x}", "cannot go with a draft model"),
        ("draft: {method: ngram, dtype: float16}", "has no meaning"),
        ("draft: {modle: x}", "did you mean `model`?"),
        ("target: {model: x}\ndraft: {dtype: float16}", "needs a `model` or a `method`"),
        ("engine: {kv_cache_memory: 3 apples}", "bytes such as 2GiB"),
        ("engine: {kv_cache_memory: 120%}", "a share such as 90%"),
        ("engine: {kv_block_size: 0}", "at least 1"),
        ("engine: {compile: true}", "unknown key `compile` in `engine`; it was removed in 0.3.0"),
    ],
)  # fmt: skip
def test_refused(recipe, text: str, word: str) -> None:
    found = messages(recipe(text + "\n"))
    assert len(found) == 1
    assert found[0].startswith("r.yaml:")
    assert word in found[0]


def test_a_removed_key_is_explained_wherever_it_is_given() -> None:
    for given in ({"environment": {"SPECDEC_ENGINE_COMPILE": "false"}}, {"sets": ["engine.compile=true"]}):
        with pytest.raises(RecipeError, match=r"; it was removed in 0\.3\.0, because it was slower than"):
            run(**given)


def test_a_file_that_is_wrong_stays_wrong_under_an_override(recipe) -> None:
    assert messages(recipe("sampling: {temperature: hot}\n"), flags={"sampling.temperature": (1.0, "--temperature")})


def test_p_min_of_a_recipe_gives_way_to_a_policy_named_above(recipe) -> None:
    name = recipe("speculation: {depth_policy: confidence, p_min: 0.3}\n")
    fixed = run(name, flags={"speculation.depth_policy": ("fixed", "--depth-policy")}).recipe
    assert fixed.speculation.depth_policy == "fixed"
    assert "p_min" not in fixed.as_dict()["speculation"]


class TestDraft:
    @pytest.mark.parametrize("text", ["[0-9]{3}", "123", "{2}", "true"])
    def test_a_key_for_text_takes_it_as_it_is(self, text: str) -> None:
        for given in ({"sets": [f"structured.regex={text}"]}, {"environment": {"SPECDEC_STRUCTURED_REGEX": text}}):
            assert run(**given).recipe.structured.regex == text

    def test_method_options_and_their_defaults(self, recipe) -> None:
        resolved = run(recipe("draft: {method: ngram, max: 6}\n"))
        assert resolved.recipe.draft_fields() == {"method": "ngram", "max": 6, "min": 2}
        assert resolved.recipe.as_dict()["draft"] == {"method": "ngram", "max": 6, "min": 2}
        assert resolved.origins["draft.min"] == "default"

    def test_null_is_no_draft(self, recipe) -> None:
        assert run(recipe("draft: null\n")).recipe.draft_fields() == {"method": "none"}
        assert run(recipe("draft:\n")).origins["draft.method"] == "recipe r.yaml:1"
        assert run(sets=["draft=null"]).recipe.draft_fields() == {"method": "none"}
        assert "has no meaning" in messages(recipe("draft: null\n"), environment={"SPECDEC_DRAFT_DEVICE": "cpu"})[0]

    def test_a_draft_before_it(self, recipe) -> None:
        name = recipe("draft: {model: y, first: ngram, device: cpu}\n")
        assert run(name).recipe.draft_fields() == {"model": "y", "first": "ngram"}
        assert run(name, flags={"draft": ({"model": "x"}, "--draft")}).recipe.draft_fields() == {"model": "x"}
        assert "first" not in run(recipe("draft: {model: y}\n")).recipe.as_dict()["draft"]
        [said] = messages(recipe("draft: {model: y, first: z}\n"))
        assert said.startswith("r.yaml:1:26: the draft `z` cannot come before another one")

    def test_a_draft_named_anew_drops_the_old_method(self, recipe) -> None:
        name = recipe("draft: {method: ngram, max: 6}\n")
        assert run(name, flags={"draft": ({"model": "y"}, "--draft")}).recipe.draft_fields() == {"model": "y"}

    def test_a_model_named_anew_drops_the_old_revision_and_keeps_the_device(self, recipe) -> None:
        name = recipe("target: {model: a, revision: r1, device: cpu}\ndraft: {model: b, revision: r2, device: cpu}\n")
        resolved = run(name, flags={"draft": ({"model": "y"}, "--draft")}, sets=["target.model=x"])
        assert (resolved.recipe.target.revision, resolved.recipe.target.device) == (None, "cpu")
        assert (resolved.recipe.draft.revision, resolved.recipe.draft.device) == (None, "cpu")

    def test_a_method_named_anew_drops_how_the_model_was_loaded(self, recipe) -> None:
        name = recipe("draft: {model: b, dtype: float16}\n")
        draft = run(name, environment={"SPECDEC_DRAFT_METHOD": "ngram"}).recipe.as_dict()["draft"]
        assert draft == {"method": "ngram", "max": 4, "min": 2}

    def test_set_and_flag_say_one_thing_together(self) -> None:
        resolved = run(sets=["draft.max=9"], flags={"draft": ({"method": "ngram"}, "--draft")})
        assert resolved.recipe.draft_fields() == {"method": "ngram", "max": 9, "min": 2}


class TestEnvironment:
    def test_others_are_left_alone(self) -> None:
        run(environment={"SPECDEC_API_KEY": "x", "SPECDEC_DEBUG": "1", "SPECDEC_HOME": "/x", "PATH": "/bin"})

    def test_empty_says_nothing(self) -> None:
        assert run(environment={"SPECDEC_SAMPLING_SEED": ""}).origins["sampling.seed"] == "default"

    @pytest.mark.parametrize("name", ["SPECDEC_SAMPLING_TEMPERATUR", "SPECDEC_SAMPLNG_TEMPERATURE"])
    def test_a_misspelt_one_is_an_error(self, name: str) -> None:
        assert "did you mean `SPECDEC_SAMPLING_TEMPERATURE`?" in messages(environment={name: "1"})[0]

    def test_trust_is_refused(self) -> None:
        assert "never taken" in messages(environment={"SPECDEC_TARGET_TRUST_REMOTE_CODE": "1"})[0]

    def test_its_error_names_it(self) -> None:
        found = messages(environment={"SPECDEC_SAMPLING_SEED": "x"})
        assert found == ["`SPECDEC_SAMPLING_SEED` must be a whole number, not the text `x`"]


class TestSet:
    def test_values(self) -> None:
        sets = [
            "target.revision=123",
            "sampling.stop=[a, 'b, c']",
            'sampling.logit_bias={5: -1, "3": 1.0}',
            "engine.max_model_len=null",
        ]
        recipe = run(sets=sets).recipe
        assert recipe.target.revision == "123"
        assert recipe.sampling.stop == ("a", "b, c")
        assert recipe.sampling.logit_bias == {5: -1.0, 3: 1.0}
        assert recipe.engine.max_model_len is None

    def test_a_whole_section_counts_key_by_key(self) -> None:
        resolved = run(sets=["sampling={seed: 3}", "sampling.top_k=4"])
        assert (resolved.recipe.sampling.seed, resolved.recipe.sampling.top_k) == (3, 4)
        assert resolved.origins["sampling.seed"] == "flag --set"

    def test_the_last_one_wins(self) -> None:
        assert run(sets=["sampling.seed=1", "sampling.seed=2"]).recipe.sampling.seed == 2

    @pytest.mark.parametrize(
        "text", ["seed", "=1", "a..b=1", "sampling.stop=[a", "sampling.stop=[*a]", "smpling.seed=1", "target.a.b=1"]
    )
    def test_refused(self, text: str) -> None:
        assert all("--set" in message for message in messages(sets=[text]))


@pytest.mark.parametrize("name", ["nope", "./nope.yaml", "/", "builtn"])
def test_no_such_recipe(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert name in caught.value.message


def test_memory() -> None:
    assert EngineSection().kv_cache_bytes() is None
    assert EngineSection(kv_cache_memory="2GiB").kv_cache_bytes() == 2 << 30
    assert EngineSection(kv_cache_memory="1000").kv_cache_bytes() == 1000
    assert EngineSection(kv_cache_memory="90%").kv_cache_bytes(1000, weights_bytes=300) == 600
    with pytest.raises(UsageError, match="is not known"):
        EngineSection(kv_cache_memory="90%").kv_cache_bytes()
    with pytest.raises(UsageError, match="leaves nothing"):
        EngineSection(kv_cache_memory="10%").kv_cache_bytes(1000, weights_bytes=300)


def test_sampling_is_sampling_params() -> None:
    """Same fields and defaults, so that `SamplingParams(**recipe.sampling.model_dump())` is the whole bridge."""
    ours = SamplingParams(**Sampling().model_dump())
    assert ours == SamplingParams()
    assert set(Sampling.model_fields) == {field.name for field in dataclasses.fields(SamplingParams)} - {"index"}


@pytest.mark.parametrize(
    "text", ["a", "no", "1", "1.5", "true", "null", "", " a", "a: b", "#a", "é 🎉\n\t\x7f\x85", "a\\b\"c'"]
)
def test_yaml_values_read_back(recipe, text: str) -> None:
    name = recipe(f"sampling: {{stop: [{yaml_value('x' + text)}]}}\ntarget: {{model: {yaml_value(text or 'x')}}}\n")
    assert run(name).recipe.sampling.stop == ("x" + text,)
    assert run(name).recipe.target.model == (text or "x")


def test_a_number_is_no_key_of_a_schema(recipe) -> None:
    assert "must have text as its key" in messages(recipe("structured: {json_schema: {1: {}}}\n"))[0]


def test_what_show_prints_reads_back_as_itself(recipe) -> None:
    sets = [
        "sampling={stop: [a, '1'], logit_bias: {3: 0.5}, temperature: 0.7}",
        "draft.method=ngram",
        "engine.kv_cache_memory=1GB",
        "structured.json_schema={type: Any, patternProperties: {'^[a-z]+$': {type: string}, '1': {}}}",
    ]
    resolved = run(sets=sets)
    again = run(recipe(to_yaml(resolved, origins=True)))
    assert again.recipe == resolved.recipe


def test_who_gives_k_means_no_table_of_k_from_below(recipe) -> None:
    path = recipe("speculation: {num_speculative_tokens: 5, k_by_batch: '1:5,4:3', k_by_context: '9000:0'}\n")
    assert run(path).recipe.speculation.k_by_batch == ((1, 5), (4, 3))
    assert run(path).recipe.as_dict()["speculation"]["k_by_context"] == "9000:0"
    for k in (0, 2):
        found = run(path, flags={"speculation.num_speculative_tokens": (k, "-k")}).recipe.speculation
        assert (found.num_speculative_tokens, found.k_by_batch) == (k, None)
    both = {"speculation.num_speculative_tokens": (2, "-k"), "speculation.k_by_batch": ("2:1", "--k-by-batch")}
    assert run(path, flags=both).recipe.speculation.k_by_batch == ((2, 1),)


def test_schema_is_strict_and_described() -> None:
    schema = json_schema(METHODS)
    json.dumps(schema, allow_nan=False)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Draft"]["properties"]["max"]["default"] == 4
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        assert all("description" in entry for entry in section["properties"].values()), name


def test_confidence_needs_a_draft_model() -> None:
    with pytest.raises(RecipeError, match="needs a draft model"):
        resolve(sets=["draft.method=ngram", "speculation.depth_policy=confidence"])


def test_a_recipes_template_does_not_go_with_another_target(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("target: {model: a, chat_template: t.jinja, default_chat_template_kwargs: {x: 1}}\n")
    assert resolve(file).recipe.target.chat_template == "t.jinja"
    assert resolve(file).recipe.target.default_chat_template_kwargs == {"x": 1}
    other = resolve(file, flags={"target.model": ("b", "--target")}).recipe.target
    assert (other.chat_template, other.default_chat_template_kwargs) == (None, None)
    named = {"SPECDEC_TARGET_CHAT_TEMPLATE": "{{ 1 }}", "SPECDEC_TARGET_DEFAULT_CHAT_TEMPLATE_KWARGS": "{y: true}"}
    other = resolve(file, environment=named, flags={"target.model": ("b", "--target")}).recipe.target
    assert (other.chat_template, other.default_chat_template_kwargs) == ("{{ 1 }}", {"y": True})
