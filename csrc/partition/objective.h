#pragma once

#include <cstdint>
#include <vector>

#include "csrc/partition/decision_tree.h"
#include "csrc/partition/options.h"

namespace smp::partition {

/// Own costs of one or several modules, for one microbatch.
struct Cost {
  double param_bytes = 0;
  double activation_bytes = 0;
  /// Activations made at the end of a microbatch on an early stage, by a head
  /// that shares its weight with the embedding; freed as soon as on the last
  /// stage.
  double late_activation_bytes = 0;
  double compute = 0;

  Cost& operator+=(const Cost& other) {
    param_bytes += other.param_bytes;
    activation_bytes += other.activation_bytes;
    late_activation_bytes += other.late_activation_bytes;
    compute += other.compute;
    return *this;
  }
};

/// The costs of an assignment.
struct Evaluation {
  std::vector<double> loads;  ///< per stage; without transfers about 1 in all
  /// Per stage: its load, plus `lead_weight` of the time of all stages before.
  std::vector<double> bounds;
  std::vector<double> param_bytes;  ///< per stage
  std::vector<double> compute;      ///< per stage
  std::vector<double> forward;      ///< per stage, part of `compute`
  /// Per stage, for one microbatch, with copies of received values.
  std::vector<double> activation_bytes;
  /// The same for all microbatches that are kept at once.
  std::vector<double> kept_bytes;
  std::vector<int64_t> transfer_bytes;  ///< per stage, sent and received
  std::vector<double> memory_bytes;     ///< per partition, at the peak
  /// Bytes per microbatch from partition `i` to `j` at `i * num_partitions +
  /// j`; values forward, gradients backward.
  std::vector<int64_t> boundary_bytes;
  int64_t crossing_bytes = 0;  ///< sum of `boundary_bytes`
  double largest_load = 0;     ///< of `bounds`
  double excess_bytes = 0;     ///< sum over partitions above the memory limit
};

/// Returns whether `a` is better: within the memory limit, then the smaller
/// largest load, then fewer bytes between partitions. Differences that rounding
/// can make do not count.
bool is_better(const Evaluation& a, const Evaluation& b);

/// The objective: load(s) = w · memory(s) / memory(all) + (1 - w) · time(s) /
/// compute(all), with the lead of the stages before it (`Evaluation::bounds`);
/// the largest of these is minimized. See docs/design/partition.md.
class Objective {
 public:
  Objective(const DecisionTree& decisions, const PartitionOptions& options);

  const DecisionTree& decisions() const { return decisions_; }
  const PartitionOptions& options() const { return options_; }

  /// @param stages  stage of each node
  Evaluation evaluate(const std::vector<int>& stages) const;

  /// Returns the cost of a node and of the nodes that go with it; zero for the
  /// latter.
  const Cost& cost_of_owner(int idx) const { return owner_costs_[idx]; }
  /// Returns the sum over the nodes of a unit.
  const Cost& cost_of_unit(int id) const { return unit_costs_[id]; }

  /// Returns the load that a cost and bytes sent and received put on a stage.
  double load(const Cost& cost, double transfer_bytes, int stage) const {
    return load(cost.param_bytes, kept_bytes(cost, stage), cost.compute,
                transfer_bytes, stage);
  }
  /// Returns the part of the bound of a load that the compute of earlier stages
  /// adds, if each of them has a share of it by the speed of its device.
  double lead(double compute, int stage) const {
    return lead(compute * slowness_before_[stage]);
  }
  double memory_bytes(const Cost& cost, int stage) const {
    return options_.state_factor * cost.param_bytes + kept_bytes(cost, stage);
  }
  /// Returns the most bytes that a stage may hold; infinity: there is no limit.
  double memory_limit(int stage) const { return limits_[stage]; }

 private:
  double lead(double time) const {
    return options_.lead_weight * compute_weight_ * time;
  }
  double kept_bytes(const Cost& cost, int stage) const {
    return kept(stage) * cost.activation_bytes +
           kept_last_ * cost.late_activation_bytes;
  }
  double load(double param_bytes, double kept_bytes, double compute,
              double transfer_bytes, int stage) const {
    const double memory =
        param_weight_ * param_bytes + activation_weight_ * kept_bytes;
    const double time =
        slowness_[stage] * compute + compute_per_byte_ * transfer_bytes;
    return tightness_[stage] * memory + compute_weight_ * time;
  }
  double kept(int stage) const { return kept_[stage]; }

  void sum_costs();
  /// @return per node the furthest stage that a microbatch has reached before
  std::vector<int> add_nodes(const std::vector<int>& stages,
                             Evaluation* result) const;
  /// @return stage per value
  std::vector<int> place_values(const std::vector<int>& stages,
                                const std::vector<int>& furthest,
                                Evaluation* result) const;
  void add_values(const std::vector<int>& stages,
                  const std::vector<int>& places, Evaluation* result) const;

  const DecisionTree& decisions_;
  const PartitionOptions options_;
  std::vector<double> kept_;             // per stage
  std::vector<double> slowness_;         // per stage
  std::vector<double> slowness_before_;  // per stage, of the stages before it
  std::vector<double> tightness_;        // per stage
  std::vector<double> limits_;           // per stage
  double kept_last_ = 1;
  const double compute_per_byte_;
  double param_weight_ = 0;
  double activation_weight_ = 0;
  double compute_weight_ = 0;
  std::vector<Cost> owner_costs_;
  std::vector<Cost> unit_costs_;
};

}  // namespace smp::partition
