#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: draft.min = 2 is left out: llama.cpp looks for n-grams of one length.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec llama-server \
  --model "$HERE/target.gguf" \
  --spec-type ngram-simple \
  --spec-ngram-simple-size-n 5 \
  --spec-ngram-simple-size-m 6 \
  --host 127.0.0.1 \
  --port 8000 \
  --metrics \
  --cache-prompt \
  --temp 0.0 \
  --n-predict 256 \
  "$@"
