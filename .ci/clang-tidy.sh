#!/usr/bin/env bash
# clang-tidy.sh BUILD_DIR [JOBS]: run clang-tidy on cpp/src and csrc_cuda with the compile commands of
# BUILD_DIR; on csrc_cuda if it was configured.
#
# The clang-tidy of PyPI has no headers of its own (stddef.h, immintrin.h). They are Debian's
# libclang-common-19-dev, installed here if we may; without it those of g++ do, except for the
# AVX2 and AVX-512 sources, whose intrinsics only g++ itself can parse.
set -euo pipefail

build_dir=$1
jobs=${2:-$(nproc)}
resource_dir=/usr/lib/llvm-19/lib/clang/19

if [[ ! -e $resource_dir/include/stddef.h && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
    apt-get install -qy --no-install-recommends libclang-common-19-dev; } || true
fi

args=(--quiet -p "$build_dir" --extra-arg=-Wno-unknown-warning-option)
skip=()
if [[ -e $resource_dir/include/stddef.h ]]; then
  args+=("--extra-arg=-resource-dir=$resource_dir")
else
  echo "clang-tidy: no libclang-common-19-dev, so *_avx2.cc and *_avx512.cc are left out" >&2
  args+=("--extra-arg=-isystem$(g++ -print-file-name=include)")
  skip=(-not -name "*_avx2.cc" -not -name "*_avx512.cc")
fi

sources=(cpp/src)
if grep -q csrc_cuda/ "$build_dir/compile_commands.json"; then
  sources+=(csrc_cuda)
fi
find "${sources[@]}" -name "*.cc" "${skip[@]}" -print0 | sort -z |
  xargs -0 -r -n 1 -P "$jobs" clang-tidy "${args[@]}" 2>&1 |
  sed '/warnings\{0,1\} generated\.$/d'
