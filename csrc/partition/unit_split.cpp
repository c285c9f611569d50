#include "csrc/partition/unit_split.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "csrc/partition/chain_split.h"

namespace smp::partition {

namespace {

constexpr int kMostPasses = 8;
constexpr int kPairReach = 2;  // items
constexpr int kRounds = 3;
constexpr double kGainOfOpening = 0.1;
constexpr size_t kShort = 32;  // positions
constexpr double kRoundEnds = 1e-3;

struct Candidate {
  ChainCut cut;
  int depth = 0;
  Evaluation evaluation;
  bool opens = false;  // a layer whose own code needs data, see opens_
};

class UnitSplitter {
 public:
  explicit UnitSplitter(const Objective& objective)
      : objective_(objective),
        decisions_(objective.decisions()),
        num_stages_(objective.options().num_stages()),
        num_free_(static_cast<int>(decisions_.free_units().size())),
        has_values_(!decisions_.tree().values().empty()) {
    find_depths();
    for (int stage = 0; stage < num_stages_; ++stage) {
      may_be_empty_.push_back(decisions_.may_be_empty(stage));
    }
  }

  std::optional<std::vector<int>> run() {
    if (num_free_ == 0) return all_aside();
    std::set<int> depths{depths_.begin() + 1, depths_.end() - 1};
    if (depths.empty()) depths.insert(0);  // one unit, and pinned ones
    std::vector<int> tried;
    for (const bool may_open : {false, true}) {
      for (int depth : depths) {
        std::vector<int> positions = positions_at(depth, may_open);
        if (positions != tried) cut_at(positions, depth, may_open);
        tried = std::move(positions);
      }
    }
    if (candidates_.empty()) return std::nullopt;
    return choose().cut.unit_stages(decisions_);
  }

 private:
  // Returns the stages of units when all of them are aside.
  std::optional<std::vector<int>> all_aside() const {
    const bool is_covered =
        std::ranges::all_of(may_be_empty_, [](bool empty) { return empty; });
    if (!is_covered) return std::nullopt;
    const ChainCut cut{std::vector<int>(num_stages_ + 1, 0)};
    return cut.unit_stages(decisions_);
  }

  // Fills depths_[i] with the number of modules that a cut before free unit i
  // opens. Sets opens_[i] if this cuts a layer of a list, or a module in one,
  // whose own code reads data of others: these data would pass through the
  // driver, which has to wait for them. A tree without values does not show the
  // readers, so each layer may be one.
  void find_depths() {
    depths_.assign(num_free_ + 1, 0);
    opens_.assign(num_free_ + 1, false);
    std::vector<bool> reads(decisions_.num_nodes(), !has_values_);
    for (const ModuleTree::Value& value : decisions_.tree().values()) {
      for (int consumer : value.consumer_idxs) {
        // Values that the driver has made for a split module are there.
        const bool from_above = value.source_values.empty() &&
                                is_above(value.producer_idx, consumer);
        if (!from_above) reads[decisions_.owner(consumer)] = true;
      }
    }
    for (int i = 1; i < num_free_; ++i) {
      int a = place(i - 1);
      int b = place(i);
      while (a != b) {  // to the lowest common ancestor; parents come first
        int& lower = a > b ? a : b;
        lower = decisions_.tree().node(lower).parent_idx;
      }
      depths_[i] = decisions_.depth(a);
      for (; decisions_.in_layer(a); a = decisions_.tree().node(a).parent_idx) {
        opens_[i] = opens_[i] || reads[a];
      }
    }
  }

  // Returns whether the first node is the second or above it.
  bool is_above(int idx, int other_idx) const {
    while (other_idx > idx)
      other_idx = decisions_.tree().node(other_idx).parent_idx;
    return other_idx == idx;
  }

  int place(int position) const {
    const int id = decisions_.free_units()[position];
    return decisions_.units()[id].place_idx;
  }

  std::vector<int> positions_at(int depth, bool may_open) const {
    std::vector<int> positions{0};
    for (int i = 1; i < num_free_; ++i) {
      if (depths_[i] > depth || (opens_[i] && !may_open)) continue;
      positions.push_back(i);
    }
    positions.push_back(num_free_);
    return positions;
  }

  void cut_at(const std::vector<int>& positions, int depth, bool may_open) {
    // In a short chain all cuts are tried; in a long one only promising cuts.
    double worth = std::numeric_limits<double>::infinity();
    if (positions.size() > kShort) worth = worthwhile_load(depth, may_open);
    // The chain cut does not see all costs of values. The missed costs are
    // given back to it, and it may choose again.
    std::vector<double> missed(num_stages_, 0);
    for (int round = 0; round < kRounds; ++round) {
      const auto split = split_chain(objective_, positions, missed, worth);
      if (!split) return;
      const double expected =
          *std::max_element(split->loads.begin(), split->loads.end());
      const std::vector<double> loads = evaluate(split->cut).bounds;
      double most = 0;
      for (int k = 0; k < num_stages_; ++k) {
        missed[k] += loads[k] - split->loads[k];
        most = std::max(most, loads[k] - expected);
      }
      if (positions.size() > kShort && most < kRoundEnds * expected) {
        consider(split->cut, depth);
        return;
      }
      consider(move_boundaries(split->cut, positions), depth);
    }
  }

  // Returns the load above which a cut would not be chosen among the
  // candidates.
  double worthwhile_load(int depth, bool may_open) const {
    double worth = std::numeric_limits<double>::infinity();
    for (const Candidate& c : candidates_) {
      if (c.evaluation.excess_bytes > 0 || c.depth > depth) continue;
      if (c.opens && !may_open) continue;
      const double gain =
          may_open && !c.opens ? kGainOfOpening : kTolerance / 2;
      worth = std::min(worth, c.evaluation.largest_load * (1 - gain));
    }
    return worth;
  }

  Evaluation evaluate(const ChainCut& cut) const {
    return objective_.evaluate(
        decisions_.complete(cut.unit_stages(decisions_)));
  }

  void consider(const ChainCut& cut, int depth) {
    Candidate candidate{cut, depth, evaluate(cut), false};
    for (int position : cut.begin) {
      candidate.opens = candidate.opens || opens_[position];
    }
    candidates_.push_back(std::move(candidate));
  }

  // Moves one boundary to its best place between its neighbours, or two
  // neighbouring ones a few items, by the exact objective, while that helps.
  ChainCut move_boundaries(const ChainCut& cut,
                           const std::vector<int>& positions) const {
    Search search{cut, evaluate(cut), false};
    const int num_boundaries = num_stages_ - 1;
    for (int pass = 0; pass < kMostPasses; ++pass) {
      search.moved = false;
      for (int k = 1; k <= num_boundaries; ++k) {
        move_one(k, positions, &search);
        if (k < num_boundaries) move_pair(k, positions, &search);
      }
      if (!search.moved) break;
    }
    return search.cut;
  }

  struct Search {
    ChainCut cut;
    Evaluation best;
    bool moved;
  };

  void move_one(int k, const std::vector<int>& positions,
                Search* search) const {
    ChainCut trial = search->cut;
    for (int position : positions) {
      trial.begin[k] = position;
      attempt(trial, k, k, search);
    }
  }

  void move_pair(int k, const std::vector<int>& positions,
                 Search* search) const {
    ChainCut trial = search->cut;
    const auto item = [&](int boundary) {
      const auto found = std::lower_bound(positions.begin(), positions.end(),
                                          search->cut.begin[boundary]);
      return static_cast<int>(found - positions.begin());
    };
    const int num_positions = static_cast<int>(positions.size());
    const int a = item(k);
    const int b = item(k + 1);
    for (int i = std::max(0, a - kPairReach); i <= a + kPairReach; ++i) {
      for (int j = std::max(i, b - kPairReach); j <= b + kPairReach; ++j) {
        if (i >= num_positions || j >= num_positions) continue;
        trial.begin[k] = positions[i];
        trial.begin[k + 1] = positions[j];
        attempt(trial, k, k + 1, search);
      }
    }
  }

  // Keeps the trial if it is better. Its boundaries [first, last] have moved.
  void attempt(const ChainCut& trial, int first, int last,
               Search* search) const {
    for (int k = first - 1; k <= last; ++k) {
      const int least = may_be_empty_[k] ? 0 : 1;
      if (trial.begin[k] + least > trial.begin[k + 1]) return;
      if (decisions_.has_wishes() && !keeps_wishes(trial, k)) return;
    }
    Evaluation evaluation = evaluate(trial);
    if (!is_better(evaluation, search->best)) return;
    search->cut = trial;
    search->best = std::move(evaluation);
    search->moved = true;
  }

  bool keeps_wishes(const ChainCut& cut, int stage) const {
    for (int i = cut.begin[stage]; i < cut.begin[stage + 1]; ++i) {
      const int wish = decisions_.units()[decisions_.free_units()[i]].wish;
      const int partition_idx = stage % objective_.options().num_partitions;
      if (wish >= 0 && wish != partition_idx) return false;
    }
    return true;
  }

  const Candidate& choose() const {
    double excess = std::numeric_limits<double>::infinity();
    for (const Candidate& c : candidates_) {
      excess = std::min(excess, c.evaluation.excess_bytes);
    }
    std::vector<const Candidate*> keeping;  // that open no layer
    std::vector<const Candidate*> all;
    for (const Candidate& c : candidates_) {
      if (c.evaluation.excess_bytes > excess) continue;
      all.push_back(&c);
      if (!c.opens) keeping.push_back(&c);
    }
    if (keeping.empty()) return simplest(all);
    const Candidate& kept = simplest(keeping);
    const Candidate& opened = simplest(all);
    const bool worth = opened.evaluation.largest_load <
                       kept.evaluation.largest_load * (1 - kGainOfOpening);
    return worth && (has_values_ || has_heavy_layer()) ? opened : kept;
  }

  bool has_heavy_layer() const {
    std::vector<double> loads(decisions_.num_nodes(), 0);
    for (int idx = decisions_.num_nodes() - 1; idx > 0; --idx) {
      const int id = decisions_.unit_of(idx);
      if (id < 0) {
        loads[idx] += objective_.load(objective_.cost_of_owner(idx), 0, 0);
      } else if (decisions_.units()[id].place_idx == idx) {
        loads[idx] += objective_.load(objective_.cost_of_unit(id), 0, 0);
      }
      const int parent_idx = decisions_.tree().node(idx).parent_idx;
      loads[parent_idx] += loads[idx];
    }
    for (int idx = 1; idx < decisions_.num_nodes(); ++idx) {
      const bool heavy = loads[idx] * num_stages_ > loads[0] * (1 + 1e-9);
      if (heavy && decisions_.in_layer(idx)) return true;
    }
    return false;
  }

  // Returns the simplest candidate within the tolerance of the best.
  static const Candidate& simplest(
      const std::vector<const Candidate*>& candidates) {
    double limit = std::numeric_limits<double>::infinity();
    for (const Candidate* c : candidates) {
      limit = std::min(limit, c->evaluation.largest_load);
    }
    limit *= 1 + kTolerance;
    const Candidate* best = nullptr;
    for (const Candidate* c : candidates) {
      if (c->evaluation.largest_load > limit) continue;
      if (best == nullptr || c->depth < best->depth ||
          (c->depth == best->depth &&
           is_better(c->evaluation, best->evaluation))) {
        best = c;
      }
    }
    return *best;
  }

  const Objective& objective_;
  const DecisionTree& decisions_;
  const int num_stages_;
  const int num_free_;
  const bool has_values_;
  std::vector<int> depths_;
  std::vector<bool> opens_;
  std::vector<bool> may_be_empty_;  // per stage
  std::vector<Candidate> candidates_;
};

}  // namespace

std::optional<std::vector<int>> split_units(const Objective& objective) {
  return UnitSplitter(objective).run();
}

}  // namespace smp::partition
