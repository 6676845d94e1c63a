# pagedlora_check_listed(<directory> <source>...)
#
# Sources are listed by hand. This looks for the ones that someone forgot: every .cc below the
# directory must be among the arguments (both relative to the current source directory).

include_guard(GLOBAL)

function(pagedlora_check_listed directory)
  file(GLOB_RECURSE present CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}"
       "${CMAKE_CURRENT_SOURCE_DIR}/${directory}/*.cc")
  list(REMOVE_ITEM present ${ARGN})
  if(present)
    set(severity WARNING)
    if(PAGEDLORA_WERROR)
      set(severity FATAL_ERROR)
    endif()
    message(${severity} "not listed in ${CMAKE_CURRENT_SOURCE_DIR}/CMakeLists.txt: ${present}")
  endif()
endfunction()
