#!/usr/bin/env bash
# Written by specdec X.Y.Z for Triton Inference Server with TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: use_rejection_sampling is a prototype in TensorRT-LLM; without it fewer drafted tokens count.
# Warning: sampling.temperature = 0.6 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.top_p = 0.95 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Warning: serve.host = 0.0.0.0 is left out: launch_triton_server.py listens on all addresses.
# Warning: serve.served_model_name = [qwen] is left out: Triton Inference Server has no such setting, or specdec does not know it.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TRTLLM=${TRTLLM:?set TRTLLM to a checkout of TensorRT-LLM}
cp -rn "$TRTLLM/triton_backend/all_models/llmapi/." "$HERE/llmapi_repo/"
exec python3 "$TRTLLM/triton_backend/scripts/launch_triton_server.py" --model_repo="$HERE/llmapi_repo/"
