# Compile options and the three helpers every CMakeLists.txt uses.

option(OSCAR_WERROR "Strict warnings, as errors" ${OSCAR_DEVELOPER_MODE})

add_library(oscar_options INTERFACE)
target_compile_features(oscar_options INTERFACE cxx_std_20)
target_compile_options(oscar_options INTERFACE -fvisibility=hidden -ffp-contract=off)
if(OSCAR_WERROR)
  target_compile_options(oscar_options INTERFACE -Wall -Wextra -Wconversion -Wno-sign-conversion -Werror)
endif()
if(OSCAR_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(OSCAR_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(NOT OSCAR_SANITIZE STREQUAL "")
  message(FATAL_ERROR "OSCAR_SANITIZE is '${OSCAR_SANITIZE}'; use address, thread or nothing")
endif()

if(NOT CMAKE_BUILD_TYPE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# oscar_add_stage(NAME SOURCES a.cpp ... DEPENDS other stages or libraries ...): object library oscar_NAME.
function(oscar_add_stage name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_library(oscar_${name} OBJECT ${ARG_SOURCES})
  set_target_properties(oscar_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(oscar_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(oscar_${name} PUBLIC tl::expected PRIVATE oscar_options ${ARG_PRIVATE})
  foreach(dependency IN LISTS ARG_DEPENDS)
    target_link_libraries(oscar_${name} PUBLIC oscar_${dependency})
  endforeach()
endfunction()

# oscar_bundle_stages(TARGET stage ...): the stages' objects in one library.
function(oscar_bundle_stages target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(stage IN LISTS ARGN)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:oscar_${stage}>)
  endforeach()
  target_link_libraries(${target} PUBLIC tl::expected Threads::Threads)
endfunction()

# oscar_add_test(NAME SOURCES a_test.cpp ... LINK libraries ... LABELS ...): GoogleTest program, one CTest entry a program.
# Label `threads`: runs several threads, so that the thread sanitizer has something to judge; it builds no others.
function(oscar_add_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE oscar_options oscar oscar_reference GTest::gtest_main rapidcheck ${ARG_LINK})
  if(OSCAR_SANITIZE STREQUAL "thread" AND NOT "threads" IN_LIST ARG_LABELS)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  # The library is optimised; a test's own code need not be, and GoogleTest and RapidCheck compile three times faster so.
  target_compile_options(${name} PRIVATE -O1)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(OSCAR_SANITIZE)
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "OSCAR_VECTORS=${OSCAR_VECTORS}")
endfunction()

set(OSCAR_VECTORS "${PROJECT_SOURCE_DIR}/tests/golden/vectors" CACHE PATH "Folder of the golden vectors")

# Models that the adapter's and the program's tests run: where scripts/models puts them.
set(models "$ENV{HOME}/.cache/oscar/models")
if(NOT "$ENV{OSCAR_MODELS}" STREQUAL "")
  set(models "$ENV{OSCAR_MODELS}")
endif()
set(OSCAR_MODELS "${models}" CACHE PATH "Folder of the test models")
unset(models)
