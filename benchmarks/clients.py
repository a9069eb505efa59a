"""Unmodified clients against a server: what each gets is held against plain HTTP, and lm-eval against transformers.

    python benchmarks/clients.py http://127.0.0.1:8000 --folder T [--without http://127.0.0.1:8001] [--only openai]

Whatever of openai, langchain-openai, litellm, guidellm and lm_eval is installed is tried, the rest is named as missing.
AIPerf is tried where its program is on the PATH, against a server with `--metrics-prefix vllm
--per-request-spec-decode-metrics detailed`. `--folder` is the target's folder (for guidellm, AIPerf and lm-eval);
`--without` a server of the same model with `-k 0`. The tool checks need a target whose chat template names the tools
(the built-in one knows none; a copy with one that does is enough).
Results are kept by model in results/clients.json, one entry for each client.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import client_aiperf
import record
from client_libraries import LIBRARIES, Place
from client_lm_eval import lm_eval_rows

CLIENTS = {name: module for name, (module, _) in LIBRARIES.items()} | {"guidellm": "guidellm", "lm_eval": "lm_eval"}
PROGRAMS = (client_aiperf.PROGRAM,)
"""Clients that run in an environment of their own."""
NUM_REQUESTS = 12


def try_library(name: str, place: Place) -> Iterator[dict[str, Any]]:
    """The checks of one library."""
    for what, check in LIBRARIES[name][1](place):
        try:
            got, wanted = check()
        except Exception as error:
            yield {"what": what, "result": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        yield {"what": what, "result": "equal" if got == wanted else f"different: {got!r}, not {wanted!r}"}


def try_guidellm(place: Place, folder: str) -> Iterator[dict[str, Any]]:
    """A short benchmark of either route; all requests must complete with the tokens that were asked for."""
    for route in ("/v1/completions", "/v1/chat/completions"):
        with tempfile.TemporaryDirectory() as made:
            report = Path(made) / "benchmarks.json"
            backend = {"kind": "openai_http", "target": place.url, "model": place.model, "request_format": route}
            backend |= {"api_key": place.api_key}
            data = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 24}
            command = ["guidellm", "run", "--backend", json.dumps(backend), "--data", json.dumps(data)]
            command += [
                "--profile",
                "kind=concurrent,streams=2",
                "--constraint",
                f"kind=max_requests,count={NUM_REQUESTS}",
            ]
            command += ["--tokenizer", json.dumps({"kind": "hf_auto", "model": folder}), "--disable-progress"]
            command += ["--output", json.dumps({"kind": "json", "path": str(report)})]
            command[0] = str(Path(sys.executable).parent / "guidellm")
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                yield {"what": route, "result": f"exit {run.returncode}: {run.stderr[-500:]}"}
            else:
                yield {"what": route, **_guidellm_result(json.loads(report.read_text()))}


def _guidellm_result(document: dict[str, Any]) -> dict[str, Any]:
    requests = document["benchmarks"][0]["requests"]
    tokens = [one["output_metrics"]["text_tokens"] for one in requests["successful"]]
    is_whole = len(tokens) == NUM_REQUESTS and not requests["errored"] and set(tokens) == {24}
    return {
        "successful": len(tokens),
        "errored": len(requests["errored"]),
        "result": "equal" if is_whole else "different",
    }


def try_client(name: str, place: Place, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything of one client."""
    if name in LIBRARIES:
        yield from try_library(name, place)
    elif name == "guidellm":
        yield from try_guidellm(place, options.folder)
    elif name == client_aiperf.PROGRAM:
        yield from client_aiperf.try_aiperf(place, options.folder)
    else:
        urls = {"with a draft": place.url} | ({"k=0": options.without} if options.without else {})
        with tempfile.TemporaryDirectory() as tasks:
            yield from lm_eval_rows(urls, place.model, place.api_key, options.folder, Path(tasks))


def served_model(url: str, api_key: str) -> str:
    """The first model of a server."""
    asked = urllib.request.Request(url + "/v1/models", headers={"authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    """Try the clients and keep what they got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--folder", help="of the served target")
    parser.add_argument("--without", metavar="URL", help="a server of the same model without speculation")
    parser.add_argument("--api-key", default=os.environ.get("SPECDEC_API_KEY", "none"))
    parser.add_argument("--only", action="append", choices=[*CLIENTS, *PROGRAMS])
    options = parser.parse_args()
    before = record.machine()
    url = options.url.rstrip("/")
    place = Place(url, served_model(url, options.api_key), options.api_key)
    kept = record.RESULTS / "clients.json"
    results: dict[str, Any] = json.loads(kept.read_text())["results"] if kept.exists() else {}
    mine = results.setdefault(Path(place.model).name, {})
    for name in options.only or [*CLIENTS, *PROGRAMS]:
        if (shutil.which(name) if name in PROGRAMS else find_spec(CLIENTS[name])) is None:
            print(f"{name}: not installed")
            continue
        if name not in LIBRARIES and options.folder is None:
            print(f"{name}: not tried, for it needs --folder")
            continue
        tried = []
        for row in try_client(name, place, options):
            print(f"{name}: {row}", flush=True)
            tried.append(row)
        mine[name] = {"version": _version(name), "measured_on": record.brief(before), "tried": tried}
        print(record.save("clients", before, results))


def _version(name: str) -> str:
    if name in PROGRAMS:
        shown = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout.split()
        return shown[-1] if shown else "unknown"
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
