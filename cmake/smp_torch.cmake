# Include folders, libraries and ABI from torch itself. torch's own CMake
# package is not used: it asks for a CUDA toolkit whenever torch is a CUDA
# build. Defines smp_torch (headers, torch_cpu, c10) and smp_torch_python.

# Importing torch takes seconds, so the answer is kept until torch changes.
set(facts_file ${CMAKE_BINARY_DIR}/torch_facts.txt)
set(facts_are_fresh OFF)
if(EXISTS ${facts_file} AND SMP_TORCH_PYTHON STREQUAL "${Python_EXECUTABLE}")
  file(STRINGS ${facts_file} stamp REGEX "^STAMP=")
  string(REGEX REPLACE "^STAMP=" "" stamp "${stamp}")
  if(EXISTS "${stamp}" AND NOT "${stamp}" IS_NEWER_THAN ${facts_file})
    set(facts_are_fresh ON)
  endif()
endif()
if(NOT facts_are_fresh)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/torch_facts.py
    OUTPUT_VARIABLE facts ERROR_VARIABLE complaint RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR
      "cannot use torch of ${Python_EXECUTABLE}:\n${complaint}\n"
      "Install torch >= 2.6 there or pass -DPython_EXECUTABLE=<python with "
      "torch>.")
  endif()
  file(WRITE ${facts_file} "${facts}")
  set(SMP_TORCH_PYTHON ${Python_EXECUTABLE} CACHE INTERNAL "")
  # What was found next to another Python does not count.
  foreach(name LIB_torch_cpu LIB_c10 LIB_torch_python
      MPICC MPI_INCLUDE_DIR MPI_LIBRARY)
    unset(SMP_${name} CACHE)
  endforeach()
endif()

foreach(name VERSION INCLUDE_DIRS LIBRARY_DIRS CXX11_ABI PYBIND11_MACROS)
  file(STRINGS ${facts_file} line REGEX "^${name}=")
  string(REGEX REPLACE "^${name}=" "" SMP_TORCH_${name} "${line}")
endforeach()
if(SMP_TORCH_VERSION VERSION_LESS 2.6)
  message(FATAL_ERROR "smp needs torch >= 2.6, got ${SMP_TORCH_VERSION}")
endif()
message(STATUS "torch ${SMP_TORCH_VERSION}, C++11 ABI ${SMP_TORCH_CXX11_ABI}")

# Everything that is linked together must agree on the ABI of std::string.
add_compile_definitions(
  $<$<COMPILE_LANGUAGE:CXX>:_GLIBCXX_USE_CXX11_ABI=${SMP_TORCH_CXX11_ABI}>)

function(smp_find_torch_library out name)
  find_library(SMP_LIB_${name} ${name} HINTS ${SMP_TORCH_LIBRARY_DIRS}
    NO_DEFAULT_PATH REQUIRED)
  set(${out} ${SMP_LIB_${name}} PARENT_SCOPE)
endfunction()

smp_find_torch_library(torch_cpu torch_cpu)
smp_find_torch_library(c10 c10)
smp_find_torch_library(torch_python torch_python)

add_library(smp_torch INTERFACE)
target_include_directories(smp_torch SYSTEM INTERFACE ${SMP_TORCH_INCLUDE_DIRS})
target_link_libraries(smp_torch INTERFACE ${torch_cpu} ${c10})

add_library(smp_torch_python INTERFACE)
target_link_libraries(smp_torch_python INTERFACE smp_torch ${torch_python}
  Python::Module)
target_compile_definitions(smp_torch_python INTERFACE
  TORCH_API_INCLUDE_EXTENSION_H ${SMP_TORCH_PYBIND11_MACROS})

# at::parallel_for uses the threads of torch only in files that are compiled with
# OpenMP. torch brings a libgomp of the usual name, so there is one in a process.
set(smp_openmp)
if(NOT SMP_SANITIZE STREQUAL "thread")  # knows nothing of libgomp's barriers
  find_package(OpenMP COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    # Flags alone: of the paths of two libgomp CMake would warn at each target.
    add_library(smp_openmp_flags INTERFACE)
    target_compile_options(smp_openmp_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:${OpenMP_CXX_FLAGS}>)
    target_link_options(smp_openmp_flags INTERFACE ${OpenMP_CXX_FLAGS})
    set(smp_openmp smp_openmp_flags)
  endif()
endif()
