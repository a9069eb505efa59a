"""`Engine.load`: one list of keyword arguments, typed, documented and with the data classes' defaults."""

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest
from typed import not_none, stand_in

from specdec_cli import AsyncEngine, Engine, EngineOptions
from specdec_cli.engine.loading import LoadArguments, LoadSettings, ModelSettings, load_parameters, settle
from specdec_cli.errors import UsageError
from specdec_cli.lm.settings import ModelArguments
from specdec_cli.lm.transformers_lm import CacheArguments, TransformersLM


def test_the_typed_arguments_are_the_data_classes_fields() -> None:
    of_models = get_type_hints(ModelSettings)
    shared = {name: kind for name, kind in get_type_hints(LoadSettings).items() if name not in ("target", "draft")}
    expected = get_type_hints(EngineOptions) | shared | of_models
    expected |= {f"draft_{name}": kind for name, kind in of_models.items()}
    assert get_type_hints(LoadArguments) == expected
    assert {one.name for one in load_parameters()} == expected.keys()
    assert get_type_hints(ModelArguments) == of_models


def test_a_models_cache_is_sized_by_the_typed_arguments() -> None:
    of_model = get_type_hints(TransformersLM.__init__)
    others = {"model", "name", "eos_token_ids", "decoder", "kind", "return"}
    assert get_type_hints(CacheArguments) == {name: kind for name, kind in of_model.items() if name not in others}


@pytest.mark.parametrize("load", [Engine.load, AsyncEngine.load])
def test_load_shows_every_argument_with_its_default(load) -> None:
    shown = inspect.signature(load).parameters
    for owner in (EngineOptions, LoadSettings, ModelSettings):
        for one in fields(owner):
            if one.name not in ("target", "draft"):
                assert shown[one.name].default == one.default, one.name
    assert "**" not in str(inspect.signature(load))
    assert "Examples:" in not_none(inspect.getdoc(load))
    assert "Raises:" in not_none(inspect.getdoc(load))


def test_both_engines_load_with_the_same_arguments() -> None:
    one, other = (inspect.signature(owner.load) for owner in (Engine, AsyncEngine))
    assert list(one.parameters.values()) == list(other.parameters.values())


@pytest.mark.parametrize("one", load_parameters(), ids=lambda one: one.name)
def test_every_argument_is_described_where_it_is_declared(one) -> None:
    assert f"    {one.field.name}: " in not_none(inspect.getdoc(one.owner))


def test_49_6_docstrings_are_not_code() -> None:
    """Python leaves them out with -OO, which transformers does not survive; our own modules do."""
    lines = (
        "from specdec_cli.engine.loading import load_parameters; print(len(load_parameters()))\n"
        "from specdec_cli.cli.main import run; run(['generate', 'Hi', '--dry-run'])"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", lines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "would decode 1 prompt" in done.stdout


def test_arguments_override_the_given_objects() -> None:
    options, settings = settle(
        {"num_speculative_tokens": 2, "max_model_len": 64, "dtype": "float32", "draft_quantize": "int8"},
        EngineOptions(max_num_seqs=3),
        LoadSettings(block_size=8, draft=ModelSettings(dtype="bfloat16")),
    )
    assert (options.num_speculative_tokens, options.max_num_seqs) == (2, 3)
    assert (settings.max_model_len, settings.block_size) == (64, 8)
    assert settings.target == ModelSettings(dtype="float32")
    assert settings.draft == ModelSettings(dtype="bfloat16", quantize="int8")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("num_speculative_token", "num_speculative_tokens"), ("draft_dtyp", "draft_dtype"), ("xyzzy", "help")],
)
def test_an_unknown_argument_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        Engine.load("no-such-model", "ngram", **stand_in({name: 3}))
    assert hint in not_none(caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_dtype": "float64"}, "draft_dtype is out of range: `float64`"),
        ({"dtype": "float64"}, "dtype is out of range: `float64`"),
        ({"draft_device": "tpu"}, "draft_device is out of range: `tpu`"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes is out of range: `-1`"),
    ],
)
def test_49_a_value_out_of_range_is_refused_by_its_arguments_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        Engine.load("no-such-model", "no-such-draft", **stand_in(arguments))
    assert not_none(caught.value.hint)


@pytest.mark.parametrize("draft", [None, "none", "ngram:max=3", "suffix", "self-int8", "mtp", {"method": "ngram"}])
@pytest.mark.parametrize(
    "name", [parameter.name for parameter in load_parameters() if parameter.name.startswith("draft_")]
)
def test_49_a_draft_without_a_model_takes_no_argument_for_one(draft: str | None, name: str) -> None:
    value = {
        "draft_dtype": "float32",
        "draft_quantize": "int8",
        "draft_compute": "native",
        "draft_load_format": "dummy",
    }
    with pytest.raises(UsageError, match=f"^{name} has no meaning for the draft `.*`, which loads no model"):
        Engine.load("no-such-model", draft, **stand_in({name: value.get(name, "cpu")}))


def test_a_subclass_loads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Engine):
        pass

    from specdec_cli.engine import build

    monkeypatch.setattr(build, "load_engines", lambda engine_class, *_, **__: [engine_class.__new__(engine_class)])
    assert type(Mine.load()) is Mine
