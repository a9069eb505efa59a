"""The engines' own parsers, run by each engine's own Python over a folder of exports; `check_exports.py` calls it.

It needs the engine's package and the standard library, no specdec: python engine_parsers.py ENGINE FOLDER
Each subfolder of FOLDER is one export. The result is JSON: the engine's version, and by subfolder its refusal or null.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock


def command(script: Path) -> list[str]:
    """The words of a script's last command, with `$HERE` filled in, without the script's own arguments."""
    text = script.read_text(encoding="utf-8").replace("\\\n", " ").replace("$HERE", str(script.parent))
    last = next(line for line in text.splitlines() if line.startswith("exec "))
    return shlex.split(last.replace('"$@"', ""))[1:]


def vllm(folder: Path) -> None:
    """`vllm serve`'s parser, and the engine's configuration made of it."""
    words = command(folder / "vllm.sh")
    assert words[:2] == ["vllm", "serve"], words
    _vllm_server(words[2:])


def _vllm_server(words: list[str]) -> None:
    launcher = import_module("vllm.entrypoints.launchers.cli_args")
    parser = launcher.make_arg_parser(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    arguments = parser.parse_args(words)
    arguments.model = arguments.model_tag
    launcher.validate_parsed_serve_args(arguments)
    import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def dynamo(folder: Path) -> None:
    """The worker's options by vLLM's parser, and its container as a Kubernetes Pod."""
    document = import_module("yaml").safe_load((folder / "dynamo.yaml").read_text(encoding="utf-8"))
    for service in document["spec"]["services"].values():
        container = {"name": "main", **service["extraPodSpec"]["mainContainer"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": document["metadata"], "spec": {"containers": [container]}}
        import_module("kubernetes_validate").validate(pod, "1.37", strict=True)
        if "args" in container:
            arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
            parser = arguments.add_cli_args(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
            arguments.from_cli_args(parser.parse_args(container["args"])).create_engine_config()


def ray_serve(folder: Path) -> None:
    """Ray Serve's schema of an application, its `LLMConfig`, and vLLM's arguments made of it."""
    document = import_module("yaml").safe_load((folder / "ray-serve.yaml").read_text(encoding="utf-8"))
    import_module("ray.serve.schema").ServeDeploySchema.model_validate(document)
    for config in document["applications"][0]["args"]["llm_configs"]:
        made = import_module("ray.serve.llm").LLMConfig(**config)
        found = made.get_engine_config().get_initialization_kwargs()
        import_module("vllm.engine.arg_utils").AsyncEngineArgs(
            **{name: value for name, value in found.items() if name not in ("enable_log_requests",)}
        )


def sglang(folder: Path) -> None:
    """`sglang.launch_server`'s parser, and what the server makes of the arguments on a GPU."""
    words = command(folder / "sglang.sh")
    assert words[:3] == ["python", "-m", "sglang.launch_server"], words
    arguments = import_module("sglang.srt.server_args").prepare_server_args([*words[3:], "--device", "cuda"])
    arguments.resolve_once()


def openvino(folder: Path) -> None:
    """The script run with a pipeline that only checks its arguments; configurations are the engine's own."""
    package = import_module("openvino_genai")
    made: dict[str, Any] = {}

    class Pipeline:
        def __init__(self, model: str, device: str, **arguments: Any) -> None:
            assert isinstance(arguments.pop("scheduler_config"), package.SchedulerConfig)
            assert set(arguments) <= {"draft_model", "prompt_lookup"}, arguments

        def generate(self, prompt: str, config: Any) -> str:
            config.validate()
            made["config"] = config
            return prompt

    with (
        mock.patch.object(package, "LLMPipeline", Pipeline),
        mock.patch.object(package, "draft_model", lambda model, device: (model, device)),
        mock.patch.object(sys, "argv", ["generate.py", "x"]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        script = folder / "generate.py"
        exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), {"__file__": str(script)})
    assert made, "the script generated nothing"


def mlx(folder: Path) -> None:
    """`mlx_lm.server`'s parser."""
    words = command(folder / "mlx.sh")
    assert words[0] == "mlx_lm.server", words
    server, real = import_module("mlx_lm.server"), argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *given: Any) -> None:
        real(parser, *given)
        raise KeyboardInterrupt  # parsed, and nothing to serve

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", words),
        contextlib.suppress(KeyboardInterrupt),
    ):
        server.main()
        raise RuntimeError("the server parsed no arguments")


def llamacpp(folder: Path) -> None:
    """`llama-server`'s parser, in this Python's wheel or on PATH; there `--help` behind the options ends it."""
    words = command(folder / "llamacpp.sh")
    assert words[0] == "llama-server", words
    own = Path(__file__).with_name("xllamacpp_parser.py")
    asked = [sys.executable, str(own), *words[1:]] if find_spec("xllamacpp") else [*words, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(next((line for line in said if line.startswith("error")), said[-1]))


PARSERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "vllm": (vllm, ("vllm",)),
    "dynamo": (dynamo, ("vllm", "kubernetes_validate")),
    "ray-serve": (ray_serve, ("ray", "vllm")),
    "sglang": (sglang, ("sglang",)),
    "openvino": (openvino, ("openvino_genai",)),
    "mlx": (mlx, ("mlx_lm",)),
    "llamacpp": (llamacpp, ()),
}
"""Each engine's check, and the packages that it needs."""


def version(engine: str) -> str:
    """The engine's version, as its packages or its program say it."""
    if engine == "llamacpp" and find_spec("xllamacpp"):
        return f"xllamacpp {import_module('xllamacpp').__version__}"
    if engine == "llamacpp":
        done = subprocess.run(["llama-server", "--version"], capture_output=True, text=True, check=True)
        return (done.stderr + done.stdout).strip().splitlines()[0]
    found = [(name, getattr(import_module(name), "__version__", None)) for name in PARSERS[engine][1]]
    return ", ".join(f"{name} {known}" if known else name for name, known in found)


def main(engine: str, folder: Path) -> dict[str, Any]:
    """The version, and each export's refusal."""
    check, _ = PARSERS[engine]
    results: dict[str, str | None] = {}
    for one in sorted(path for path in folder.iterdir() if path.is_dir()):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                check(one)
        except (Exception, SystemExit) as error:
            results[one.name] = f"{type(error).__name__}: {error} {said.getvalue()[-400:]}".strip()
        else:
            results[one.name] = None
    return {"version": version(engine), "results": results}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]))) + "\n")
