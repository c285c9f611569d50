#include "csrc/partition/chain_costs.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp::partition {

namespace {

constexpr double kRounding = 1e-9;
// Wishes of items that name no partition.
constexpr int kAnywhere = -1;
constexpr int kApart = -2;  // on different ones

int both(int wish, int other) {
  if (wish == kAnywhere || wish == other) return other;
  return other == kAnywhere ? wish : kApart;
}

Cost minus(const Cost& a, const Cost& b) {
  return {
      a.param_bytes - b.param_bytes, a.activation_bytes - b.activation_bytes,
      a.late_activation_bytes - b.late_activation_bytes, a.compute - b.compute};
}

}  // namespace

// The positions in the chain where a value is made and read; -1 is stage 0.
struct ChainCosts::ValueSpan {
  double crossing_bytes = 0;  // per rank that reads it, with its gradient
  double kept_bytes = 0;      // by the rank that receives it
  int made = -1;
  std::vector<int> readers;  // items, in the end ascending
  bool driver_reads = false;
  int owner = -1;  // module above units whose code leaves it to others
  Cost cost;       // of making it

  void add_reader(int item) {
    if (item >= 0) {
      readers.push_back(item);
    } else {
      driver_reads = true;
    }
  }
};

// A module above units, with the items [begin, end) of the chain; begin is -1
// if it is on stage 0 in any case.
struct ChainCosts::Span {
  int owner;
  int begin;
  int end;
  Cost cost;
};

ChainCosts::ChainCosts(const Objective& objective,
                       const std::vector<int>& positions)
    : objective_(objective), decisions_(objective.decisions()) {
  add_units(positions);
  std::vector<Span> spans = find_spans();
  const std::vector<ValueSpan> values = find_value_spans();
  add_own_costs(values, &spans);
  const size_t size = static_cast<size_t>(num_items_ + 1) * (num_items_ + 1);
  costs_.resize(size);
  transfers_.assign(size, 0);
  copies_.assign(size, 0);
  split_loads_.assign(size, 0);
  first_transfers_.assign(num_items_ + 1, 0);
  fill_costs(spans);
  if (!item_wishes_.empty()) fill_wishes();
  fill_split_loads(spans);
  if (!values.empty()) fill_transfers(values);
}

void ChainCosts::add_units(const std::vector<int>& positions) {
  num_items_ = static_cast<int>(positions.size()) - 1;
  const int num_stages = objective_.options().num_stages();
  for (int stage = 0; stage < num_stages; ++stage) {
    may_be_empty_.push_back(decisions_.may_be_empty(stage));
  }
  if (decisions_.has_wishes()) aside_.resize(num_stages);
  item_of_unit_.assign(decisions_.num_units(), -1);
  item_costs_.resize(num_items_);
  const std::vector<int>& free_units = decisions_.free_units();
  for (int item = 0; item < num_items_; ++item) {
    for (int i = positions[item]; i < positions[item + 1]; ++i) {
      item_of_unit_[free_units[i]] = item;
    }
  }
  for (int id = 0; id < decisions_.num_units(); ++id) {
    const int item = item_of_unit_[id];
    const DecisionTree::Unit& unit = decisions_.units()[id];
    Cost& cost = unit.aside ? aside_[unit.wish]
                 : item < 0 ? fixed_
                            : item_costs_[item];
    cost += objective_.cost_of_unit(id);
    if (item < 0 || unit.wish < 0) continue;
    item_wishes_.resize(num_items_, kAnywhere);
    item_wishes_[item] = both(item_wishes_[item], unit.wish);
  }
}

void ChainCosts::fill_wishes() {
  wishes_.assign(costs_.size(), kAnywhere);
  for (int i = 0; i < num_items_; ++i) {
    for (int j = i + 1; j <= num_items_; ++j) {
      wishes_[at(i, j)] = both(wishes_[at(i, j - 1)], item_wishes_[j - 1]);
    }
  }
}

bool ChainCosts::is_asked_elsewhere(int stage, int i, int j) const {
  if (wishes_.empty() || i >= j) return false;
  const int wish = wishes_[at(i, j)];
  return wish != kAnywhere &&
         wish != stage % objective_.options().num_partitions;
}

std::vector<ChainCosts::Span> ChainCosts::find_spans() {
  std::vector<Span> spans;
  first_item_.assign(decisions_.num_nodes(), -1);
  for (int idx = 0; idx < decisions_.num_nodes(); ++idx) {
    if (decisions_.unit_of(idx) >= 0 || decisions_.owner(idx) != idx) continue;
    int first = num_items_;
    int last = -1;
    for (int id : decisions_.below(idx)) {
      first = std::min(first, item_of_unit_[id]);
      last = std::max(last, item_of_unit_[id]);
    }
    if (idx == 0) first = -1;
    first_item_[idx] = first;
    spans.push_back(Span{idx, first, last + 1, objective_.cost_of_owner(idx)});
  }
  return spans;
}

// Adds own costs of modules to the items. Work that a module leaves to the
// ranks that have the data costs the same whether it is split or not. Only
// modules of several items remain in `spans`.
void ChainCosts::add_own_costs(const std::vector<ValueSpan>& values,
                               std::vector<Span>* spans) {
  std::vector<Cost> left(decisions_.num_nodes());
  int furthest = -1;
  for (const ValueSpan& value : values) {
    furthest = std::max(furthest, value.made);
    if (value.owner < 0) continue;
    left[value.owner] += value.cost;
    Cost cost = value.cost;
    if (value.made < furthest) {
      std::swap(cost.activation_bytes, cost.late_activation_bytes);
    }
    (value.made >= 0 ? item_costs_[value.made] : fixed_) += cost;
  }
  std::vector<Span> long_ones;
  for (Span& span : *spans) {
    const double rounding = kRounding * span.cost.compute;
    span.cost = minus(span.cost, left[span.owner]);
    if (span.cost.compute < rounding) span.cost.compute = 0;
    if (span.begin < 0) {
      fixed_ += span.cost;
    } else if (span.begin + 1 == span.end) {
      item_costs_[span.begin] += span.cost;
    } else {
      long_ones.push_back(span);
    }
  }
  *spans = std::move(long_ones);
  sums_.assign(1, Cost{});
  for (const Cost& cost : item_costs_) {
    sums_.push_back(sums_.back());
    sums_.back() += cost;
  }
}

void ChainCosts::fill_costs(const std::vector<Span>& spans) {
  // Spans by their first item, then sums of all spans within [i, j).
  std::vector<std::vector<const Span*>> beginning(num_items_ + 1);
  for (const Span& span : spans) beginning[span.begin].push_back(&span);
  std::vector<Cost> inside(num_items_ + 1);
  for (int i = num_items_ - 1; i >= 0; --i) {
    for (const Span* span : beginning[i]) {
      for (int j = span->end; j <= num_items_; ++j) inside[j] += span->cost;
    }
    for (int j = i + 1; j <= num_items_; ++j) {
      Cost& cost = costs_[at(i, j)];
      cost = minus(sums_[j], sums_[i]);
      cost += inside[j];
    }
  }
}

void ChainCosts::fill_split_loads(const std::vector<Span>& spans) {
  for (const Span& span : spans) {
    const double load = objective_.load(span.cost, 0, 0);
    if (load == 0) continue;
    for (int i = span.begin + 1; i < span.end; ++i) {
      for (int j = span.end; j <= num_items_; ++j) {
        split_loads_[at(i, j)] += load;
      }
    }
  }
}

int ChainCosts::place_of(int node_idx) const {
  const int owner = decisions_.owner(node_idx);
  const int unit = decisions_.unit_of(owner);
  return unit >= 0 ? item_of_unit_[unit] : first_item_[owner];
}

std::vector<ChainCosts::ValueSpan> ChainCosts::find_value_spans() const {
  std::vector<ValueSpan> spans;
  for (const ModuleTree::Value& value : decisions_.tree().values()) {
    ValueSpan span;
    const auto bytes = static_cast<double>(value.num_bytes);
    span.crossing_bytes = value.needs_grad ? 2 * bytes : bytes;
    span.kept_bytes = value.needs_grad ? bytes : 0;
    span.made = place_of(value.producer_idx);
    const int owner = decisions_.owner(value.producer_idx);
    if (!value.source_values.empty() && decisions_.unit_of(owner) < 0) {
      span.made = std::max(span.made, spans[value.source_values.back()].made);
      span.owner = owner;
      span.cost.compute = value.compute;
      span.cost.activation_bytes = static_cast<double>(value.activation_bytes);
    }
    for (int source : value.source_values) spans[source].add_reader(span.made);
    for (int consumer : value.consumer_idxs) {
      const int item = place_of(consumer);
      // The objective decides where a module's own code reads a value made in
      // the module: this depends on whether the module is split.
      const bool is_unit = decisions_.unit_of(decisions_.owner(consumer)) >= 0;
      if (item < 0 || is_unit) span.add_reader(item);
    }
    spans.push_back(std::move(span));
  }
  for (ValueSpan& span : spans) {
    std::vector<int>& readers = span.readers;
    std::sort(readers.begin(), readers.end());
    readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
  }
  return spans;
}

void ChainCosts::fill_transfers(const std::vector<ValueSpan>& spans) {
  std::vector<std::vector<int>> made(num_items_);
  std::vector<std::vector<int>> reads(num_items_);
  for (size_t id = 0; id < spans.size(); ++id) {
    if (spans[id].made >= 0) made[spans[id].made].push_back(id);
    for (int item : spans[id].readers) reads[item].push_back(id);
  }
  std::vector<int> seen(spans.size(), -1);
  for (int i = 0; i < num_items_; ++i) {
    double received = 0;
    double sent = 0;
    double sent_to_driver = 0;
    double copies = 0;
    for (int j = i + 1; j <= num_items_; ++j) {
      for (int id : reads[j - 1]) {
        const ValueSpan& span = spans[id];
        if (span.made < i && seen[id] != i) {
          received += span.crossing_bytes;
          copies += span.kept_bytes;
          seen[id] = i;
        }
        // If it was made before j - 1, it was counted as sent until its last
        // reader.
        const bool counted = span.made >= i && span.made < j - 1;
        if (counted && span.readers.back() == j - 1) {
          sent -= span.crossing_bytes;
        }
      }
      for (int id : made[j - 1]) {
        const ValueSpan& span = spans[id];
        if (!span.readers.empty() && span.readers.back() > j - 1) {
          sent += span.crossing_bytes;
        }
        if (span.driver_reads) sent_to_driver += span.crossing_bytes;
      }
      transfers_[at(i, j)] = received + sent + sent_to_driver;
      copies_[at(i, j)] = copies;
      if (i == 0) first_transfers_[j] = sent;
    }
  }
}

double ChainCosts::load(int stage, int i, int j) const {
  if (is_asked_elsewhere(stage, i, j)) {
    return std::numeric_limits<double>::infinity();
  }
  Cost cost = i < j ? costs_[at(i, j)] : Cost{};
  if (!aside_.empty()) cost += aside_[stage];
  double transfer = 0;
  if (stage == 0) {
    cost += fixed_;
    transfer = first_transfers_[j];
  } else {
    cost.activation_bytes += copies_[at(i, j)];
    transfer = transfers_[at(i, j)];
  }
  if (objective_.memory_bytes(cost, stage) > objective_.memory_limit(stage)) {
    return std::numeric_limits<double>::infinity();
  }
  const double before = stage > 0 ? lead(stage, i) : 0;
  return objective_.load(cost, transfer, stage) + before;
}

double ChainCosts::lead(int stage, int i) const {
  const double before = i > 0 ? costs_[at(0, i)].compute : 0;
  return objective_.lead(before + fixed_.compute, stage);
}

double ChainCosts::least_load(int stage, int i, int j) const {
  return objective_.load(minus(sums_[j], sums_[i]), 0, stage);
}

}  // namespace smp::partition
