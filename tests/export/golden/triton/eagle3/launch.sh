#!/usr/bin/env bash
# Written by specdec X.Y.Z for Triton Inference Server with TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: speculation.tree = 2,1 is left out: a chain is drafted, because Triton Inference Server describes trees in another way, by use_dynamic_tree.
# Warning: draft_len_schedule has upper bounds as keys, as TensorRT-LLM 1.4 reads them; in 2025 they were lower bounds.
# Warning: serve.port = 9000 is left out: launch_triton_server.py has its own ports (8000, 8001, 8002).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TRTLLM=${TRTLLM:?set TRTLLM to a checkout of TensorRT-LLM}
cp -rn "$TRTLLM/triton_backend/all_models/llmapi/." "$HERE/llmapi_repo/"
exec python3 "$TRTLLM/triton_backend/scripts/launch_triton_server.py" --model_repo="$HERE/llmapi_repo/"
