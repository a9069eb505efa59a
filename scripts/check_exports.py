#!/usr/bin/env python
"""Exports read by each engine's own parser, with models of a few kilobytes in place of hub ids.

python scripts/check_exports.py vllm --python /opt/vllm/bin/python
python scripts/check_exports.py llamacpp             # `llama-server` on PATH, or --python with xllamacpp

The engine's package is in the Python that --python names (default: this one). Exits with 1 if the engine refuses one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TOKENIZER = REPOSITORY / "specdec_cli" / "builtin" / "draft"
sys.path.insert(0, str(REPOSITORY / "tests"))

from export_recipes import CASES, RECIPES, resolved  # noqa: E402  (found in the folder that was just added)

from specdec_cli.export import export  # noqa: E402

_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_SHAPE = _LAYERS | {"head_dim": 16, "num_hidden_layers": 4, "vocab_size": 151936, "max_position_embeddings": 40960}
_PLAIN = _SHAPE | {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 2}
_QWEN = _PLAIN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_LLAMA = _PLAIN | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_HEAD = _LLAMA | {"num_hidden_layers": 1}
STAND_INS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": _QWEN,
    "Qwen/Qwen3-0.6B": _QWEN,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA,
    "AngelSlim/Qwen3-8B_eagle3": _HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    "yuhuili/EAGLE-Qwen3-8B": _HEAD | {"architectures": ["EagleLlamaForCausalLM"]},
    "amd/PARD-Qwen3-0.6B": _QWEN | {"pard_token": 151660},
    "zai-org/GLM-4.5-Air": _PLAIN
    | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 1},
}
"""Configurations that stand in for the hub ids of the recipes: the models' kinds, a few kilobytes each."""


def write_exports(engine: str, folder: Path) -> None:
    """Every recipe's export for an engine, in a subfolder each, that names local models."""
    for hub_id, configuration in STAND_INS.items():
        model = folder / "models" / hub_id
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
        for one in TOKENIZER.glob("tokenizer*.json"):
            shutil.copy(one, model)
    cases = {name: resolved(name) for name in RECIPES}
    cases |= {name: resolved(base, **more) for name, (base, more) in CASES.items()}
    for name, recipe in cases.items():
        made, _ = export(engine, recipe, "X")
        for file, text in made.files.items():
            path = folder / "exports" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            for hub_id in sorted(STAND_INS, key=len, reverse=True):
                text = text.replace(f" {hub_id}", f" {folder}/models/{hub_id}")
                text = text.replace(f'"{hub_id}', f'"{folder}/models/{hub_id}')
            path.write_text(text, encoding="utf-8")


def check(engine: str, python: str) -> dict[str, Any]:
    """The result of the engine's parser; see `engine_parsers.py`."""
    with tempfile.TemporaryDirectory(prefix="specdec-exports-") as made:
        folder = Path(made)
        write_exports(engine, folder)
        command = [python, str(Path(__file__).with_name("engine_parsers.py")), engine, str(folder / "exports")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(f"{engine}'s parser did not run: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def main() -> int:
    """Check one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    found = check(given.engine, given.python)
    refused = {name: reason for name, reason in found["results"].items() if reason is not None}
    for name, reason in refused.items():
        sys.stdout.write(f"refused: {name}: {reason}\n")
    sys.stdout.write(f"{given.engine} ({found['version']}): {len(found['results'])} exports, {len(refused)} refused\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
