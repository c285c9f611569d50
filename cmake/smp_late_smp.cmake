# The module smp_late: kernels of smp for the late device
# (docs/design/late_device.md). It lies beside smp_late_device, whose streams it
# uses by their addresses, and registers with smp._C.
function(smp_add_late_smp)
  if(NOT TARGET smp_late_device)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS tests/cpp/optim/late/*.cpp)
  add_library(smp_late MODULE ${sources} csrc/optim/chunks.cpp)
  add_dependencies(smp_late _C smp_late_device)
  target_link_libraries(smp_late PRIVATE smp_flags smp_torch_python
    -Wl,$<TARGET_FILE:_C>)
  set_target_properties(smp_late PROPERTIES
    PREFIX "" SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}/..)
  add_dependencies(smp_for_python smp_late)
endfunction()
