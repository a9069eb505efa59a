#!/usr/bin/env bash
# Written by specdec X.Y.Z for SGLang 0.5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: speculation.tree = 2,1 is left out: a chain is drafted, because SGLang describes trees in another way, by --speculative-eagle-topk.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec python -m sglang.launch_server \
  --model-path Qwen/Qwen3-8B \
  --host 127.0.0.1 \
  --port 9000 \
  --speculative-algorithm EAGLE3 \
  --speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 \
  --speculative-num-steps 5 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 6 \
  --speculative-adaptive \
  --speculative-adaptive-config "$HERE/adaptive.json" \
  "$@"
