# The module smp_testing: the checks of tests/cpp/comm/communicator_suite.h for
# communicators that need processes, and what tests put into _C: lanes without a
# GPU, delays, limits of memory. Of _C it uses what is SMP_EXPORT, and has classes
# of rooms below once more. It lies next to the package, outside of it, and is not
# installed.
function(smp_add_test_module)
  set(sources comm/communicator_suite.cpp
    mailbox/python_module/testing_module.cpp ${ARGN})
  list(TRANSFORM sources PREPEND tests/cpp/)
  # The prefix of ranks is that of _C.
  file(GLOB common CONFIGURE_DEPENDS csrc/common/*.cpp)
  list(REMOVE_ITEM common ${CMAKE_SOURCE_DIR}/csrc/common/check.cpp)
  list(APPEND sources ${common} csrc/lanes/slot_ring.cpp)
  add_library(smp_testing MODULE ${sources})
  add_dependencies(smp_testing _C)
  # As a flag, because CMake turns the path of a file that is not there yet
  # into -l<name>, which does not fit a module's name.
  target_link_libraries(smp_testing PRIVATE smp_flags smp_torch_python
    -Wl,$<TARGET_FILE:_C>)
  smp_link_rooms(smp_testing health)
  smp_compile_together(smp_testing 16)
  set_target_properties(smp_testing PROPERTIES
    PREFIX "" SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}/..)
endfunction()
