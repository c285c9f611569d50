#pragma once

#include <vector>

#include "csrc/partition/objective.h"

namespace smp::partition {

/// Costs of the segments `[i, j)` of a chain of items. An item is the part
/// between two neighbouring positions at which a cut is allowed.
class ChainCosts {
 public:
  /// @param positions  as in split_chain
  ChainCosts(const Objective& objective, const std::vector<int>& positions);

  int num_items() const { return num_items_; }
  /// Returns whether a stage may have no items.
  bool may_be_empty(int stage) const { return may_be_empty_[stage]; }

  /// Returns the load of the segment as stage `stage`, with the lead of the
  /// items before it (`Evaluation::bounds`), without `split_load`; for stage 0
  /// with the modules that are fixed there. Infinite above the memory limit,
  /// and where an item has a wish for another partition.
  double load(int stage, int i, int j) const;
  /// Returns a lower bound of `load` that does not fall when `j` grows.
  double least_load(int stage, int i, int j) const;
  /// Returns the load that a cut at `i` puts on stage 0, because it splits
  /// modules which end at `j` or before: a module is counted at its last cut.
  double split_load(int i, int j) const { return split_loads_[at(i, j)]; }
  /// Returns bytes sent and received, by a stage other than 0.
  double transfer_bytes(int i, int j) const { return transfers_[at(i, j)]; }

 private:
  struct Span;
  struct ValueSpan;
  size_t at(int i, int j) const {
    return static_cast<size_t>(i) * (num_items_ + 1) + j;
  }
  int place_of(int node_idx) const;
  double lead(int stage, int i) const;  // of the items before `i`
  bool is_asked_elsewhere(int stage, int i, int j) const;
  void fill_wishes();
  void add_units(const std::vector<int>& positions);
  std::vector<Span> find_spans();
  void fill_costs(const std::vector<Span>& spans);
  void fill_split_loads(const std::vector<Span>& spans);
  std::vector<ValueSpan> find_value_spans() const;
  void add_own_costs(const std::vector<ValueSpan>& values,
                     std::vector<Span>* spans);
  void fill_transfers(const std::vector<ValueSpan>& spans);

  const Objective& objective_;
  const DecisionTree& decisions_;
  int num_items_ = 0;
  std::vector<int> item_of_unit_;  // -1: on stage 0 in any case
  std::vector<int> first_item_;    // of a module above units; -1 as above
  std::vector<Cost> item_costs_;
  std::vector<Cost> sums_;          // of item_costs_, before each item
  Cost fixed_;                      // on stage 0
  std::vector<Cost> aside_;         // per stage; empty: none
  std::vector<bool> may_be_empty_;  // per stage
  std::vector<int> item_wishes_;    // per item; empty: none
  std::vector<int> wishes_;         // of [i, j)
  std::vector<Cost> costs_;
  std::vector<double> transfers_;
  std::vector<double> first_transfers_;  // of [0, j) as stage 0
  std::vector<double> copies_;           // of what is received
  std::vector<double> split_loads_;
};

}  // namespace smp::partition
