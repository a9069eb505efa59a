"""Recipes that exports are tried on, and the goldens' writer: `python tests/export_recipes.py` writes them again."""

from __future__ import annotations

import sys
from pathlib import Path

from specdec_cli.cli.shared import draft_methods
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
_RULE: dict[str, object] = {"sampling.temperature": 0.7}
_DRAFTS: dict[str, dict[str, object]] = {
    "eagle": {"model": "yuhuili/EAGLE-Qwen3-8B"},
    "p-eagle": {"method": "p-eagle", "model": "AngelSlim/Qwen3-8B_eagle3"},
    "pard": {"method": "pard", "model": "amd/PARD-Qwen3-0.6B"},
    "universal": {"method": "universal", "model": "Qwen/Qwen3-0.6B"},
    "none": {"method": "none"},
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: ("sampled", {"draft": draft}) for name, draft in _DRAFTS.items()},
    **{f"sampled-{rule}": ("sampled", {"speculation.verify": rule}) for rule in ("exact-match", "typical", "gumbel")},
    **{f"eagle3-{rule}": ("eagle3", _RULE | {"speculation.verify": rule}) for rule in ("rejection", "exact-match")},
    "mtp": ("sampled", {"target.model": "zai-org/GLM-4.5-Air", "draft": {"method": "mtp"}}),
    "table": ("sampled", {"speculation.k_by_batch": "2:6,9:2"}),
    "limit": ("sampled", {"speculation.disable_by_batch_size": 12}),
    "confident": ("sampled", {"speculation.depth_policy": "confidence", "speculation.p_min": 0.3}),
    "synthetic": ("sampled", {"speculation.synthetic_acceptance_length": 2.5}),
    "llama.cpp's own": ("ngram", {"draft": {"method": "ngram-map-k4v", "size_n": 8, "min_hits": 2}}),
    "hashed": ("ngram", {"draft": {"method": "ngram-mod"}}),
    "loading": ("sampled", {"target.load_format": "dummy", "target.dtype": "float16", "target.device": "cuda"}),
    "generation": ("sampled", {"target.generation_config": "none", "target.chat_template": "{{ messages }}"}),
    "template": ("sampled", {"target.default_chat_template_kwargs": {"thinking": False}}),
    "penalties": (
        "sampled",
        {
            "sampling.top_k": 17,
            "sampling.min_p": 0.07,
            "sampling.repetition_penalty": 1.3,
            "sampling.presence_penalty": 0.3,
            "sampling.frequency_penalty": 0.2,
            "sampling.min_tokens": 3,
            "sampling.seed": 77,
            "sampling.ignore_eos": True,
        },
    ),
    "engine": (
        "ngram",
        {
            "engine.kv_block_size": 32,
            "engine.kv_cache_memory": "3GiB",
            "engine.max_num_batched_tokens": 4096,
            "engine.enable_prefix_caching": False,
            "engine.max_num_seqs": 4,
            "serve.reasoning_parser": "qwen3",
            "serve.tool_call_parser": "hermes",
            "serve.served_model_name": ["a", "b"],
        },
    ),
}
"""Further recipes, each a change of one above, that the engines' own parsers read: `scripts/check_exports.py`."""


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
