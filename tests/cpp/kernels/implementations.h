#pragma once

#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/multi_array.h"

namespace smp::kernels {

/// Returns the tables that the tests of a binary run: the tables that this
/// processor can run, or those of the CUDA kernels in an emulation. Null after
/// the last.
const cpu::FusedTable* const* implementations();

/// y += a * x, which is in no table.
void add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a);

}  // namespace smp::kernels
