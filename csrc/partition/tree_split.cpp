#include "csrc/partition/tree_split.h"

#include <algorithm>

#include "csrc/partition/dhondt.h"
#include "csrc/partition/segment_split.h"

namespace smp::partition {

namespace {

// Consecutive partitions [begin, end).
struct Slice {
  int begin;
  int end;
  int size() const { return end - begin; }
};

// Loads as in a stage in the middle, which keeps an average of activations.
std::vector<double> subtree_costs(const Objective& objective) {
  const DecisionTree& tree = objective.decisions();
  const int middle = objective.options().num_stages() / 2;
  std::vector<double> costs(tree.num_nodes(), 0);
  for (int id : tree.free_units()) {
    costs[tree.units()[id].place_idx] =
        objective.load(objective.cost_of_unit(id), 0, middle);
  }
  for (int idx = tree.num_nodes() - 1; idx > 0; --idx) {
    if (tree.unit_of(idx) < 0) {
      costs[idx] += objective.load(objective.cost_of_owner(idx), 0, middle);
    }
    costs[tree.tree().node(idx).parent_idx] += costs[idx];
  }
  return costs;
}

class Splitter {
 public:
  explicit Splitter(const Objective& objective)
      : tree_(objective.decisions()),
        costs_(subtree_costs(objective)),
        slices_(tree_.num_nodes(), Slice{0, 1}) {
    slices_[0] = Slice{0, objective.options().num_stages()};
  }

  std::vector<int> run() {
    // Parents come before children, so index order does as breadth first.
    for (int idx = 0; idx < tree_.num_nodes(); ++idx) {
      const Slice slice = slices_[idx];
      const std::vector<int>& children = tree_.children(idx);
      if (children.empty()) continue;
      if (slice.size() > 1) {
        distribute(slice, children, slice.begin);
      } else {
        for (int child : children) slices_[child] = slice;
      }
    }
    std::vector<int> unit_stages;
    for (const DecisionTree::Unit& unit : tree_.units()) {
      unit_stages.push_back(unit.pinned ? 0 : slices_[unit.place_idx].begin);
    }
    return unit_stages;
  }

 private:
  // Cuts siblings into segments and gives each a slice of the partitions; a
  // segment that gets none goes to the partition before it, or to `fallback`.
  void distribute(Slice slice, const std::vector<int>& siblings, int fallback) {
    std::vector<double> costs;
    for (int idx : siblings) costs.push_back(costs_[idx]);
    const int num_segments =
        std::min(slice.size(), static_cast<int>(siblings.size()));
    const std::vector<int> ends = split_segments(costs, num_segments);

    std::vector<std::vector<int>> segments;
    std::vector<double> segment_costs;
    for (int k = 0, begin = 0; k < num_segments; begin = ends[k++]) {
      segments.emplace_back(siblings.begin() + begin,
                            siblings.begin() + ends[k]);
      segment_costs.push_back(0);
      for (int i = begin; i < ends[k]; ++i) segment_costs[k] += costs[i];
    }
    const std::vector<int> counts = dhondt(segment_costs, slice.size());

    int begin = slice.begin;
    for (int k = 0; k < num_segments; ++k) {
      const Slice part{begin, begin + counts[k]};
      begin = part.end;
      if (part.size() == 0) {
        const int last = begin > slice.begin ? begin - 1 : fallback;
        for (int idx : segments[k]) slices_[idx] = Slice{last, last + 1};
      } else if (segments[k].size() == 1 || part.size() == 1) {
        for (int idx : segments[k]) slices_[idx] = part;
      } else {
        distribute(part, segments[k], part.begin);
      }
    }
  }

  const DecisionTree& tree_;
  const std::vector<double> costs_;  // per subtree
  std::vector<Slice> slices_;
};

}  // namespace

std::vector<int> split_tree(const Objective& objective) {
  return Splitter(objective).run();
}

}  // namespace smp::partition
