#!/usr/bin/env bash
# Written by specdec X.Y.Z for SGLang 0.5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: SGLang's NGRAM looks up in a trie of all served text, and its depth is not the n-gram's.
# Warning: sampling.max_new_tokens = 256 is left out: requests must carry it, as those of the next command do.
# Warning: draft.min = 2 is left out: SGLang has no such setting.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
set -euo pipefail
exec python -m sglang.launch_server \
  --model-path meta-llama/Llama-3.1-8B-Instruct \
  --host 127.0.0.1 \
  --port 8000 \
  --speculative-algorithm NGRAM \
  --speculative-ngram-max-bfs-breadth 1 \
  --speculative-num-draft-tokens 7 \
  "$@"
