#include "csrc/comm/agreement.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <string>

#include "csrc/common/check.h"
#include "tests/cpp/comm/run_ranks.h"

namespace smp::comm {
namespace {

// An operation of a device, for which the host never waits.
class TwinWork final : public Work {
 public:
  bool done() override { return false; }
  void wait(std::chrono::milliseconds) override {
    throw Error("the host has waited");
  }
  bool order_stream() override { return is_ordered = true; }

  bool is_ordered = false;
};

// A group of two whose other rank has the same numbers.
class TwinGroup final : public Communicator {
 public:
  int group_rank() const override { return 0; }
  int size() const override { return 2; }
  const std::string& name() const override { return name_; }
  WorkPtr send(const at::Tensor&, int, int) override { return {}; }
  WorkPtr recv(at::Tensor, int, int) override { return {}; }
  WorkPtr all_reduce(at::Tensor, ReduceOp) override { return {}; }
  WorkPtr broadcast(at::Tensor, int) override { return {}; }
  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    output.copy_(input.expand_as(output));
    return work;
  }
  WorkPtr reduce_scatter(at::Tensor, const at::Tensor&, ReduceOp) override {
    return {};
  }
  WorkPtr all_to_all(at::Tensor, const at::Tensor&) override { return {}; }
  WorkPtr all_to_all_v(at::Tensor, const at::Tensor&, const Counts&,
                       const Counts&) override {
    return {};
  }
  WorkPtr barrier() override { return {}; }
  bool is_stream_ordered() const override { return true; }
  void abort() override {}

  std::shared_ptr<TwinWork> work = std::make_shared<TwinWork>();

 private:
  std::string name_ = "stream";
};

TEST(GatherBytes, ComeByGroupRankWhateverTheirSizes) {
  run_ranks(3, [](int group_rank, const CommunicatorPtr& group) {
    const auto all =
        gather_bytes(*group, std::string(group_rank, '\0') + "x", {}, "test");
    ASSERT_EQ(all.size(), 3u);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(all[rank], std::string(rank, '\0') + "x");
    }
    EXPECT_EQ(gather_bytes(*group, "", {}, "test")[2], "");
  });
}

TEST(GatherNumbers, ComeByGroupRank) {
  run_ranks(3, [](int group_rank, const CommunicatorPtr& group) {
    const at::Tensor own = at::full({2}, group_rank, at::kDouble);
    own[1] += 10;
    const at::Tensor all = gather_numbers(*group, own, {}, "test");
    ASSERT_EQ(all.sizes(), at::IntArrayRef({3, 2}));
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(all[rank][0].item<double>(), rank);
      EXPECT_EQ(all[rank][1].item<double>(), rank + 10);
    }
    EXPECT_THROW(gather_numbers(*group, own[0], {}, "test"), ValueError);
  });
}

TEST(GatherNumbers, TheHostDoesNotWaitForADevice) {
  TwinGroup group;
  const at::Tensor all =
      gather_numbers(group, at::full({1}, 3.0, at::kDouble), {}, "test");
  EXPECT_EQ(all.sum().item<double>(), 6);
  EXPECT_TRUE(group.work->is_ordered);
}

}  // namespace
}  // namespace smp::comm
