// Tests how long the memory of a gather stays where it is while a device reads.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <deque>

#include "csrc/comm/c10d_communicator.h"
#include "csrc/parameters/unit_gather.h"
#include "tests/cpp/comm/stream_backend.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::parameters {
namespace {

constexpr int kHome = 1;

// A group that compares no stamps, hence needs no other rank.
class UncomparedGathers final : public GatherGroup {
 public:
  explicit UncomparedGathers(GatherGroupPtr inner) : inner_(std::move(inner)) {}

  int group_rank() const override { return inner_->group_rank(); }
  int size() const override { return inner_->size(); }
  GatherPtr all_gather(at::Tensor output, at::Tensor input,
                       uint64_t stamp) override {
    return inner_->all_gather(std::move(output), std::move(input), stamp);
  }
  GatherPtr compare(uint64_t) override { return nullptr; }
  GatherPtr meet(uint64_t) override { return nullptr; }

 private:
  const GatherGroupPtr inner_;
};

comm::CommunicatorPtr group_of_two(const char* name) {
  return comm::make_c10d_communicator(
      c10::make_intrusive<comm::StreamBackend>(0, 2, kHome), name,
      {.device = fake_device::device(kHome)});
}

class GatherMemory : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { fake_device::reset(); }
  void TearDown() override { fake_device::reset(); }

  static GatherGroupPtr make_group(bool has_two_hops) {
    if (!has_two_hops) return make_flat_gathers(group_of_two("whole"));
    return make_hierarchical_gathers(group_of_two("across"),
                                     group_of_two("within"), nullptr);
  }
};

// Shards that lie apart are packed into a tensor that only the gather needs.
// Later work on the compute stream may take its memory, if it is free.
TEST_P(GatherMemory, of_packed_shards_is_not_taken_while_it_is_read) {
  constexpr int64_t kPart = 3;
  UncomparedGathers group(make_group(GetParam()));
  const c10::Stream stream = fake_device::new_stream(kHome);
  const c10::StreamGuard guard(stream);
  const at::TensorOptions options(stream.device());
  StoragePool pool(stream.device());
  std::deque<ShardedParameter> params;
  for (const double value : {1., 2.}) {
    params.emplace_back(at::zeros({group.size(), kPart}, options),
                        at::full({kPart}, value, options), group.size(), pool);
  }
  fake_device::set_lazy(true);
  UnitGather gather({&params[0], &params[1]}, group, 1, "a unit");
  const int64_t packed_bytes = 2 * kPart * 4;
  const at::Tensor rubbish = at::full({packed_bytes}, 255, at::kByte);
  at::Tensor taken = at::empty({packed_bytes}, options.dtype(at::kByte));
  taken.copy_(rubbish, /*non_blocking=*/true);
  fake_device::run(stream);  // the stream of the gather is slower
  gather.finish({});
  fake_device::run_all();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor expected =
        at::full({group.size(), kPart}, static_cast<double>(i) + 1.);
    EXPECT_TRUE(params[i].whole().cpu().equal(expected)) << "parameter " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Hops, GatherMemory, testing::Bool());

}  // namespace
}  // namespace smp::parameters
