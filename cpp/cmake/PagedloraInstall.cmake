# What find_package(pagedlora) finds: headers, static libraries and the package files, below
# PAGEDLORA_INSTALL_ROOT (empty: the install prefix itself; a wheel has them inside the package).

include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(PAGEDLORA_INSTALL_ROOT "" CACHE STRING "Directory below the prefix for headers and libraries")
set(root .)
if(PAGEDLORA_INSTALL_ROOT)
  set(root "${PAGEDLORA_INSTALL_ROOT}")
endif()
# lib everywhere: a wheel is searched at that place only.
set(PAGEDLORA_INSTALL_INCLUDE "${root}/include")
set(PAGEDLORA_INSTALL_LIB "${root}/lib")
set(PAGEDLORA_INSTALL_CMAKE "${root}/lib/cmake/pagedlora")

# pagedlora_install_component(<component> <target> <include directory>...)
function(pagedlora_install_component component target)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${component})
  install(
    TARGETS ${target}
    EXPORT pagedlora-${component}
    ARCHIVE DESTINATION "${PAGEDLORA_INSTALL_LIB}" COMPONENT development)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${PAGEDLORA_INSTALL_INCLUDE}>)
  install(
    EXPORT pagedlora-${component}
    NAMESPACE pagedlora::
    DESTINATION "${PAGEDLORA_INSTALL_CMAKE}"
    COMPONENT development)
  foreach(directory IN LISTS ARGN)
    install(
      DIRECTORY "${directory}/"
      DESTINATION "${PAGEDLORA_INSTALL_INCLUDE}"
      COMPONENT development
      FILES_MATCHING
      PATTERN "*.h")
  endforeach()
endfunction()

function(pagedlora_install_package)
  configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/cpp/cmake/pagedloraConfig.cmake.in" pagedloraConfig.cmake
    INSTALL_DESTINATION "${PAGEDLORA_INSTALL_CMAKE}")
  write_basic_package_version_file(pagedloraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(
    FILES "${CMAKE_CURRENT_BINARY_DIR}/pagedloraConfig.cmake"
          "${CMAKE_CURRENT_BINARY_DIR}/pagedloraConfigVersion.cmake"
    DESTINATION "${PAGEDLORA_INSTALL_CMAKE}"
    COMPONENT development)
endfunction()
