#!/usr/bin/env bash
# Builds for the GPU of this machine, and checks and measures what only a GPU can show.
#
#   tests/gpu/run.sh [--only cpp|python|sanitizer|bench]
#
# Takes what is installed: nvcc, cmake, ninja, Python with torch (CUDA), pybind11 and what
# pyproject.toml names, pytest, peft and hypothesis; downloads nothing. What is missing can lie in
# build: packages as wheels in build/wheels, GoogleTest's sources in build/googletest (without them
# the C++ part is skipped).
#
# All of it ends within LIMIT seconds (default: 290), with one part a longer one. Each part's output
# is also in $OUT/PART.log (default: build/gpu). The measurements come last, as a table and as JSON.
set -uo pipefail
cd "$(dirname "$0")/../.."

only=all
if [[ ${1:-} == --only && -n ${2:-} ]]; then
  only=$2
elif [[ $# -gt 0 ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

python=${PYTHON:-python3}
build=build/gpu
out=${OUT:-$build}
limit=${LIMIT:-290}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin"
mkdir -p "$build" "$out"
failed=0
summary=()

wants() { [[ $only == all || $only == "$1" ]]; }

# part NAME COMMAND...: run it, note how it ended.
part() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '\n==== %s\n' "$name"
  "$@" 2>&1 | tee "$out/$name.log" || status=$?
  summary+=("$(printf '%-10s exit status %d after %d s' "$name" "$status" $((SECONDS - start)))")
  ((status == 0)) || failed=$((failed + 1))
  return "$status"
}

skip() {
  summary+=("$(printf '%-10s skipped: %s' "$1" "$2")")
}

# seconds_for MOST RESERVE: what a part may take so that those behind it have RESERVE seconds left.
seconds_for() {
  local left=$((limit - SECONDS - ($2)))
  [[ $only == all ]] || left=$1
  echo $((left < $1 ? (left > 1 ? left : 1) : $1))
}

configure_and_build() {
  local tests=OFF gtest=()
  if [[ -e build/googletest/CMakeLists.txt ]]; then
    tests=ON
    gtest=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$PWD/build/googletest")
  elif [[ -e /usr/include/gmock/gmock.h ]]; then
    tests=ON
  fi
  if compgen -G 'build/wheels/*.whl' >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
      --target "$build/packages" build/wheels/*.whl || return
  fi
  "$python" - <<'PYTHON' || return
import importlib, sys
names = "numpy pybind11 pydantic yaml regex rich torch transformers typer pytest peft hypothesis"
missing = []
for name in names.split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name}: {error}")
if missing:
    sys.exit("put wheels of what is missing into build/wheels:\n" + "\n".join(missing))
import pybind11, torch
if int(pybind11.__version__.split(".")[0]) < 3:
    sys.exit(f"pybind11 is {pybind11.__version__}: put a wheel of 3.0 or newer into build/wheels")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU")
PYTHON
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CUDA_ARCHITECTURES=native -DCMAKE_CUDA_FLAGS=-lineinfo \
    -DPAGEDLORA_CUDA=ON -DPAGEDLORA_PYTHON=ON "-DPAGEDLORA_TESTS=$tests" "${gtest[@]}" \
    "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)" "-DPython_EXECUTABLE=$(command -v "$python")" &&
    cmake --build "$build" --target _core &&
    { [[ $tests == OFF ]] || cmake --build "$build" --target pagedlora_gpu_tests; } &&
    rm -rf "$build/site" && mkdir -p "$build/site" && cp -r python/pagedlora "$build/site/" &&
    rm -f "$build"/site/pagedlora/_core*.so && cp "$build"/cpp/bindings/_core*.so "$build/site/pagedlora/"
}

# What lies there is found before what is installed.
export PYTHONPATH="$PWD/$build/site:$PWD:$PWD/$build/packages${PYTHONPATH:+:$PYTHONPATH}"
part build configure_and_build || { printf '%s\n' "${summary[@]}"; exit 1; }

# Other versions of other packages warn of other things: here that is no error.
pytest=("$python" -m pytest -q -W default -p no:randomly -p no:cacheprovider --durations=10)

if wants cpp; then
  if [[ -x $build/tests/cpp/pagedlora_gpu_tests ]]; then
    part cpp timeout -k 5 "$(seconds_for 60 160)" "$build/tests/cpp/pagedlora_gpu_tests"
  else
    skip cpp "no GoogleTest here: put its sources into build/googletest"
  fi
fi

if wants python; then
  part python timeout -k 5 "$(seconds_for 240 130)" "${pytest[@]}" --maxfail=30 tests/gpu
fi

if wants sanitizer; then
  # Calls that fail on purpose are among the tests; kernels are what is looked at.
  sanitizer=(compute-sanitizer --report-api-errors no --error-exitcode 1 --leak-check no)
  if ! command -v compute-sanitizer >/dev/null; then
    skip sanitizer "there is no compute-sanitizer"
  elif (($(seconds_for 240 120) < 60)); then
    skip sanitizer "there is no time left: raise LIMIT, or run it by --only sanitizer"
  elif timeout -k 5 40 "${sanitizer[@]}" "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>&1 |
    grep -qi 'not supported'; then
    skip sanitizer "compute-sanitizer does not support this machine"
  else
    part sanitizer timeout -k 5 "$(seconds_for 240 120)" "${sanitizer[@]}" "${pytest[@]}" \
      tests/gpu/test_lora_on_gpu.py tests/gpu/test_scatter_on_gpu.py \
      -k 'neighbours or captured or repeated'
  fi
fi

if wants bench; then
  seconds=$(seconds_for 240 0)
  part bench timeout -k 5 "$seconds" "$python" -m benchmarks.python.gpu_bench \
    --output "$out/gpu.json" --seconds $((seconds - 25))
fi

printf '\n'
printf '%s\n' "${summary[@]}"
exit $((failed > 0))
