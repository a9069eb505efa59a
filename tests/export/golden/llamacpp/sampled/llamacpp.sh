#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Warning: target.revision = main is left out: llama.cpp has no such setting, or specdec does not know it.
# Warning: target.tensor_parallel_size = 2 is left out: llama.cpp has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: llama.cpp has no such setting, or specdec does not know it.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --endpoint-model qwen --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec llama-server \
  --model "$HERE/target.gguf" \
  --spec-type draft-simple \
  --spec-draft-model "$HERE/draft.gguf" \
  --spec-draft-n-max 4 \
  --spec-draft-n-min 0 \
  --host 0.0.0.0 \
  --port 8000 \
  --metrics \
  --ctx-size 131072 \
  --parallel 16 \
  --alias qwen \
  --temp 0.6 \
  --top-p 0.95 \
  "$@"
