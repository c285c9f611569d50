# The Python extension smp_late_device: a device without a GPU whose operators
# run later (docs/design/late_device.md). It lies beside smp_testing and uses
# nothing of smp.
function(smp_add_late_device)
  if(SMP_TORCH_VERSION VERSION_LESS 2.11)
    message(STATUS "no late device: it needs torch 2.11, got ${SMP_TORCH_VERSION}")
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS tests/cpp/device/*.cpp)
  add_library(smp_late_device MODULE ${sources})
  target_link_libraries(smp_late_device PRIVATE smp_flags smp_torch_python)
  set_target_properties(smp_late_device PROPERTIES
    PREFIX "" SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}/..)
  add_dependencies(smp_for_python smp_late_device)
endfunction()
