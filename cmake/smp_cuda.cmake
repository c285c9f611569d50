# SMP_CUDA=auto|on|off decides which files of csrc/kernels are compiled:
# cuda/*.cu, or no_cuda.cpp, and of csrc/lanes. Sets SMP_HAS_CUDA.

set(SMP_CUDA auto CACHE STRING "compile CUDA kernels: auto, on or off")
# Wheels have machine code for GPUs that are sold (`sold`). A checkout compiles it
# once, and code from which the driver makes that of others at their first use.
if(DEFINED SKBUILD)
  set(default_architectures sold)
else()
  set(default_architectures "80-virtual;90-real")
endif()
set(SMP_CUDA_ARCHITECTURES "${default_architectures}" CACHE STRING
  "list such as 80;90, or sold")
set_property(CACHE SMP_CUDA PROPERTY STRINGS auto on off)
if(NOT SMP_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "SMP_CUDA must be auto, on or off; got '${SMP_CUDA}'")
endif()

# Sets `result` to the architectures that are sold and that `nvcc` knows. The
# newest has code for later ones, too.
function(smp_sold_architectures nvcc result)
  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE known
    COMMAND_ERROR_IS_FATAL ANY)
  set(found)
  foreach(architecture 80 86 89 90 100 120)
    if(known MATCHES "sm_${architecture}\n")
      list(APPEND found ${architecture})
    endif()
  endforeach()
  if(NOT found)
    message(FATAL_ERROR "${nvcc} compiles for none of the GPUs that smp is made "
      "for (80 to 120); set SMP_CUDA_ARCHITECTURES. It has: ${known}")
  endif()
  list(POP_BACK found newest)
  list(TRANSFORM found APPEND -real)
  set(${result} ${found} ${newest} PARENT_SCOPE)
endfunction()

set(SMP_HAS_CUDA OFF)
if(NOT SMP_CUDA STREQUAL "off" AND NOT SMP_SANITIZE)
  find_program(SMP_NVCC nvcc
    HINTS $ENV{CUDA_HOME}/bin $ENV{CUDACXX} /usr/local/cuda/bin)
  if(SMP_NVCC)
    set(CMAKE_CUDA_COMPILER ${SMP_NVCC})
    set(CMAKE_CUDA_ARCHITECTURES ${SMP_CUDA_ARCHITECTURES})
    if(SMP_CUDA_ARCHITECTURES STREQUAL "sold")
      smp_sold_architectures(${SMP_NVCC} CMAKE_CUDA_ARCHITECTURES)
    endif()
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
