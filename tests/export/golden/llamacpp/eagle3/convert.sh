#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: k by batch size is left out: llama.cpp has one k.
# Warning: speculation.tree = 2,1 is left out: llama.cpp drafts chains with an EAGLE-3 head.
# Measure it: specdec bench --endpoint http://127.0.0.1:9000 -t Qwen/Qwen3-8B
# A hub id must be downloaded first: convert_hf_to_gguf.py reads folders (or add --remote).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LLAMACPP=${LLAMACPP:?set LLAMACPP to a checkout of llama.cpp}
python "$LLAMACPP/convert_hf_to_gguf.py" Qwen/Qwen3-8B --outtype auto --outfile "$HERE/target.gguf"
python "$LLAMACPP/convert_hf_to_gguf.py" AngelSlim/Qwen3-8B_eagle3 --outtype auto --outfile "$HERE/draft.gguf" --target-model-dir Qwen/Qwen3-8B
