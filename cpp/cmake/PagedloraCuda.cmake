# PAGEDLORA_CUDA_ENABLED: whether this build has the GPU part. It needs nvcc and the static runtime
# of the toolkit, neither a driver nor a GPU.

include_guard(GLOBAL)

set(PAGEDLORA_CUDA_ENABLED OFF)

if(PAGEDLORA_CUDA STREQUAL "ON" OR PAGEDLORA_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Machine code for each generation, and PTX of the newest for those that follow.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit QUIET)
  endif()
  if(TARGET CUDA::cudart_static)
    set(PAGEDLORA_CUDA_ENABLED ON)
  elseif(PAGEDLORA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PAGEDLORA_CUDA is ON, but nvcc and the CUDA toolkit were not found: "
                        "put nvcc on PATH or set CMAKE_CUDA_COMPILER")
  endif()
elseif(NOT PAGEDLORA_CUDA STREQUAL "OFF")
  message(FATAL_ERROR "PAGEDLORA_CUDA is '${PAGEDLORA_CUDA}': use AUTO, ON or OFF")
endif()

message(STATUS "pagedlora: GPU part ${PAGEDLORA_CUDA_ENABLED}")
