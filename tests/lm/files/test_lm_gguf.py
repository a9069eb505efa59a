"""GGUF files as targets and drafts: the numbers that they hold, their tokenizer, and one sentence for every fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import refusal
from tiny_models import make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec_cli.cli.main import run
from specdec_cli.engine.engine import Engine
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.facts import describe
from specdec_cli.lm.load import load_lm, load_tokenizer
from specdec_cli.lm.machine import device_memory
from specdec_cli.lm.machine.cgroups import MemoryLimit
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.recipe.values import Quantize
from specdec_cli.sampling.params import SamplingParams

pytest.importorskip("gguf", reason="needs gguf")

from tiny_gguf import SIZES, write_gguf

TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
GEMMA: dict[str, Any] = {"layer_types": None, "num_hidden_layers": 6, "tie_word_embeddings": True}
GEMMA |= {"query_pre_attn_scalar": 256, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 256, "norm_topk_prob": True},
    "mixtral": {},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {},
    "gemma2": {"attn_logit_softcapping": 50.0, **GEMMA},
    "gemma3_text": GEMMA,
}
OWN = ("llama", "qwen2", "qwen3")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16", "Q4_0": "bfloat16"}
DTYPES |= {"Q4_K_M": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def checkpoint(folder: Path, family: str) -> Path:
    path = folder / family
    return path if path.exists() else make_tiny(family, path, **SIZES | FAMILIES[family])


@pytest.fixture(scope="module")
def llama(folder: Path) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """A Llama in every form, and the weights that each file holds."""
    source = checkpoint(folder, "llama")
    return {form: (folder / f"{form}.gguf", write_gguf(source, folder / f"{form}.gguf", form)) for form in DTYPES}


def reference(folder: Path, weights: dict[str, Tensor]) -> Any:
    """transformers' model of a checkpoint with the weights that a file holds."""
    # Eager attention: the usual one leaves soft caps out beside older versions of transformers.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model.eval()


@torch.no_grad()
def logits(folder: Path, weights: dict[str, Tensor]) -> Tensor:
    found: Tensor = reference(folder, weights)(torch.tensor([TOKENS])).logits[0]
    return found


def score(path: Path, **options: Any) -> Tensor:
    return load_lm(str(path), compute="dequantized", **options).score([Row(0, TOKENS, len(TOKENS))])


@pytest.mark.in_turn(4, every=5)
@pytest.mark.parametrize("family", [*FAMILIES])
def test_39_a_family_computes_with_the_numbers_in_its_file(folder: Path, family: str) -> None:
    source, path = checkpoint(folder, family), folder / f"{family}.gguf"
    weights = write_gguf(source, path, "Q4_K_M")
    lm = load_lm(str(path), dtype="float32", compute="dequantized")
    assert relative_error(lm.score([Row(0, TOKENS, len(TOKENS))]), logits(source, weights)) < 1e-5
    assert lm.decoder == "own" or family not in OWN
    facts = describe(str(path), compute="dequantized")
    assert facts.decoder.startswith(lm.decoder)
    assert "GGUF (Q4_K, Q6_K" in (facts.stored_as or "")


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("form", DTYPES)
def test_39_a_form_keeps_its_numbers_in_its_dtype(folder: Path, llama, form: str) -> None:
    path, weights = llama[form]
    right = logits(folder / "llama", weights)
    assert relative_error(score(path, dtype="float32"), right) < 1e-5
    lm = load_lm(str(path), compute="dequantized")
    assert str(lm.dtype) == f"torch.{DTYPES[form]}"
    both = torch.stack([lm.score([Row(0, TOKENS, len(TOKENS))]).float().flatten(), right.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.99
    facts = describe(str(path), compute="dequantized")
    assert (facts.dtype, facts.stored_bytes) == (DTYPES[form], path.stat().st_size)
    assert facts.weights_bytes == facts.num_parameters * lm.dtype.itemsize


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_39_tokens_of_target_and_draft_equal_the_dequantized_reference(folder: Path, llama, form: str) -> None:
    path, weights = llama[form]
    model = reference(folder / "llama", weights)
    draft = str(llama["Q4_0"][0])
    engine = Engine.load(str(path), draft, dtype="float32", compute="dequantized", num_speculative_tokens=3)
    prompt = "the rabbit"
    given = load_tokenizer(str(path))(prompt)["input_ids"]
    expected = model.generate(torch.tensor([given]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    [found] = engine.generate([prompt], SamplingParams(max_new_tokens=24, temperature=0))
    assert list(found.token_ids) == expected[0, len(given) :].tolist()[: len(found.token_ids)]
    assert len(found.token_ids) == 24 or found.finish_reason == "stop"


def test_39_int8_packs_what_was_dequantized(folder: Path, llama) -> None:
    path, weights = llama["Q8_0"]
    lm = load_lm(str(path), quantize="int8")
    assert (lm.kind, lm.decoder) == ("int8", "own")
    assert relative_error(lm.score([Row(0, TOKENS, len(TOKENS))]), logits(folder / "llama", weights)) < 0.1


def test_39_tokenizer_chat_template_and_end_tokens_are_the_files(llama) -> None:
    path = str(llama["Q8_0"][0])
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == SIZES["vocab_size"]
    assert tokenizer.decode(tokenizer("that hare<end>")["input_ids"]) == "that hare<end>"
    assert len(tokenizer("th<end>")["input_ids"]) == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "[user]a"
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert load_lm(path).generation.eos_token_ids == (end,) == describe(path).eos_token_ids


def test_sampling_defaults_are_the_files(folder: Path) -> None:
    path = folder / "sampling.gguf"
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 2}
    entries: dict[str, Any] = {f"general__sampling__{key}": value for key, value in sampling.items()}
    source = checkpoint(folder, "llama")
    write_gguf(source, path, "Q8_0", **entries)
    found = ModelPlan(str(path)).generation
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert (found.unused, found.source) == ({"general.sampling.mirostat": 2}, str(path))
    assert len(found.eos_token_ids) == 1
    plain = ModelPlan(str(path), generation_config="none").generation
    assert (plain.sampling, plain.eos_token_ids) == ({}, found.eos_token_ids)
    write_gguf(source, path, "Q8_0", general__sampling__top_p=1.5)
    with pytest.raises(RunError, match=rf"`{re.escape(str(path))}`: `top_p` must be a number above 0 and at most 1"):
        load_lm(str(path))


def test_39_forms_are_told_apart(llama) -> None:
    origins = [load_lm(str(llama[form][0]), dtype="float32", check=False).origin for form in ("Q8_0", "Q4_0", "Q8_0")]
    assert origins[0].weights == origins[2].weights != origins[1].weights


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "the", "-n", "4", "--quiet", "--json"],
        ["serve", "--dry-run"],
        ["doctor", "--json", "--quiet"],
        ["bench", "--dry-run"],
    ],
)
def test_39_commands_take_a_file(llama, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    pair = ["-t", str(llama["Q8_0"][0]), "-d", str(llama["Q4_0"][0])]
    assert run([*arguments, *pair]) == 0
    out = capsys.readouterr().out
    if arguments[0] == "doctor":
        assert json.loads(out)["pair"]["target"]["stored_as"] == "GGUF (Q8_0)"


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
        ({"rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_39_stretched_positions_are_the_files(folder: Path, metadata: dict[str, Any], scaling: dict[str, Any]) -> None:
    path = folder / "stretched.gguf"
    more: dict[str, Any] = {"rope__scaling__original_context_length": 32} if scaling["rope_type"] == "yarn" else {}
    write_gguf(checkpoint(folder, "qwen2"), path, "Q8_0", **metadata, **more)
    rope = load_lm(str(path)).config.rope_parameters
    assert scaling.items() <= rope.items()
    assert rope["original_max_position_embeddings"] == 32 if more else "original_max_position_embeddings" not in rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_39_llama_3_scaling_is_read_from_its_factors(folder: Path, factor: float) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = make_tiny("llama", folder / f"llama3-{factor}", **SIZES, rope_parameters=rope)
    path = folder / f"llama3-{factor}.gguf"
    weights = write_gguf(source, path, "F32", rope_factors=True)
    assert load_lm(str(path)).config.rope_parameters == rope
    assert relative_error(score(path), logits(source, weights)) < 1e-5


def test_39_other_rotary_factors_are_refused(folder: Path) -> None:
    path = folder / "factors.gguf"
    write_gguf(checkpoint(folder, "llama"), path, "F32", rope_factors=True)
    assert "by factors that are not Llama 3's" in refusal(path).message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention__sliding_window": 64}, "says `llama.attention.sliding_window: 64`, which is not read"),
        ({"rope__scaling__type": "longrope"}, "says `llama.rope.scaling.type: longrope`, which is not read"),
        ({"expert_count": 4}, "does not say its `llama.expert_used_count`"),
        ({"expert_count": 4, "expert_used_count": 5}, "`llama.expert_used_count: 5`, and has 4 experts"),
        ({"without": "blk.1.ffn_up.weight"}, "do not match its header: `blk.1.ffn_up.weight` is missing"),
        ({"extra": "blk.0.attn_q.bias"}, "do not match its header: `blk.0.attn_q.bias` is not read"),
    ],
)
def test_39_what_would_be_another_model_is_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    path = folder / "other.gguf"
    write_gguf(checkpoint(folder, "llama"), path, "Q8_0", **options)
    assert said in refusal(path).message


def test_39_broken_files_are_one_sentence(folder: Path, llama, tmp_path: Path) -> None:
    whole = llama["Q8_0"][0].read_bytes()
    for name, content, said in (
        ("magic", b"GGML" + whole[4:], "is not a GGUF file: it does not begin with `GGUF`"),
        ("empty", b"", "is not a GGUF file"),
        ("header", whole[:300], "is not a whole GGUF file: "),
        ("list", whole[:3000], "is not a whole GGUF file: "),
        ("data", whole[: len(whole) // 2], "is not a whole GGUF file: "),
        ("tail", whole[:-4], "is not a whole GGUF file: "),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        assert said in refusal(path).message
    assert "the GGUF file" in refusal(tmp_path / "none.gguf").message


@pytest.mark.parametrize("tensor", ["blk.1.ffn_up.weight", "token_embd.weight", "blk.0.ffn_norm.weight"])
def test_39_numbers_that_are_none_are_refused(folder: Path, tmp_path: Path, tensor: str) -> None:
    path = tmp_path / "nan.gguf"
    write_gguf(checkpoint(folder, "llama"), path, "Q8_0", nan_in=tensor)
    for compute in ("native", "dequantized"):
        with pytest.raises(RunError, match=f"`{tensor}`.* holds numbers that are not finite"):
            load_lm(str(path), compute=compute)


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_doctor_reads_the_numbers_of_a_gguf_draft(
    folder: Path, llama, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], is_compiled: bool
) -> None:
    if not is_compiled:
        monkeypatch.setattr("specdec_cli.lm.gguf_blocks.has_layout", lambda _: False)
    sound = str(llama["Q4_0"][0])
    assert run(["doctor", "-t", sound, "-d", str(llama["Q4_K_M"][0]), "--quiet"]) == 0
    for tensor in ("blk.1.ffn_up.weight", "token_embd.weight", "blk.0.ffn_norm.weight"):
        draft = str(tmp_path / f"{tensor}.gguf")
        write_gguf(checkpoint(folder, "llama"), Path(draft), "Q8_0", nan_in=tensor)
        assert run(["doctor", draft, "--quiet"]) == 0, "a target's numbers are read when it is loaded"
        capsys.readouterr()
        assert run(["doctor", "-t", sound, "-d", draft, "--quiet"]) == 2
        assert f"the weight `{tensor}` of `{draft}` holds numbers that are not finite" in capsys.readouterr().err


def test_39_an_unknown_architecture_and_a_part_are_refused(folder: Path, tmp_path: Path) -> None:
    source = checkpoint(folder, "llama")
    write_gguf(source, tmp_path / "part.gguf", "F32", split__count=3)
    assert "is one of 3 files of a model" in refusal(tmp_path / "part.gguf").message
    write_gguf(source, tmp_path / "flux.gguf", "F32", architecture="flux")
    said = refusal(tmp_path / "flux.gguf")
    assert isinstance(said, UsageError)
    assert "does not read architecture `flux`" in said.message


def test_39_without_the_package_the_extra_is_named(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.lm.files.gguf_header.find_spec", lambda _: None)
    said = refusal(llama["Q8_0"][0])
    assert "takes the package `gguf`, which is not installed" in said.message
    assert said.hint == "pip install 'specdec-cli[gguf]'"


def test_39_a_folder_of_files_asks_for_one(llama) -> None:
    folder = llama["Q8_0"][0].parent
    said = refusal(folder)
    assert "is a folder of GGUF files" in said.message
    assert ".gguf`" in (said.hint or "")


def test_49_4_loading_counts_bytes_and_makes_the_table_of_names_once(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path, real = llama["Q8_0"][0], gguf.get_tensor_name_map
    counts: list[tuple[float, float]] = []
    tables: list[Any] = []

    def counted(*arguments: Any) -> Any:
        tables.append(arguments)
        return real(*arguments)

    monkeypatch.setattr("gguf.get_tensor_name_map", counted)
    load_lm(str(path), compute="dequantized", check=False, progress=lambda *count: counts.append(count))
    assert len(tables) == 2  # one for the check before, one for the weights; not one for every module
    done = [count[0] for count in counts]
    assert done == sorted(done)
    assert counts[-1] == pytest.approx((path.stat().st_size, path.stat().st_size))


@pytest.mark.in_turn(2, every=3)
@pytest.mark.parametrize("form", ["Q8_0", "Q4_K_M", "F16"])
def test_49_4_pieces_and_threads_do_not_change_a_number(llama, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    path, weights = llama[form]
    monkeypatch.setattr("specdec_cli.lm.files.gguf_weights._PIECE", 256)
    lm = load_lm(str(path), dtype="float32", decoder="transformers", check=False)
    found = dict(lm.model.named_parameters())
    for key in (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        assert torch.equal(found[key], weights[key])


def wide_file(folder: Path) -> Path:
    path = folder / "wide.gguf"
    if not path.exists():
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
        write_gguf(make_tiny("qwen2", folder / "wide", **SIZES | sizes), path, "Q8_0")
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_of_a_file_are_let_go_as_its_blocks_are_packed(folder: Path) -> None:
    path, done, resident = wide_file(folder), [], []

    def mapped_bytes() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        sizes = [
            int(next(one for one in lines if one.startswith("Rss")).split()[1]) for line in lines if str(path) in line
        ]
        return 1024 * sum(sizes)

    def progress(num_done: float, num: float) -> None:
        done.append(num_done / num)
        resident.append(mapped_bytes())

    lm = load_lm(str(path), progress=progress, num_blocks=8)
    assert lm.decoder == "own, native"
    assert (done, done[-1]) == (sorted(done), 1)
    assert max(resident) < lm.weight_bytes / 2
    assert mapped_bytes() < lm.weight_bytes / 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_49_4_no_second_copy_of_all_weights_is_made(folder: Path, llama: Any, quantize: Quantize) -> None:
    paths = [str(path) for path in (llama["Q8_0"][0], wide_file(folder))]
    # A process of its own: memory that earlier tests freed would be used again, and not count.
    made = subprocess.run(
        [sys.executable, "-c", RESIDENT, *paths, quantize], capture_output=True, text=True, check=True
    )
    plain, weight_bytes, most, left = (int(one) for one in made.stdout.split())
    assert plain < most < 1.7 * plain
    assert left < weight_bytes + 0.5 * plain


# Prints bytes: of the weights in float32, of the weights as they are computed with, resident at most while they load,
# and resident after it.
RESIDENT = """
import sys
from pathlib import Path
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.cache.memory import return_freed_memory

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def load(path):
    return load_lm(path, compute="dequantized", dtype="float32", quantize=quantize, num_blocks=8)

small, path, quantize = sys.argv[1:]
load(small)  # what any load imports
return_freed_memory()
Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
before = resident("VmHWM")
lm = load(path)
print(4 * lm.num_parameters, lm.weight_bytes, resident("VmHWM") - before, resident("VmRSS") - before)
"""


@pytest.mark.parametrize("options", [{}, {"compute": "dequantized"}, {"compute": "dequantized", "dtype": "float32"}])
def test_49_4_what_loading_takes_is_refused_before_it_kills(
    llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    path = str(llama["Q8_0"][0])
    weights = describe(path, **options).weights_bytes
    # Numbers alone would fit, but not beside the blocks they come from. Blocks are read once, but for the embedding.
    num_free = weights + 1000 if options else weights // 2
    free = device_memory.DeviceMemory(2 * weights, num_free, MemoryLimit("cgroup /a", 2 * weights, 0))
    monkeypatch.setattr(device_memory, "device_memory", lambda _: free)
    said = r" GB to load, and `0.0` GB of cpu memory are free within the limit of cgroup /a"
    with pytest.raises(RunError, match=said):
        load_lm(path, **options)
    flags = [f"--{name}={value}" for name, value in options.items()]
    assert run(["doctor", "-t", path, "-d", "none", "--quiet", *flags]) == 1
    assert re.search(said, capsys.readouterr().out.replace("\n", " "))
