#!/usr/bin/env bash
# Written by specdec X.Y.Z for llama.cpp of November 2026.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: draft.min = 2 is left out: llama.cpp looks for n-grams of one length.
# Measure it: specdec bench --endpoint http://127.0.0.1:8000 -t meta-llama/Llama-3.1-8B-Instruct --set sampling.max_new_tokens=256
# A hub id must be downloaded first: convert_hf_to_gguf.py reads folders (or add --remote).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LLAMACPP=${LLAMACPP:?set LLAMACPP to a checkout of llama.cpp}
python "$LLAMACPP/convert_hf_to_gguf.py" meta-llama/Llama-3.1-8B-Instruct --outtype auto --outfile "$HERE/target.gguf"
