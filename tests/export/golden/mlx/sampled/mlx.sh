#!/usr/bin/env bash
# Written by specdec X.Y.Z for mlx-lm 0.32.2.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: mlx-lm does not batch requests while it drafts.
# Warning: sampling.stop = [END, it's] is left out: requests must carry it, as those of the next command do.
# Warning: target.revision = main is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: target.dtype = bfloat16 is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: target.tensor_parallel_size = 2 is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: engine.max_num_seqs = 16 is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: engine.max_model_len = 8192 is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: mlx-lm has no such setting, or specdec does not know it.
# Warning: serve.served_model_name = [qwen] is left out: mlx-lm has no such setting, or specdec does not know it.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t Qwen/Qwen3-8B --set sampling.temperature=0.6 --set sampling.top_p=0.95 --set 'sampling.stop=["END", "it'"'"'s"]'
set -euo pipefail
exec mlx_lm.server \
  --model Qwen/Qwen3-8B \
  --host 0.0.0.0 \
  --port 8000 \
  --draft-model Qwen/Qwen3-0.6B \
  --num-draft-tokens 4 \
  --temp 0.6 \
  --top-p 0.95 \
  "$@"
