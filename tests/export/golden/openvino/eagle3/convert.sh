#!/usr/bin/env bash
# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: k by batch size is left out: OpenVINO GenAI has one k.
# Warning: speculation.tree = 2,1 is left out: a chain is drafted, because OpenVINO GenAI describes trees in another way, by branching_factor and tree_depth.
# Warning: the settings of serve are left out: this is a script and no server.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
optimum-cli export openvino --model Qwen/Qwen3-8B --task text-generation-with-past --weight-format fp16 "$HERE/target"
optimum-cli export openvino --model AngelSlim/Qwen3-8B_eagle3 --task text-generation-with-past --weight-format fp16 "$HERE/draft"
