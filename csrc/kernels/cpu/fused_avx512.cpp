// The fused kernels for AVX-512 (F, BW, DQ, VL); CMakeLists.txt has the
// compiler flags.
#ifdef __x86_64__

#define SMP_ISA avx512
#include "csrc/kernels/cpu/vector/table.h"

namespace smp::kernels::cpu {

const FusedTable& avx512_table() { return avx512::kTable; }

}  // namespace smp::kernels::cpu

#endif
