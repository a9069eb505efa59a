"""llama.cpp beside our engine: what `llama_cpp` runs in an environment of its own, which needs no more than its wheel.

    python -m venv E
    E/bin/pip install xllamacpp

`E/bin/python llama_cpp_arm.py FILE THREADS` loads a GGUF file and prints a line of JSON. For each line that it then
reads, `{"prompt": [token ids], "tokens": n}`, it decodes greedily from an empty cache and prints its own figures.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Load, and answer until the input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
    server = xllamacpp.Server(params)
    about = {"system": xllamacpp.get_system_info().strip(), "build": str(xllamacpp.BUILD_INFO)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        body = {"prompt": job["prompt"], "n_predict": job["tokens"], "temperature": 0}
        answer = server.handle_completions(body | {"cache_prompt": False, "ignore_eos": True})
        timings = (answer if isinstance(answer, dict) else json.loads(answer))["timings"]
        assert timings["prompt_n"] == len(job["prompt"]), "the prompt was cached"
        seconds = {"prompt_seconds": timings["prompt_ms"] / 1e3, "decode_seconds": timings["predicted_ms"] / 1e3}
        print(json.dumps(seconds | {"decode_tokens": timings["predicted_n"] - 1}), flush=True)


if __name__ == "__main__":
    main()
