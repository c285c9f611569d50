# smp_add_room(<room> [TORCH] [STREAMS] [DEPS room...] [EXCLUDE file...]
#              [SOURCES file...] [LIBRARIES target...] [TESTS file...])
#
# Makes the OBJECT library smp_<room> from csrc/<room>/*.cpp and, when
# tests/cpp/<room> has sources, the gtest binary smp_<room>_test, linked with
# this room and the rooms below it only. Objects, not archives: the linker must
# not drop static op registrars.
#
#   TORCH      the room may include torch headers
#   STREAMS    its tests run a second time over groups that look like those of
#              a device (tests/cpp/comm/stream_group.h)
#   DEPS       rooms whose headers it may include (with theirs, transitively)
#   EXCLUDE    globbed files, relative to the room, that are not compiled
#   SOURCES    further files relative to the room
#   LIBRARIES  further libraries
#   TESTS      files of tests of other rooms, relative to tests/cpp, that its
#              tests use
set_property(GLOBAL PROPERTY smp_rooms)

# Torch's headers are most of what the compiler reads: 7 of 9 seconds per file.
# Those of C++ and googletest are half of the rest. Sources of one room are
# compiled together, so that they are read once; but for kernels, which have
# options of their own, and health, whose sources have names in common.
option(SMP_UNITY "compile many sources of a room at once; OFF: each alone" ON)

# Headers that nearly all rooms with torch read are compiled once for them, and
# once with other flags for their tests. Flags of one group are equal; a room
# with OpenMP's has none.
set(smp_shared_headers <ATen/core/Tensor.h> <torch/library.h>
  <torch/csrc/autograd/custom_function.h> <algorithm> <chrono>
  <condition_variable> <functional> <map> <memory> <mutex> <optional> <set>
  <sstream> <string> <thread> <unordered_map> <vector>)

function(smp_share_headers target group)
  get_property(owner GLOBAL PROPERTY smp_headers_of_${group})
  if(owner)
    target_precompile_headers(${target} REUSE_FROM ${owner})
  else()
    target_precompile_headers(${target} PRIVATE ${smp_shared_headers} ${ARGN})
    set_property(GLOBAL PROPERTY smp_headers_of_${group} ${target})
  endif()
endfunction()

function(smp_compile_together target num_files)
  if(SMP_UNITY)
    set_target_properties(${target} PROPERTIES
      UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${num_files})
    # A type of one source that has members of that source's own types.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

function(smp_add_room room)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH;STREAMS" ""
    "DEPS;EXCLUDE;SOURCES;LIBRARIES;TESTS")
  set(folder ${CMAKE_SOURCE_DIR}/csrc/${room})
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  foreach(name ${arg_EXCLUDE})
    list(REMOVE_ITEM sources ${folder}/${name})
  endforeach()
  list(TRANSFORM arg_SOURCES PREPEND ${folder}/)
  list(APPEND sources ${arg_SOURCES})

  # All rooms below, each once.
  set(closure ${room})
  foreach(dep ${arg_DEPS})
    get_property(below GLOBAL PROPERTY smp_closure_${dep})
    if(NOT below)
      message(FATAL_ERROR "room ${room} depends on ${dep}, which is not "
        "declared before it")
    endif()
    list(APPEND closure ${below})
  endforeach()
  list(REMOVE_DUPLICATES closure)
  set_property(GLOBAL PROPERTY smp_closure_${room} ${closure})
  set_property(GLOBAL APPEND PROPERTY smp_rooms ${room})

  set(libraries smp_flags Threads::Threads ${arg_LIBRARIES})
  if(arg_TORCH)
    list(APPEND libraries smp_torch)
  endif()
  # What others compile does not depend on a room's own libraries: else all of it
  # is compiled again when CUDA is switched on.
  list(TRANSFORM arg_LIBRARIES REPLACE "(.+)" "$<LINK_ONLY:\\1>")
  set_property(GLOBAL PROPERTY smp_libraries_${room} smp_flags Threads::Threads
    ${arg_LIBRARIES} $<$<BOOL:${arg_TORCH}>:smp_torch>)

  if(sources)
    add_library(smp_${room} OBJECT ${sources})
    target_link_libraries(smp_${room} PRIVATE ${libraries})
    if(NOT room MATCHES "^(kernels|health)$")
      smp_compile_together(smp_${room} 32)
    endif()
    if(arg_TORCH AND SMP_UNITY AND NOT "${smp_openmp}" IN_LIST libraries)
      smp_share_headers(smp_${room} rooms)
    endif()
  endif()
  file(GLOB tests CONFIGURE_DEPENDS
    ${CMAKE_SOURCE_DIR}/tests/cpp/${room}/*.cpp)
  list(TRANSFORM arg_TESTS PREPEND ${CMAKE_SOURCE_DIR}/tests/cpp/)
  list(APPEND tests ${arg_TESTS})
  if(tests AND SMP_TESTS)
    add_executable(smp_${room}_test ${tests})
    smp_link_rooms(smp_${room}_test ${closure})
    # A test runs once per build; its room is as fast as in the extension.
    target_compile_options(smp_${room}_test PRIVATE -O1)
    target_link_libraries(smp_${room}_test PRIVATE smp_gtest)
    if(NOT room MATCHES "^(kernels|health)$")
      smp_compile_together(smp_${room}_test 8)
    endif()
    if(arg_TORCH AND SMP_UNITY)
      smp_share_headers(smp_${room}_test tests <gtest/gtest.h>)
    endif()
    add_test(NAME ${room} COMMAND smp_${room}_test)
    set_tests_properties(${room} PROPERTIES LABELS unit TIMEOUT 300
      ENVIRONMENT "${SMP_TEST_ENVIRONMENT}")
    if(arg_STREAMS)
      add_test(NAME ${room}_streams COMMAND smp_${room}_test)
      set_tests_properties(${room}_streams PROPERTIES LABELS unit TIMEOUT 300
        ENVIRONMENT "${SMP_TEST_ENVIRONMENT};SMP_TEST_STREAMS=1")
    endif()
  endif()
endfunction()

# Links the objects of rooms, and what they need, into a binary.
function(smp_link_rooms target)
  foreach(room ${ARGN})
    get_property(libraries GLOBAL PROPERTY smp_libraries_${room})
    if(TARGET smp_${room})
      target_link_libraries(${target} PRIVATE smp_${room} ${libraries})
    else()
      target_link_libraries(${target} PRIVATE ${libraries})
    endif()
  endforeach()
endfunction()
