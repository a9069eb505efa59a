#!/usr/bin/env bash
# Written by specdec X.Y.Z for mlx-lm 0.32.2.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: the draft is left out: mlx-lm has no counterpart of an EAGLE-3 head, and decodes without a draft.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
set -euo pipefail
exec mlx_lm.server \
  --model Qwen/Qwen3-8B \
  --host 127.0.0.1 \
  --port 9000 \
  "$@"
