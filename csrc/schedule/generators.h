#pragma once

#include <string>

#include "csrc/schedule/schedule_text.h"

namespace smp::schedule {

/// What each rank does in a step in which every stage takes the same time.
/// Generators are pure; all take at least one rank and one microbatch.

/// All forwards, then all backwards (GPipe).
Schedule plan_fill_drain(int num_ranks, int num_microbatches);

/// 1F1B: a rank starts as many forwards as there are ranks behind it, then one
/// forward and one backward in turn. arXiv:2104.04473, section 2.2.1.
Schedule plan_1f1b(int num_ranks, int num_microbatches);

/// 1F1B over `num_chunks` stages per rank: rank i has the stages i, i + p, ...
/// arXiv:2104.04473, section 2.2.2.
/// @throws ValueError unless `num_microbatches` is a multiple of `num_ranks`
Schedule plan_virtual_stages(int num_ranks, int num_microbatches,
                             int num_chunks);

/// ZB-H1: 1F1B whose weight gradients are put off into the gaps, at most i of
/// them on rank i, so no rank keeps more than the first of 1F1B.
/// arXiv:2401.10241.
Schedule plan_zero_bubble(int num_ranks, int num_microbatches);

/// By the name of the policy: "simple", "interleaved", "virtual_interleaved" or
/// "zero_bubble". @throws ValueError for another name, or if only
/// "virtual_interleaved" could have `num_chunks` above 1
Schedule make_plan(const std::string& name, int num_ranks, int num_microbatches,
                   int num_chunks = 1);

}  // namespace smp::schedule
