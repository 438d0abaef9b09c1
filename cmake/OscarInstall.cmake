# What `cmake --install` writes: the headers, liboscar.a, the `oscar` program, the licence texts, and the package files with
# which find_package(oscar) gives oscar::oscar (COMPONENTS ggml: oscar::ggml too) and pkg-config finds `oscar`.
include(CMakePackageConfigHelpers)

option(OSCAR_INSTALL "Generate the install target" ${PROJECT_IS_TOP_LEVEL})
if(NOT OSCAR_INSTALL)
  return()
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)

install(DIRECTORY include/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(TARGETS oscar EXPORT oscarTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT oscarTargets NAMESPACE oscar:: DESTINATION ${package_dir})

# The adapter has its own export: a consumer without llama.cpp never loads it.
if(TARGET oscar_ggml)
  set_target_properties(oscar_ggml PROPERTIES EXPORT_NAME ggml)
  install(FILES engines/ggml/include/oscar/ggml.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/oscar)
  install(TARGETS oscar_ggml EXPORT oscarGgmlTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT oscarGgmlTargets NAMESPACE oscar:: DESTINATION ${package_dir})
endif()

configure_package_config_file(cmake/oscarConfig.cmake.in ${PROJECT_BINARY_DIR}/oscarConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor release may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/oscarConfig.cmake ${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake
  DESTINATION ${package_dir})

# From the .pc file back to the prefix, so that an installed tree can be moved.
file(RELATIVE_PATH OSCAR_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/oscar.pc.in ${PROJECT_BINARY_DIR}/oscar.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/oscar.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})
