"""NVIDIA Dynamo: a `DynamoGraphDeployment` for Kubernetes with a frontend and a vLLM worker.

The form is `nvidia.com/v1alpha1` as Dynamo's examples have it; the worker takes vLLM's own options.
"""

from __future__ import annotations

from math import prod
from typing import Any

from specdec_cli.export.exported import Export, ExportJob, flags, to_yaml
from specdec_cli.export.vllm import engine_arguments

NAME, VERSION = "NVIDIA Dynamo", "(v1alpha1) with vLLM 0.33.0"
_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:VERSION"


def export(job: ExportJob) -> Export:
    """The manifest."""
    settings = job.settings
    arguments = {"model": settings.target} | engine_arguments(settings)
    names = settings.given("serve.served_model_name")
    if names:
        arguments["served_model_name"] = names[0] if isinstance(names, list | tuple) else names
    sizes = (settings.value(f"target.{axis}_parallel_size") for axis in ("tensor", "pipeline"))
    gpus = str(prod(sizes))
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "specdec"},
        "spec": {
            "backendFramework": "vllm",
            "services": {
                "Frontend": {
                    "componentType": "frontend",
                    "replicas": 1,
                    "extraPodSpec": {"mainContainer": {"image": _IMAGE}},
                },
                "Worker": _worker(["python3", "-m", "dynamo.vllm"], flags(arguments), gpus),
            },
        },
    }
    following = settings.next_command()
    notes = "# Put Dynamo's release in place of VERSION, then: kubectl apply -f dynamo.yaml\n"
    notes += "# Reach it: kubectl port-forward svc/specdec-frontend 8000:8000\n"
    return Export({"dynamo.yaml": job.comment(following) + notes + to_yaml(document)}, next_command=following)


def _worker(command: list[str], arguments: list[str], gpus: str) -> dict[str, Any]:
    container = {"image": _IMAGE, "command": command, "args": arguments}
    return {
        "componentType": "worker",
        "replicas": 1,
        "envFromSecret": "hf-token-secret",
        "resources": {"limits": {"gpu": gpus}},
        "extraPodSpec": {"mainContainer": container},
    }
