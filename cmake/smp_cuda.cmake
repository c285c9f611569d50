# SMP_CUDA=auto|on|off decides which files of csrc/kernels are compiled:
# cuda/*.cu, or no_cuda.cpp, and of csrc/lanes. Sets SMP_HAS_CUDA.

set(SMP_CUDA auto CACHE STRING "compile CUDA kernels: auto, on or off")
set(SMP_CUDA_ARCHITECTURES 90 CACHE STRING "list such as 80;90")
set_property(CACHE SMP_CUDA PROPERTY STRINGS auto on off)
if(NOT SMP_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "SMP_CUDA must be auto, on or off; got '${SMP_CUDA}'")
endif()

set(SMP_HAS_CUDA OFF)
if(NOT SMP_CUDA STREQUAL "off" AND NOT SMP_SANITIZE)
  find_program(SMP_NVCC nvcc
    HINTS $ENV{CUDA_HOME}/bin $ENV{CUDACXX} /usr/local/cuda/bin)
  if(SMP_NVCC)
    set(CMAKE_CUDA_COMPILER ${SMP_NVCC})
    set(CMAKE_CUDA_ARCHITECTURES ${SMP_CUDA_ARCHITECTURES})
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(SMP_HAS_CUDA ON)
  elseif(SMP_CUDA STREQUAL "on")
    message(FATAL_ERROR "SMP_CUDA=on but nvcc was not found; put it on PATH "
      "or set CUDA_HOME")
  endif()
endif()
message(STATUS "CUDA kernels: ${SMP_HAS_CUDA}")
