#!/usr/bin/env bash
# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: draft.min = 2 is left out: OpenVINO GenAI tries n-grams down to one token.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
optimum-cli export openvino --model meta-llama/Llama-3.1-8B-Instruct --task text-generation-with-past --weight-format fp16 "$HERE/target"
