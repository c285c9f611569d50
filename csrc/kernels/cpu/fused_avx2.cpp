// The fused kernels for AVX2, FMA and F16C; CMakeLists.txt has the compiler
// flags.
#ifdef __x86_64__

#define SMP_ISA avx2
#include "csrc/kernels/cpu/vector/table.h"

namespace smp::kernels::cpu {

const FusedTable& avx2_table() { return avx2::kTable; }

}  // namespace smp::kernels::cpu

#endif
