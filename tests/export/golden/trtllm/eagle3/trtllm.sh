#!/usr/bin/env bash
# Written by specdec X.Y.Z for TensorRT-LLM 1.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: speculation.tree = 2,1 is left out: a chain is drafted, because TensorRT-LLM describes trees in another way, by use_dynamic_tree.
# Warning: draft_len_schedule has upper bounds as keys, as TensorRT-LLM 1.4 reads them; in 2025 they were lower bounds.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec trtllm-serve Qwen/Qwen3-8B \
  --config "$HERE/trtllm.yaml" \
  --host 127.0.0.1 \
  --port 9000 \
  "$@"
