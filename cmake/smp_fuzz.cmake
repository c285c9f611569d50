# Fuzzers of what the C++ core decodes: smp_fuzz_<name> from tests/fuzz/cpp/<name>.cpp
# and the sources that it needs, compiled anew under the address and undefined-
# behaviour sanitizers, whatever SMP_SANITIZE says. Right inputs lie in
# tests/fuzz/corpus/<name>; a test of `make test-all`, which builds them, runs a few
# thousand that are nearly right.

if(SMP_TESTS)
  add_custom_target(smp_fuzzers)
endif()

function(smp_add_fuzzer name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES" ${ARGN})
  set(target smp_fuzz_${name})
  set(folder tests/fuzz/cpp)
  set(sanitize -fsanitize=address,undefined -fno-sanitize=vptr
    -fno-sanitize-recover=undefined)
  add_executable(${target} EXCLUDE_FROM_ALL ${folder}/${name}.cpp ${folder}/main.cpp
    ${folder}/mutator.cpp ${arg_SOURCES} csrc/common/check.cpp)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_options(${target} PRIVATE -O2 -g -Wall -Wextra
    -fno-omit-frame-pointer ${sanitize})
  target_link_options(${target} PRIVATE ${sanitize})
  if(arg_TORCH)
    target_link_libraries(${target} PRIVATE smp_torch)
  endif()
  add_dependencies(smp_fuzzers ${target})
  add_test(NAME fuzz_${name} COMMAND ${target} -runs=4000 -seed=1
    ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${name})
  set_tests_properties(fuzz_${name} PROPERTIES LABELS others TIMEOUT 300
    ENVIRONMENT "${SMP_TEST_ENVIRONMENT}")
endfunction()

# The thread sanitizer and this one exclude each other.
if(SMP_TESTS AND NOT SMP_SANITIZE STREQUAL "thread")
  smp_add_fuzzer(liveness SOURCES csrc/health/liveness_frame.cpp
    csrc/health/collective_log.cpp csrc/health/rank_set.cpp)
  smp_add_fuzzer(handshake SOURCES csrc/health/handshake.cpp
    csrc/common/sha256.cpp)
  smp_add_fuzzer(schedule SOURCES csrc/schedule/schedule_text.cpp
    csrc/schedule/text_reader.cpp csrc/schedule/task.cpp)
  smp_add_fuzzer(wire TORCH SOURCES csrc/mailbox/wire.cpp)
endif()
