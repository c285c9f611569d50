#pragma once

#include <optional>
#include <vector>

#include "csrc/partition/objective.h"

namespace smp::partition {

/// A way to cut the free units, which are in the order of execution, into
/// stages: stage `k` has the units in `[begin[k], begin[k + 1])`, and what is
/// behind the last entry is on stage 0 again, where the driver is.
struct ChainCut {
  std::vector<int> begin;  ///< num_stages + 1 positions, ascending from 0

  /// Stage per unit, pinned ones included.
  std::vector<int> unit_stages(const DecisionTree& decisions) const;
};

struct ChainSplit {
  ChainCut cut;
  std::vector<double> loads;  ///< per stage, with the extra ones
};

/// The cut with the smallest largest load and, among those, with the least cost
/// of modules that it splits, then the fewest bytes over boundaries, then the
/// most even loads.
///
/// Exact for chains, where a value is read by neighbouring stages. It counts
/// what a value costs its sender once for all stages that read it, and nothing
/// for what the driver sends and split modules read.
/// @param positions  where cuts are allowed, ascending, with 0 and `end`
/// @param end  first unit of those at the end that stay on stage 0
/// @param extra_loads  per stage, counted on top
/// @param most  the largest load that is of interest
/// @return nothing if there are too few positions, too little memory, or only
///     cuts with a larger load
std::optional<ChainSplit> split_chain(const Objective& objective,
                                      const std::vector<int>& positions,
                                      int end,
                                      const std::vector<double>& extra_loads,
                                      double most);

}  // namespace smp::partition
