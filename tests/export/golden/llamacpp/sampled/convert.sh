#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Warning: target.revision = main is left out: llama.cpp has no such setting, or specdec does not know it.
# Warning: target.tensor_parallel_size = 2 is left out: llama.cpp has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: llama.cpp has no such setting, or specdec does not know it.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --endpoint-model qwen --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
# A hub id must be downloaded first: convert_hf_to_gguf.py reads folders (or add --remote).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LLAMACPP=${LLAMACPP:?set LLAMACPP to a checkout of llama.cpp}
python "$LLAMACPP/convert_hf_to_gguf.py" Qwen/Qwen3-8B --outtype bf16 --outfile "$HERE/target.gguf"
python "$LLAMACPP/convert_hf_to_gguf.py" Qwen/Qwen3-0.6B --outtype auto --outfile "$HERE/draft.gguf"
