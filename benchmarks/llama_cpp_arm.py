"""llama.cpp beside our engine: what `llama_cpp` runs in an environment of its own, which needs no more than its wheel.

    python -m venv E
    E/bin/pip install xllamacpp

`E/bin/python llama_cpp_arm.py FILE THREADS [DRAFT [STREAMS]]` loads a GGUF file and prints a line of JSON. For each
line that it then reads, `{"prompt": [token ids], "tokens": n, "ignore_eos": false}`, it decodes greedily from an empty
cache and prints its own figures. DRAFT is `none` or a kind of llama.cpp's drafts without a model, with settings if need
be, such as `ngram_simple:size_n=4,size_m=16`. Its HTTP server, whose address is in the first line, decodes STREAMS
requests together.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CONTEXT = 2048  # of each stream


def choose_draft(params: Any, draft: str) -> None:
    """Set a kind of draft and its settings."""
    from xllamacpp import common_speculative_type as kinds

    kind, _, settings = draft.partition(":")
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        setattr(getattr(params.speculative, kind), name, int(value))


def main() -> None:
    """Load, and answer until the input ends."""
    import xllamacpp

    path, threads, draft, streams = (*sys.argv[1:], "none", "1")[:4] if len(sys.argv) == 3 else (*sys.argv[1:], "1")[:4]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_parallel, params.warmup = int(streams), False
    params.n_ctx = CONTEXT * params.n_parallel
    choose_draft(params, draft)
    server = xllamacpp.Server(params)
    about = {"system": xllamacpp.get_system_info().strip(), "build": str(xllamacpp.BUILD_INFO)}
    about["address"] = server.listening_address
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        body = {"prompt": job["prompt"], "n_predict": job["tokens"], "temperature": 0}
        body |= {"cache_prompt": False, "ignore_eos": job.get("ignore_eos", True)}
        answer = server.handle_completions(body)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        timings = answer["timings"]
        assert timings["prompt_n"] == len(job["prompt"]), "the prompt was cached"
        seconds = {"prompt_seconds": timings["prompt_ms"] / 1e3, "decode_seconds": timings["predicted_ms"] / 1e3}
        counts = {"decode_tokens": timings["predicted_n"] - 1, "accepted": timings.get("draft_n_accepted", 0)}
        print(json.dumps(seconds | counts | {"text": answer["choices"][0]["text"]}), flush=True)


if __name__ == "__main__":
    main()
