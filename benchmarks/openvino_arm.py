"""OpenVINO GenAI beside our engine: what `peers --openvino PYTHON` runs in an environment of its own.

    python -m venv E
    E/bin/pip install torch==2.13.0 openvino-genai "optimum-intel>=2.2" "transformers<5" "datasets<4.5"
    E/bin/pip uninstall --yes torchvision

Reads one JSON document, `{"target", "draft", "folder", "k", "tokens", "threads", "prompts"}`, prints another: plain and
with the draft (both in its continuous batching, where its speculative decoding runs), each prompt's tokens and the
seconds that those after the first took. Checkpoints are converted once, into `folder`; weights float16, products
bfloat16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

CACHE_GIB = 1
PRECISION = "bf16"


def readable(source: Path, folder: Path) -> Path:
    """A checkpoint as transformers 4 reads it: transformers 5 has other names for three settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        shutil.copy(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config.pop("rope_parameters", {}).get("rope_theta", 10000.0)
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def converted(source: Path, folder: Path) -> Path:
    """The checkpoint in OpenVINO's form, made when it is not there yet."""
    made = folder / f"{source.name}_openvino"
    if (made / "openvino_detokenizer.xml").exists():
        return made
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    copy = readable(source, folder / f"{source.name}_transformers4")
    OVModelForCausalLM.from_pretrained(copy, export=True, compile=False, load_in_8bit=False).save_pretrained(made)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(copy), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, made / f"openvino_{name}.xml")
    shutil.rmtree(copy)
    return made


def decode(pipeline: Any, job: dict[str, Any], k: int | None) -> list[dict[str, Any]]:
    """Every prompt alone, the first one before as well."""
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["tokens"], True, False
    if k is not None:
        config.num_assistant_tokens = k
    rows = []
    for prompt in [job["prompts"][0], *job["prompts"]]:
        found = pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        metrics = found.perf_metrics
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
        rows.append({"token_ids": list(found.tokens[0]), "decode_seconds": seconds})
    return rows[1:]


def main() -> None:
    """Convert, decode, print."""
    import openvino_genai

    job = json.loads(sys.stdin.read())
    folder = Path(job["folder"])
    target, draft = (str(converted(Path(job[role]), folder)) for role in ("target", "draft"))
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    hints = {"INFERENCE_PRECISION_HINT": PRECISION, "INFERENCE_NUM_THREADS": job["threads"]}
    plain = openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **hints)
    arms = {"plain": decode(plain, job, None)}
    del plain
    guess = openvino_genai.draft_model(draft, "CPU", **hints)
    both = openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, draft_model=guess, **hints)
    arms["draft"] = decode(both, job, job["k"])
    print(json.dumps({"version": openvino_genai.__version__, "arms": arms}))


if __name__ == "__main__":
    main()
