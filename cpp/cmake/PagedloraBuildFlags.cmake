# pagedlora::build_flags: what every target of this project is compiled with; linked PRIVATE.

include_guard(GLOBAL)

find_package(Threads REQUIRED)

add_library(pagedlora_build_flags INTERFACE)
add_library(pagedlora::build_flags ALIAS pagedlora_build_flags)
target_compile_features(pagedlora_build_flags INTERFACE cxx_std_20)
target_link_libraries(pagedlora_build_flags INTERFACE Threads::Threads)

# -ffp-contract=off: the kernels of all instruction sets must give the same bits, so a * b + c is
# fused only where we write it.
set(cxx_flags
    -ffp-contract=off
    -Wall
    -Wextra
    -Wpedantic
    -Wshadow
    -Wconversion
    -Wold-style-cast
    -Wextra-semi
    -Wnon-virtual-dtor
    -Woverloaded-virtual
    $<$<BOOL:${PAGEDLORA_WERROR}>:-Werror>)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC PR105651: false positives on std::string operator+ when optimising.
  list(APPEND cxx_flags -Wno-restrict)
endif()

# nvcc has flags of its own (csrc_cuda/CMakeLists.txt).
target_compile_options(pagedlora_build_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${cxx_flags}>")

if(PAGEDLORA_SANITIZE STREQUAL "thread")
  set(sanitize_flags -fsanitize=thread)
elseif(PAGEDLORA_SANITIZE STREQUAL "address")
  set(sanitize_flags -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(NOT PAGEDLORA_SANITIZE STREQUAL "")
  message(FATAL_ERROR "PAGEDLORA_SANITIZE is '${PAGEDLORA_SANITIZE}': use thread, address or nothing")
endif()
if(sanitize_flags)
  target_compile_options(
    pagedlora_build_flags
    INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags};-fno-omit-frame-pointer>")
  target_compile_definitions(pagedlora_build_flags INTERFACE _GLIBCXX_ASSERTIONS)
  target_link_options(pagedlora_build_flags INTERFACE ${sanitize_flags})
endif()

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
