"""llama.cpp beside our engine: what `llama_cpp` runs, with nothing but Python's own library and llama.cpp.

    python -m venv E; E/bin/pip install xllamacpp    # a prebuilt wheel, or
    cmake -S LLAMA_CPP -B B -DGGML_NATIVE=ON; cmake --build B --target llama-server    # one for this processor

`E/bin/python llama_cpp_arm.py FILE THREADS [DRAFT [STREAMS]]` loads a GGUF file into the wheel's server, or with
`--server B/bin/llama-server` into that one, and prints a line of JSON. For each line that it then reads, `{"prompt":
[token ids], "tokens": n, "ignore_eos": false}`, it decodes greedily from an empty cache and prints its own figures.
DRAFT is `none` or a kind of llama.cpp's drafts without a model, with settings if need be, such as
`ngram_simple:size_n=4,size_m=16`. The server, whose address is in the first line, decodes STREAMS requests together.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from time import sleep
from typing import Any


def settings_of(draft: str) -> tuple[str, dict[str, int]]:
    """A kind of draft and its settings."""
    kind, _, settings = draft.partition(":")
    pairs = (setting.split("=") for setting in filter(None, settings.split(",")))
    return kind, {name: int(value) for name, value in pairs}


class Wheel:
    """The server in xllamacpp."""

    def __init__(self, given: argparse.Namespace) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = given.path
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
        params.n_parallel, params.warmup = given.streams, False
        params.n_ctx = given.context * params.n_parallel
        kind, settings = settings_of(given.draft)
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
        for name, value in settings.items():
            setattr(getattr(params.speculative, kind), name, value)
        self._server = xllamacpp.Server(params)
        self.address = self._server.listening_address
        self.about = {"system": xllamacpp.get_system_info().strip(), "build": str(xllamacpp.BUILD_INFO)}


class Program:
    """A `llama-server`, in a process of its own."""

    def __init__(self, given: argparse.Namespace) -> None:
        kind, settings = settings_of(given.draft)
        words = ["-m", given.path, "-t", given.threads, "-np", given.streams, "-c", given.context * given.streams]
        words += ["--no-warmup", "--port", 0, "--spec-type", kind.replace("_", "-")]
        for name, value in settings.items():
            words += [f"--spec-{kind}-{name}".replace("_", "-"), value]
        log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen([given.server, *map(str, words)], stdout=log, stderr=log)
        written = ""
        while not self._is_ready(written):
            if self._process.poll() is not None:
                raise SystemExit(written)
            sleep(0.005)
            written = Path(log.name).read_text()
        props = json.load(urllib.request.urlopen(f"{self.address}/props"))
        self.about = {"build": props["build_info"], "pid": self._process.pid}

    def _is_ready(self, log: str) -> bool:
        """Whether it answers requests."""
        address = re.search(r"http://127\.0\.0\.1:\d+", log)
        if address is None:
            return False
        self.address = address[0]
        try:
            return bool(urllib.request.urlopen(f"{self.address}/health").status == 200)
        except urllib.error.URLError:
            return False


def main() -> None:
    """Load, and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("threads", type=int)
    parser.add_argument("draft", nargs="?", default="none")
    parser.add_argument("streams", type=int, nargs="?", default=1)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each stream's context")
    parser.add_argument("--server", help="a `llama-server` in place of the wheel's")
    given = parser.parse_args()
    server = Program(given) if given.server else Wheel(given)
    print(json.dumps(server.about | {"address": server.address}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        body = {"prompt": job["prompt"], "max_tokens": job["tokens"], "temperature": 0}
        body |= {"cache_prompt": False, "ignore_eos": job.get("ignore_eos", True)}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.address}/v1/completions", json.dumps(body).encode(), head)
        answer: dict[str, Any] = json.load(urllib.request.urlopen(request))
        timings = answer["timings"]
        assert timings["prompt_n"] == len(job["prompt"]), "the prompt was cached"
        seconds = {"prompt_seconds": timings["prompt_ms"] / 1e3, "decode_seconds": timings["predicted_ms"] / 1e3}
        counts = {"decode_tokens": timings["predicted_n"] - 1, "accepted": timings.get("draft_n_accepted", 0)}
        print(json.dumps(seconds | counts | {"text": answer["choices"][0]["text"]}), flush=True)


if __name__ == "__main__":
    main()
