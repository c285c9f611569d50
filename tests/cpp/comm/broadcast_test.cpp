#include "csrc/comm/broadcast.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/comm/run_ranks.h"

namespace smp::comm {
namespace {

TEST(Broadcast, all_ranks_get_the_tensors_of_the_root) {
  run_ranks(3, [](int group_rank, const CommunicatorPtr& dp) {
    const double mine = group_rank;
    const std::vector<at::Tensor> tensors = {
        at::full({3, 4}, mine).t(),
        at::full({2}, mine, at::kDouble),
        at::full({}, mine, at::kLong),
        at::full({0}, mine),
        at::full({300}, mine).requires_grad_(),
        at::full({5}, mine)};
    broadcast_coalesced(tensors, *dp, 2, {}, 256);
    for (const at::Tensor& tensor : tensors) {
      EXPECT_TRUE(tensor.equal(at::full_like(tensor, 2)));
    }
  });
}

}  // namespace
}  // namespace smp::comm
