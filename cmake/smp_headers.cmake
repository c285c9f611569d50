# Target smp_headers: compiles headers of ours alone, as the one line of a file,
# so that none leans on what happens to be included before it. A header that
# the source of its name includes first is checked by a build without SMP_UNITY
# already. Not part of that build; CI builds it.

file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR}
  ${CMAKE_SOURCE_DIR}/csrc/*.h)
if(NOT SMP_HAS_MPI)
  list(REMOVE_ITEM headers csrc/comm/mpi_buffers.h)
endif()
set(header_sources)
foreach(header ${headers})
  string(REGEX REPLACE "h$" "cpp" twin ${CMAKE_SOURCE_DIR}/${header})
  if(EXISTS ${twin} AND NOT SMP_UNITY)
    file(STRINGS ${twin} first REGEX "^#include" LIMIT_COUNT 1)
    if(first STREQUAL "#include \"${header}\"")
      continue()
    endif()
  endif()
  string(REPLACE "/" "__" name ${header})
  set(source ${CMAKE_BINARY_DIR}/headers/${name}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n")
  list(APPEND header_sources ${source})
endforeach()
add_library(smp_headers OBJECT EXCLUDE_FROM_ALL ${header_sources})
target_link_libraries(smp_headers PRIVATE smp_flags smp_torch_python smp_mpi)
target_compile_options(smp_headers PRIVATE -O0 -g0)
