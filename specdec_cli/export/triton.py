"""Triton Inference Server with TensorRT-LLM's LLM API: a model repository around one `model.yaml`.

The layout is that of tensorrt_llm/triton_backend/all_models/llmapi (TensorRT-LLM 1.4). The engine batches the requests
in flight itself, so Triton's own batching stays off (`max_batch_size: 0`).
"""

from __future__ import annotations

from specdec_cli.export.exported import HERE, Export, ExportJob, to_yaml
from specdec_cli.export.trtllm import llm_arguments

NAME, VERSION = "Triton Inference Server", "with TensorRT-LLM 1.4"
_MODEL = "llmapi_repo/tensorrt_llm/1/model.yaml"


def export(job: ExportJob) -> Export:
    """The model's YAML, and a script that completes the repository from a checkout of TensorRT-LLM and starts it."""
    settings = job.settings
    document = {"model": settings.target} | llm_arguments(settings)
    document["triton_config"] = {"max_batch_size": 0, "decoupled": False}
    settings.leave_to_requests()
    settings.without("serve.port", "launch_triton_server.py has its own ports (8000, 8001, 8002)")
    settings.without("serve.host", "launch_triton_server.py listens on all addresses")
    comment = job.comment()
    lines = [
        "set -euo pipefail",
        HERE,
        "TRTLLM=${TRTLLM:?set TRTLLM to a checkout of TensorRT-LLM}",
        'cp -rn "$TRTLLM/triton_backend/all_models/llmapi/." "$HERE/llmapi_repo/"',
        'exec python3 "$TRTLLM/triton_backend/scripts/launch_triton_server.py" --model_repo="$HERE/llmapi_repo/"',
    ]
    launch = f"#!/usr/bin/env bash\n{comment}" + "".join(f"{line}\n" for line in lines)
    return Export({_MODEL: comment + to_yaml(document), "launch.sh": launch}, frozenset({"launch.sh"}))
