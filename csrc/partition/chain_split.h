#pragma once

#include <optional>
#include <vector>

#include "csrc/partition/objective.h"

namespace smp::partition {

/// A way to cut the free units, which are in the order of execution, into
/// stages: stage `k` has the units in `[begin[k], begin[k + 1])`.
struct ChainCut {
  /// Positions, num_stages + 1 of them, ascending from 0 to the number of free
  /// units. DecisionTree::may_be_empty says which stages may have no unit.
  std::vector<int> begin;

  /// Returns the stage of each unit, pinned ones included.
  std::vector<int> unit_stages(const DecisionTree& decisions) const;
};

struct ChainSplit {
  ChainCut cut;
  std::vector<double> loads;  ///< per stage, with the extra ones
};

/// Returns the cut with the smallest largest load and, among those, with the
/// least cost of modules that it splits, then the fewest bytes over boundaries,
/// then the most even loads.
///
/// Exact for chains, where a value is read by neighbouring stages. A value
/// costs its sender once for all stages that read it, and values that the
/// driver sends and split modules read cost nothing.
/// @param positions  places where cuts are allowed, ascending, with both ends
/// @param extra_loads  further load per stage
/// @param most  largest load that is of interest
/// @return nothing if there are too few positions, too little memory, or only
///     cuts with a larger load
std::optional<ChainSplit> split_chain(const Objective& objective,
                                      const std::vector<int>& positions,
                                      const std::vector<double>& extra_loads,
                                      double most);

}  // namespace smp::partition
