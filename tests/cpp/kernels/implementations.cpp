#include "tests/cpp/kernels/implementations.h"

namespace smp::kernels {

const cpu::FusedTable* const* implementations() { return cpu::usable_tables(); }

}  // namespace smp::kernels
