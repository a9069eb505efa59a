#!/usr/bin/env bash
# Everything to run on a GPU while one can be had, unattended, in at most nine minutes.
#
#   benchmarks/gpu_day.sh --wheels    # where there is a network: wheels of what a PyTorch image lacks, into .whl/
#   benchmarks/gpu_day.sh             # on the GPU's machine, from a copy of the repository that includes .whl/
#   benchmarks/gpu_day.sh --cpu       # anywhere: the same steps, shortened, to try the script
#
# It needs a Python with torch and transformers (PYTHON names it; else .venv/bin/python, else python3) and no network.
# Results go to $OUT, or benchmarks/results/. Further options are those of gpu_day.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --wheels ]; then
  version=${WHEELS_FOR:-3.12} # of the GPU's machine's Python
  names=(pydantic pydantic-core annotated-types typing-inspection datasets multiprocess dill httpx2 httpcore2 truststore)
  platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
  exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --constraint constraints.txt --dest .whl "${names[@]}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if ! "$python" benchmarks/gpu_day.py --check-packages 2>/dev/null && compgen -G '.whl/*.whl' >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
  export PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" benchmarks/gpu_day.py "$@"
