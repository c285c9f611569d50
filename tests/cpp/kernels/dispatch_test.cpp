#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "csrc/kernels/cpu/fused_table.h"

namespace smp::kernels::cpu {
namespace {

TEST(Dispatch, FollowsTheCapabilityThatPyTorchIsGiven) {
  std::vector<const FusedTable*> usable;
  for (auto* table = usable_tables(); *table != nullptr; ++table) {
    usable.push_back(*table);
  }
  const auto fastest = [&](std::vector<const FusedTable*> permitted) {
    const auto found = std::find_first_of(usable.begin(), usable.end(),
                                          permitted.begin(), permitted.end());
    return *found;
  };
  EXPECT_EQ(&table_for(""), usable[0]);
  EXPECT_EQ(&table_for("a word of a later release"), usable[0]);
  EXPECT_EQ(&table_for("default"), &portable_table());
#ifdef __x86_64__
  EXPECT_EQ(&table_for("avx2"), fastest({&avx2_table(), &portable_table()}));
  EXPECT_EQ(&table_for("avx512"),
            fastest({&avx512_table(), &avx2_table(), &portable_table()}));
#endif
}

}  // namespace
}  // namespace smp::kernels::cpu
