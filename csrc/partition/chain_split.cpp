#include "csrc/partition/chain_split.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/partition/chain_costs.h"

namespace smp::partition {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums taken in another order differ by rounding; such costs count as equal.
constexpr double kSlack = 1e-9;
constexpr double kPrecision = 1e-3;

bool less(double a, double b) {
  return a < b - kSlack * std::max(std::abs(a), std::abs(b));
}

// The values to minimize among cuts whose loads are all small enough.
struct Preference {
  double split_load = kInfinity;  // on stage 0, because modules are split
  double transfer_bytes = 0;
  double squares = 0;

  bool operator<(const Preference& other) const {
    if (split_load == kInfinity || other.split_load == kInfinity) {
      return split_load < other.split_load;
    }
    if (less(split_load, other.split_load)) return true;
    if (less(other.split_load, split_load)) return false;
    if (less(transfer_bytes, other.transfer_bytes)) return true;
    if (less(other.transfer_bytes, transfer_bytes)) return false;
    return less(squares, other.squares);
  }
};

class Splitter {
 public:
  Splitter(const ChainCosts& costs, const std::vector<double>& extra_loads,
           double most)
      : costs_(costs),
        extra_loads_(extra_loads),
        most_(most),
        n_(costs.num_items()),
        num_stages_(static_cast<int>(extra_loads.size())) {}

  std::optional<ChainSplit> run(const std::vector<int>& positions) const {
    const std::optional<std::vector<int>> begin = best_begin();
    if (!begin) return std::nullopt;
    ChainSplit split;
    for (int k = 0; k < num_stages_; ++k) {
      split.loads.push_back(load(k, (*begin)[k], (*begin)[k + 1]));
      split.loads[0] +=
          k > 0 ? costs_.split_load((*begin)[k], (*begin)[k + 1]) : 0;
    }
    for (int item : *begin) split.cut.begin.push_back(positions[item]);
    return split;
  }

 private:
  double load(int k, int i, int j) const {
    return extra_loads_[k] + costs_.load(k, i, j);
  }
  double least_load(int k, int i, int j) const {
    return extra_loads_[k] + costs_.least_load(k, i, j);
  }

  // Returns the items at which stages begin, with the number of items at the
  // end.
  std::optional<std::vector<int>> best_begin() const {
    int least = 0;
    for (int k = 0; k < num_stages_; ++k) least += least_items(k);
    if (n_ < least) return std::nullopt;
    double low = smallest_maximum();
    if (low == kInfinity) return std::nullopt;
    std::optional<std::vector<int>> best = cut_within(low * (1 + kSlack));
    if (best) return best;
    // Splitting modules loads stage 0 further; find out how much is needed.
    double high = std::min(low + most_split_load(), most_) * (1 + kSlack);
    best = cut_within(high);
    while (best && high - low > kPrecision * low) {
      const double middle = (low + high) / 2;
      std::optional<std::vector<int>> cut = cut_within(middle);
      (cut ? high : low) = middle;
      if (cut) best = std::move(cut);
    }
    return best;
  }

  // Returns 1 unless the stage has modules in any case.
  int least_items(int k) const { return costs_.may_be_empty(k) ? 0 : 1; }

  // c(k, i) = min over j > i of max(load of [i, j), c(k+1, j)), from the end.
  double smallest_maximum() const {
    std::vector<double> best(n_ + 1, kInfinity);
    best[n_] = 0;
    for (int k = num_stages_ - 1; k >= 1; --k) {
      std::vector<double> next(n_ + 1, kInfinity);
      for (int i = 0; i <= n_; ++i) {
        for (int j = i + least_items(k); j <= n_; ++j) {
          if (best[j] >= next[i]) continue;
          if (least_load(k, i, j) > std::min(next[i], most_)) break;
          next[i] = std::min(next[i], std::max(best[j], load(k, i, j)));
        }
      }
      best = std::move(next);
    }
    double result = kInfinity;
    for (int j = least_items(0); j <= n_; ++j) {
      result = std::min(result, std::max(best[j], load(0, 0, j)));
    }
    return result <= most_ ? result : kInfinity;
  }

  double most_split_load() const {
    double most = 0;
    for (int i = 1; i < n_; ++i) most += costs_.split_load(i, n_);
    return most;
  }

  // Applies the same recursion to the preference, over segments within the
  // limit.
  std::optional<std::vector<int>> cut_within(double limit) const {
    std::vector<Preference> best(n_ + 1);
    best[n_] = Preference{0, 0, 0};
    std::vector<std::vector<int>> ends(num_stages_,
                                       std::vector<int>(n_ + 1, -1));
    for (int k = num_stages_ - 1; k >= 1; --k) {
      std::vector<Preference> next(n_ + 1);
      for (int i = 0; i <= n_; ++i) {
        for (int j = i + least_items(k); j <= n_; ++j) {
          if (best[j].split_load == kInfinity) continue;
          if (least_load(k, i, j) > limit) break;
          const double stage_load = load(k, i, j);
          if (stage_load > limit) continue;
          const Preference candidate{
              best[j].split_load + costs_.split_load(i, j),
              best[j].transfer_bytes + costs_.transfer_bytes(i, j),
              best[j].squares + stage_load * stage_load};
          if (candidate < next[i]) {
            next[i] = candidate;
            ends[k][i] = j;
          }
        }
      }
      best = std::move(next);
    }
    return finish(best, ends, limit);
  }

  std::optional<std::vector<int>> finish(
      const std::vector<Preference>& best,
      const std::vector<std::vector<int>>& ends, double limit) const {
    Preference chosen;
    int end = -1;
    for (int j = least_items(0); j <= n_; ++j) {
      if (best[j].split_load == kInfinity) continue;
      const double stage_load = load(0, 0, j) + best[j].split_load;
      if (stage_load > limit) continue;
      const Preference candidate{best[j].split_load, best[j].transfer_bytes,
                                 best[j].squares + stage_load * stage_load};
      if (candidate < chosen) {
        chosen = candidate;
        end = j;
      }
    }
    if (end < 0) return std::nullopt;
    std::vector<int> begin{0, end};
    for (int k = 1; k < num_stages_; ++k) begin.push_back(ends[k][begin[k]]);
    return begin;
  }

  const ChainCosts& costs_;
  const std::vector<double>& extra_loads_;
  const double most_;
  const int n_;
  const int num_stages_;
};

}  // namespace

std::vector<int> ChainCut::unit_stages(const DecisionTree& decisions) const {
  std::vector<int> stages;
  for (const DecisionTree::Unit& unit : decisions.units()) {
    stages.push_back(unit.aside ? unit.wish : 0);
  }
  const int num_stages = static_cast<int>(begin.size()) - 1;
  for (int k = 0; k < num_stages; ++k) {
    for (int i = begin[k]; i < begin[k + 1]; ++i) {
      stages[decisions.free_units()[i]] = k;
    }
  }
  return stages;
}

std::optional<ChainSplit> split_chain(const Objective& objective,
                                      const std::vector<int>& positions,
                                      const std::vector<double>& extra_loads,
                                      double most) {
  const ChainCosts costs(objective, positions);
  return Splitter(costs, extra_loads, most).run(positions);
}

}  // namespace smp::partition
