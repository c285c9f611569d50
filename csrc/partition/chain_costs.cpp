#include "csrc/partition/chain_costs.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp::partition {

namespace {

Cost minus(const Cost& a, const Cost& b) {
  return {
      a.param_bytes - b.param_bytes, a.activation_bytes - b.activation_bytes,
      a.late_activation_bytes - b.late_activation_bytes, a.compute - b.compute};
}

}  // namespace

// Where in the chain a value is made and read; -1 is stage 0.
struct ChainCosts::ValueSpan {
  double crossing_bytes = 0;  // per rank that reads it, with its gradient
  double kept_bytes = 0;      // by who receives it
  int made = -1;
  std::vector<int> readers;  // items, in the end ascending
  bool driver_reads = false;

  void add_reader(int item) {
    if (item >= 0) {
      readers.push_back(item);
    } else {
      driver_reads = true;
    }
  }
};

// A module above units, of which the chain has the items [begin, end).
struct ChainCosts::Span {
  int begin;
  int end;
  Cost cost;
};

ChainCosts::ChainCosts(const Objective& objective,
                       const std::vector<int>& positions, int end)
    : objective_(objective), decisions_(objective.decisions()) {
  add_units(positions, end);
  const std::vector<Span> spans = find_spans();
  const size_t size = static_cast<size_t>(num_items_ + 1) * (num_items_ + 1);
  costs_.resize(size);
  transfers_.assign(size, 0);
  copies_.assign(size, 0);
  split_loads_.assign(size, 0);
  first_transfers_.assign(num_items_ + 1, 0);
  fill_costs(spans);
  fill_split_loads(spans);
  if (!decisions_.tree().values().empty()) fill_transfers();
}

void ChainCosts::add_units(const std::vector<int>& positions, int end) {
  num_items_ = static_cast<int>(
      std::lower_bound(positions.begin(), positions.end(), end) -
      positions.begin());
  item_of_unit_.assign(decisions_.num_units(), -1);
  item_costs_.resize(num_items_);
  const std::vector<int>& free_units = decisions_.free_units();
  for (int item = 0; item < num_items_; ++item) {
    for (int i = positions[item]; i < positions[item + 1]; ++i) {
      item_of_unit_[free_units[i]] = item;
    }
  }
  for (int id = 0; id < decisions_.num_units(); ++id) {
    const Cost& cost = objective_.cost_of_unit(id);
    if (item_of_unit_[id] >= 0) {
      item_costs_[item_of_unit_[id]] += cost;
    } else {
      has_fixed_units_ = true;
      fixed_ += cost;
      if (decisions_.units()[id].pinned) continue;
      fixed_.activation_bytes -= cost.activation_bytes;
      fixed_.late_activation_bytes += cost.activation_bytes;
    }
  }
}

std::vector<ChainCosts::Span> ChainCosts::find_spans() {
  std::vector<Span> spans;
  first_item_.assign(decisions_.num_nodes(), -1);
  for (int idx = 0; idx < decisions_.num_nodes(); ++idx) {
    if (decisions_.unit_of(idx) >= 0 || decisions_.owner(idx) != idx) continue;
    const Cost& cost = objective_.cost_of_owner(idx);
    int first = num_items_;
    int last = -1;
    bool on_driver = idx == 0;
    for (int id : decisions_.below(idx)) {
      const int item = item_of_unit_[id];
      on_driver = on_driver || item < 0;
      first = std::min(first, item);
      last = std::max(last, item);
    }
    if (on_driver) {
      fixed_ += cost;
      continue;
    }
    first_item_[idx] = first;
    if (first == last) {
      item_costs_[first] += cost;
    } else {
      spans.push_back(Span{first, last + 1, cost});
    }
  }
  sums_.assign(1, Cost{});
  for (const Cost& cost : item_costs_) {
    sums_.push_back(sums_.back());
    sums_.back() += cost;
  }
  return spans;
}

void ChainCosts::fill_costs(const std::vector<Span>& spans) {
  // Spans that begin at i, then all within [i, j).
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
    const bool by_unit =
        decisions_.unit_of(decisions_.owner(value.producer_idx)) >= 0;
    if (!value.source_values.empty() && !by_unit) {
      span.made = std::max(span.made, spans[value.source_values.back()].made);
    }
    for (int source : value.source_values) spans[source].add_reader(span.made);
    for (int consumer : value.consumer_idxs) {
      const int item = place_of(consumer);
      // Where own code of a module reads what is made in it depends on whether
      // it is split; the objective knows.
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

void ChainCosts::fill_transfers() {
  const std::vector<ValueSpan> spans = find_value_spans();
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
        // Made before j - 1, it was counted as sent until its last reader.
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
  Cost cost = i < j ? costs_[at(i, j)] : Cost{};
  double transfer = 0;
  if (stage == 0) {
    cost += fixed_;
    transfer = first_transfers_[j];
  } else {
    cost.activation_bytes += copies_[at(i, j)];
    transfer = transfers_[at(i, j)];
  }
  const auto limit =
      static_cast<double>(objective_.options().memory_limit_bytes);
  if (limit > 0 && objective_.memory_bytes(cost, stage) > limit) {
    return std::numeric_limits<double>::infinity();
  }
  return objective_.load(cost, transfer, stage);
}

double ChainCosts::least_load(int stage, int i, int j) const {
  return objective_.load(minus(sums_[j], sums_[i]), 0, stage);
}

}  // namespace smp::partition
