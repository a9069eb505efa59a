r"""Write the log-probabilities that llama.cpp gives the tokens of a text, which tests/real_models compares with ours.

    python -m venv E; E/bin/pip install xllamacpp numpy
    E/bin/python scripts/llama_cpp_logits.py FILE.gguf... --text docs/decoding.md specdec_cli/engine/verify.py \
        --save tests/real_models/llama_cpp_logits.npz

It asks for one token behind every beginning of the text, which llama.cpp decodes from its cache. Of each distribution
the file keeps the most likely tokens: their ids and log-probabilities, beside the text's own token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

NUM_TOP = 10


class Model:
    """A GGUF file in llama.cpp's server."""

    def __init__(self, path: Path, num_tokens: int, port: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.port = num_tokens + 64, 1, False, port
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text."""
        import urllib.request

        body = json.dumps({"content": text, "add_special": True}).encode()
        address = f"{self._server.listening_address}/tokenize"
        with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
            ids: list[int] = json.load(answer)["tokens"]
        return ids

    def most_likely(self, tokens: list[int]) -> list[tuple[int, float]]:
        """The most likely next tokens with their log-probabilities, the best first."""
        body = {"prompt": tokens, "n_predict": 1, "n_probs": NUM_TOP, "temperature": 0, "cache_prompt": True}
        answer: Any = self._server.handle_completions(body)
        document = answer if isinstance(answer, dict) else json.loads(answer)
        top = document["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return [(one["id"], one["logprob"]) for one in top]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files of text, joined")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18191)
    given = parser.parse_args()
    import numpy

    text = "\n\n".join(path.read_text(encoding="utf-8") for path in given.text)
    arrays: dict[str, Any] = {}
    for place, path in enumerate(given.files):
        model = Model(path, given.tokens, given.port + place)
        tokens = model.tokens(text)[: given.tokens]
        assert len(tokens) == given.tokens, f"the text has {len(tokens)} tokens"
        begin = perf_counter()
        rows = [model.most_likely(tokens[: end + 1]) for end in range(len(tokens))]
        print(f"{path.name}: {len(tokens)} tokens, {perf_counter() - begin:.0f} s", flush=True)
        arrays[f"{path.name}/tokens"] = numpy.array(tokens, numpy.uint32)
        arrays[f"{path.name}/ids"] = numpy.array([[token for token, _ in row] for row in rows], numpy.uint32)
        arrays[f"{path.name}/logprobs"] = numpy.array([[value for _, value in row] for row in rows], numpy.float16)
    numpy.savez_compressed(given.save, **arrays)


if __name__ == "__main__":
    main()
