from pathlib import Path

import pytest
import typer

from specdec_cli.cli.main import run
from specdec_cli.cli.options import OPTIONS
from specdec_cli.cli.shared import Shared, with_shared_options
from specdec_cli.errors import UsageError


def parse(*arguments: str, aliases: bool = True) -> Shared:
    seen: list[Shared] = []

    @with_shared_options(aliases=aliases)
    def command(prompt: str = typer.Argument("none"), *, shared: Shared) -> None:
        seen.append(shared)

    app = typer.Typer()
    app.command()(command)
    with typer.main.get_command(app).make_context("specdec", list(arguments)) as context:
        context.command.invoke(context)
    return seen[0]


def test_nothing_said_is_nothing() -> None:
    assert parse() == Shared()


def test_every_option_reaches_its_key_under_its_name() -> None:
    samples = {
        "sets": "sampling.top_k=3", "recipe": "builtin", "output": "x.json", "draft": "none", "target.model": "m",
        "target.dtype": "float16", "target.quantize": "int8", "target.device": "cpu", "draft.dtype": "float16",
        "draft.quantize": "none", "draft.device": "cpu", "speculation.depth_policy": "fixed",
        "speculation.verify": "block",
        "sampling.logit_bias": "3=4", "engine.kv_cache_memory": "0.5", "speculation.p_min": "0.5",
        "engine.decoder": "transformers", "target.default_chat_template_kwargs": "{}",
    }  # fmt: skip
    for option in OPTIONS:
        if option.path == "force":
            continue
        shared = parse(option.flag, *([] if option.kind is bool else [samples.get(option.path, "1")]))
        if "." in option.path or option.path == "draft":
            assert shared.flags[option.path][1] == option.flag
        else:
            assert getattr(shared, option.path)


def test_values_resolve_with_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SAMPLING_TOP_K", "7")
    shared = parse(
        "-r", "builtin", "-d", "ngram:max=5,min=3", "-k", "6", "--stop", "a", "--stop", "b", "--stop-token-id", "3",
        "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--ignore-eos", "--set", "sampling.seed=9",
    )  # fmt: skip
    resolved = shared.resolve()
    sampling = resolved.recipe.sampling
    assert resolved.recipe.draft_fields() == {"method": "ngram", "max": 5, "min": 3}
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("a", "b"), (3,), True)
    assert (sampling.logit_bias, sampling.seed, sampling.top_k) == ({5: -1.5, 6: 2.0}, 9, 7)
    assert resolved.origins["draft.max"] == "flag --draft"
    assert resolved.origins["speculation.num_speculative_tokens"] == "flag --num-speculative-tokens"
    assert resolved.origins["sampling.top_k"] == "environment SPECDEC_SAMPLING_TOP_K"
    assert resolved.origins["target.model"] == "recipe builtin.yaml:4"


def test_aliases() -> None:
    shared = parse(
        "--model", "m", "--speculative-model", "d", "--speculative-disable-by-batch-size", "4", "--max-num-seqs", "2",
        "--max-model-len", "100", "--gpu-memory-utilization", "0.85", "--speculative-draft-tensor-parallel-size", "1",
    )  # fmt: skip
    recipe = shared.resolve().recipe
    assert (recipe.target.model, recipe.draft.model) == ("m", "d")
    assert (recipe.speculation.disable_by_batch_size, recipe.engine.max_num_seqs, recipe.engine.max_model_len) == (
        4,
        2,
        100,
    )
    assert recipe.engine.memory_share() == pytest.approx(0.85)


def test_aliases_are_not_everywhere() -> None:
    for name in ("--model", "--max-num-seqs"):
        with pytest.raises(Exception, match="No such option"):
            parse(name, "1", aliases=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logit-bias", "5"], ["--logit-bias", "a=1"], ["--logit-bias", "5=x"], ["--logit-bias", "5=nan"],
        ["-d", ""], ["-d", "ngram:max=x"], ["-d", "ngram:mx=3"], ["-d", "self-exit:x"], ["-t", ""],
        ["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "1.5"],
        ["-k", "-1"], ["-k", "65"], ["--temperature", "nan"], ["--temperature", "-1"], ["--top-p", "0"],
        ["--seed", "9223372036854775808"],
        ["--quantize", "int5"], ["--tensor-parallel-size", "2"], ["--device", "gpu"], ["--dtype", "fp16"],
        ["--depth-policy", "clever"], ["--k-by-batch", "8:3,1:5"], ["--k-by-batch", "8"],
        ["--p-min", "0.5"], ["--stop", ""], ["--verify", "bloc"], ["--force"],
        ["-d", "ngram", "--draft-dtype", "float16"], ["--set", "x"], ["-r", "nope"], ["-n", "0"], ["--logprobs", "101"],
    ],
)  # fmt: skip
def test_refused_with_one_sentence(arguments: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*arguments).resolve()
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2


def test_output_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("mine")
    for path in (there, tmp_path, tmp_path / "missing" / "x.json"):
        with pytest.raises(UsageError):
            parse("--output", str(path))
    assert there.read_text() == "mine"
    assert parse("--output", str(there), "--force").output == there


def test_a_negative_seed_is_drawn_once_for_a_command_line() -> None:
    shared = Shared(flags={"sampling.seed": (-1, "--seed")})
    seeds = {shared.resolve().recipe.sampling.seed for _ in range(3)}
    assert len(seeds) == 1
    assert min(seeds) >= 0
    assert shared.resolve(draws_seed=False).recipe.sampling.seed == -1
    assert Shared(flags=shared.flags).resolve().recipe.sampling.seed not in seeds
    assert {one.recipe.sampling.seed for one in shared.resolve_drafts()} == seeds


@pytest.mark.parametrize("name", ["SPECDEC_HOME", "SPECDEC_MAX_TOKENS", "SPECDEC_"])
def test_a_variable_that_nothing_reads_is_reported_once(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    shared = Shared()
    shared.resolve()
    shared.resolve()
    assert capsys.readouterr().err.count(f"`{name}` is ignored") == 1
    Shared(quiet=True).resolve()
    monkeypatch.setenv(name, "")
    Shared().resolve()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stop", "a\udcffb"], "`--stop` must be Unicode text, not `a�b`"),
        (["-t", "a\udcffb"], "`--target` must be Unicode text"),
        (["--prediction", "a\udcffb"], "`text` of `prediction` must be Unicode text"),
        (
            ["--set", "sampling.stop=[a\udcffb]"],
            "`--set sampling.stop` is not a value in YAML: byte `0xed` is not UTF-8",
        ),
        (["--set", "a\udcffb=1"], "`--set a�b=1` is not KEY.PATH=VALUE"),
    ],
)
def test_49_bytes_of_no_text_are_refused_by_their_option(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", *words, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}"), err
    assert err.count("error:") == 1
