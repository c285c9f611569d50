# Target smp_headers: compiles every header of ours alone, as the one line of a
# file, so that none leans on what happens to be included before it. Not part
# of the normal build; CI builds it.

file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}
  ${CMAKE_SOURCE_DIR}/csrc/*.h)
if(NOT SMP_HAS_MPI)
  list(REMOVE_ITEM headers csrc/comm/mpi_buffers.h)
endif()
set(header_sources)
foreach(header ${headers})
  string(REPLACE "/" "__" name ${header})
  set(source ${CMAKE_BINARY_DIR}/headers/${name}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n")
  list(APPEND header_sources ${source})
endforeach()
add_library(smp_headers OBJECT EXCLUDE_FROM_ALL ${header_sources})
target_link_libraries(smp_headers PRIVATE smp_flags smp_torch_python smp_mpi)
