# Tests of csrc/lanes as it is, with cuda_copies.cpp, over a stand-in for the CUDA
# runtime (tests/cpp/cuda_runtime). They need neither a CUDA toolkit nor a GPU.
# Processes share devices by mapped memory, of which the thread sanitizer would
# learn nothing.

if(SMP_SANITIZE STREQUAL "thread")
  return()
endif()

# Torch tells streams' handles, which these copies need, from this release on.
if(SMP_TORCH_VERSION VERSION_LESS 2.11)
  return()
endif()

set(tests ${CMAKE_SOURCE_DIR}/tests/cpp)
file(GLOB lanes_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/lanes/*.cpp)
list(REMOVE_ITEM lanes_sources ${CMAKE_SOURCE_DIR}/csrc/lanes/no_cuda_copies.cpp)
file(GLOB stand_in CONFIGURE_DEPENDS ${tests}/cuda_runtime/*.cpp)
file(GLOB rank_sources CONFIGURE_DEPENDS ${tests}/lanes/cuda/*.cpp)
get_property(rooms_below GLOBAL PROPERTY smp_closure_lanes)
list(REMOVE_ITEM rooms_below lanes)

function(smp_over_stand_in target)
  # Before the headers of a toolkit.
  target_include_directories(${target} BEFORE PRIVATE ${tests}/cuda_runtime/include)
  target_compile_options(${target} PRIVATE -O1 -fPIE)
  target_link_libraries(${target} PRIVATE smp_flags smp_torch smp_gtest
    Threads::Threads)
  smp_compile_together(${target} 16)
  if(SMP_UNITY)
    smp_share_headers(${target} tests <gtest/gtest.h>)
  endif()
endfunction()

# The stand-in, and ranks over it.
add_library(smp_cuda_stand_in OBJECT ${stand_in} ${rank_sources})
smp_over_stand_in(smp_cuda_stand_in)

# The room as it is.
add_executable(smp_cuda_lanes_test ${lanes_sources})
smp_over_stand_in(smp_cuda_lanes_test)
smp_link_rooms(smp_cuda_lanes_test ${rooms_below})
target_link_libraries(smp_cuda_lanes_test PRIVATE smp_cuda_stand_in)
add_test(NAME cuda_lanes COMMAND smp_cuda_lanes_test)
set_tests_properties(cuda_lanes PROPERTIES LABELS unit TIMEOUT 300
  ENVIRONMENT "${SMP_TEST_ENVIRONMENT}")
add_test(NAME cuda_lanes_others COMMAND smp_cuda_lanes_test
  --gtest_filter=*CudaLanes*)
set_tests_properties(cuda_lanes_others PROPERTIES LABELS others TIMEOUT 600
  ENVIRONMENT "${SMP_TEST_ENVIRONMENT};SMP_TEST_CUDA_SAMPLES=1")

# The room with faults, each behind a switch, to see which of them these tests
# find; that takes its time, so `make test-all` does it.
set(mutants ${tests}/lanes/cuda/mutants)
set(written ${CMAKE_BINARY_DIR}/mutants)
set(mutated cuda_copies group_copies host_lane ipc_lane nccl_lane)
set(mutated_sources ${mutated})
list(TRANSFORM mutated_sources REPLACE "(.+)" "${written}/\\1.cpp")
set(other_sources ${lanes_sources})
set(original_sources ${mutated})
list(TRANSFORM original_sources REPLACE "(.+)"
  "${CMAKE_SOURCE_DIR}/csrc/lanes/\\1.cpp")
list(REMOVE_ITEM other_sources ${original_sources})
add_custom_command(OUTPUT ${mutated_sources} ${written}/mutation_list.h
  COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${CMAKE_SOURCE_DIR}
    ${Python_EXECUTABLE} ${mutants}/mutations.py
    ${CMAKE_SOURCE_DIR}/csrc/lanes ${written}
  DEPENDS ${mutants}/mutations.py ${CMAKE_SOURCE_DIR}/tests/mutation.py
    ${original_sources} VERBATIM)
add_executable(smp_cuda_mutants_test ${mutated_sources} ${other_sources}
  ${mutants}/mutants_test.cpp ${written}/mutation_list.h)
target_include_directories(smp_cuda_mutants_test PRIVATE ${written})
target_compile_options(smp_cuda_mutants_test PRIVATE -Wno-misleading-indentation)
smp_over_stand_in(smp_cuda_mutants_test)
smp_link_rooms(smp_cuda_mutants_test ${rooms_below})
target_link_libraries(smp_cuda_mutants_test PRIVATE smp_cuda_stand_in)
foreach(name MutationList Mutants)
  add_test(NAME cuda_${name} COMMAND smp_cuda_mutants_test
    --gtest_filter=*${name}*)
  set_tests_properties(cuda_${name} PROPERTIES LABELS others TIMEOUT 1200
    ENVIRONMENT "${SMP_TEST_ENVIRONMENT}")
endforeach()
set_tests_properties(cuda_MutationList PROPERTIES LABELS unit)
