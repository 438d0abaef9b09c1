# Installed package: find_package(oscar) gives oscar::oscar.
include(CMakePackageConfigHelpers)
