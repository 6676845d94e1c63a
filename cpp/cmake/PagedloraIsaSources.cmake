# Flags of the *_avx2.cc and *_avx512.cc sources, and whether this compiler and processor family
# can use them.

include_guard(GLOBAL)
include(CheckCXXCompilerFlag)

set(PAGEDLORA_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(PAGEDLORA_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma)
set(PAGEDLORA_HAVE_AVX2 OFF)
set(PAGEDLORA_HAVE_AVX512 OFF)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  foreach(isa AVX2 AVX512)
    string(REPLACE ";" " " flags_line "${PAGEDLORA_${isa}_FLAGS}")
    check_cxx_compiler_flag("${flags_line}" PAGEDLORA_COMPILER_HAS_${isa})
    set(PAGEDLORA_HAVE_${isa} ${PAGEDLORA_COMPILER_HAS_${isa}})
  endforeach()
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC PR105593: the compiler's own AVX-512 headers start from undefined registers.
  list(APPEND PAGEDLORA_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

# pagedlora_add_isa_objects(<target> <AVX2|AVX512> <source>...)
#
# Compile the sources for that instruction set and add them to <target>, which then carries the
# definition PAGEDLORA_HAVE_<isa> (as do its users). Does nothing on other processors.
#
# Such a source must not define weak symbols (an inline function or template that was not
# inlined): the linker may keep that copy for the whole program, which then dies of SIGILL on an
# older processor. The tests `<isa>_objects_define_no_weak_symbols` look.
function(pagedlora_add_isa_objects target isa)
  if(NOT PAGEDLORA_HAVE_${isa} OR NOT ARGN)
    return()
  endif()
  string(TOLOWER ${isa} suffix)
  set(objects ${target}_${suffix})
  add_library(${objects} OBJECT ${ARGN})
  target_include_directories(${objects} PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
  target_link_libraries(${objects} PRIVATE pagedlora::build_flags)
  target_compile_options(${objects} PRIVATE ${PAGEDLORA_${isa}_FLAGS})
  target_compile_definitions(${objects} PRIVATE PAGEDLORA_HAVE_${isa}=1)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  target_compile_definitions(${target} PUBLIC PAGEDLORA_HAVE_${isa}=1)
endfunction()
