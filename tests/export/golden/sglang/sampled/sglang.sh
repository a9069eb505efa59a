#!/usr/bin/env bash
# Written by specdec X.Y.Z for SGLang 0.5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: SGLang verifies greedily on a CPU, whatever the temperature.
# Warning: sampling.temperature = 0.6 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.top_p = 0.95 is left out: requests must carry it, as those of the next command do.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --endpoint-model qwen --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
set -euo pipefail
exec python -m sglang.launch_server \
  --model-path Qwen/Qwen3-8B \
  --host 0.0.0.0 \
  --port 8000 \
  --revision main \
  --dtype bfloat16 \
  --tp-size 2 \
  --context-length 8192 \
  --max-running-requests 16 \
  --served-model-name qwen \
  --mem-fraction-static 0.9 \
  --speculative-algorithm STANDALONE \
  --speculative-draft-model-path Qwen/Qwen3-0.6B \
  --speculative-num-steps 4 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 5 \
  "$@"
