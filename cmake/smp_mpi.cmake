# SMP_MPI=auto|on|off decides whether the Open MPI adapter of csrc/comm is built
# as a library that mpi_loader.cpp loads when it is asked for, or whether
# no_mpi.cpp answers. MPI comes from the system's mpicc, from
# pkg-config, or from the `openmpi` Python package in the prefix of the chosen
# Python. Sets SMP_HAS_MPI, SMP_MPI_LIBRARY_DIR; defines smp_mpi.

set(SMP_MPI auto CACHE STRING "build the MPI adapter: auto, on or off")
set_property(CACHE SMP_MPI PROPERTY STRINGS auto on off)
if(NOT SMP_MPI MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "SMP_MPI must be auto, on or off; got '${SMP_MPI}'")
endif()

set(SMP_HAS_MPI OFF)
add_library(smp_mpi INTERFACE)
if(NOT SMP_MPI STREQUAL "off")
  # The folder that holds the chosen Python, without resolving the venv's link.
  get_filename_component(python_bin ${Python_EXECUTABLE} DIRECTORY)
  get_filename_component(python_prefix ${python_bin} DIRECTORY)

  set(include_hints)
  set(library_hints)
  find_program(SMP_MPICC mpicc HINTS ENV MPI_HOME PATH_SUFFIXES bin)
  if(SMP_MPICC)
    foreach(what incdirs libdirs)  # Open MPI's wrapper answers these
      execute_process(COMMAND ${SMP_MPICC} --showme:${what}
        OUTPUT_VARIABLE dirs OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      separate_arguments(dirs)
      if(what STREQUAL "incdirs")
        list(APPEND include_hints ${dirs})
      else()
        list(APPEND library_hints ${dirs})
      endif()
    endforeach()
  endif()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(SMP_OMPI QUIET ompi)
    list(APPEND include_hints ${SMP_OMPI_INCLUDE_DIRS})
    list(APPEND library_hints ${SMP_OMPI_LIBRARY_DIRS})
  endif()
  list(APPEND include_hints ${python_prefix}/include)
  list(APPEND library_hints ${python_prefix}/lib)

  find_path(SMP_MPI_INCLUDE_DIR mpi.h HINTS ${include_hints}
    PATH_SUFFIXES openmpi)
  find_library(SMP_MPI_LIBRARY NAMES libmpi.so.40 mpi HINTS ${library_hints}
    PATH_SUFFIXES openmpi/lib)
  if(SMP_MPI_INCLUDE_DIR AND SMP_MPI_LIBRARY)
    set(SMP_HAS_MPI ON)
    get_filename_component(SMP_MPI_LIBRARY_DIR ${SMP_MPI_LIBRARY} DIRECTORY)
    target_include_directories(smp_mpi SYSTEM INTERFACE ${SMP_MPI_INCLUDE_DIR})
    target_link_libraries(smp_mpi INTERFACE ${SMP_MPI_LIBRARY})
  elseif(SMP_MPI STREQUAL "on")
    message(FATAL_ERROR "SMP_MPI=on but mpi.h or libmpi was not found; install "
      "Open MPI, or the openmpi Python package next to ${Python_EXECUTABLE}")
  endif()
endif()
message(STATUS "MPI adapter: ${SMP_HAS_MPI} ${SMP_MPI_LIBRARY}")

# The adapter as a library of its own, next to _C, whose symbols it uses.
function(smp_add_mpi_plugin)
  set(folder ${CMAKE_SOURCE_DIR}/csrc/comm)
  add_library(smp_mpi_plugin MODULE ${folder}/mpi_communicator.cpp
    ${folder}/mpi_plugin.cpp ${folder}/communicator_checks.cpp)
  add_dependencies(smp_mpi_plugin _C)
  # As a flag, because CMake turns the path of a file that is not there yet
  # into -l<name>, which does not fit a module's name.
  target_link_libraries(smp_mpi_plugin PRIVATE smp_flags smp_torch smp_mpi
    Threads::Threads -Wl,$<TARGET_FILE:_C>)
  set_target_properties(smp_mpi_plugin PROPERTIES
    OUTPUT_NAME smp_mpi
    LIBRARY_OUTPUT_DIRECTORY ${SMP_PYTHON_DIR}
    BUILD_RPATH "$ORIGIN"
    INSTALL_RPATH "$ORIGIN;${smp_rpath}")
  install(TARGETS smp_mpi_plugin LIBRARY DESTINATION ${SMP_INSTALL_DIR})
endfunction()
