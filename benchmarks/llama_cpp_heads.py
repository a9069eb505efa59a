"""Draft heads as GGUF in llama.cpp: its acceptance, step by step, beside our engine's with the same head and target.

    python -m venv E; E/bin/pip install xllamacpp
    pip download --no-deps --no-binary :all: xllamacpp; tar xzf xllamacpp-*.tar.gz
    python benchmarks/llama_cpp_heads.py WORK --llama-cpp E/bin/python --source xllamacpp-*/thirdparty/llama.cpp

Heads for the built-in target are trained for a few minutes into WORK, if they are not there already. The MTP module
and its target, a Qwen3.5 with four layers, are made instead: the target mostly follows a random order of its tokens,
the module knows it, and random layers disturb both. llama.cpp's own script converts everything, in float32. It finds a
tokenizer's rules by a checksum, which this tokenizer's is not among, so they are set to `gpt-2`. Greedy, each prompt
alone. Times are not kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import record
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec_cli.engine.engine import Engine
from specdec_cli.sampling.params import SamplingParams

BUILTIN = Path(__file__).parents[1] / "specdec_cli" / "builtin" / "target"
TRAINED = {"eagle3": (3, 5), "dflash": (3, 7), "dspark": (3, 7), "dflash2": (3, 7)}
"""Kinds of heads, and the ks that they are run with: DFlash's are a part of a block and all of it."""
MTP_KS = (2, 4)
PROMPTS = "Once upon a time", "One day a dog named Max found a ball", "Lily and Tom went to the park"
NUM_TOKENS = 64
COUNTS = "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_histogram"
Decoded = tuple[list[list[int]], list[dict[str, Any]]]
"""Token ids of every prompt, and its counts."""
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:], "--outtype", "f32"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def specdec(*words: str) -> str:
    """Standard output of a command.

    Raises:
        SystemExit: it failed, with its own sentence.
    """
    done = subprocess.run([sys.executable, "-m", "specdec_cli", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"specdec {' '.join(words)}\n{done.stderr}")
    return done.stdout


def converted(given: argparse.Namespace, folder: Path, name: str, *words: str) -> str:
    """The GGUF file that llama.cpp's script makes of a folder."""
    file = given.work / f"{name}.gguf"
    if file.exists():
        return str(file)
    command = [sys.executable, "-c", CONVERT, str(given.source), str(folder), "--outfile", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return str(file)


def trained(given: argparse.Namespace, kind: str) -> Path:
    """The folder of a head, which is trained if it is not there."""
    folder: Path = given.work / kind
    if not (folder / "config.json").exists():
        steps = ["-n", str(NUM_TOKENS), "--max-steps", str(given.steps)]
        specdec("train-draft", "--data", "builtin:stories", "--method", kind, "--output", str(folder), *steps)
    return folder


def mtp_target(folder: Path, noise: float = 1.4, seed: int = 3) -> Path:
    """A small Qwen3.5 with an MTP module, both of which mostly follow one order of tokens.

    Args:
        folder: that it is saved in.
        noise: scale of what its layers add.
        seed: of its weights.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "num_hidden_layers": 4}
    sizes |= {f"linear_{part}": size for part, size in (("num_key_heads", 2), ("num_value_heads", 4))}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.Qwen3_5TextConfig(**sizes, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hidden, table = sizes["hidden_size"], torch.randn(sizes["vocab_size"], sizes["hidden_size"])
    vocabulary = json.loads((BUILTIN / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = ((token.lstrip("\u0120"), place) for token, place in vocabulary.items())
    order = torch.tensor([place for word, place in words if word.isascii() and word.isalpha()])
    order = order[torch.randperm(len(order))]
    output = torch.zeros_like(table)
    output[order] = table[order.roll(1)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(_random(name, parameter, noise))
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.get_input_embeddings().weight.copy_(table)
        model.get_output_embeddings().weight.copy_(output)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers - 1}."
    module = {
        f"mtp.layers.0.{name.removeprefix(last)}": _random(name, weight, noise) if weight.dim() > 1 else weight.clone()
        for name, weight in saved.items()
        if name.startswith(last)
    }
    module |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    module["mtp.norm.weight"] = torch.zeros(hidden)
    token_alone = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    module["mtp.fc.weight"] = token_alone + 0.3 * noise * _random("", token_alone, noise)
    save_file(saved | module, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    for file in BUILTIN.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def _random(name: str, like: torch.Tensor, noise: float) -> torch.Tensor:
    """A random matrix; one that writes into the residual stream has the scale of the noise."""
    scale = noise if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
    found: torch.Tensor = scale * torch.randn_like(like) * like.shape[-1] ** -0.5
    return found


def theirs(given: argparse.Namespace, target: str, draft: str, k: int) -> Decoded:
    """llama.cpp's text of every prompt, one after the other, as `generate --engine llamacpp` has it."""
    words = ["--engine", "llamacpp", "--engine-command", given.llama_cpp, "--engine-args=--threads=1", "-k", str(k)]
    words += ["-t", target, "-d", draft, "-n", str(NUM_TOKENS), "--max-num-seqs", "1", "--quiet", "--json"]
    outputs = json.loads(specdec("generate", *words, "--temperature", "0", *PROMPTS))["outputs"]
    return [output["token_ids"] for output in outputs], [output["speculative"] for output in outputs]


@lru_cache
def ours(target: str, draft: str | None, k: int) -> Decoded:
    """Our own engine's."""
    engine = Engine.load(target, draft, max_num_seqs=1, dtype="float32", num_speculative_tokens=k)
    outputs = engine.generate([*PROMPTS], SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0))
    return [output.token_ids for output in outputs], [
        {name: getattr(output.speculative, name) for name in COUNTS} for output in outputs
    ]


def counts(its: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all prompts together."""
    found = {name: sum(one[name] for one in its) for name in COUNTS[:-1]}
    steps = [sum(column) for column in zip_longest(*(one[COUNTS[-1]] for one in its), fillvalue=0)]
    return found | {"steps_by_accepted_tokens": steps}


def compared(given: argparse.Namespace, in_gguf: tuple[str, str], folders: tuple[str, str], k: int) -> dict[str, Any]:
    """Both engines with one head at one k.

    Args:
        given: the command line.
        in_gguf: target and draft as GGUF.
        folders: those that they were converted from.
        k: tokens drafted in a step.
    """
    plain, _ = ours(folders[0], None, 0)
    found: dict[str, Any] = {"k": k}
    equal: dict[str, int] = {}
    for name, (texts, its) in (("llama.cpp", theirs(given, *in_gguf, k)), ("specdec", ours(*folders, k))):
        found[name] = counts(its)
        equal[name] = sum(text == its for text, its in zip(texts, plain, strict=True))
    found["same steps"] = found["llama.cpp"] == found["specdec"]
    found["texts equal to plain"] = {"of": len(PROMPTS), **equal}
    return found


def main() -> None:
    """Make, convert and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for targets and heads")
    parser.add_argument("--llama-cpp", required=True, help="a Python with xllamacpp, or a llama-server")
    parser.add_argument("--source", type=Path, required=True, help="llama.cpp's source, which converts")
    parser.add_argument("--kinds", nargs="+", default=[*TRAINED, "mtp"], choices=[*TRAINED, "mtp"])
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--save", action="store_true", help="keep the result")
    given = parser.parse_args()
    before = record.machine()
    given.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    target = converted(given, BUILTIN, "target")
    for kind in given.kinds:
        if kind == "mtp":
            folder, ks = mtp_target(given.work / "mtp"), MTP_KS
            trunk, alone = (converted(given, folder, name, f"--{name}") for name in ("no-mtp", "mtp"))
            forms = {"mtp": (converted(given, folder, "mtp-inside"), "mtp"), "mtp, alone": (trunk, alone)}
            folders = str(folder), "mtp"
        else:
            folder, ks = trained(given, kind), TRAINED[kind]
            forms = {kind: (target, converted(given, folder, kind, "--target-model-dir", str(BUILTIN)))}
            folders = "builtin:target", str(folder)
        for name, form in forms.items():
            results[name] = [compared(given, form, folders, k) for k in ks]
            print(json.dumps({name: results[name]}), flush=True)
    if given.save:
        print(record.save("llama_cpp_heads", before, results))


if __name__ == "__main__":
    main()
