"""Recipes that exports are tried on, and the goldens' writer: `python tests/export_recipes.py` writes them again."""

from __future__ import annotations

import sys
from pathlib import Path

from specdec_cli.cli.options import draft_methods
from specdec_cli.export import ENGINES, export
from specdec_cli.recipe import Resolved, resolve

GOLDEN = Path(__file__).parent / "export" / "golden"
RECIPES = {
    "sampled": {
        "target.model": "Qwen/Qwen3-8B",
        "target.dtype": "bfloat16",
        "target.revision": "main",
        "target.tensor_parallel_size": 2,
        "draft": {"model": "Qwen/Qwen3-0.6B"},
        "speculation.num_speculative_tokens": 4,
        "sampling.temperature": 0.6,
        "sampling.top_p": 0.95,
        "sampling.stop": ["END", "it's"],
        "engine.max_num_seqs": 16,
        "engine.max_model_len": 8192,
        "engine.kv_cache_memory": "90%",
        "serve.host": "0.0.0.0",
        "serve.served_model_name": ["qwen"],
    },
    "ngram": {
        "target.model": "meta-llama/Llama-3.1-8B-Instruct",
        "draft": {"method": "ngram", "max": 5, "min": 2},
        "speculation.num_speculative_tokens": 6,
        "sampling.temperature": 0.0,
        "sampling.max_new_tokens": 256,
        "engine.enable_prefix_caching": True,
    },
    "eagle3": {
        "target.model": "Qwen/Qwen3-8B",
        "draft": {"model": "AngelSlim/Qwen3-8B_eagle3"},
        "speculation.k_by_batch": "1:5,8:3,32:0",
        "speculation.tree": "2,1",
        "serve.port": 9000,
    },
}
"""What each sets, by path; `draft` as drafters take it."""


def resolved(name: str, **more: object) -> Resolved:
    """A recipe of the table, with more settings by path."""
    given = {**RECIPES[name], **more}
    return resolve(flags={path: (value, f"--{path}") for path, value in given.items()}, methods=draft_methods())


def files_of(engine: str, name: str) -> dict[str, str]:
    """The files of one export, and its warnings as a file of their own."""
    made, warnings = export(engine, resolved(name), "X.Y.Z")
    return made.files | {"warnings.txt": "".join(f"{warning}\n" for warning in warnings)}


if __name__ == "__main__":
    for engine in ENGINES:
        for name in RECIPES:
            if engine != "profile":
                for file, text in files_of(engine, name).items():
                    path = GOLDEN / engine / name / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {GOLDEN}\n")
