#pragma once

#include <cstdint>

#include "csrc/tensor_parallel/group.h"

namespace smp::tensor_parallel {

/// Seeds for operators that number their elements, such as dropout. Each draws
/// once from the default generator of the host, on every rank, so that what
/// restores that generator (activation checkpointing) restores these. Not
/// negative.

/// Different on each rank of the group: for what is split.
int64_t own_seed(const Group& group);

/// The same on each rank of the group: for what all have. Collective.
int64_t common_seed(Group& group);

/// That of group rank 0, given the seed of this rank; draws nothing.
/// Collective.
int64_t seed_of_first(Group& group, uint64_t seed);

}  // namespace smp::tensor_parallel
