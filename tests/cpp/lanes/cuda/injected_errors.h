#pragma once

#include <vector>

#include "tests/cpp/lanes/cuda/cuda_rank.h"

namespace smp::lanes {

/// Runs two ranks again and again; each time another call of rank 0 fails,
/// from the first one to those of the end of its lanes.
/// @param is_sticky  the device has failed for good
/// @param num_samples  number of calls that are tried; 0: all
/// @return ends of the first run in which a rank was not as it should be, or of
///     the last one
std::vector<RankEnd> run_with_injected_errors(const CudaRankOptions& options,
                                              bool is_sticky, int num_samples);

}  // namespace smp::lanes
