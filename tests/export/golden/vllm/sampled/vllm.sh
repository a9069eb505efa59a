#!/usr/bin/env bash
# Written by specdec X.Y.Z for vLLM 0.33.0.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --endpoint-model qwen --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
set -euo pipefail
exec vllm serve Qwen/Qwen3-8B \
  --revision main \
  --dtype bfloat16 \
  --tensor-parallel-size 2 \
  --max-model-len 8192 \
  --max-num-seqs 16 \
  --gpu-memory-utilization 0.9 \
  --override-generation-config '{"temperature": 0.6, "top_p": 0.95}' \
  --speculative-config '{"method": "draft_model", "num_speculative_tokens": 4, "model": "Qwen/Qwen3-0.6B", "draft_tensor_parallel_size": 2, "draft_sample_method": "probabilistic"}' \
  --host 0.0.0.0 \
  --port 8000 \
  --served-model-name qwen \
  "$@"
