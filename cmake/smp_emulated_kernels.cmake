# Target smp_kernels_emulated_test: the CUDA sources, compiled for the host and
# run on the CPU, under tests of the kernels' room and under tests of their own.
# Needs no CUDA compiler. Threads of a block are fibers of one thread, of which
# the thread sanitizer would learn nothing.

if(SMP_SANITIZE STREQUAL "thread")
  return()
endif()

set(tests tests/cpp/kernels)
set(script ${CMAKE_SOURCE_DIR}/${tests}/emulated/host_sources.py)
set(written ${CMAKE_BINARY_DIR}/emulated)
file(GLOB cuda_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}
  ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cu
  ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cuh)
set(host_sources)
foreach(source ${cuda_sources})
  string(REGEX REPLACE "[.]cu$" ".cpp" host_source ${written}/${source})
  add_custom_command(OUTPUT ${host_source}
    COMMAND ${Python_EXECUTABLE} ${script} ${CMAKE_SOURCE_DIR}/${source}
      ${host_source}
    DEPENDS ${script} ${CMAKE_SOURCE_DIR}/${source} VERBATIM)
  list(APPEND host_sources ${host_source})
endforeach()
# Threads index with unsigned numbers; loops are unrolled by another pragma.
set(host_flags -fno-strict-aliasing -Wno-unknown-pragmas -Wno-sign-compare
  -Wno-unused-function)
if(NOT SMP_SANITIZE)
  # A device refuses an access that is not aligned to its size, so stop there.
  list(APPEND host_flags -fsanitize=alignment
    -fsanitize-undefined-trap-on-error)
endif()

file(GLOB emulation CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/${tests}/emulated/*.cpp)
if(SMP_SANITIZE)
  # The address sanitizer has its own calls before each access.
  list(FILTER emulation EXCLUDE REGEX "/(races|barriers)_test[.]cpp$")
else()
  # Calls before each access, which races.cpp answers.
  set_source_files_properties(${host_sources}
    ${CMAKE_SOURCE_DIR}/${tests}/emulated/races_test.cpp
    PROPERTIES COMPILE_OPTIONS -fsanitize=thread)
endif()
add_executable(smp_kernels_emulated_test ${host_sources} ${emulation}
  ${tests}/fused_test.cpp ${tests}/multi_array_test.cpp)
# Before the original sources: their headers launch kernels, too.
target_include_directories(smp_kernels_emulated_test BEFORE PRIVATE
  ${written} ${CMAKE_SOURCE_DIR}/${tests}/emulated/include)
target_compile_options(smp_kernels_emulated_test PRIVATE ${host_flags})
# The reference is the room's, without the files that answer for CUDA there.
add_dependencies(smp_kernels_emulated_test smp_kernels)
target_link_libraries(smp_kernels_emulated_test PRIVATE
  $<FILTER:$<TARGET_OBJECTS:smp_kernels>,INCLUDE,csrc/kernels/cpu/> smp_flags
  smp_gtest Threads::Threads)
add_test(NAME kernels_emulated COMMAND smp_kernels_emulated_test)
set_tests_properties(kernels_emulated PROPERTIES LABELS unit TIMEOUT 600
  ENVIRONMENT "${SMP_TEST_ENVIRONMENT}")
