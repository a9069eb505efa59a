"""`--engine vllm`: the recipe in vLLM's words, and what is refused by name."""

import re

import pytest

from specdec_cli.cli.main import run
from specdec_cli.cli.other_engine import OtherEngine
from specdec_cli.cli.shared import Shared
from specdec_cli.errors import UsageError


def asked(*sets: str, args: str | None = None) -> OtherEngine:
    shared = Shared(sets=("engine.name=vllm", *sets), takes_engine=True, engine_args=args)
    return OtherEngine.of(shared.resolve(), shared)


def test_the_recipe_becomes_vllm_options_as_in_export() -> None:
    engine = asked(
        *("target.model=some/model", "draft.model=some/draft", "speculation.num_speculative_tokens=3"),
        *("target.tensor_parallel_size=2", "target.pipeline_parallel_size=2"),
        "engine.distributed_executor_backend=ray",
        args="--enforce-eager",
    )
    words = engine.words()
    assert words[:2] == ("serve", "some/model")
    assert " ".join(words).endswith("--enforce-eager")
    for option in ("--tensor-parallel-size 2", "--pipeline-parallel-size 2", "--distributed-executor-backend ray"):
        assert option in " ".join(words)
    assert '"num_speculative_tokens": 3' in words[words.index("--speculative-config") + 1]
    assert '"draft_tensor_parallel_size": 2' in words[words.index("--speculative-config") + 1]
    assert "--host" not in words
    assert "--speculative-config" not in engine.words(0)
    assert "--no-enable-prefix-caching" in engine.without_prefix_caching().words(0)
    assert engine.shown(0).startswith("vllm serve some/model --")


@pytest.mark.parametrize(
    "argument",
    [
        *("--speculative-config {}", "--speculative_config={}", "--speculative-config.method=ngram", "-sc {}"),
        *("--spec-tokens 3", "--speculative-con {}", "--enable-prefix-caching", "--no-enable-prefix-caching"),
        *("--model other/model", "--served-model-name x", "--config file.yaml"),
        *("--max-model-len 9", "--tensor_parallel_size=4", "-tp 4"),
    ],
)
def test_options_that_specdec_chooses_are_refused_by_name(argument: str) -> None:
    sets = ("target.model=some/model", "draft.model=some/draft", "engine.max_model_len=64")
    engine = asked(*sets, "target.tensor_parallel_size=2", args=f"--enforce-eager {argument}")
    for k in (None, 0):
        with pytest.raises(UsageError, match=f"must not hold `{re.escape(argument.split()[0])}`: specdec chooses it"):
            engine.words(k)


def test_options_that_the_recipe_leaves_open_may_be_given() -> None:
    args = "--max-model-len 9 --no-enforce-eager --chat-template-content-format=auto -tp 4"
    assert " ".join(asked("target.model=some/model", args=args).words()).endswith(args)


def test_a_draft_that_vllm_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="vLLM has no draft like an int8 copy of the target"):
        asked("target.model=some/model", "draft.method=self-int8").server()


def test_sampling_that_vllm_refuses_is_refused() -> None:
    engine = asked("target.model=some/model", "draft.model=some/draft", "sampling.min_p=0.1", "sampling.temperature=1")
    with pytest.raises(UsageError, match=r"vLLM refuses `sampling\.min_p` together with speculation"):
        engine.server()
    assert not engine.server(0).drafts


def test_settings_that_are_left_out_are_named() -> None:
    made = asked("target.model=m/m", "draft.model=d/d", "draft.quantize=int8", "draft.dtype=float16").server()
    assert [one.split(" = ")[0] for one in made.warnings] == ["draft.quantize", "draft.dtype"]


def test_a_tree_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`speculation\.tree` has no effect with --engine vllm: it drafts chains"):
        asked("target.model=m/m", "draft.model=d/d", "speculation.tree=2,1").server()


def test_an_unknown_release_is_named() -> None:
    engine = asked("target.model=some/model")
    assert engine.unknown_version("0.33.1") is None
    assert engine.unknown_version("0.32.0") is None
    said = engine.unknown_version("0.3.3")
    assert said is not None
    assert said.startswith("vLLM 0.3.3 answers, and its settings were checked for 0.32 and 0.33")


def test_the_builtin_pair_is_two_folders() -> None:
    words = asked().words()
    assert words[1].endswith("builtin/target")
    assert "builtin/draft" in words[words.index("--speculative-config") + 1]


@pytest.mark.parametrize("command", [["chat"], ["doctor"]])
def test_a_command_that_starts_no_engine_refuses_one(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--set", "engine.name=vllm"]) == 2
    assert "this command starts no other engine" in capsys.readouterr().err


def test_several_devices_need_another_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--set", "target.pipeline_parallel_size=2"]) == 2
    assert "specdec runs a model on one device" in capsys.readouterr().err
