#!/usr/bin/env bash
# Builds for the GPU of this machine, and checks and measures what only a GPU can show.
#
#   tests/gpu/run.sh [--only cpp|python|sanitizer|bench]
#
# Takes what is installed: nvcc, cmake, ninja, Python with torch (CUDA), transformers, peft, pybind11,
# pytest and hypothesis; downloads nothing. GoogleTest's sources, if they are not installed, are
# looked for in build/googletest; without either the C++ part is skipped. The measurements come
# last, as a table and as JSON in $OUT (default: build/gpu).
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
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$build" "$out"
failed=0
summary=()

wants() { [[ $only == all || $only == "$1" ]]; }

# part NAME COMMAND...: run it, note how it ended.
part() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '\n==== %s\n' "$name"
  "$@" || status=$?
  summary+=("$(printf '%-10s exit status %d after %d s' "$name" "$status" $((SECONDS - start)))")
  ((status == 0)) || failed=$((failed + 1))
  return "$status"
}

skip() {
  summary+=("$(printf '%-10s skipped: %s' "$1" "$2")")
}

configure_and_build() {
  local tests=OFF gtest=()
  if [[ -e build/googletest/CMakeLists.txt ]]; then
    tests=ON
    gtest=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$PWD/build/googletest")
  elif [[ -e /usr/include/gmock/gmock.h ]]; then
    tests=ON
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES=native \
    -DPAGEDLORA_CUDA=ON -DPAGEDLORA_PYTHON=ON "-DPAGEDLORA_TESTS=$tests" "${gtest[@]}" \
    "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)" "-DPython_EXECUTABLE=$(command -v "$python")" &&
    cmake --build "$build" --target _core &&
    { [[ $tests == OFF ]] || cmake --build "$build" --target pagedlora_gpu_tests; } &&
    rm -rf "$build/site" && mkdir -p "$build/site" && cp -r python/pagedlora "$build/site/" &&
    rm -f "$build"/site/pagedlora/_core*.so && cp "$build"/cpp/bindings/_core*.so "$build/site/pagedlora/"
}

part build configure_and_build || { printf '%s\n' "${summary[@]}"; exit 1; }
export PYTHONPATH="$PWD/$build/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Other versions of other packages warn of other things: here that is no error.
pytest=(-m pytest -q -W default -p no:randomly -p no:cacheprovider)

if wants cpp; then
  if [[ -x $build/tests/cpp/pagedlora_gpu_tests ]]; then
    part cpp timeout 120 "$build/tests/cpp/pagedlora_gpu_tests"
  else
    skip cpp "no GoogleTest here: put its sources into build/googletest"
  fi
fi

if wants python; then
  part python timeout 240 "$python" "${pytest[@]}" tests/gpu
fi

if wants sanitizer; then
  # Calls that fail on purpose are among the tests; kernels are what is looked at.
  sanitizer=(timeout 240 compute-sanitizer --report-api-errors no --error-exitcode 1 --leak-check no)
  if ! command -v compute-sanitizer >/dev/null; then
    skip sanitizer "there is no compute-sanitizer"
  elif "${sanitizer[@]}" "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>&1 |
    grep -qi 'not supported'; then
    skip sanitizer "compute-sanitizer does not support this machine"
  else
    part sanitizer "${sanitizer[@]}" "$python" "${pytest[@]}" tests/gpu/test_lora_on_gpu.py \
      tests/gpu/test_scatter_on_gpu.py -k 'neighbours or captured or repeated'
  fi
fi

if wants bench; then
  part bench timeout 240 "$python" -m benchmarks.python.gpu_bench --output "$out/gpu.json"
fi

printf '\n'
printf '%s\n' "${summary[@]}"
exit $((failed > 0))
