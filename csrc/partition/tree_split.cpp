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

class Splitter {
 public:
  Splitter(const DecisionTree& tree, int num_partitions)
      : tree_(tree), slices_(tree.num_nodes(), Slice{0, 1}) {
    slices_[0] = Slice{0, num_partitions};
  }

  TreeSplit run() {
    TreeSplit result;
    result.partition_idxs.assign(tree_.num_nodes(), 0);
    result.divided.assign(tree_.num_nodes(), false);
    // Parents come before children, so index order does as breadth first.
    for (int idx = 0; idx < tree_.num_nodes(); ++idx) {
      const Slice slice = slices_[idx];
      result.partition_idxs[idx] = slice.begin;
      const std::vector<int>& children = tree_.children(idx);
      if (children.empty()) continue;
      if (slice.size() > 1) {
        result.divided[idx] = true;
        distribute(slice, children, slice.begin);
      } else {
        for (int child : children) slices_[child] = slice;
      }
    }
    return result;
  }

 private:
  // Cuts siblings into segments and gives each a slice of the partitions; a
  // segment that gets none goes to the partition before it, or to `fallback`.
  void distribute(Slice slice, const std::vector<int>& siblings, int fallback) {
    std::vector<double> costs;
    for (int idx : siblings) costs.push_back(tree_.subtree_cost(idx));
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
  std::vector<Slice> slices_;
};

}  // namespace

TreeSplit split_tree(const DecisionTree& tree, int num_partitions) {
  return Splitter(tree, num_partitions).run();
}

}  // namespace smp::partition
