// The fused kernels for AVX-512 (F, BW, DQ, VL) with BF16; CMakeLists.txt has
// the compiler flags.
#ifdef __x86_64__

#define SMP_ISA avx512_bf16
#include "csrc/kernels/cpu/vector/table.h"

namespace smp::kernels::cpu {

const FusedTable& avx512_bf16_table() { return avx512_bf16::kTable; }

}  // namespace smp::kernels::cpu

#endif
