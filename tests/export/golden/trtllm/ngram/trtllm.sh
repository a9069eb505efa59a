#!/usr/bin/env bash
# Written by specdec X.Y.Z for TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: sampling.max_new_tokens = 256 is left out: requests must carry it, as those of the next command do.
# Warning: draft.min = 2 is left out: TensorRT-LLM has no such setting.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec trtllm-serve meta-llama/Llama-3.1-8B-Instruct \
  --config "$HERE/trtllm.yaml" \
  --host 127.0.0.1 \
  --port 8000 \
  "$@"
