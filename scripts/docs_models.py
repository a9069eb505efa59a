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
MARKS = {"equal": "yes", "near tie": "yes, with near ties", "wrong": "no", "refused": "no"}

HEAD = """# Models

<!-- Written by scripts/docs_models.py from results of every_model and file_forms in benchmarks/. Do not edit. -->

Which model types of transformers {transformers} run as a target or a draft. For a checkpoint,
`specdec doctor -t MODEL` gives the same answer from its configuration and file headers alone.

The tables are the outcome of `benchmarks/every_model.py` on a CPU ({measured}, commit {commit}). For each
type the script makes a tiny random checkpoint. It decodes without a draft, with a random draft, with the model
itself, with a noisy copy of it and with n-grams. Batches are ragged, windows are exceeded, prompts come in
chunks, and prefixes are reused.

- **Plain**: in float32, tokens equal transformers' `generate(do_sample=False)` and the logits of whole texts agree.
- **Draft**: the same with every draft, and the model accepts its own drafts.
- **bfloat16**: speculative text equals plain text. In a near tie, rounding decides between two tokens.
- **Own decoder**: `specdec`'s C++ decoder runs the type on a CPU. All others run in transformers' forward pass.

[Forms of files](#forms-of-files) are at the end of the page. What was measured on a GPU stands in
[Performance](performance.md).

"""

FORMS_HEAD = """## Forms of files

{summary}

The table is the outcome of `benchmarks/file_forms.py` on a CPU ({measured}, commit {commit}). For each form the
script makes a tiny checkpoint, a Llama unless the table says otherwise, with groups of 32 weights. A form runs if its
logits in float32 are those of transformers on the numbers that the form means, if its tokens are too, without a draft
and with the model as its own draft, and if its logits in bfloat16 correlate with transformers'. The lowest correlation
is {correlation:.4f}.

Weights of every form become plain numbers when they are loaded; no kernel multiplies with the packed ones.
`--quantize int8` packs the plain numbers for the int8 kernel. Bits are those of a layer's weight with its scales.
[Model files](formats.md) says more.

"""
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
    parts = [HEAD.format(transformers=about["transformers"], measured=about["measured"][:10], commit=about["commit"])]
    parts += [f"## Causal language models\n\n{summary(causal)}\n\n", *table(causal), "\n"]
    parts += [
        f"## Multimodal models, text only\n\n{summary(wrappers)}\n\n",
        "The whole model is loaded and decodes text; prompts with images, video or sound are not supported.\n\n",
        *table(wrappers),
        "\n",
        "## Not supported\n\n",
        *refusals({**causal, **wrappers}),
        "\n",
        *forms(json.loads(FORMS.read_text(encoding="utf-8"))),
    ]
    return "".join(parts)


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


def table(outcomes: dict[str, Any]) -> Iterator[str]:
    """The types that run."""
    yield "| Type | Plain | Draft | bfloat16 | Own decoder |\n|---|---|---|---|---|\n"
    for name, one in outcomes.items():
        if kind_of(one) == "runs":
            marks = [MARKS[one[column]] for column in ("plain", "draft")]
            own = "yes" if one.get("decoder") == "own" else "no"
            yield f"| `{name}` | {' | '.join([*marks, MARKS.get(one.get('bfloat16', ''), 'not run'), own])} |\n"


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
        cells = (NAMES.get(name, name), one["decoder"], stored, f"{one['bits_in_memory']:.0f}", int8_of(one))
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
    """The other types with their reasons; those without a checkpoint last."""
    yield "| Type | Reason |\n|---|---|\n"
    for name, one in outcomes.items():
        if kind_of(one) in ("refused", "wrong"):
            yield f"| `{name}` | {reason_of(name, one['reason'])} |\n"
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
