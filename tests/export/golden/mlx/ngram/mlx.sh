#!/usr/bin/env bash
# Written by specdec X.Y.Z for mlx-lm 0.32.2.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft is left out: mlx-lm has no counterpart of prompt lookup, and decodes without a draft.
# Warning: engine.enable_prefix_caching = true is left out: mlx-lm has no such setting, or specdec does not know it.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
set -euo pipefail
exec mlx_lm.server \
  --model meta-llama/Llama-3.1-8B-Instruct \
  --host 127.0.0.1 \
  --port 8000 \
  --max-tokens 256 \
  "$@"
