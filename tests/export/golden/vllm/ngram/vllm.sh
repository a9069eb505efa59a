#!/usr/bin/env bash
# Written by specdec X.Y.Z for vLLM 0.33.0.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
set -euo pipefail
exec vllm serve meta-llama/Llama-3.1-8B-Instruct \
  --enable-prefix-caching \
  --override-generation-config '{"temperature": 0.0, "max_new_tokens": 256}' \
  --speculative-config '{"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2, "num_speculative_tokens": 6}' \
  --host 127.0.0.1 \
  --port 8000 \
  "$@"
