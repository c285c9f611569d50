#include "csrc/memory/random_state.h"

#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <set>

namespace smp::memory {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

double draw() { return at::rand({}).item<double>(); }

TEST(RandomState, restored_generators_repeat_their_numbers) {
  seed_generators(3, kCpu);
  draw();
  const RandomState state = RandomState::capture(kCpu);
  const double first = draw();
  const double second = draw();
  EXPECT_NE(first, second);
  state.restore();
  EXPECT_EQ(draw(), first);
  EXPECT_EQ(draw(), second);
}

TEST(RandomState, a_copy_is_not_changed_by_later_draws) {
  seed_generators(4, kCpu);
  const RandomState state = RandomState::capture(kCpu);
  const double first = draw();
  for (int i = 0; i < 1000; ++i) draw();
  state.restore();
  EXPECT_EQ(draw(), first);
}

TEST(RandomState, equal_seeds_give_equal_numbers_and_others_do_not) {
  seed_generators(5, kCpu);
  const double five = draw();
  seed_generators(6, kCpu);
  EXPECT_NE(draw(), five);
  seed_generators(5, kCpu);
  EXPECT_EQ(draw(), five);
}

TEST(MixSeed, neighbouring_values_give_distinct_seeds) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    for (uint64_t value = 0; value < 100; ++value) {
      seeds.insert(mix_seed(seed, value));
    }
  }
  EXPECT_EQ(seeds.size(), 10000u);
  EXPECT_EQ(mix_seed(7, 8), mix_seed(7, 8));
}

}  // namespace
}  // namespace smp::memory
