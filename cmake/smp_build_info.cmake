# Writes smp/_build_info.py next to the extension.
foreach(name CUDA MPI)
  string(TOLOWER has_${name} variable)
  if(SMP_HAS_${name})
    set(${variable} True)
  else()
    set(${variable} False)
  endif()
endforeach()
configure_file(${CMAKE_SOURCE_DIR}/cmake/build_info.py.in
  ${SMP_PYTHON_DIR}/_build_info.py @ONLY)
install(FILES ${SMP_PYTHON_DIR}/_build_info.py
  DESTINATION ${SMP_INSTALL_DIR})
