#!/usr/bin/env bash
# Written by specdec X.Y.Z for TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: use_rejection_sampling is a prototype in TensorRT-LLM; without it fewer drafted tokens count.
# Warning: sampling.temperature = 0.6 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.top_p = 0.95 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Warning: serve.served_model_name = [qwen] is left out: TensorRT-LLM has no such setting, or specdec does not know it.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec trtllm-serve Qwen/Qwen3-8B \
  --config "$HERE/trtllm.yaml" \
  --host 0.0.0.0 \
  --port 8000 \
  "$@"
