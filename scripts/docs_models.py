#!/usr/bin/env python
"""Write docs/models.md, which model types and forms of files decode, from benchmarks/results/.

python scripts/docs_models.py           # write the page
python scripts/docs_models.py --check   # exit 1 if that would change it
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "every_model.json"
FORMS = ROOT / "benchmarks" / "results" / "file_forms.json"
RUNS = ("equal", "near tie")

HEAD = """# Models

<!-- Written by scripts/docs_models.py from results of every_model and file_forms in benchmarks/. Do not edit. -->

The model types of transformers {transformers} that run as a target or a draft. A checkpoint's `config.json` names its
type as `model_type`. `specdec doctor -t MODEL` gives the same answer for a checkpoint, from its configuration and file
headers.

"""

COMMON_HEAD = """## Models that people ask for

On a CPU, types in the second column run on `specdec`'s own C++ decoder, those in the third in transformers' forward
pass.

"""

TESTED = """## How this was tested

`benchmarks/every_model.py` made a tiny random checkpoint of each type on a CPU ({measured}, commit {commit}). It
decoded without a draft, with a random draft, with the model itself, with a noisy copy of it and with n-grams, in ragged
batches, beyond windows, with prompts in chunks and with prefix caching. A type runs if

- in float32, its tokens equal transformers' `generate(do_sample=False)` with every draft, and logits of whole texts
  agree,
- the model accepts its own drafts, and
- in bfloat16, speculative text equals plain text{exceptions}.

[Performance](performance.md) says what was measured on a GPU.

"""

FORMS_HEAD = """## Forms of files

{summary} Weights become plain numbers when they are loaded, as in the table,
except that our own decoder keeps most matrices of [GGUF files](formats.md#gguf) as they are, and whole numbers with
scales in [blocks of the same numbers](formats.md#gptq-awq-and-compressed-tensors). `--quantize int8` packs the
plain numbers for the int8 kernel. Bits include a layer's scales. [Model files](formats.md) says what each form needs.

`benchmarks/file_forms.py` tried each form on a tiny checkpoint on a CPU ({measured}, commit {commit}; GGUF files
2026-11-28, commit 8b55c2c, but F16 and "Q4_K, F16" 2026-11-29; and other forms that stay in blocks c75ce21). A form
runs if its logits and tokens in float32 are those of transformers on the numbers that the form means, without a draft
and with the model as its own draft, and if its logits in bfloat16 correlate with transformers' (at least
{correlation:.4f}). Of forms that stay as they are that holds for dequantized numbers.

"""
COMMON = {
    "Llama 2, 3, TinyLlama": ("llama",),
    "Llama 4": ("llama4", "llama4_text"),
    "Qwen 2, 2.5": ("qwen2", "qwen2_moe"),
    "Qwen 3": ("qwen3", "qwen3_moe"),
    "Qwen3-Next, Qwen 3.5": ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "Qwen 4": ("qwen4_exp", "qwen4_exp_text"),
    "gpt-oss": ("gpt_oss",),
    "Gemma 1, 2, 3": ("gemma", "gemma2", "gemma3", "gemma3_text"),
    "Gemma 3n, 4": ("gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    "Mistral, Ministral, Mixtral": ("mistral", "ministral", "ministral3", "mixtral"),
    "DeepSeek V2, V3, R1, V3.2, V4": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    "GLM 4, 4.5": ("glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    "Kimi": ("kimi_linear", "kimi_k25"),
    "MiniMax": ("minimax", "minimax_m2", "minimax_m3_vl_text"),
    "Phi": ("phi", "phi3", "phimoe", "phi4_multimodal"),
    "Granite": ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    "OLMo": ("olmo", "olmo2", "olmo3", "olmoe", "olmo_hybrid", "flex_olmo"),
    "SmolLM 3": ("smollm3",),
    "Cohere Command": ("cohere", "cohere2", "cohere2_moe"),
    "ERNIE 4.5": ("ernie4_5", "ernie4_5_moe"),
    "EXAONE 4": ("exaone4", "exaone_moe"),
    "Seed-OSS": ("seed_oss",),
    "MiMo V2": ("mimo_v2_flash",),
    "Nemotron": ("nemotron", "nemotron_h"),
    "LFM": ("lfm2", "lfm2_moe", "lfm3"),
    "Falcon, Falcon-H1, Falcon-Mamba": ("falcon", "falcon_h1", "falcon_mamba"),
    "Mamba, Mamba-2, Jamba, Zamba, RWKV-4": ("mamba", "mamba2", "jamba", "zamba", "zamba2", "rwkv"),
    "GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, MPT": ("gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt"),
    "BitNet": ("bitnet",),
    "Qwen-VL, text only": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
}
"""Model types by the names under which people look for them. A model that does not run stands under Not supported."""
NAMES = {
    "fp8 blocks": "FP8, scales of blocks (`quant_method: fp8`)",
    "fp8 tensors": "FP8, a scale of the tensor (`quant_method: fp8`)",
    "mxfp8": "MXFP8 (`quant_method: mxfp8`)",
    "w8a8": "compressed-tensors INT8 (W8A8)",
    "fp8 dynamic": "compressed-tensors FP8, a scale for each token",
    "fp8 dynamic, one scale a batch": "compressed-tensors FP8, a scale for the batch",
    "w4a16": "compressed-tensors INT4 (W4A16)",
    "compressed, sparse": "compressed-tensors, sparse (`marlin-24`)",
    "nvfp4 compressed": "compressed-tensors NVFP4",
    "mxfp4 compressed": "compressed-tensors MXFP4",
    "mxfp8 compressed": "compressed-tensors MXFP8",
    "nvfp4 modelopt": "ModelOpt NVFP4",
    "fp8 modelopt": "ModelOpt FP8",
    "modelopt awq": "ModelOpt W4A16 AWQ",
    "nvfp4": "transformers' NVFP4 (`quant_method: nvfp4`)",
    "awq": "AWQ, 4 bits",
    "awq gemv": "AWQ for GEMV",
    "gptq": "GPTQ, 4 bits",
    "gptq in order": "GPTQ, 4 bits, `desc_act`",
    "gptq, 8 bits, second version": "GPTQ, 8 bits, `gptq_v2`",
    "gptq, 3 bits": "GPTQ, 3 bits",
    "bitnet": "BitNet, packed",
    "mlx": "MLX, 4 bits",
    "bitsandbytes nf4": "bitsandbytes NF4, nested scales",
    "bitsandbytes nf4, sizes as they are": "bitsandbytes NF4",
    "bitsandbytes int8": "bitsandbytes INT8",
    "fp8 without a form": "FP8 that `config.json` does not mention",
    "int8 without a form": "INT8 that `config.json` does not mention",
    "torchao int4 in bytes": "torchao int4, a byte each",
    "torchao int4 in tiles": "torchao int4, a GPU's tiles",
}
"""Names of forms where those of the result are short."""


def page() -> str:
    """The whole page."""
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    about, results = document["machine"], document["results"]
    causal, wrappers = results["causal"], results["wrappers"]
    parts = [HEAD.format(transformers=about["transformers"]), COMMON_HEAD, *common({**causal, **wrappers})]
    parts += [
        f"\n## All causal language models\n\n{summary(causal)}\n\n{names(causal)}\n\n",
        f"## Multimodal models, text only\n\n{summary(wrappers)} The whole model is loaded and decodes text. Prompts "
        f"with images, video or sound are not supported.\n\n{names(wrappers)}\n\n",
        "## Not supported\n\n",
        *refusals({**causal, **wrappers}),
        "\n",
        TESTED.format(measured=about["measured"][:10], commit=about["commit"], exceptions=exceptions(causal, wrappers)),
        *forms(json.loads(FORMS.read_text(encoding="utf-8"))),
    ]
    return "".join(parts)


def common(outcomes: dict[str, Any]) -> Iterator[str]:
    """The table of models that people ask for, with the types that run, by decoder."""
    yield "| Models | own decoder | transformers' forward pass |\n|---|---|---|\n"
    for models, types in COMMON.items():
        running = {name: outcomes[name].get("decoder") for name in types if kind_of(outcomes[name]) == "runs"}
        cells = [
            ", ".join(f"`{name}`" for name, decoder in running.items() if (decoder == "own") is own)
            for own in (True, False)
        ]
        yield f"| {models} | {' | '.join(cells)} |\n"


def names(outcomes: dict[str, Any]) -> str:
    """The types that run."""
    return ", ".join(f"`{name}`" for name, one in outcomes.items() if kind_of(one) == "runs") + "."


def exceptions(*groups: dict[str, Any]) -> str:
    """The types that run with near ties or not in bfloat16, as the end of a sentence."""
    runs = {name: one for group in groups for name, one in group.items() if kind_of(one) == "runs"}
    ties = [f"`{name}`" for name, one in runs.items() if "near tie" in one.values()]
    refused = [f"`{name}`" for name, one in runs.items() if one.get("bfloat16") == "refused"]
    clauses = [f"apart from near ties in {', '.join(ties)}"] if ties else []
    clauses += [f"{', '.join(refused)} does not run in bfloat16"] if refused else []
    return "".join(f"; {clause}" for clause in clauses)


def summary(outcomes: dict[str, Any]) -> str:
    """How many types run."""
    counts = Counter(kind_of(one) for one in outcomes.values())
    words = [f"{counts['runs']} of {len(outcomes)} types run", f"{counts['refused']} are refused by name"]
    if counts["wrong"]:
        words.append(f"{counts['wrong']} fail")
    if counts["untried"]:
        words.append(f"of {counts['untried']} no checkpoint could be made here")
    return ", ".join(words) + "."


def kind_of(outcome: dict[str, Any]) -> str:
    """`runs`, `refused`, `untried` or `wrong`."""
    if outcome["plain"] in RUNS and outcome.get("draft") in RUNS:
        return "runs"
    if outcome["plain"] != "refused":
        return "wrong"
    return "untried" if "has no weights" in outcome["reason"] else "refused"


def forms(document: dict[str, Any]) -> Iterator[str]:
    """The section of files: forms that run, with what they take, and the others with their reasons."""
    about, results = document["machine"], document["results"]
    runs = {name: one for name, one in results.items() if one["outcome"] == "equal"}
    yield FORMS_HEAD.format(
        summary=f"{len(runs)} of {len(results)} forms run, the others are refused by name.",
        measured=about["measured"][:10],
        commit=about["commit"],
        correlation=min(one["correlation"] for one in runs.values()),
    )
    yield "| Form | Decoder | Bits in the file | In memory (bfloat16) | With `--quantize int8` |\n"
    yield "|---|---|---|---|---|\n"
    for name, one in runs.items():
        stored = "those of its base" if one["bits_in_file"] is None else f"{one['bits_in_file']:.1f}"
        cells = (NAMES.get(name, name), one["decoder"], stored, f"{round(one['bits_in_memory'], 1):g}", int8_of(one))
        yield f"| {' | '.join(cells)} |\n"
    yield "\n| Form that is refused | Reason |\n|---|---|\n"
    for name, one in results.items():
        if name not in runs:
            yield f"| {NAMES.get(name, name)} | {reason_of('quantized', one['reason'])} |\n"


def int8_of(outcome: dict[str, Any]) -> str:
    """Bits of a weight that is packed for the int8 kernel, and whether its numbers stay."""
    if "int8_bits" not in outcome:
        return "refused"
    return f"{outcome['int8_bits']:.1f}, {'the same numbers' if outcome['int8'] else 'rounded'}"


def refusals(outcomes: dict[str, Any]) -> Iterator[str]:
    """The other types by reason; those without a checkpoint last."""
    by_reason: dict[str, list[str]] = {}
    for name, one in outcomes.items():
        if kind_of(one) in ("refused", "wrong"):
            by_reason.setdefault(reason_of(name, one["reason"]), []).append(f"`{name}`")
    yield "| Reason | Types |\n|---|---|\n"
    for reason, types in by_reason.items():
        yield f"| {reason} | {', '.join(types)} |\n"
    untried = [f"`{name}`" for name, one in outcomes.items() if kind_of(one) == "untried"]
    if untried:
        yield f"\nNo small checkpoint of these could be made here, so nothing is known: {', '.join(untried)}.\n"


def reason_of(name: str, said: str) -> str:
    """A refusal's message without its subject."""
    for subject in (f"`{name}` is not supported: ", f"`{name}` "):
        said = said.removeprefix(subject)
    return said.split("\n")[0].replace("|", "\\|").strip()


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    is_check = parser.parse_args().check
    made = page()
    if not is_check:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        sys.exit(f"{PAGE} is out of date: run scripts/docs_models.py")


if __name__ == "__main__":
    main()
