#!/usr/bin/env bash
# Written by specdec X.Y.Z for vLLM 0.33.0.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: speculation.tree = 2,1 is left out: vLLM drafts chains with an EAGLE-3 head.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
set -euo pipefail
exec vllm serve Qwen/Qwen3-8B \
  --speculative-config '{"method": "eagle3", "num_speculative_tokens": 5, "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens_per_batch_size": [[1, 7, 5], [8, 31, 3], [32, 1048576, 0]]}' \
  --host 127.0.0.1 \
  --port 9000 \
  "$@"
