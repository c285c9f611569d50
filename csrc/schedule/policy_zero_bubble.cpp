#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "csrc/schedule/in_flight.h"
#include "csrc/schedule/policy.h"

namespace smp::schedule {
namespace {

// ZB-H1 (arXiv:2401.10241) as a rule: 1F1B whose weight gradients fill the
// gaps. Rank `depth` puts off at most `depth` of them, so that together with
// its forwards it keeps no more activations than the first rank.
//
// Three quarters of these are for the end. With equal ranks a gap is as long as
// a message takes: what fills it takes longer, and holds up a backward that the
// rank in front waits for.
class ZeroBubblePolicy final : public Policy {
 public:
  const std::string& name() const override {
    static const std::string text = "zero_bubble";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress& progress) const override {
    std::set<std::pair<int64_t, int64_t>> weights;  // of several modules each
    for (const ReadyTask& task : ready) {
      if (task.key.phase == Phase::kWeight) {
        weights.insert({task.key.mb, task.chunk});
      }
    }
    if (static_cast<int>(weights.size()) > progress.depth) {
      return oldest(ready, Phase::kWeight);
    }
    // One forward and one backward in turn: a forward that may run has its
    // turn, since after it as many are kept as this rank may keep.
    const auto forward = oldest(ready, Phase::kForward);
    if (forward && !is_beyond_1f1b(ready[*forward], progress)) {
      return forward;
    }
    if (const auto backward = oldest(ready, Phase::kBackward)) return backward;
    const int num_for_the_end = (3 * progress.depth + 3) / 4;
    if (static_cast<int>(weights.size()) <= num_for_the_end &&
        has_backwards_to_come(progress)) {
      return std::nullopt;
    }
    return oldest(ready, Phase::kWeight);
  }

  int default_active_microbatches(int num_partitions,
                                  int num_microbatches) const override {
    return std::min(num_microbatches, num_partitions);
  }

  bool splits_backward(int64_t, int64_t) const override { return true; }

  // Returns the list of the article. With fewer microbatches than ranks `pick`
  // also fills gaps of a pipeline that is never full.
  Schedule plan(const PipelineSize& size) const override {
    Schedule schedule;
    for (int depth = 0; depth < size.num_partitions; ++depth) {
      schedule.push_back(list_of(size, depth));
    }
    return schedule;
  }

 private:
  static ActionList list_of(const PipelineSize& size, int depth) {
    const int m = size.num_microbatches;
    const int num_warmup = std::min(m, size.num_partitions - 1 - depth);
    ActionList actions;
    int f = 0;
    int b = 0;
    int w = 0;
    while (f < num_warmup) actions.push_back({Phase::kForward, f++});
    while (f < m) {
      actions.push_back({Phase::kForward, f++});
      actions.push_back({Phase::kBackward, b++});
      while (b - w > depth) actions.push_back({Phase::kWeight, w++});
    }
    while (b < m) {
      actions.push_back({Phase::kBackward, b++});
      actions.push_back({Phase::kWeight, w++});
    }
    while (w < m) actions.push_back({Phase::kWeight, w++});
    return actions;
  }

  static std::optional<size_t> oldest(const std::vector<ReadyTask>& ready,
                                      Phase phase) {
    const auto age = [&](size_t i) {
      return std::tuple(ready[i].key.mb, ready[i].arrival);
    };
    std::optional<size_t> best;
    for (size_t i = 0; i < ready.size(); ++i) {
      if (ready[i].key.phase != phase) continue;
      if (!best || age(i) < age(*best)) best = i;
    }
    return best;
  }
};

const RegisterPolicy<ZeroBubblePolicy> registered_zero_bubble;

}  // namespace

}  // namespace smp::schedule
