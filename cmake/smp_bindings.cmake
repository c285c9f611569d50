# The extension module _C: all rooms and one bind_<room>.cpp each. The list of
# bind functions is generated from the files there are.

function(smp_add_bindings)
  set(folder ${CMAKE_SOURCE_DIR}/csrc/bindings)
  file(GLOB bind_files CONFIGURE_DEPENDS ${folder}/bind_*.cpp)
  get_property(rooms GLOBAL PROPERTY smp_rooms)
  # Lower layers first: types before their users. Some rooms have several files.
  set(names ${rooms})
  list(FIND names pipeline pipeline_idx)
  list(INSERT names ${pipeline_idx} timeline)
  list(FIND names gradients gradients_idx)
  list(INSERT names ${gradients_idx} comm_hook)

  set(declarations "")
  set(calls "")
  foreach(room ${names})
    if(${folder}/bind_${room}.cpp IN_LIST bind_files)
      list(REMOVE_ITEM bind_files ${folder}/bind_${room}.cpp)
      list(APPEND sources ${folder}/bind_${room}.cpp)
      string(APPEND declarations
        "void bind_${room}(pybind11::module_& m);\n")
      string(APPEND calls "  bind_${room}(m);\n")
    endif()
  endforeach()
  if(bind_files)
    message(FATAL_ERROR "no room for ${bind_files}: a file in csrc/bindings is "
      "named bind_<room>.cpp after a room in CMakeLists.txt")
  endif()
  configure_file(${CMAKE_SOURCE_DIR}/cmake/bind_rooms.h.in
    ${CMAKE_BINARY_DIR}/generated/bind_rooms.h @ONLY)

  add_library(_C MODULE ${folder}/module.cpp ${sources})
  target_include_directories(_C PRIVATE ${CMAKE_BINARY_DIR}/generated)
  smp_compile_together(_C 8)
  target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
  smp_link_rooms(_C ${rooms})
  target_link_libraries(_C PRIVATE smp_flags smp_torch_python)
  # Under this name libsmp_mpi.so finds the copy that is loaded already.
  target_link_options(_C PRIVATE -Wl,-soname,smp_C.so)
  set_target_properties(_C PROPERTIES
    PREFIX "" SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}
    INSTALL_RPATH "${smp_rpath}")
  add_custom_command(TARGET _C POST_BUILD VERBATIM
    COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/write_stubs.py
      ${SMP_PYTHON_DIR})
  install(TARGETS _C LIBRARY DESTINATION ${SMP_INSTALL_DIR})
endfunction()
