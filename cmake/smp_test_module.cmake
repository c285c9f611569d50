# The checks of tests/cpp/comm/communicator_suite.h as a Python module, for
# communicators that need processes. It lies next to the package, outside of
# it, and is not installed.
add_library(smp_communicator_suite MODULE
  tests/cpp/comm/communicator_suite.cpp
  tests/cpp/comm/python_module/communicator_suite_module.cpp)
target_link_libraries(smp_communicator_suite PRIVATE smp_flags smp_torch_python)
set_target_properties(smp_communicator_suite PROPERTIES
  PREFIX "" SUFFIX ".so"
  LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}/..)
