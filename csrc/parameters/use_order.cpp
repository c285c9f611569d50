#include "csrc/parameters/use_order.h"

#include <algorithm>
#include <utility>

namespace smp::parameters {

void UseOrder::begin(int64_t kind) {
  kind_ = kind;
  record_.clear();
  follows_ = orders_.contains(kind);
}

void UseOrder::end() {
  if (!record_.empty()) orders_[kind_] = std::move(record_);
  record_.clear();
  follows_ = false;
}

bool UseOrder::use(int unit) {
  const std::span<const int> expected = coming();
  record_.push_back(unit);
  if (expected.empty() || expected.front() == unit) return true;
  follows_ = false;
  return false;
}

std::vector<int> UseOrder::next(int num_units) const {
  std::vector<int> units;
  for (const int unit : coming()) {
    if (std::ssize(units) == num_units) break;
    if (std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(unit);
    }
  }
  return units;
}

std::span<const int> UseOrder::coming() const {
  if (!follows_) return {};
  const std::vector<int>& order = orders_.at(kind_);
  if (record_.size() >= order.size()) return {};
  return std::span(order).subspan(record_.size());
}

}  // namespace smp::parameters
