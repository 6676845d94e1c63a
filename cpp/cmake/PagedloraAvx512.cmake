# Flags of the *_avx512.cc sources, and whether this compiler and processor family can use them.

include_guard(GLOBAL)
include(CheckCXXCompilerFlag)

set(PAGEDLORA_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma)
set(PAGEDLORA_HAVE_AVX512 OFF)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  string(REPLACE ";" " " avx512_flags_line "${PAGEDLORA_AVX512_FLAGS}")
  check_cxx_compiler_flag("${avx512_flags_line}" PAGEDLORA_COMPILER_HAS_AVX512)
  set(PAGEDLORA_HAVE_AVX512 ${PAGEDLORA_COMPILER_HAS_AVX512})
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC PR105593: the compiler's own AVX-512 headers start from undefined registers.
  list(APPEND PAGEDLORA_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

# pagedlora_add_avx512_objects(<target> <source>...)
#
# Compile the sources for AVX-512 and add them to <target>, which then carries the definition
# PAGEDLORA_HAVE_AVX512 (as do its users). Does nothing on other processors.
#
# Such a source must not define weak symbols (an inline function or template that was not
# inlined): the linker may keep that copy for the whole program, which then dies of SIGILL on an
# older processor. The test `avx512_objects_define_no_weak_symbols` looks.
function(pagedlora_add_avx512_objects target)
  if(NOT PAGEDLORA_HAVE_AVX512 OR NOT ARGN)
    return()
  endif()
  add_library(${target}_avx512 OBJECT ${ARGN})
  target_include_directories(${target}_avx512
                             PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
  target_link_libraries(${target}_avx512 PRIVATE pagedlora::build_flags)
  target_compile_options(${target}_avx512 PRIVATE ${PAGEDLORA_AVX512_FLAGS})
  target_compile_definitions(${target}_avx512 PRIVATE PAGEDLORA_HAVE_AVX512=1)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_avx512>)
  target_compile_definitions(${target} PUBLIC PAGEDLORA_HAVE_AVX512=1)
endfunction()
