#!/usr/bin/env bash
# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: target.revision = main is left out: optimum-cli converts the newest; give it a folder of that revision.
# Warning: OpenVINO GenAI's sampling with a draft does not keep the target's distribution.
# Warning: the settings of serve are left out: this is a script and no server.
# Warning: target.tensor_parallel_size = 2 is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
# Warning: engine.max_model_len = 8192 is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
optimum-cli export openvino --model Qwen/Qwen3-8B --task text-generation-with-past --weight-format bf16 "$HERE/target"
optimum-cli export openvino --model Qwen/Qwen3-0.6B --task text-generation-with-past --weight-format fp16 "$HERE/draft"
