#include "csrc/partition/refinement.h"

#include <algorithm>
#include <utility>

#include "csrc/partition/segment_split.h"

namespace smp::partition {

namespace {

constexpr double kMinimumGain = 0.02;
constexpr double kMinimumGainOfOpening = 0.1;
constexpr double kRounding = 1e-9;

class Refiner {
 public:
  Refiner(const DecisionTree& tree, const TreeSplit& split, int num_partitions)
      : tree_(tree), num_partitions_(num_partitions), opened_(split.divided) {
    opened_[0] = true;
    in_layer_.assign(tree.num_nodes(), false);
    for (int idx = 0; idx < tree.num_nodes(); ++idx) {
      in_layer_[idx] = in_layer_[idx] || tree.is_layer(idx);
      for (int child : tree.children(idx)) in_layer_[child] = in_layer_[idx];
    }
    consider(split.partition_idxs, 0);
  }

  std::vector<int> run() {
    for (double minimum_gain = kMinimumGain;;
         minimum_gain = kMinimumGainOfOpening) {
      collect_units();
      if (static_cast<int>(units_.size()) >= num_partitions_) {
        cut_units(minimum_gain);
      }
      if (!open_units()) return best_;
    }
  }

 private:
  // Units in order, each with the own cost of the ancestors it comes first in.
  void collect_units() {
    units_.clear();
    unit_costs_.clear();
    double ancestors_cost = 0;
    std::vector<int> stack{0};
    while (!stack.empty()) {
      const int idx = stack.back();
      stack.pop_back();
      const std::vector<int>& children = tree_.children(idx);
      const bool is_free = tree_.is_list(idx) && !tree_.is_layer(idx);
      if ((opened_[idx] || is_free) && !children.empty()) {
        ancestors_cost += tree_.own_cost(idx);
        stack.insert(stack.end(), children.rbegin(), children.rend());
      } else {
        units_.push_back(idx);
        unit_costs_.push_back(ancestors_cost + tree_.subtree_cost(idx));
        ancestors_cost = 0;
      }
    }
  }

  void cut_units(double minimum_gain) {
    const std::vector<int> ends = split_segments(unit_costs_, num_partitions_);
    std::vector<int> partition_idxs(tree_.num_nodes(), -1);
    for (int k = 0, i = 0; k < num_partitions_; ++k) {
      for (; i < ends[k]; ++i) partition_idxs[units_[i]] = k;
    }
    // Down into the units, then up: an inner node goes with its first unit.
    for (int idx = 0; idx < tree_.num_nodes(); ++idx) {
      if (partition_idxs[idx] < 0) continue;
      for (int child : tree_.children(idx)) {
        partition_idxs[child] = partition_idxs[idx];
      }
    }
    for (int idx = tree_.num_nodes() - 1; idx >= 0; --idx) {
      if (partition_idxs[idx] >= 0) continue;
      const std::vector<int>& children = tree_.children(idx);
      partition_idxs[idx] =
          children.empty() ? 0 : partition_idxs[children.front()];
    }
    consider(partition_idxs, minimum_gain);
  }

  void consider(const std::vector<int>& partition_idxs, double minimum_gain) {
    std::vector<int> candidate = tree_.complete(partition_idxs);
    const std::vector<double> loads = tree_.loads(candidate, num_partitions_);
    const double largest = *std::max_element(loads.begin(), loads.end());
    const bool idle = tree_.leaves_idle(candidate, num_partitions_);
    const bool accept =
        best_.empty() || (best_idle_ && !idle) ||
        (best_idle_ == idle && largest < best_largest_ * (1 - minimum_gain));
    if (!accept) return;
    best_ = std::move(candidate);
    best_largest_ = largest;
    best_idle_ = idle;
  }

  // Opens one level: what is no layer, layers that alone are heavier than the
  // mean, and everything if a partition has nothing yet. Returns false when
  // there is nothing to open.
  bool open_units() {
    const double mean = tree_.total_cost() / num_partitions_;
    bool any = false;
    for (int idx : units_) {
      if (tree_.children(idx).empty()) continue;
      const bool heavy = tree_.subtree_cost(idx) > mean * (1 + kRounding);
      if (heavy || best_idle_ || !in_layer_[idx]) {
        opened_[idx] = true;
        any = true;
      }
    }
    return any;
  }

  const DecisionTree& tree_;
  const int num_partitions_;
  std::vector<bool> opened_;
  std::vector<bool> in_layer_;  // a layer, or something below one
  std::vector<int> units_;
  std::vector<double> unit_costs_;
  std::vector<int> best_;
  double best_largest_ = 0;
  bool best_idle_ = false;
};

}  // namespace

std::vector<int> refine(const DecisionTree& tree, const TreeSplit& split,
                        int num_partitions) {
  return Refiner(tree, split, num_partitions).run();
}

}  // namespace smp::partition
