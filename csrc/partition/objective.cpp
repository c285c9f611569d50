#include "csrc/partition/objective.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"

namespace smp::partition {

namespace {

constexpr double kTied = 1e-9;

}  // namespace

void check_options(const PartitionOptions& options) {
  SMP_CHECK_VALUE(options.num_partitions >= 1,
                  "partition: expected at least 1 partition, got ",
                  options.num_partitions);
  SMP_CHECK_VALUE(options.memory_weight >= 0 && options.memory_weight <= 1,
                  "partition: memory_weight must be in [0, 1], got ",
                  options.memory_weight);
  SMP_CHECK_VALUE(options.num_chunks >= 1,
                  "partition: num_chunks must be at least 1, got ",
                  options.num_chunks);
  SMP_CHECK_VALUE(
      options.state_factor >= 1 && std::isfinite(options.state_factor),
      "partition: state_factor must be at least 1, got ", options.state_factor);
  const std::vector<int64_t>& limits = options.memory_limits;
  SMP_CHECK_VALUE(
      limits.empty() ||
          (static_cast<int>(limits.size()) == options.num_partitions &&
           *std::min_element(limits.begin(), limits.end()) >= 1),
      "partition: memory_limits must have a number of bytes >= 1 for each of "
      "the ",
      options.num_partitions, " partitions, or none; got ", limits.size(),
      " numbers");
  const std::vector<double>& speeds = options.speeds;
  SMP_CHECK_VALUE(
      speeds.empty() ||
          (static_cast<int>(speeds.size()) == options.num_partitions &&
           std::ranges::all_of(
               speeds, [](double s) { return s > 0 && std::isfinite(s); })),
      "partition: speeds must have a number > 0 for each of the ",
      options.num_partitions, " partitions, or none; got ", speeds.size(),
      " numbers");
  SMP_CHECK_VALUE(options.lead_weight >= 0 && options.lead_weight <= 1,
                  "partition: lead_weight must be in [0, 1], got ",
                  options.lead_weight);
  const std::vector<int>& kept = options.kept_microbatches;
  SMP_CHECK_VALUE(
      kept.empty() ||
          (static_cast<int>(kept.size()) == options.num_partitions &&
           *std::min_element(kept.begin(), kept.end()) >= 1),
      "partition: kept_microbatches must have a number >= 1 for each of the ",
      options.num_partitions, " partitions, got ", kept.size(), " numbers");
}

bool is_better(const Evaluation& a, const Evaluation& b) {
  if (a.excess_bytes != b.excess_bytes) return a.excess_bytes < b.excess_bytes;
  const double tolerance = kTied * std::max(a.largest_load, b.largest_load);
  if (std::abs(a.largest_load - b.largest_load) > tolerance) {
    return a.largest_load < b.largest_load;
  }
  return a.crossing_bytes < b.crossing_bytes;
}

Objective::Objective(const DecisionTree& decisions,
                     const PartitionOptions& options)
    : decisions_(decisions),
      options_(options),
      compute_per_byte_(decisions.tree().compute_per_byte()),
      owner_costs_(decisions.num_nodes()),
      unit_costs_(decisions.num_units()) {
  double mean_kept = 0;
  double speed_before = 0;
  for (int stage = 0; stage < options_.num_stages(); ++stage) {
    kept_.push_back(options_.kept(stage));
    mean_kept += kept_.back() / options_.num_stages();
    slowness_.push_back(options_.slowness(stage));
    slowness_before_.push_back(stage > 0 ? stage / speed_before : 1);
    speed_before += 1 / slowness_.back();
    tightness_.push_back(options_.tightness(stage));
    const int partition_idx = stage % options_.num_partitions;
    limits_.push_back(
        options_.is_limited()
            ? static_cast<double>(options_.memory_limits[partition_idx])
            : std::numeric_limits<double>::infinity());
  }
  kept_last_ = kept_.back();
  sum_costs();
  Cost total;
  for (const ModuleTree::Node& node : decisions.tree().nodes()) {
    total.param_bytes += static_cast<double>(node.param_bytes);
    total.activation_bytes += static_cast<double>(node.activation_bytes);
    total.compute += node.compute;
  }
  const double memory = options_.state_factor * total.param_bytes +
                        mean_kept * total.activation_bytes;
  // A term whose total is zero is left out, and the other counts alone.
  const double memory_weight = total.compute > 0 ? options_.memory_weight : 1;
  const double time_weight = memory > 0 ? 1 - options_.memory_weight : 1;
  if (memory > 0) {
    param_weight_ = memory_weight * options_.state_factor / memory;
    activation_weight_ = memory_weight / memory;
  }
  if (total.compute > 0) compute_weight_ = time_weight / total.compute;
}

void Objective::sum_costs() {
  // Number of free units, per unit, that were placed before the end of its
  // place.
  std::vector<int> num_placed(decisions_.num_units(), -1);
  std::vector<bool> is_free(decisions_.num_units(), false);
  for (int id : decisions_.free_units()) is_free[id] = true;
  int num_free_places = 0;
  for (int idx : decisions_.order()) {
    const int owner = decisions_.owner(idx);
    const int unit = decisions_.unit_of(owner);
    const bool places = unit >= 0 && num_placed[unit] < 0;
    if (places) {
      if (is_free[unit]) ++num_free_places;
      num_placed[unit] = num_free_places;
    }
    const ModuleTree::Node& node = decisions_.tree().node(idx);
    const auto activations = static_cast<double>(node.activation_bytes);
    const bool late = unit >= 0 && num_placed[unit] < num_free_places;
    const Cost own{static_cast<double>(node.param_bytes),
                   late ? 0 : activations, late ? activations : 0,
                   node.compute};
    owner_costs_[owner] += own;
    if (unit >= 0) unit_costs_[unit] += own;
  }
}

Evaluation Objective::evaluate(const std::vector<int>& stages) const {
  const int num_stages = options_.num_stages();
  const int num_partitions = options_.num_partitions;
  Evaluation result;
  result.param_bytes.assign(num_stages, 0);
  result.compute.assign(num_stages, 0);
  result.forward.assign(num_stages, 0);
  result.activation_bytes.assign(num_stages, 0);
  result.kept_bytes.assign(num_stages, 0);
  result.transfer_bytes.assign(num_stages, 0);
  result.memory_bytes.assign(num_partitions, 0);
  result.boundary_bytes.assign(num_partitions * num_partitions, 0);
  const std::vector<int> furthest = add_nodes(stages, &result);
  if (!decisions_.tree().values().empty() && num_partitions > 1) {
    add_values(stages, place_values(stages, furthest, &result), &result);
  }
  double before = 0;
  for (int s = 0; s < num_stages; ++s) {
    const auto transfer = static_cast<double>(result.transfer_bytes[s]);
    result.loads.push_back(load(result.param_bytes[s], result.kept_bytes[s],
                                result.compute[s], transfer, s));
    result.bounds.push_back(result.loads[s] + lead(before));
    result.largest_load = std::max(result.largest_load, result.bounds[s]);
    before += slowness_[s] * result.compute[s] + compute_per_byte_ * transfer;
    result.memory_bytes[s % num_partitions] +=
        options_.state_factor * result.param_bytes[s] + result.kept_bytes[s];
  }
  for (int64_t bytes : result.boundary_bytes) result.crossing_bytes += bytes;
  for (int p = 0; p < num_partitions; ++p) {
    result.excess_bytes += std::max(0.0, result.memory_bytes[p] - limits_[p]);
  }
  return result;
}

std::vector<int> Objective::add_nodes(const std::vector<int>& stages,
                                      Evaluation* result) const {
  // Backward comes back from the furthest stage that a microbatch has reached,
  // so values made after that are kept no longer than values there.
  std::vector<int> reached(stages.size(), 0);
  int furthest = 0;
  for (int idx : decisions_.order()) {
    const ModuleTree::Node& node = decisions_.tree().node(idx);
    const int stage = stages[idx];
    furthest = std::max(furthest, stage);
    reached[idx] = furthest;
    const auto activations = static_cast<double>(node.activation_bytes);
    result->param_bytes[stage] += static_cast<double>(node.param_bytes);
    result->compute[stage] += node.compute;
    result->forward[stage] += node.forward;
    result->activation_bytes[stage] += activations;
    result->kept_bytes[stage] += kept(furthest) * activations;
  }
  return reached;
}

std::vector<int> Objective::place_values(const std::vector<int>& stages,
                                         const std::vector<int>& furthest,
                                         Evaluation* result) const {
  std::vector<signed char> split(stages.size(), -1);  // -1: not asked yet
  std::vector<int> places;
  int reached = 0;
  for (const ModuleTree::Value& value : decisions_.tree().values()) {
    const int owner = decisions_.owner(value.producer_idx);
    if (split[owner] < 0) split[owner] = decisions_.is_split(owner, stages);
    const int from = stages[value.producer_idx];
    const bool leaves = split[owner] && !value.source_values.empty();
    const int to = leaves ? places[value.source_values.back()] : from;
    places.push_back(to);
    reached = std::max(reached, to);
    if (!leaves) continue;
    const auto activations = static_cast<double>(value.activation_bytes);
    const ModuleTree::Node& producer =
        decisions_.tree().node(value.producer_idx);
    const double forward =
        producer.compute > 0
            ? value.compute * producer.forward / producer.compute
            : 0;
    result->compute[from] -= value.compute;
    result->compute[to] += value.compute;
    result->forward[from] -= forward;
    result->forward[to] += forward;
    result->activation_bytes[from] -= activations;
    result->activation_bytes[to] += activations;
    result->kept_bytes[from] -=
        kept(furthest[value.producer_idx]) * activations;
    result->kept_bytes[to] += kept(reached) * activations;
  }
  return places;
}

void Objective::add_values(const std::vector<int>& stages,
                           const std::vector<int>& places,
                           Evaluation* result) const {
  const std::vector<ModuleTree::Value>& values = decisions_.tree().values();
  const int num_partitions = options_.num_partitions;
  const size_t n = values.size();
  // Stages that read a value of another partition, at most one per partition.
  std::vector<std::vector<int>> readers(n);
  auto read = [&](size_t value, int stage) {
    const int partition_idx = stage % num_partitions;
    if (places[value] % num_partitions == partition_idx) return;
    for (int other : readers[value]) {
      if (other % num_partitions == partition_idx) return;
    }
    readers[value].push_back(stage);
  };
  for (size_t id = 0; id < n; ++id) {
    for (int source : values[id].source_values) read(source, places[id]);
  }
  for (size_t id = 0; id < n; ++id) {
    const ModuleTree::Value& value = values[id];
    for (int consumer : value.consumer_idxs) read(id, stages[consumer]);
    const int from = places[id] % num_partitions;
    for (int stage : readers[id]) {
      const int to = stage % num_partitions;
      result->boundary_bytes[from * num_partitions + to] += value.num_bytes;
      int64_t bytes = value.num_bytes;
      if (value.needs_grad) {
        result->boundary_bytes[to * num_partitions + from] += value.num_bytes;
        bytes *= 2;
        // The backward of the reader needs the value there as well.
        const auto copy = static_cast<double>(value.num_bytes);
        result->activation_bytes[stage] += copy;
        result->kept_bytes[stage] +=
            std::min(kept(places[id]), kept(stage)) * copy;
      }
      result->transfer_bytes[places[id]] += bytes;
      result->transfer_bytes[stage] += bytes;
    }
  }
}

}  // namespace smp::partition
