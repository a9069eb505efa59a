#!/usr/bin/env python
"""Write docs/models.md, which model types decode, from benchmarks/results/every_model.json.

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
RUNS = ("equal", "near tie")
MARKS = {"equal": "yes", "near tie": "yes, with near ties", "wrong": "no", "refused": "no"}

HEAD = """# Models

<!-- Written by scripts/docs_models.py from benchmarks/results/every_model.json. Do not edit. -->

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

[Model files](formats.md) lists quantized forms. What was measured on a GPU stands in [Performance](performance.md).

"""


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
