#pragma once

#include <cstdint>

#include "csrc/tensor_parallel/group.h"

namespace smp::tensor_parallel {

/// Seeds for operators that number their elements, such as dropout. Each
/// function draws once from the default generator of the host, on every rank,
/// so that code that restores that generator (activation checkpointing)
/// restores the seeds. Not negative.

/// Returns a seed that differs on each rank of the group: for split tensors.
int64_t own_seed(const Group& group);

/// Returns a seed that is equal on all ranks of the group: for tensors that all
/// have. Collective.
int64_t common_seed(Group& group);

/// Returns the seed of group rank 0, given the seed of this rank; draws
/// nothing. Collective.
int64_t seed_of_first(Group& group, uint64_t seed);

}  // namespace smp::tensor_parallel
