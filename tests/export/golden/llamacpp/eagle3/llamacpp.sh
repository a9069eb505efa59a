#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: k by batch size is left out: llama.cpp has one k.
# Warning: speculation.tree = 2,1 is left out: llama.cpp drafts chains with an EAGLE-3 head.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec llama-server \
  --model "$HERE/target.gguf" \
  --spec-type draft-eagle3 \
  --spec-draft-model "$HERE/draft.gguf" \
  --spec-draft-n-max 5 \
  --spec-draft-n-min 0 \
  --host 127.0.0.1 \
  --port 9000 \
  --metrics \
  "$@"
