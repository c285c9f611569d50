#pragma once

#include "csrc/kernels/cpu/fused_table.h"

namespace smp::kernels {

/// Returns the tables that the tests of a binary run: the tables that this
/// processor can run, or those of the CUDA kernels in an emulation. Null after
/// the last.
const cpu::FusedTable* const* implementations();

}  // namespace smp::kernels
