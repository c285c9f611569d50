#include "tests/cpp/kernels/implementations.h"

namespace smp::kernels {

const cpu::FusedTable* const* implementations() { return cpu::usable_tables(); }

void add_scaled(const ArrayPair* pairs, int64_t num_pairs, double a) {
  cpu::add_scaled(pairs, num_pairs, a);
}

}  // namespace smp::kernels
