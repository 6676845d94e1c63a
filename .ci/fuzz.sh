#!/usr/bin/env bash
# Fuzz the parser of safetensors headers with clang's libFuzzer, under AddressSanitizer and UBSan.
#
# usage: fuzz.sh [SECONDS]     build and run for so long (10), from the committed corpus
#        fuzz.sh --compiler    print the compiler that would be used; fail and say so without one
#
# What is found beyond the committed corpus stays in build/fuzz, a crashing input too.
set -euo pipefail
cd "$(dirname "$0")/.."

target=safetensors_header
sources=(
  "tests/cpp/fuzz/${target}_fuzz.cc"
  cpp/src/{adapter_root,errors,safetensors_header,tensor_source}.cc
  cpp/src/internal/{json_cursor,printable,regular_file}.cc
)
flags=(-std=c++20 -O1 -g -Icpp/include -Icpp/src -Wno-deprecated-declarations
  -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)

# The first clang++ that comes with libFuzzer.
find_compiler() {
  local candidate
  for candidate in clang++ clang++-{21,20,19,18,17,16,15}; do
    if command -v "$candidate" >/dev/null &&
      echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$candidate" -fsanitize=fuzzer -x c++ - -o /dev/null 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no clang++ with libFuzzer: install clang and libclang-rt-dev" >&2
  return 1
}

compiler=$(find_compiler)
if [[ ${1:-} == --compiler ]]; then
  echo "$compiler"
  exit
fi

out=build/fuzz
mkdir -p "$out/corpus" "$out/crashes"
"$compiler" "${flags[@]}" "${sources[@]}" -o "$out/$target"
"$out/$target" -max_total_time="${1:-10}" -timeout=10 -rss_limit_mb=1024 -max_len=4096 \
  -dict="tests/cpp/fuzz/$target.dict" -artifact_prefix="$out/crashes/" -print_final_stats=1 \
  "$out/corpus" "tests/cpp/fuzz/corpus/$target"
