#!/usr/bin/env bash
# Written by specdec X.Y.Z for Triton Inference Server with TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: sampling.max_new_tokens = 256 is left out: requests must carry it, as those of the next command do.
# Warning: draft.min = 2 is left out: Triton Inference Server has no such setting.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TRTLLM=${TRTLLM:?set TRTLLM to a checkout of TensorRT-LLM}
cp -rn "$TRTLLM/triton_backend/all_models/llmapi/." "$HERE/llmapi_repo/"
exec python3 "$TRTLLM/triton_backend/scripts/launch_triton_server.py" --model_repo="$HERE/llmapi_repo/"
