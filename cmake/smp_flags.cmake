# Compiler settings of every target of ours.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# Nothing here is a module, and CMake from 3.28 on preprocesses each source once
# more to find that out.
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# Line tables only: enough for stack traces, half the link time.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")

find_program(SMP_CCACHE ccache)
if(SMP_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
    ${SMP_CCACHE})
endif()

add_library(smp_flags INTERFACE)
target_include_directories(smp_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(smp_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
target_link_options(smp_flags INTERFACE -Wl,--as-needed)

set(SMP_SANITIZE "" CACHE STRING "empty, address or thread")
set(SMP_TEST_ENVIRONMENT OMP_NUM_THREADS=1)
set(suppressions ${CMAKE_SOURCE_DIR}/tests/cpp)
if(SMP_SANITIZE STREQUAL "address")
  # vptr checks need type information that torch's libraries do not export.
  set(sanitize -fsanitize=address,undefined -fno-sanitize=vptr
    -fno-sanitize-recover=undefined)
  list(APPEND SMP_TEST_ENVIRONMENT
    LSAN_OPTIONS=suppressions=${suppressions}/asan.supp:print_suppressions=0
    UBSAN_OPTIONS=print_stacktrace=1)
elseif(SMP_SANITIZE STREQUAL "thread")
  set(sanitize -fsanitize=thread)
  list(APPEND SMP_TEST_ENVIRONMENT
    TSAN_OPTIONS=suppressions=${suppressions}/tsan.supp:halt_on_error=0)
elseif(SMP_SANITIZE)
  message(FATAL_ERROR "SMP_SANITIZE must be empty, address or thread; "
    "got '${SMP_SANITIZE}'")
endif()
if(SMP_SANITIZE)
  target_compile_options(smp_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:${sanitize}> -fno-omit-frame-pointer)
  target_link_options(smp_flags INTERFACE ${sanitize})
endif()
