"""Ray Serve LLM: an application whose `engine_kwargs` go to vLLM as they are.

The form is that of ray.serve.llm:build_openai_app in Ray 2.5x with vLLM 0.33.0; `serve run` starts it.
"""

from __future__ import annotations

from typing import Any

from specdec_cli.export.exported import Export, ExportJob, to_yaml
from specdec_cli.export.vllm import engine_arguments

NAME, VERSION = "Ray Serve LLM", "with vLLM 0.33.0"


def export(job: ExportJob) -> Export:
    """The application's YAML."""
    settings = job.settings
    arguments = engine_arguments(settings)
    names = settings.given("serve.served_model_name")
    name = (names[0] if isinstance(names, list | tuple) else names) or settings.recipe.target.model
    llm: dict[str, Any] = {
        "model_loading_config": {"model_id": name, "model_source": settings.target},
        "engine_kwargs": arguments,
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "log_engine_metrics": True,
    }
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [llm]},
    }
    host, port = settings.address
    document = {"http_options": {"host": host, "port": port}, "applications": [application]}
    following = settings.next_command()
    start = "# Start it: serve run ray-serve.yaml\n"
    return Export({"ray-serve.yaml": job.comment(following) + start + to_yaml(document)}, next_command=following)
