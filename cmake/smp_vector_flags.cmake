# The fused kernels of csrc/kernels/cpu/vector are compiled once per instruction
# set; fused_dispatch.cpp chooses at run time.

set(vector_flags -O3 -fno-math-errno -fno-trapping-math)
set(vector_flags_avx2 -mavx2 -mfma -mf16c)
# Some of GCC's own intrinsics begin with an undefined register.
set(vector_flags_avx512 ${vector_flags_avx2} -mavx512f -mavx512bw -mavx512dq
  -mavx512vl -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
set(vector_flags_avx512_bf16 ${vector_flags_avx512} -mavx512bf16)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(vector_flags_avx2)
  set(vector_flags_avx512)
  set(vector_flags_avx512_bf16)
endif()
foreach(isa portable avx2 avx512 avx512_bf16)
  set_source_files_properties(
    ${CMAKE_SOURCE_DIR}/csrc/kernels/cpu/fused_${isa}.cpp PROPERTIES
    COMPILE_OPTIONS "${vector_flags};${vector_flags_${isa}}")
endforeach()
