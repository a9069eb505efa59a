"""`doctor`: the machine without a pair, a pair without its weights, and exit codes that tell why not."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from schemas import assert_fits
from tiny_engine import letter_tokenizer
from tiny_hybrids import save_hybrid
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM
from typed import not_none

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import UsageError
from specdec_cli.lm.invariance import InvarianceCheck
from specdec_cli.lm.llama import native
from specdec_cli.measure.machine import doctor as doctor_module
from specdec_cli.measure.machine import machine as machine_module
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.recipe import resolve

REFORMER = {"model_type": "reformer", "architectures": ["ReformerModelWithLMHead"], "is_decoder": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Two models of one tokenizer, and one of another."""
    folder = tmp_path_factory.mktemp("models")
    for name, without, shape in (
        ("target", "", {}),
        ("draft", "", {"max_position_embeddings": 64}),
        ("stranger", "the", {}),
    ):
        make_tiny("llama", folder / name, **shape)
        letter_tokenizer(without=without).save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels are tried (a second each time) and no weights may be loaded."""
    passed = InvarianceCheck("linear", "bfloat16", (2, 64), (), True)
    monkeypatch.setattr(doctor_module, "row_invariance", lambda _: [passed])

    def loads(*_, **__) -> None:
        raise AssertionError("doctor loads no weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loads)


def doctor(capsys: pytest.CaptureFixture[str], *arguments, code=0):
    assert run(["doctor", "--json", "--quiet", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert_fits(document, doctor_module.Diagnosis)
    return document, err


def test_the_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    document, _ = doctor(capsys)
    assert document["schema"] == "specdec.doctor/1"
    assert document["pair"] is None
    assert document["recipe"] is None
    assert document["verdict"] == "ok"
    machine = document["machine"]
    assert machine["devices"][0]["name"] == "cpu"
    assert machine["devices"][0]["memory_bytes"] > machine["devices"][0]["free_bytes"] > 0
    assert machine["versions"]["torch"]
    assert machine["num_threads"] >= 1
    assert document["row_invariance"]["holds"]
    assert any("mixtures of experts" in sentence for sentence in document["not_claimed"])
    assert any("64 rows" in sentence for sentence in document["not_claimed"])


def test_a_fitting_pair(capsys: pytest.CaptureFixture[str], models) -> None:
    document, err = doctor(capsys, "-t", models / "target", "-d", models / "draft", "-k", 3, "--max-num-seqs", 2)
    assert err == ""
    pair = document["pair"]
    assert document["verdict"] == "ok"
    assert pair["overlap"]["equal"]
    assert (pair["max_context"], pair["draft_max_context"]) == (128, 64)
    # the vocabulary is padded: 97 logits, fewer tokens
    assert pair["target"]["embedding_size"] == 97 > pair["tokenizers"]["target"]["num_tokens"]
    memory = pair["memory"]["target"]
    assert memory["weights"] == pair["target"]["num_parameters"] * 4
    assert memory["logits"] == 2 * 4 * 97 * 4
    assert memory["kv_wanted"] == 2 * (128 + 16) * memory["kv_per_token"]
    messages = [problem["message"] for problem in pair["problems"]]
    assert any("continues without a draft" in message for message in messages)
    assert any("no chat template" in message for message in messages)


def test_a_chat_template_that_does_not_parse_is_a_warning(capsys, models, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    document, _ = doctor(capsys, "-t", tmp_path / "target")
    broken = [problem for problem in document["pair"]["problems"] if "chat template" in problem["message"]]
    assert [problem["severity"] for problem in broken] == ["warning"]
    assert "is broken: " in broken[0]["message"]


def test_tiny_models_have_thousands_of_parameters(capsys: pytest.CaptureFixture[str], models) -> None:
    assert run(["doctor", "-t", str(models / "target"), "-d", str(models / "draft")]) == 0
    shown = capsys.readouterr().out
    assert " K, from" in shown
    assert "0.0 M" not in shown


def test_different_tokenizers_run_and_show_what_they_share(capsys: pytest.CaptureFixture[str], models) -> None:
    document, _ = doctor(capsys, "-t", models / "target", "-d", models / "stranger")
    pair = document["pair"]
    assert not pair["overlap"]["equal"]
    assert pair["draft_method"] == "universal"
    assert 0 < pair["shared_vocabulary"]["share_of_text"] <= 1
    assert any("tokenizers of target and draft differ" in problem["message"] for problem in pair["problems"])


def test_an_architecture_that_is_refused_is_incompatible(
    capsys: pytest.CaptureFixture[str], models, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFORMER))
    document, err = doctor(capsys, "-t", tmp_path, "-d", "ngram", code=2)
    assert document["verdict"] == "incompatible"
    assert "`reformer`" in err


def test_an_incompatibility_comes_before_what_cannot_run(
    capsys: pytest.CaptureFixture[str], models, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFORMER))
    (shutil.copytree(models / "target", tmp_path / "without-weights") / "model.safetensors").unlink()
    doctor(capsys, "-t", tmp_path / "without-weights", "-d", "ngram", code=1)
    doctor(capsys, "-t", tmp_path / "without-weights", "-d", tmp_path, code=2)


def test_too_little_memory_cannot_run(
    capsys: pytest.CaptureFixture[str], models, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = machine_module.look

    def small():
        machine = look()
        return replace(machine, devices=(replace(machine.devices[0], free_bytes=1000),))

    monkeypatch.setattr(doctor_module, "look", small)
    document, err = doctor(capsys, "-t", models / "target", "-d", "ngram", code=1)
    assert "weights and logits take" in err
    assert document["verdict"] == "cannot-run"


@pytest.mark.parametrize(("memory", "said"), [("1KiB", "no room for the KV cache"), ("0.0001%", "leaves nothing")])
def test_too_little_memory_for_keys_and_values_cannot_run(
    capsys: pytest.CaptureFixture[str], models, memory: str, said: str
) -> None:
    pair = ["-t", models / "target", "-d", "ngram", "--set", f"engine.kv_cache_memory={memory}"]
    code = 1 if "room" in said else 2
    _, err = doctor(capsys, *pair, code=code)
    assert said in err


def test_graphs_are_for_a_gpu(capsys: pytest.CaptureFixture[str], models) -> None:
    _, err = doctor(
        capsys, "-t", models / "target", "-d", "ngram", "--device", "cpu", "--set", "engine.decoder=graphs", code=2
    )
    assert "is for a GPU" in err


def test_point_8_a_draft_head_is_incompatible(capsys: pytest.CaptureFixture[str], models, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    document, err = doctor(capsys, "-t", models / "target", "-d", tmp_path, code=2)
    assert document["verdict"] == "incompatible"
    assert "lacks the tensor `fc.weight`" in err


def test_a_device_that_is_not_here_cannot_run(capsys: pytest.CaptureFixture[str], models) -> None:
    _, err = doctor(capsys, "-t", models / "target", "-d", "ngram", "--device", "cuda:99", code=1)
    assert "`cuda:99`" in err


def test_kernels_without_the_property_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = InvarianceCheck("linear 8→8", "bfloat16", (2, 64), (3,), True)
    monkeypatch.setattr(doctor_module, "row_invariance", lambda _: [failed])
    document, _ = doctor(capsys)
    assert not document["row_invariance"]["holds"]
    assert any("depend on the other rows" in warning for warning in document["warnings"])


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize(
    ("words", "is_tested"), [((), True), (("--no-kernels",), False), (("PAIR",), False), (("PAIR", "--kernels"), True)]
)
def test_kernels_are_tested_where_the_machine_is_asked_about(
    words: tuple[str, ...], is_tested: bool, capsys: pytest.CaptureFixture[str], models
) -> None:
    pair = ["-t", models / "target", "-d", models / "draft"] if "PAIR" in words else []
    given = [*pair, *(word for word in words if word != "PAIR")]
    document, _ = doctor(capsys, *given)
    assert document["row_invariance"]["holds"] is (True if is_tested else None)
    assert bool(document["row_invariance"]["checks"]) is is_tested
    assert run(["doctor", *map(str, given)]) == 0
    assert ("not tested; --kernels tests it" in capsys.readouterr().out) is not is_tested


def test_the_report_is_for_people(capsys: pytest.CaptureFixture[str], models) -> None:
    assert run(["doctor", "-t", str(models / "target"), "-d", str(models / "draft"), "--kernels"]) == 0
    out, _ = capsys.readouterr()
    assert "row invariance: passed" in out
    assert "tokenizers: equal" in out
    assert "effective context: 128 tokens, drafted up to 64" in out
    assert "OK: the pair can run" in out
    assert "\x1b" not in out


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module.psutil, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert "busy" in not_none(machine_module.look().busy)
    monkeypatch.setattr(machine_module.psutil, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert machine_module.look().busy is None


def test_the_hub_is_read_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub = machine_module.look().hub
    assert hub["offline"] is True
    assert hub["token"] is True
    assert "secret" not in map(str, hub.values())


def test_a_flag_without_a_named_pair_is_looked_at_with_the_built_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--dtype", "bfloat16", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["target"]["dtype"] == "bfloat16"


def test_a_context_limit_above_the_targets_own_is_incompatible(capsys: pytest.CaptureFixture[str], models) -> None:
    document, err = doctor(capsys, "-t", models / "target", "-d", "ngram", "--max-model-len", 4096, code=2)
    assert document["verdict"] == "incompatible"
    assert "max_model_len is `4096`" in err
    assert "reads `128` tokens at most" in err


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A drafting method that reads hidden states of the target: of a layer that an option names, and the final ones."""
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "mine.py").write_text(
        "from dataclasses import dataclass\nimport feature_drafter\n\n@dataclass\n"
        "class Drafter(feature_drafter.Drafter):\n    layer: int = 0\n\n    def __post_init__(self):\n"
        "        super().__post_init__()\n        self.taps = (self.layer, 'final')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "readers.mine", raising=False)
    monkeypatch.delitem(sys.modules, "readers", raising=False)
    return "readers.mine"


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("spec", "words"), [
    ("self-int8", "an int8 copy of the target's linear layers"),
    ("self-int4", "an int4 copy of the target's linear layers"),
    ("self-exit:1", "the target's first layer"),
])  # fmt: skip
def test_a_draft_made_of_the_target_is_described(capsys: pytest.CaptureFixture[str], spec: str, words: str) -> None:
    if "int" in spec and native.missing() is not None:
        pytest.skip("our own decoder does not run here")
    pair = ["-t", "builtin:target", "-d", spec]
    found = doctor(capsys, *pair)[0]["pair"]
    assert (found["draft"]["name"], found["self_draft"], found["problems"]) == (spec, words, [])
    target, draft = found["memory"]["target"], found["memory"]["draft"]
    assert (0 < draft["weights"] < target["weights"]) if "int" in spec else draft["weights"] == 0
    assert 0 < draft["kv_planned"] <= target["kv_planned"]
    assert found["outlook"]["cost_ratio"] < 1
    assert run(["doctor", *map(str, pair)]) == 0
    assert words.split()[-1] in capsys.readouterr().out


def test_memory_of_hidden_states_is_stated(capsys: pytest.CaptureFixture[str], models, reader: str) -> None:
    pair = ["-t", models / "target", "--set", f"draft.method={reader}", "--max-num-seqs", 3, "--max-model-len", 100]
    found = doctor(capsys, *pair, "--dtype", "bfloat16")[0]["pair"]
    assert (found["taps"], found["target"]["hidden_size"]) == ([0, "final"], 32)
    memory = found["memory"]["target"]
    assert memory["taps_per_token"] == 2 * 32 * 2
    assert memory["taps_most"] == 3 * 100 * memory["taps_per_token"]
    assert run(["doctor", *map(str, pair)]) == 0
    assert "hidden states for the" in capsys.readouterr().out
    without = doctor(capsys, "-t", models / "target", "-d", "ngram")[0]["pair"]
    assert without["taps"] == []
    assert without["memory"]["target"]["taps_per_token"] is None


def test_memory_of_snapshots_is_stated(capsys: pytest.CaptureFixture[str], models, tmp_path: Path) -> None:
    hybrid = save_hybrid("qwen3_5_text", tmp_path)
    letter_tokenizer().save_pretrained(hybrid)
    pair = ["-t", hybrid, "-d", "ngram", "--max-num-seqs", 1]
    memory = doctor(capsys, *pair)[0]["pair"]["memory"]["target"]
    assert (memory["prefix_states_planned"], memory["tokens_apart"]) == (None, None)
    assert run(["doctor", *map(str, pair)]) == 0
    assert "each, with --prefix-caching" in capsys.readouterr().out
    least = memory["states"] + memory["kv_wanted"] + 4 * memory["prefix_state"]
    pair += ["--prefix-caching", "--set", f"engine.kv_cache_memory={least}"]
    found = doctor(capsys, *pair)[0]["pair"]["memory"]["target"]
    assert (found["kv_planned_tokens"], found["prefix_states_planned"], found["tokens_apart"]) == (144, 4, 48)
    assert run(["doctor", *map(str, pair)]) == 0
    assert "kB: 4, one after every 48 tokens" in capsys.readouterr().out
    assert doctor(capsys, "-t", models / "target", "-d", "ngram")[0]["pair"]["memory"]["target"]["prefix_state"] == 0


def test_hidden_states_that_the_target_lacks_are_refused_before_its_weights_are_read(
    capsys: pytest.CaptureFixture[str], models, reader: str
) -> None:
    pair = ["-t", models / "target", "--set", f"draft.method={reader}", "--set", "draft.layer=2"]
    document, err = doctor(capsys, *pair, code=2)
    assert document["verdict"] == "incompatible"
    said = "the draft reads hidden states of layer `2`, and"
    assert said in err
    with pytest.raises(UsageError, match=said):  # where loading weights fails this test
        Engine.load(str(models / "target"), {"method": reader, "layer": 2})


@pytest.mark.skipif(native.missing() is not None, reason="our own decoder does not run here")
def test_only_torchs_forwards_emulate_a_dtype() -> None:
    cpu, *others = look().devices
    machine = replace(look(), devices=(replace(cpu, dtypes=cpu.dtypes | {"bfloat16": "emulated"}), *others))
    for decoder, whose in (("auto", []), ("transformers", ["target", "draft"])):
        given = ["target.dtype=bfloat16", "draft.dtype=bfloat16", "draft.quantize=none", f"engine.decoder={decoder}"]
        found = preflight(resolve("builtin", sets=given).recipe, machine).problems
        expected = [f"`bfloat16` of the {role} is emulated on `cpu`: correct, and slow" for role in whose]
        assert [one.message for one in found if "emulated" in one.message] == expected
