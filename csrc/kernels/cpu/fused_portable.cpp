// The fused kernels for any processor of the target.
#define SMP_ISA portable
#include "csrc/kernels/cpu/vector/table.h"

namespace smp::kernels::cpu {

const FusedTable& portable_table() { return portable::kTable; }

}  // namespace smp::kernels::cpu
