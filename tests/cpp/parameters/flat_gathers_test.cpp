#include "csrc/parameters/flat_gathers.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/stream_group.h"

namespace smp::parameters {
namespace {

TEST(FlatGathers, all_parts_come_where_they_are_waited_for) {
  comm::run_ranks(3, [](int group_rank, const comm::CommunicatorPtr& world) {
    const comm::CommunicatorPtr shard = comm::as_wanted(world);
    const std::vector<at::Tensor> flats = {at::zeros({12}),
                                           at::zeros({6}, at::kBFloat16)};
    FlatGathers gathers(flats, shard, {});
    EXPECT_FALSE(gathers.pending());
    for (int update = 1; update <= 3; ++update) {
      // A group with streams notices writes to tensors that are in flight.
      if (comm::streams_wanted()) gathers.wait_all();
      for (const at::Tensor& flat : flats) {
        const int64_t numel = flat.numel() / 3;
        flat.narrow(0, group_rank * numel, numel)
            .fill_(10 * update + group_rank);
      }
      gathers.launch();
      EXPECT_TRUE(gathers.pending());
      gathers.wait({1});
      for (int part = 0; part < 3; ++part) {
        EXPECT_EQ(flats[1][2 * part + 1].item<double>(), 10 * update + part);
      }
      EXPECT_TRUE(gathers.pending());
      if (update < 3) continue;  // the next launch waits
      gathers.wait({0, 1});
      gathers.wait_all();
      EXPECT_FALSE(gathers.pending());
      for (int part = 0; part < 3; ++part) {
        EXPECT_EQ(flats[0][4 * part].item<double>(), 10 * update + part);
      }
    }
    EXPECT_EQ(gathers.num_gathers(), 6);
    EXPECT_EQ(gathers.num_overlapped(), 4);
  });
}

TEST(FlatGathers, the_end_of_a_run_waits_without_the_health_of_others) {
  comm::run_ranks(2, [](int group_rank, const comm::CommunicatorPtr& shard) {
    const at::Tensor flat = at::full({4}, group_rank + 1);
    FlatGathers gathers({flat}, shard, {});
    gathers.launch();
    gathers.finish(std::chrono::seconds(20));
    EXPECT_FALSE(gathers.pending());
    EXPECT_EQ(flat.sum().item<double>(), 6);
  });
}

TEST(FlatGathers, what_cannot_be_divided_is_refused) {
  comm::run_ranks(2, [](int, const comm::CommunicatorPtr& shard) {
    EXPECT_THROW(FlatGathers({at::zeros({5})}, shard, {}), ValueError);
  });
}

}  // namespace
}  // namespace smp::parameters
