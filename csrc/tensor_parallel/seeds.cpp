#include "csrc/tensor_parallel/seeds.h"

#include <ATen/CPUGeneratorImpl.h>

#include <limits>
#include <mutex>

#include "csrc/memory/random_state.h"

namespace smp::tensor_parallel {
namespace {

uint64_t draw() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

int64_t not_negative(uint64_t seed) {
  return static_cast<int64_t>(seed & std::numeric_limits<int64_t>::max());
}

}  // namespace

int64_t own_seed(const Group& group) {
  // Ranks often have equal or neighbouring seeds.
  return not_negative(
      memory::mix_seed(draw(), static_cast<uint64_t>(group.group_rank()) + 1));
}

int64_t common_seed(Group& group) {
  return group.broadcast_from_first(not_negative(draw()), "common_seed");
}

int64_t seed_of_first(Group& group, uint64_t seed) {
  return group.broadcast_from_first(not_negative(seed), "seed_of_first");
}

}  // namespace smp::tensor_parallel
