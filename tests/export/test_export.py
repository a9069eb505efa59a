import ast
import json
import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_recipes import GOLDEN, RECIPES, files_of, resolved
from typed import not_none

from specdec_cli.cli.shared import draft_methods
from specdec_cli.drafters import methods, options
from specdec_cli.errors import UsageError
from specdec_cli.export import ENGINES, export
from specdec_cli.export.draft_kind import draft_kind
from specdec_cli.recipe import resolve

SERVERS = [name for name in ENGINES if name != "profile"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("engine", SERVERS)
def test_files_are_the_golden_ones(engine: str, name: str) -> None:
    files = files_of(engine, name)
    folder = GOLDEN / engine / name
    assert set(files) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for file, text in files.items():
        assert text == (folder / file).read_text(encoding="utf-8"), f"write it again: python {GOLDEN.parents[1]}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("engine", SERVERS)
def test_files_are_what_their_names_say(engine: str, name: str) -> None:
    for file, text in files_of(engine, name).items():
        if file.endswith(".sh"):
            assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        elif file.endswith(".py"):
            ast.parse(text)
        elif file.endswith(".yaml"):
            assert isinstance(yaml.safe_load(text), dict)
        elif file.endswith(".json"):
            json.loads(text)


@pytest.mark.parametrize(
    ("configuration", "k", "most"),
    [
        ({"architectures": ["DFlashDraftModel"], "block_size": 8}, 12, 7),
        ({"architectures": ["DFlashDraftModel"], "block_size": 8}, 7, None),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, 16, 15),
        ({"speculators_model_type": "dflash"}, 8, 7),
        ({"speculators_model_type": "dflash", "sample_from_anchor": True}, 8, None),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, 8, 7),
        ({"architectures": ["LlamaForCausalLM"], "block_size": 4}, 12, None),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_k_beyond_what_the_draft_gives_is_told(
    engine: str, configuration: dict[str, Any], k: int, most: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    flags: dict[str, Any] = {
        "target.model": "org/target",
        "draft": {"model": str(tmp_path)},
        "speculation.num_speculative_tokens": k,
    }
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    made, warnings = export(engine, named, "0")
    told = [one for one in warnings if "drafts in a row" in one]
    assert len(told) == (most is not None)
    if most is not None:
        assert f"num_speculative_tokens = {k} is more than" in told[0]
        assert f"which is {most}: set k to {most}" in told[0]
        assert told[0] in next(iter(made.files.values()))


@pytest.mark.parametrize(
    ("engine", "configuration", "written", "warned"),
    [
        (
            "vllm",
            {"architectures": ["DFlash2DraftModel"]},
            '"method": "dflash"',
            "a DFlash2 draft in its V2 model runner",
        ),
        ("vllm", {"speculators_model_type": "dspark"}, '"method": "dspark"', "takes `sample_from_anchor` for false"),
        (
            "vllm",
            {"architectures": ["Qwen3DSparkModel"]},
            '"method": "dspark"',
            "a DSpark draft in its V2 model runner",
        ),
        ("sglang", {"architectures": ["DFlash2DraftModel"]}, "DFLASH", None),
        ("llamacpp", {"architectures": ["DFlash2DraftModel"]}, "draft-dflash", None),
        ("llamacpp", {"architectures": ["Qwen3DSparkModel"]}, "draft-dspark", None),
        ("trtllm", {"architectures": ["DFlash2DraftModel"]}, "", "has no counterpart of a DFlash2 draft"),
    ],
)
def test_block_drafts_are_named_as_engines_name_them(
    engine: str, configuration: dict[str, Any], written: str, warned: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    flags: dict[str, Any] = {"target.model": "org/target", "draft": {"model": str(tmp_path), "method": "dflash"}}
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    made, warnings = export(engine, named, "0")
    assert written in "".join(made.files.values())
    assert warned is None or any(warned in one for one in warnings)
    assert any("V2 model runner" in one for one in warnings) == (engine == "vllm")


@pytest.mark.parametrize(
    ("engine", "draft", "words"),
    [
        ("sglang", {"method": "eagle3", "model": "org/head"}, "SGLang describes trees in another way, by --spec"),
        ("sglang", {"model": "org/draft"}, "in another way, by --speculative-eagle-topk"),
        ("sglang", {"method": "ngram"}, "in another way, by --speculative-ngram-max-bfs-breadth"),
        ("sglang", {"method": "dflash", "model": "org/draft"}, "SGLang drafts chains with a DFlash draft"),
        ("trtllm", {"method": "eagle3", "model": "org/head"}, "in another way, by use_dynamic_tree"),
        ("trtllm", {"model": "org/draft"}, "TensorRT-LLM drafts chains with a draft model"),
        ("openvino", {"method": "eagle3", "model": "org/head"}, "in another way, by branching_factor and tree_depth"),
        ("openvino", {"model": "org/draft"}, "OpenVINO GenAI drafts chains with a draft model"),
        ("vllm", {"method": "eagle3", "model": "org/head"}, "vLLM drafts chains with an EAGLE-3 head"),
    ],
)
def test_a_tree_is_left_out_for_a_reason_that_is_the_engines(engine: str, draft: dict[str, Any], words: str) -> None:
    flags: dict[str, Any] = {"target.model": "org/target", "draft": draft, "speculation.tree": "2,1"}
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    _, warnings = export(engine, named, "0")
    (told,) = [one for one in warnings if one.startswith("speculation.tree = 2,1 is left out")]
    assert words in told


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"method": "eagle3", "model": "org/head"}, "SGLang has a rule of its own, --speculative-adaptive"),
        ({"model": "org/draft"}, "SGLang drafts a fixed number of tokens"),
    ],
)
def test_sglangs_own_depth_policy_is_named(draft: dict[str, Any], words: str) -> None:
    flags: dict[str, Any] = {"target.model": "org/target", "draft": draft, "speculation.depth_policy": "adaptive"}
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    _, warnings = export("sglang", named, "0")
    assert f"speculation.depth_policy = adaptive is left out: {words}" in warnings


@pytest.mark.parametrize(("num", "k", "is_told"), [(3, 4, True), (3, 6, False), (3, 2, False), (1, 5, False)])
def test_a_k_that_vllm_refuses_with_mtp_modules_is_told(num: int, k: int, is_told: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": num}))
    flags: dict[str, Any] = {
        "target.model": str(tmp_path),
        "draft": {"method": "mtp"},
        "speculation.num_speculative_tokens": k,
    }
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    _, warnings = export("vllm", named, "0")
    assert any(f"vLLM refuses k = {k} with {num} MTP modules" in one for one in warnings) is is_told


SETTINGS: dict[str, Any] = {
    "target.revision": "v2",
    "target.load_format": "dummy",
    "target.dtype": "float16",
    "target.quantize": "int8",
    "target.compute": "native",
    "target.device": "cuda",
    "target.tensor_parallel_size": 4,
    "target.pipeline_parallel_size": 2,
    "engine.distributed_executor_backend": "ray",
    "target.generation_config": "none",
    "target.chat_template": "{{ messages }}",
    "target.default_chat_template_kwargs": {"thinking": False},
    "draft.revision": "v3",
    "draft.dtype": "bfloat16",
    "draft.quantize": "int8",
    "draft.compute": "native",
    "draft.device": "cuda:1",
    "draft.tensor_parallel_size": 4,
    "draft.load_format": "dummy",
    "speculation.depth_policy": "adaptive",
    "speculation.verify": "typical",
    "speculation.disable_by_batch_size": 12,
    "speculation.k_by_batch": "1:6,9:2",
    "speculation.k_by_context": "4000:0",
    "speculation.tree": "dynamic:12",
    "speculation.synthetic_acceptance_length": 2.5,
    "sampling.top_k": 17,
    "sampling.min_p": 0.07,
    "sampling.repetition_penalty": 1.3,
    "sampling.presence_penalty": 0.3,
    "sampling.frequency_penalty": 0.2,
    "sampling.logit_bias": {7: 3.0},
    "sampling.stop_token_ids": [9],
    "sampling.ignore_eos": True,
    "sampling.min_tokens": 3,
    "sampling.logprobs": 2,
    "sampling.seed": 77,
    "sampling.max_new_tokens": 99,
    "structured.regex": "a+",
    "engine.kv_block_size": 32,
    "engine.kv_cache_memory": "3GiB",
    "engine.max_num_batched_tokens": 4096,
    "engine.enable_prefix_caching": False,
    "engine.decoder": "transformers",
    "serve.reasoning_parser": "qwen3",
    "serve.tool_call_parser": "hermes",
    "serve.api_key_env": "KEYS",
    "serve.max_waiting": 3,
    "draft.first": "suffix",
}


@pytest.mark.parametrize("name", ["min_p", "logit_bias"])
def test_the_next_command_asks_for_nothing_that_the_engine_refuses(name: str) -> None:
    path = f"sampling.{name}"
    with_draft, warnings = export("vllm", resolved("sampled", **{path: SETTINGS[path]}), "X")
    assert f"{path} is left out" in " ".join(warnings)
    assert "as those of the next command do" not in " ".join(one for one in warnings if path in one)
    assert path not in not_none(with_draft.next_command)
    alone, _ = export(
        "vllm", resolved("sampled", **{path: SETTINGS[path], "speculation.num_speculative_tokens": 0}), "X"
    )
    assert path in not_none(alone.next_command)


@pytest.mark.in_turn(5, every=8)
@pytest.mark.parametrize("path", [*SETTINGS])
@pytest.mark.parametrize("engine", SERVERS)
def test_no_setting_is_lost_in_silence(engine: str, path: str) -> None:
    name = "ngram" if path.startswith("serve.") else "sampled"
    before = export(engine, resolved(name), "X")
    after = export(engine, resolved(name, **{path: SETTINGS[path]}), "X")
    without_command = [
        [line for text in made.files.values() for line in text.splitlines() if not line.startswith("#")]
        for made, _ in (before, after)
    ]
    assert without_command[0] != without_command[1] or before[1] != after[1]


_LINES = "a\nexit 7\u2028b: [\x85'\"$(exit 8)\\ü🎈"
"""Text that ends a comment, a word or a string where it is not escaped."""


@pytest.mark.parametrize("engine", SERVERS)
def test_text_of_several_lines_stays_in_its_comment_and_reaches_the_requests(engine: str) -> None:
    stops, template = [_LINES, "12", "null", "x, y"], f"{{{{ messages }}}}{_LINES}"
    given = resolved("sampled", **{"sampling.stop": stops, "target.chat_template": template})
    made, warnings = export(engine, replace(given, source="a\nb"), "X")
    for file, text in made.files.items():
        if file.endswith(".sh"):
            head, _, _ = text.partition("set -euo pipefail\n")
            assert all(line.startswith("#") for line in head.splitlines())
        elif file.endswith(".py"):
            ast.parse(text)
        elif file.endswith(".yaml"):
            assert isinstance(yaml.safe_load(text), dict)
    assert not any("\n" in one for one in warnings)
    if made.next_command is not None:
        words = shlex.split(made.next_command)
        again = resolve(sets=[word for before, word in pairwise(words) if before == "--set"], methods=draft_methods())
        assert again.recipe.sampling.stop == tuple(stops)


def test_a_name_of_a_recipe_runs_no_command(tmp_path: Path) -> None:
    name = f"$HERE/$(touch {tmp_path}/made)"
    made, _ = export("vllm", resolved("ngram", **{"serve.served_model_name": [name]}), "X")
    asked = made.files["vllm.sh"].replace("exec vllm", "exec printf '%s\\n'")
    said = subprocess.run(["bash"], input=asked, text=True, check=True, capture_output=True).stdout
    assert name in said.splitlines()
    assert not (tmp_path / "made").exists()


def test_dynamo_asks_for_the_gpus_of_all_stages() -> None:
    sizes = {"target.tensor_parallel_size": 2, "target.pipeline_parallel_size": 3}
    made, _ = export("dynamo", resolved("sampled", **sizes), "X")
    worker = yaml.safe_load(made.files["dynamo.yaml"])["spec"]["services"]["Worker"]
    assert worker["resources"]["limits"]["gpu"] == "6"


def test_every_setting_of_a_recipe_is_in_that_list() -> None:
    listed = {*SETTINGS, *RECIPES["sampled"], *RECIPES["ngram"], *RECIPES["eagle3"]}
    recipe = resolved("sampled").recipe
    sections = ("target", "draft", "speculation", "sampling", "structured", "engine")
    every = {f"{one}.{key}" for one in sections for key in type(getattr(recipe, one)).model_fields}
    without_effect = {"draft.model", "draft.method", "speculation.p_min", "sampling.skip_special_tokens"}
    without_effect |= {"speculation.synthetic_acceptance_rates", "structured.json_schema", "structured.choice"}
    assert every - listed - without_effect <= {
        "engine.check_at_load",
        *("engine.name", "engine.start_timeout_seconds"),  # how specdec starts an engine, which export does not
    }


def test_random_weights_cannot_be_exported() -> None:
    with pytest.raises(UsageError, match="random weights"):
        export("vllm", resolved("sampled", **{"target.model": "shape:llama-2-70b"}), "X")


def test_vllm_gets_the_whole_table_of_k() -> None:
    made, _ = export("vllm", resolved("sampled", **{"speculation.k_by_batch": "2:6,9:2"}), "X")
    assert '"num_speculative_tokens": 6' in made.files["vllm.sh"], "it would cut the table to a smaller one"
    assert "[[1, 1, 4], [2, 8, 6], [9, 1048576, 2]]" in made.files["vllm.sh"]


def test_a_limit_on_the_batch_ends_the_table() -> None:
    made, _ = export("trtllm", resolved("sampled", **{"speculation.disable_by_batch_size": 12}), "X")
    document = yaml.safe_load(made.files["trtllm.yaml"])
    assert document["speculative_config"]["draft_len_schedule"] == {12: 4}


@pytest.mark.parametrize(
    ("table", "most", "schedule"),
    [
        ("1:4,8:2", 4, {4: 4}),
        ("1:4,4:2,5:1", 4, {3: 4, 4: 2}),
        ("1:4,8:2,32:0", 16, {7: 4, 16: 2}),
        ("1:4,8:0", 16, {7: 4}),
    ],
)
def test_tensorrt_llms_schedule_ends_with_the_largest_batch(table: str, most: int, schedule: dict[int, int]) -> None:
    made, _ = export("trtllm", resolved("ngram", **{"speculation.k_by_batch": table, "engine.max_num_seqs": most}), "X")
    found = yaml.safe_load(made.files["trtllm.yaml"])["speculative_config"]
    assert list(found["draft_len_schedule"].items()) == list(schedule.items())


def test_drafts_that_no_engine_has_are_left_out_with_a_warning() -> None:
    given = {"target.model": "a/b", "draft": {"method": "prediction", "text": "x"}}
    from specdec_cli.cli.shared import draft_methods
    from specdec_cli.recipe import resolve

    recipe = resolve(flags={path: (value, path) for path, value in given.items()}, methods=draft_methods())
    for engine in SERVERS:
        made, warnings = export(engine, recipe, "X")
        assert any("the draft is left out" in one for one in warnings), engine
        assert "specul" not in "".join(
            line for line in next(iter(made.files.values())).splitlines() if not line.startswith("#")
        )


@pytest.mark.parametrize(
    ("draft", "engine", "said"),
    [
        ({"method": "universal", "model": "c/d"}, "vllm", '"use_heterogeneous_vocab": true'),
        ({"method": "universal", "model": "c/d"}, "transformers", "assistant_tokenizer=assistant_tokenizer"),
        ({"method": "self-exit", "layers": 3}, "transformers", "assistant_early_exit=3"),
        ({"method": "suffix", "min_prob": 0.2}, "vllm", '"suffix_decoding_min_token_prob": 0.2'),
        ({"method": "mtp"}, "sglang", "--speculative-algorithm NEXTN"),
        ({"method": "p-eagle", "model": "c/d"}, "vllm", '"parallel_drafting": true'),
        ({"method": "pard", "model": "c/d"}, "trtllm", "decoding_type: PARD"),
    ],
)
def test_drafts_have_the_names_of_each_engine(draft: dict[str, Any], engine: str, said: str) -> None:
    made, _ = export(engine, resolved("sampled", draft=draft), "X")
    assert said in "".join(made.files.values())


def test_every_drafting_method_is_exported_or_left_out_by_name() -> None:
    for method in methods():
        given: dict[str, Any] = {"model": "c/d"} if "model" in {one.name for one in options(method)} else {}
        given |= {"layers": 2} if method == "self-exit" else {}
        fields = {"model": "c/d"} if method == "model" else {"method": method, **given}
        for engine in SERVERS:
            made, warnings = export(engine, resolved("sampled", draft=fields), "X")
            assert made.files
            assert not any("none like `" in one for one in warnings if method not in ("prediction", "pard2"))


@pytest.mark.parametrize(
    ("configuration", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["EAGLEModel"]}, "eagle"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "peagle"}, "p-eagle"),
        ({"architectures": ["LlamaForCausalLM"], "pard_token": 5}, "pard"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
        (["nonsense"], "draft_model"),
    ],
)
def test_a_folder_says_what_draft_it_holds(tmp_path: Path, configuration: Any, method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert draft_kind(str(tmp_path), None, {}).method == method


def test_hub_ids_are_told_by_their_names() -> None:
    found = draft_kind("lmsys/SGLang-EAGLE3-Llama-4", None, {})
    assert (found.method, found.guessed_by) == ("eagle3", "its name")
    assert draft_kind("Qwen/Qwen3-0.6B", None, {}).guessed_by is None


def test_51_llama_cpp_gets_a_chosen_gguf_file_by_its_repository_or_path(tmp_path: Path) -> None:
    for file in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        (tmp_path / file).write_bytes(b"GGUF")
    cases = {
        ("org/repo:Q4_K_M", "org/small:Q8_0"): "--hf-repo org/repo:Q4_K_M --spec-draft-hf org/small:Q8_0",
        ("org/repo:a-Q4_K_M.gguf", "org/small:Q8_0"): "--hf-repo org/repo --hf-file a-Q4_K_M.gguf --spec",
        (
            f"{tmp_path}:Q4_K_M",
            f"{tmp_path}:Q8_0",
        ): f"--model {tmp_path}/a-Q4_K_M.gguf --spec-draft-model {tmp_path}/a-Q8",
    }
    for (target, draft), words in cases.items():
        recipe = resolved("sampled", **{"target.model": target, "draft": {"model": draft}})
        made, _ = export("llamacpp", recipe, "X.Y.Z")
        text = " ".join(made.files["llamacpp.sh"].replace("\\\n", " ").split())
        text = text.replace("--spec-type draft-simple ", "")
        assert words in text
        assert "convert.sh" not in made.files


@pytest.mark.parametrize("engine", SERVERS)
def test_a_draft_without_all_tokens_has_no_counterpart(engine: str, tmp_path: Path) -> None:
    content = {"architectures": ["LlamaForCausalLM"], "draft_token_ids": [5, 3]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    flags: dict[str, Any] = {"target.model": "org/target", "draft": {"model": str(tmp_path)}}
    named = resolve(flags={path: (value, path) for path, value in flags.items()}, methods=draft_methods())
    _, warnings = export(engine, named, "0")
    what = "a draft model with a reduced vocabulary (fewer tokens than its tokenizer)"
    assert any(f"has no counterpart of {what}" in one for one in warnings)
    _, warnings = export(engine, resolved("ngram", **{"target.model": str(tmp_path)}), "0")
    assert any(one.startswith(f"target.model is {what}: ") for one in warnings)
    file = tmp_path / "model.gguf"
    file.touch()
    _, warnings = export(engine, resolved("ngram", **{"target.model": str(file)}), "0")
    assert any(one.startswith("target.model is a file of this machine") for one in warnings)
